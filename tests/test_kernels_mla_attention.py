import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec.kernels.mla_attention as kernel
from jaxspec.kernels.mla_attention import mla_attention, xla
from jaxspec.kernels.mla_attention.reference import mla_attention_reference
from tests import trees

LAYERS, SLOTS, HEADS, LATENT, ROTARY = 3, 130, 3, 24, 8
SCALE = 0.3
KV_LEN = [0, 1, 63, 64, 65, 130]
"""Around the block of 64 that these tests set, and the full cache, no multiple of it."""
LAYER = 1
NAMES = ("q_latent", "q_rotary", "latent", "rotary", "layer", "kv_len", "new_latent", "new_rotary")
"""The order of the arguments."""


@pytest.fixture(autouse=True)
def _blocks_of_64(monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 64)


def inputs(tokens: int, kv_len=KV_LEN, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments whose unfilled slots, and whose other layers, hold NaN."""
    rng, batch = np.random.default_rng(seed), len(kv_len)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    caches = {"latent": normal(LAYERS, batch, SLOTS, LATENT)}
    caches["rotary"] = normal(LAYERS, batch, SLOTS, ROTARY)
    for cache in caches.values():
        cache[np.arange(LAYERS) != LAYER] = np.nan
        for b, length in enumerate(kv_len):
            cache[:, b, length:] = np.nan
    return {
        "q_latent": normal(batch, tokens, HEADS, LATENT),
        "q_rotary": normal(batch, tokens, HEADS, ROTARY),
        **caches,
        "layer": np.int32(LAYER),
        "kv_len": np.asarray(kv_len, np.int32),
        "new_latent": normal(batch, tokens, LATENT),
        "new_rotary": normal(batch, tokens, ROTARY),
    }


@functools.cache
def compiled(function=mla_attention, block: int = 64):
    """`function`, compiled once for all tests that set the same block."""
    assert block == xla.BLOCK
    return jax.jit(lambda args, sees: function(*(args[name] for name in NAMES), sees, scale=SCALE))


def exact(args: dict[str, np.ndarray], sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and log-sum-exps in f64, one query and head at a time, over the keys it sees."""
    args = {name: np.asarray(value, np.float64) for name, value in args.items()}
    batch, tokens = args["q_latent"].shape[:2]
    out, lse = np.zeros((batch, tokens, HEADS, LATENT)), np.zeros((batch, tokens, HEADS))
    for b, t in np.ndindex(batch, tokens):
        filled = slice(int(args["kv_len"][b]))
        latent, rotary = (
            np.concatenate([args[name][LAYER, b, filled], args[f"new_{name}"][b, sees[b, t]]])
            for name in ("latent", "rotary")
        )
        for n in range(HEADS):
            scores = SCALE * (
                latent @ args["q_latent"][b, t, n] + rotary @ args["q_rotary"][b, t, n]
            )
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ latent / weights.sum()
            lse[b, t, n] = scores.max() + np.log(weights.sum())
    return out, lse


def everybody(parents: list[int]) -> np.ndarray:
    return np.stack([trees.ancestors(parents)] * len(KV_LEN))


@pytest.mark.parametrize("tokens", [1, 8, 33])
def test_causal(tokens):
    args = inputs(tokens)
    wanted = exact(args, everybody(trees.chain(tokens)))
    for function in (mla_attention, mla_attention_reference):
        for got, want in zip(compiled(function)(args, None), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "parents",
    [trees.chain(8), trees.star(8), trees.random_tree(8, 0), trees.random_tree(8, 1)],
    ids=["chain", "star", "random 0", "random 1"],
)
def test_tree(parents):
    args, sees = inputs(8), everybody(parents)
    out, lse = compiled()(args, jnp.asarray(sees))
    want_out, want_lse = exact(args, sees)
    np.testing.assert_allclose(out, want_out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-6)


def test_trees_of_a_batch_differ():
    args = inputs(8)
    sees = np.stack([trees.ancestors(trees.random_tree(8, b)) for b in range(len(KV_LEN))])
    np.testing.assert_allclose(
        compiled()(args, jnp.asarray(sees))[0], exact(args, sees)[0], rtol=2e-5, atol=2e-6
    )


def test_node_is_the_end_of_its_own_chain():
    parents, args = trees.random_tree(8, 1), inputs(8)
    out, lse = compiled()(args, jnp.asarray(everybody(parents)))
    deepest = int(np.argmax(trees.depths(parents)))
    path = trees.path(parents, deepest)
    assert len(path) > 2
    alone = dict(args)
    for name in ("q_latent", "q_rotary", "new_latent", "new_rotary"):
        alone[name] = args[name][:, path]
    chain_out, chain_lse = compiled()(alone, None)
    np.testing.assert_allclose(out[:, deepest], chain_out[:, -1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:, deepest], chain_lse[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_more_rows_than_queries(monkeypatch, implementation):
    """Rows of earlier calls come first. With Mosaic they are a part of their own, merged.

    The kernel itself, which has a Hopper GPU's code alone, is stood in for by plain XLA.
    """
    monkeypatch.setattr(kernel, "mla_attention_mosaic", xla.mla_attention_xla)
    parents = trees.random_tree(8, 1)
    args, sees = inputs(8), everybody(parents)
    args["new_latent"][:, 0, :2] = np.nan  # of a row that the later queries do not all see
    sees[:, :, 0] = False
    later = {**args, **{name: args[name][:, 5:] for name in ("q_latent", "q_rotary")}}
    run = jax.jit(
        lambda args, sees: mla_attention(
            *(args[name] for name in NAMES), sees, scale=SCALE, implementation=implementation
        )
    )
    for got, want in zip(run(later, sees[:, 5:]), exact(later, sees[:, 5:]), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    with pytest.raises(ValueError, match="8 new rows for 3 queries"):
        jax.eval_shape(run, later, None)


def test_permuted_nodes_give_permuted_outputs():
    args, sees = inputs(8), everybody(trees.random_tree(8, 1))
    run, order = compiled(), np.random.default_rng(0).permutation(8)
    shuffled = dict(args)
    for name in ("q_latent", "q_rotary", "new_latent", "new_rotary"):
        shuffled[name] = args[name][:, order]
    out, lse = run(args, jnp.asarray(sees))
    got_out, got_lse = run(shuffled, jnp.asarray(sees[:, order][:, :, order]))
    np.testing.assert_allclose(got_out, out[:, order], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_lse, lse[:, order], rtol=1e-5, atol=1e-6)


def test_block_size_does_not_matter(monkeypatch):
    args, results = inputs(8), []
    for block in (16, 64, 4096):
        monkeypatch.setattr(xla, "BLOCK", block)
        results.append(compiled(block=block)(args, None)[0])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[0], results[2], rtol=1e-5, atol=1e-6)


def test_other_sequences_do_not_change_a_bit():
    """Not even when they are longer, so that more blocks are read for all."""
    run = compiled()
    args, others = inputs(3, [0, 1, 20, 40]), inputs(3, [130, 130, 20, 130], seed=1)
    for name, value in others.items():
        axis = 1 if name in ("latent", "rotary") else 0
        if value.ndim:
            np.moveaxis(value, axis, 0)[2] = np.moveaxis(args[name], axis, 0)[2]
    for got, want in zip(run(others, None), run(args, None), strict=True):
        np.testing.assert_array_equal(got[2], want[2])


def test_bf16():
    args = inputs(8)
    low = {
        n: jnp.asarray(v, jnp.bfloat16 if v.dtype == np.float32 else None) for n, v in args.items()
    }
    out, lse = compiled()(low, None)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    want_out, want_lse = exact(low, everybody(trees.chain(8)))
    np.testing.assert_allclose(np.asarray(out, np.float64), want_out, atol=0.02)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q_rotary", lambda x: x[:, :2], r"q_rotary is \(6, 2, 3, 8\) where .* \(6, 3, 3, 8\)"),
        ("rotary", lambda x: x[..., :4], r"rotary is \(3, 6, 130, 4\)"),
        ("latent", lambda x: x[:, :4], r"latent is \(3, 4, 130, 24\)"),
        ("new_latent", lambda x: x.astype(np.float16), "new_latent is float16 where .* float32"),
    ],
)
def test_arguments_that_do_not_belong_together(name, change, message):
    args = inputs(3)
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(compiled(), args, None)


def test_unknown_implementation():
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        mla_attention(*inputs(1).values(), None, scale=SCALE, implementation="cuda")
