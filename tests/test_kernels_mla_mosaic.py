"""The Mosaic kernel of `mla_attention` under the interpreter: races on, unset memory NaN.

Tolerances: the relative error of the norm is at most 1e-2 and the cosine difference at most 5e-6.
Three roundings to bf16 (the softmax numerators, the splits' outputs, the result), 1.7e-3 each, make
2.9e-3 and 4.2e-6. Log-sum-exps are f32 throughout: 1e-5.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.mla_attention import mla_attention, mosaic, why_not_mosaic
from jaxspec.kernels.mla_attention.mosaic import Tuning, mla_attention_mosaic
from jaxspec.kernels.mla_attention.mosaic_merge import merge_splits
from jaxspec.kernels.mla_attention.reference import mla_attention_reference
from tests import trees

LAYERS, LAYER, SLOTS, HEADS, LATENT, ROTARY = 2, 1, 192, 8, 128, 64
HEAD, VALUE = 32, 16
SCALE = 0.1
TUNING = Tuning()
KV_LEN = (0, 1, 63, 64, 65, 192)
NAMES = ("q_latent", "q_rotary", "latent", "rotary", "layer", "kv_len", "new_latent", "new_rotary")


# jax 0.11 prints a race; 0.12 raises, which leaves the interpreter unusable, or logs it.
IS_LOGGED = "on_race" in {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}
INTERPRETER = plgpu.InterpretGPUParams(
    detect_races=True, **({"on_race": "warn"} if IS_LOGGED else {})
)


@pytest.fixture(autouse=True)
def _no_race(request, capfd, caplog):
    yield
    logged = [record.getMessage() for record in caplog.get_records("call")]
    said = logged if IS_LOGGED else [capfd.readouterr().out]
    found = sum(text.count("RACE DETECTED") for text in said)
    assert (found > 0) == ("race" in request.node.name), f"{found} races"


def inputs(tokens, kv_len=KV_LEN, heads=HEADS, latent=LATENT, slots=SLOTS, seed=0):
    """bf16 arguments; unfilled slots and other layers hold NaN. And what absorbs their heads.

    Queries are q_nope . k_up, as in the model, so that an oracle may work with keys per head.
    """
    rng, batch = np.random.default_rng(seed), len(kv_len)

    def normal(*shape):
        return rng.normal(size=shape) * 0.5

    q_nope, k_up = normal(batch, tokens, heads, HEAD), normal(heads, HEAD, latent)
    args = {
        "q_latent": np.einsum("btnh,nhc->btnc", q_nope, k_up),
        "q_rotary": normal(batch, tokens, heads, ROTARY),
        "latent": normal(LAYERS, batch, slots, latent),
        "rotary": normal(LAYERS, batch, slots, ROTARY),
        "new_latent": normal(batch, tokens, latent),
        "new_rotary": normal(batch, tokens, ROTARY),
    }
    for name in ("latent", "rotary"):
        args[name][np.arange(LAYERS) != LAYER] = np.nan
        for b, length in enumerate(kv_len):
            args[name][:, b, length:] = np.nan
    args = {name: jnp.asarray(value, jnp.bfloat16) for name, value in args.items()}
    args["layer"], args["kv_len"] = jnp.int32(LAYER), jnp.asarray(kv_len, jnp.int32)
    return args, {"q_nope": q_nope, "k_up": k_up}


@functools.cache
def compiled(splits: int, tuning: Tuning = TUNING):
    """The kernel, compiled once for tests of the same shapes."""

    @jax.jit
    def run(args, sees):
        return mla_attention_mosaic(
            *(args[name] for name in NAMES),
            sees,
            scale=SCALE,
            splits=splits,
            tuning=tuning,
            interpret=INTERPRETER,
        )

    return run


def reference(args, sees):
    return mla_attention_reference(*(args[name] for name in NAMES), sees, scale=SCALE)


def assert_close(got, want, lse_atol=1e-5):
    got_out, want_out = (np.asarray(x[0], np.float64) for x in (got, want))
    assert np.isfinite(got_out).all()
    error = np.linalg.norm(got_out - want_out) / np.linalg.norm(want_out)
    cosine = (got_out * want_out).sum() / np.linalg.norm(got_out) / np.linalg.norm(want_out)
    assert error <= 1e-2, error
    assert 1 - cosine <= 5e-6, 1 - cosine
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=lse_atol)


def bits(*parents: list[int]) -> jax.Array:
    return jnp.asarray(np.stack([trees.ancestors(p) for p in parents]))


def unabsorbed(args, heads, sees):
    """Outputs and log-sum-exps in f64 with keys of every head built; queries unrounded."""
    args = {name: np.asarray(value, np.float64) for name, value in args.items()}
    batch, tokens, num_heads, latent = args["q_latent"].shape
    out, lse = np.zeros((batch, tokens, num_heads, latent)), np.zeros((batch, tokens, num_heads))
    for b, t, n in np.ndindex(*lse.shape):
        filled = slice(int(args["kv_len"][b]))
        rows, rotary = (
            np.concatenate([args[name][LAYER, b, filled], args[f"new_{name}"][b, sees[b, t]]])
            for name in ("latent", "rotary")
        )
        keys = rows @ heads["k_up"][n].T
        scores = SCALE * (keys @ heads["q_nope"][b, t, n] + rotary @ args["q_rotary"][b, t, n])
        weights = np.exp(scores - scores.max())
        lse[b, t, n] = scores.max() + np.log(weights.sum())
        out[b, t, n] = weights @ rows / weights.sum()
    return out, lse


def test_tree_against_keys_built_per_head():
    """Lengths around a block, a tree for each sequence, splits of which some are empty."""
    args, heads = inputs(8)
    sees = bits(trees.chain(8), trees.star(8), *(trees.random_tree(8, seed) for seed in range(4)))
    got = compiled(splits=2)(args, sees)
    assert_close(got, reference(args, sees))
    # The oracle's queries are not rounded to bf16: scores differ by up to 1e-2.
    assert_close(got, unabsorbed(args, heads, np.asarray(sees)), lse_atol=2e-2)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("tokens", [1, 3, *(pytest.param(t, marks=SLOW) for t in (2, 16))])
def test_causal(tokens):
    args, _ = inputs(tokens, kv_len=(0, 65))
    assert_close(compiled(splits=2)(args, None), reference(args, None))


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        (16, "tree"),
        (33, "causal"),
        *(pytest.param(*c, marks=SLOW) for c in [(33, "tree"), (64, "causal"), (64, "tree")]),
        *(pytest.param(72, kind, marks=SLOW) for kind in ("causal", "tree")),
    ],
)
def test_many_tiles(tokens, kind):
    """More query rows than a tile, at 72 tokens also more new rows than a block."""
    args, _ = inputs(tokens, kv_len=(65,))
    sees = bits(trees.random_tree(tokens, 0)) if kind == "tree" else None
    assert_close(compiled(splits=2)(args, sees), reference(args, sees))


@pytest.mark.parametrize("heads", [pytest.param(16, marks=SLOW), 64])
def test_heads(heads):
    args, _ = inputs(3, kv_len=(1, 70), heads=heads)
    sees = bits(trees.star(3), trees.chain(3))
    assert_close(compiled(splits=1)(args, sees), reference(args, sees))


def test_real_widths():
    args, _ = inputs(4, kv_len=(100,), heads=16, latent=512)
    sees = bits(trees.random_tree(4, 0))
    assert_close(compiled(splits=2)(args, sees), reference(args, sees))


def test_number_of_splits_does_not_matter():
    args, _ = inputs(2, kv_len=(150,))
    want = reference(args, None)
    for splits in (1, 7):
        assert_close(compiled(splits)(args, None), want)


def test_tuning_does_not_matter():
    args, _ = inputs(1, kv_len=(70,), latent=256)
    want = reference(args, None)
    tuning = Tuning(depth=128, columns=64)
    assert_close(compiled(1, tuning)(args, None), want)


@pytest.mark.parametrize("shape", [(1, 40, 8, 128), (2, 3, 64, 128)])
def test_merge_of_splits(shape):
    """Against f64; one split is empty, and all splits are for one row."""
    rng = np.random.default_rng(0)
    lse = rng.normal(size=shape[:3]).astype(np.float32) * 3
    lse[:, 1], lse[:, :, 3] = -np.inf, -np.inf
    out = np.where(np.isneginf(lse)[..., None], 0, rng.normal(size=shape)).astype(jnp.bfloat16)
    weights = np.exp(lse.astype(np.float64))
    total = weights.sum(1)
    mixed = (weights[..., None] * out.astype(np.float64)).sum(1)
    want = mixed / np.where(total > 0, total, 1)[..., None]
    merge = jax.jit(functools.partial(merge_splits, interpret=INTERPRETER))
    got, got_lse = merge(jnp.asarray(out), jnp.asarray(lse))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(got_lse, np.log(total), rtol=1e-5, atol=1e-6)


def test_node_is_the_end_of_its_own_chain():
    args, _ = inputs(8, kv_len=(40,))
    parents = trees.random_tree(8, 1)
    path = trees.path(parents, int(np.argmax(trees.depths(parents))))
    out, lse = compiled(splits=1)(args, bits(parents))
    alone = {n: x[:, path] if n.startswith(("q_", "new_")) else x for n, x in args.items()}
    chain_out, chain_lse = compiled(splits=1)(alone, None)
    assert_close((out[:, path[-1]], lse[:, path[-1]]), (chain_out[:, -1], chain_lse[:, -1]))


def test_permuted_nodes_give_permuted_outputs():
    args, _ = inputs(8, kv_len=(40,))
    sees, order = bits(trees.random_tree(8, 1)), np.random.default_rng(0).permutation(8)
    out, lse = compiled(splits=1)(args, sees)
    shuffled = {n: x[:, order] if n.startswith(("q_", "new_")) else x for n, x in args.items()}
    got = compiled(splits=1)(shuffled, sees[:, order][:, :, order])
    assert_close(got, (out[:, order], lse[:, order]))


def test_length_beyond_the_cache_is_the_cache():
    args, _ = inputs(2, kv_len=(SLOTS,))
    want = reference(args, None)
    args["kv_len"] = jnp.asarray([SLOTS + 100], jnp.int32)
    assert_close(compiled(splits=2)(args, None), want)


def test_nan_of_a_node_reaches_those_who_see_it_alone():
    args, _ = inputs(3, kv_len=(40,))
    sees = bits(trees.star(3))
    want = reference(args, sees)
    args["new_latent"] = args["new_latent"].at[:, 1, 5].set(jnp.nan)
    out, lse = compiled(splits=2)(args, sees)
    assert np.isnan(out[:, 1]).all()
    assert np.isnan(lse[:, 1]).all()
    assert_close((out[:, ::2], lse[:, ::2]), [x[:, ::2] for x in want])


def test_row_that_sees_nothing_is_zero():
    """A padding node of a sequence without a prefix: neither split has a key for it."""
    args, _ = inputs(2, kv_len=(0,))
    sees = jnp.asarray([[[True, False], [False, False]]])
    out, lse = compiled(splits=2)(args, sees)
    assert not np.asarray(out[:, 1], np.float32).any()
    assert np.isneginf(lse[:, 1]).all()
    assert np.isfinite(lse[:, 0]).all()


def test_a_missing_fence_is_found_as_a_race(monkeypatch):
    """The interpreter would say so."""
    monkeypatch.setattr(mosaic.plgpu, "commit_smem", lambda: None)
    compiled.__wrapped__(splits=1)(inputs(1, kv_len=(65,))[0], None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 12}, "12 local heads: only multiples of 8"),
        ({"heads": 72}, "72 local heads"),
        ({"slots": 100}, "100 cache slots: only multiples of 64"),
        ({"latent": 384}, "latent width is 384"),
        ({"latent": 1024}, "latent width is 1024"),
        ({"tokens": 2049}, "a chunk of 2049 tokens: at most 2048"),
    ],
)
def test_shapes_outside_the_kernel_are_refused(change, message):
    shapes = {"tokens": 1, "kv_len": (1,), **change}
    args = jax.eval_shape(lambda: inputs(**shapes)[0])
    with pytest.raises(ValueError, match=f"mosaic kernel cannot run: {message}"):
        jax.eval_shape(compiled(1), args, None)


def test_trees_and_dtypes_outside_the_kernel_are_refused():
    args = jax.eval_shape(lambda: inputs(129, kv_len=(1,))[0])
    sees = jax.ShapeDtypeStruct((1, 129, 129), jnp.bool_)
    with pytest.raises(ValueError, match="a tree of 129 nodes: at most 128"):
        jax.eval_shape(compiled(1), args, sees)
    args["q_latent"] = args["q_latent"].update(dtype=jnp.float32)
    with pytest.raises(ValueError, match="dtype is float32: only bfloat16"):
        jax.eval_shape(compiled(1), args, None)


def test_public_function_refuses_what_the_named_kernel_cannot_run():
    args = jax.eval_shape(lambda: inputs(1, kv_len=(1,), heads=12)[0])

    def call(args, sees, **choice):
        return mla_attention(*(args[name] for name in NAMES), sees, scale=SCALE, **choice)

    with pytest.raises(ValueError, match="mosaic kernel cannot run: 12 local heads"):
        jax.eval_shape(functools.partial(call, implementation="mosaic"), args, None)
    assert jax.eval_shape(call, args, None)[1].shape == (1, 1, 12)
    for sees, message in [
        (jax.ShapeDtypeStruct((1, 1, 2), jnp.bool_), r"sees is \(1, 1, 2\) where .* \(1, 1, 1\)"),
        (jax.ShapeDtypeStruct((1, 1, 1), jnp.int32), "sees is int32 where bool"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(call, args, sees)


def test_default_is_the_kernel_on_a_hopper_gpu_only(monkeypatch):
    args = jax.eval_shape(lambda: inputs(1, kv_len=(1,))[0])
    shapes = args["q_latent"], args["q_rotary"], args["latent"], False
    assert why_not_mosaic(*shapes) == "the default backend is cpu, not a Hopper GPU"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, expected in [("9.0", None), ("8.0", "a GPU has compute capability 8.0")]:
        device = types.SimpleNamespace(compute_capability=capability, device_kind="a GPU")
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        reason = why_not_mosaic(*shapes)
        assert reason is None if expected is None else reason.startswith(expected)


@pytest.mark.parametrize("splits", [0, 257])
def test_splits_that_cannot_be_merged_are_refused(splits):
    args = jax.eval_shape(lambda: inputs(1, kv_len=(1,))[0])
    with pytest.raises(ValueError, match=f"splits={splits}, but 1 to 256"):
        jax.eval_shape(compiled(splits), args, None)


@pytest.mark.parametrize("wrong", [{"depth": 96}, {"columns": 512}, {"num_sms": 0}])
def test_tuning_checks_itself(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Tuning(**wrong)


def test_splits_fill_the_device_and_no_more():
    tuning = Tuning()
    assert mosaic.num_splits(1, 1, 8, 131072, tuning) in range(120, 133)
    assert mosaic.num_splits(1, 2048, 8, 32768, tuning) == 1
    assert mosaic.num_splits(1, 2048, 64, 32768, tuning) == 1
    assert mosaic.num_splits(8, 1, 8, 32768, tuning) * 8 <= 132
