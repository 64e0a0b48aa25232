import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.kernels import gqa_attention as kernel
from jaxspec.kernels.gqa_attention import gqa_attention
from tests import trees

LAYERS, SLOTS, HEADS, KV_HEADS, WIDTH = 2, 130, 6, 2, 8
KV_LEN = [0, 1, 63, 64, 65, 130]
"""Around the block of 64 that these tests set, and the full cache, no multiple of it."""
LAYER = 1
NAMES = ("q", "key", "value", "layer", "kv_len", "new_key", "new_value")
"""The order of the arguments."""


@pytest.fixture(autouse=True)
def _blocks_of_64(monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 64)


def inputs(tokens: int, rows: int, kv_len=KV_LEN, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments whose unfilled slots, and whose other layers, hold NaN."""
    rng, batch = np.random.default_rng(seed), len(kv_len)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    caches = {name: normal(LAYERS, KV_HEADS, batch, SLOTS, WIDTH) for name in ("key", "value")}
    for cache in caches.values():
        cache[np.arange(LAYERS) != LAYER] = np.nan
        for b, length in enumerate(kv_len):
            cache[:, :, b, length:] = np.nan
    return {
        "q": normal(batch, tokens, HEADS, WIDTH),
        **caches,
        "layer": np.int32(LAYER),
        "kv_len": np.asarray(kv_len, np.int32),
        "new_key": normal(KV_HEADS, batch, rows, WIDTH),
        "new_value": normal(KV_HEADS, batch, rows, WIDTH),
    }


@functools.cache
def compiled(block: int = 64):
    """`gqa_attention`, compiled once for all tests that set the same block."""
    assert block == kernel.BLOCK
    return jax.jit(lambda args, sees: gqa_attention(*(args[name] for name in NAMES), sees))


def exact(args: dict[str, np.ndarray], sees: np.ndarray) -> np.ndarray:
    """Outputs in f64, one query and head at a time, over the keys it sees."""
    args = {name: np.asarray(value, np.float64) for name, value in args.items()}
    out = np.zeros(args["q"].shape)
    group = args["q"].shape[2] // KV_HEADS
    for b, t, n in np.ndindex(*out.shape[:3]):
        head, filled = n // group, slice(int(args["kv_len"][b]))
        key, value = (
            np.concatenate(
                [args[name][LAYER, head, b, filled], args[f"new_{name}"][head, b, sees[b, t]]]
            )
            for name in ("key", "value")
        )
        scores = key @ args["q"][b, t, n] / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights @ value / weights.sum()
    return out


@pytest.mark.parametrize("tokens", [1, 3])
def test_causal(tokens):
    args = inputs(tokens, tokens)
    sees = np.stack([trees.ancestors(trees.chain(tokens))] * len(KV_LEN))
    np.testing.assert_allclose(compiled()(args, None), exact(args, sees), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 2])
def test_one_query_for_a_key_head(rows, monkeypatch):
    """As a chain's levels have it; what is added to it for a product is not in the output."""
    attention = functools.partial(kernel._attention, rows_per_head=rows)
    monkeypatch.setattr(kernel.lax, "platform_dependent", lambda *args, **_: attention(*args))
    args = inputs(1, 1)
    args["q"] = args["q"][:, :, :KV_HEADS]
    sees = np.ones((len(KV_LEN), 1, 1), bool)
    got = gqa_attention(*(args[name] for name in NAMES), None)
    np.testing.assert_allclose(got, exact(args, sees), rtol=2e-5, atol=2e-6)


def test_turns_are_few():
    """Blocks grow with the cache, so that the loop turns 16 times at most."""
    assert [kernel.num_turns(length, 130) for length in KV_LEN] == [0, 1, 1, 1, 2, 3]
    assert [kernel.num_turns(length, 32768) for length in (1, 2048, 2049, 32768)] == [1, 1, 2, 16]
    assert kernel.num_turns(33000, 33000) == 16
    assert kernel.num_turns(32768, 32768, row_width=64 * 128) == 128, "on one device: all heads"


def test_more_rows_than_queries():
    """A draft level's queries, over the rows of the levels above and their own."""
    args, rng = inputs(4, 12), np.random.default_rng(3)
    sees = rng.random((len(KV_LEN), 4, 12)) < 0.4
    sees[:, np.arange(4), 8 + np.arange(4)] = True
    np.testing.assert_allclose(
        compiled()(args, jnp.asarray(sees)), exact(args, sees), rtol=2e-5, atol=2e-6
    )


def test_block_size_does_not_matter(monkeypatch):
    args, results = inputs(3, 3), []
    for block in (16, 4096):
        monkeypatch.setattr(kernel, "BLOCK", block)
        results.append(compiled(block=block)(args, None))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_other_sequences_do_not_change_a_bit():
    """Not even when they are longer, so that more blocks are read for all."""
    run = compiled()
    args = inputs(3, 3, [0, 1, 20, 40])
    others = inputs(3, 3, [130, 130, 20, 130], seed=1)
    axes = {"key": 2, "value": 2, "new_key": 1, "new_value": 1}
    for name, value in others.items():
        if value.ndim:
            axis = axes.get(name, 0)
            np.moveaxis(value, axis, 0)[2] = np.moveaxis(args[name], axis, 0)[2]
    np.testing.assert_array_equal(run(others, None)[2], run(args, None)[2])


def test_heads_that_do_not_divide():
    args = inputs(1, 1)
    args["q"] = args["q"][:, :, :5]
    with pytest.raises(ValueError, match="5 query heads over 2 key heads"):
        jax.eval_shape(compiled(), args, None)
