"""The Mosaic kernels of `expert_matmul` under the interpreter: races on, unset memory NaN.

Tolerances: the relative error of the norm is at most 1e-2 and the cosine difference at most 5e-6.
One rounding to bf16, that of the hidden rows, makes 1.7e-3 and 1.4e-6; all else is f32.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.expert_matmul import expert_matmul, mosaic, why_not_mosaic
from jaxspec.kernels.expert_matmul.mosaic import Tuning, expert_matmul_mosaic, supported
from jaxspec.kernels.expert_matmul.packing import PackedInt4, pack
from jaxspec.kernels.expert_matmul.reference import expert_matmul_reference
from jaxspec.kernels.expert_matmul.slots import assign, most_slots

LAYERS, LAYER, EXPERTS, CHOICES = 2, 1, 4, 2
NOBODY = EXPERTS
WIDTH = HIDDEN = 256
TUNING = Tuning(token_tile=8, stages=2, programs=2, unroll=1)

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


@functools.cache
def stacks(width: int = WIDTH, hidden: int = HIDDEN, experts: int = EXPERTS):
    """Random packed gate-up and down stacks."""
    rng = np.random.default_rng(0)

    def packed(*shape: int) -> PackedInt4:
        scale = rng.random((*shape[:-1], shape[-1] // 32)) * 0.1
        packed = pack(rng.integers(-8, 8, shape), scale.astype(ml_dtypes.bfloat16))
        return jax.tree.map(jnp.asarray, packed)

    return packed(LAYERS, experts, 2, hidden, width), packed(LAYERS, experts, width, hidden)


def tokens_of(count: int, width: int = WIDTH, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, width)), jnp.bfloat16)


def choices(tokens: int, seed: int = 1):
    """Distinct experts for each token, and shares."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(tokens)])
    return experts.astype(np.int32), jnp.asarray(rng.random((tokens, CHOICES)), jnp.float32)


@functools.cache
def compiled(tuning: Tuning = TUNING):
    """The kernels, compiled once for tests of the same shapes."""

    @jax.jit
    def run(*args):
        with plgpu.force_gpu_interpret_mode(INTERPRETER):
            return expert_matmul_mosaic(*args, tuning=tuning)

    return run


def check(got, x, gate_up, down, experts, shares) -> None:
    want = np.asarray(expert_matmul_reference(x, gate_up, down, LAYER, experts, shares))
    got, norms = np.asarray(got), np.linalg.norm(got) * np.linalg.norm(want)
    assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want)
    assert 1 - (got * want).sum(dtype=np.float64) / norms <= 5e-6


# 17 tokens with two choices of four experts: more choices of an expert than a tile holds.
@pytest.mark.parametrize("tokens", [1, 3, 8, 17])
def test_against_reference(tokens):
    gate_up, down = stacks()
    x, (experts, shares) = tokens_of(tokens), choices(tokens)
    got = compiled()(x, gate_up, down, LAYER, experts, shares)
    assert got.dtype == jnp.float32
    check(got, x, gate_up, down, experts, shares)


def test_one_expert_chosen_by_all_and_experts_nobody_chose():
    gate_up, down = stacks()
    x, (_, shares) = tokens_of(17), choices(17)
    experts = np.tile(np.array([3, NOBODY], np.int32), (17, 1))
    got = compiled()(x, gate_up, down, LAYER, experts, shares)
    check(got, x, gate_up, down, experts, shares)


def test_nobody():
    """A choice that is no expert adds nothing, whatever its share; nor does a row of them, NaN."""
    gate_up, down = stacks()
    x, (experts, shares) = tokens_of(8), choices(8)
    experts[0], experts[3, 1], experts[4, 0] = NOBODY, NOBODY + 100, -1
    x, shares = x.at[0].set(jnp.nan), shares.at[0].set(jnp.inf)
    wild = shares.at[3, 1].set(jnp.nan)
    got = np.asarray(compiled()(x, gate_up, down, LAYER, experts, wild))
    np.testing.assert_array_equal(got[0], 0)
    check(got[1:], x[1:], gate_up, down, experts[1:], shares[1:])
    idle = compiled()(x, gate_up, down, LAYER, np.full_like(experts, NOBODY), shares)
    np.testing.assert_array_equal(idle, 0)


def test_other_tokens_do_not_change_a_bit():
    """A token's place in its experts' tiles moves with the others' choices; its sum does not."""
    gate_up, down = stacks()
    x, (experts, shares) = tokens_of(17), choices(17)
    alone = np.asarray(compiled()(x, gate_up, down, LAYER, experts, shares))
    other_x, (other_experts, other_shares) = tokens_of(17, seed=5), choices(17, seed=6)
    other_experts[::3] = NOBODY
    kept, moved = np.array([2, 7, 16]), np.array([16, 0, 5])
    other_x = other_x.at[moved].set(x[kept])
    other_experts[moved], other_shares = experts[kept], other_shares.at[moved].set(shares[kept])
    got = compiled()(other_x, gate_up, down, LAYER, other_experts, other_shares)
    np.testing.assert_array_equal(np.asarray(got)[moved], alone[kept])


# Several blocks along both widths, more stages than an item has blocks, blocks cut in parts.
@pytest.mark.parametrize(
    "tuning", [Tuning(16, 3, 5, 2), Tuning(32, 2, 1, 4, parts=4)], ids=["tile-16", "tile-32"]
)
def test_several_blocks(tuning):
    gate_up, down = stacks(512, 512)
    x, (_, shares) = tokens_of(17, 512), choices(17)
    experts = np.tile(np.array([1, NOBODY], np.int32), (17, 1))
    got = compiled(tuning)(x, gate_up, down, LAYER, experts, shares)
    check(got, x, gate_up, down, experts, shares)


def test_full_width():
    """7168 wide, as Kimi-K2.5; its hidden rows are 2048."""
    gate_up, down = stacks(7168, 256, 2)
    x, shares = tokens_of(2, 7168), np.array([[0.75], [0.5]], np.float32)
    experts = np.array([[1], [1]], np.int32)
    got = compiled()(x, gate_up, down, LAYER, experts, shares)
    check(got, x, gate_up, down, experts, shares)


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_slots(tokens, tile):
    """Each choice has a row of its own, in a slot of its expert; slots in use come first."""
    many = 23
    num_slots = most_slots(tokens * 8, many, tile)
    num_rows = num_slots * tile
    for seed in range(10):
        rng = np.random.default_rng(seed)
        experts = np.stack([rng.permutation(many + 9)[:8] - 2 for _ in range(tokens)])
        if seed == 0:
            experts = np.tile(np.arange(8), (tokens, 1))
        slots = jax.jit(assign, static_argnums=(1, 2))(experts.astype(np.int32), many, tile)
        row, table = np.asarray(slots.row), np.asarray(slots.table)
        token, expert, (used,) = np.split(table, [num_rows, num_rows + num_slots])
        here = (experts >= 0) & (experts < many)
        assert used == sum(-(-count // tile) for count in np.bincount(experts[here], minlength=1))
        assert np.unique(row[here]).size == here.sum()
        assert (row[here] < used * tile).all()
        assert (row[~here] == num_rows).all()
        np.testing.assert_array_equal(expert[row[here] // tile], experts[here])
        np.testing.assert_array_equal(token[row[here]], np.nonzero(here)[0])


def test_a_stage_loaded_before_it_is_read_is_a_race(monkeypatch):
    """The interpreter would say so: this is what `commit_smem` is there for."""
    without = types.SimpleNamespace(**vars(plgpu))
    without.commit_smem = lambda: None
    monkeypatch.setattr(mosaic, "plgpu", without)
    gate_up, down = stacks(512, 512)
    args = tokens_of(1, 512), gate_up, down, LAYER, *choices(1)
    jax.block_until_ready(compiled(Tuning(8, 2, 1, 1))(*args))


def test_what_is_not_supported():
    gate_up, down = stacks()
    x = tokens_of(3)
    assert supported(x, gate_up, down) is None
    plain = jnp.zeros((LAYERS, EXPERTS, WIDTH, HIDDEN), jnp.bfloat16)
    assert supported(x, gate_up, plain) == "the experts are plain weights, not packed int4"
    assert supported(x.astype(jnp.float32), gate_up, down) == "tokens are float32, not bfloat16"
    f32 = PackedInt4(down.words, down.scales.astype(jnp.float32), HIDDEN)
    assert supported(x, gate_up, f32) == "the scales of down are float32, not bfloat16"
    narrow = pack(np.zeros((1, 4, 64, 64), int), np.ones((1, 4, 64, 2), ml_dtypes.bfloat16))
    gate_up_narrow = PackedInt4(narrow.words[:, :, None], narrow.scales[:, :, None], 64)
    reason = "widths 64 and 64 are not both multiples of 256"
    assert supported(tokens_of(3, 64), gate_up_narrow, narrow) == reason
    with pytest.raises(ValueError, match="the mosaic kernels cannot run: tokens are float32"):
        expert_matmul(
            x.astype(jnp.float32), gate_up, down, LAYER, *choices(3), implementation="mosaic"
        )


def test_without_a_gpu_the_best_is_xla():
    gate_up, down = stacks()
    x, (experts, shares) = tokens_of(3), choices(3)
    assert why_not_mosaic(x, gate_up, down) == "the default backend is cpu, not a Hopper GPU"
    args = x, gate_up, down, LAYER, experts, shares
    best, xla = (expert_matmul(*args, implementation=name) for name in (None, "xla"))
    np.testing.assert_array_equal(best, xla)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_tile": 12}, "token_tile is 12"),
        ({"stages": 1}, "at least two stages"),
        ({"programs": 0}, "0 programs"),
        ({"unroll": 3}, "unroll is 3"),
        ({"parts": 0}, "0 parts"),
        ({"stages": 11}, "need 252928 bytes of shared memory, there are 232448"),
    ],
)
def test_tunings_that_cannot_be(changed, message):
    with pytest.raises(ValueError, match=message):
        Tuning(**changed)
