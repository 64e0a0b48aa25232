import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.kernels.expert_matmul import PackedInt4, expert_matmul, xla
from jaxspec.kernels.expert_matmul.packing import pack, unpack
from jaxspec.kernels.expert_matmul.reference import expert_matmul_reference
from jaxspec.step import compiler_options
from tests.reference import formulas

LAYERS, EXPERTS, LAYER = 2, 5, 1
NOBODY = EXPERTS
"""An id that is no expert."""


def random_packed(rng: np.random.Generator, *shape: int) -> tuple[PackedInt4, np.ndarray]:
    """A packed stack, and its exact q x scale in f64."""
    *lead, columns = shape
    q = rng.integers(-8, 8, shape)
    scale = (rng.random((*lead, columns // 32)) * 0.1).astype(ml_dtypes.bfloat16)
    return pack(q, scale), q * scale.astype(np.float64).repeat(32, axis=-1)


@functools.cache
def stacks(width: int, hidden: int):
    """Packed gate-up and down stacks, and the same in f64."""
    rng = np.random.default_rng(0)
    gate_up = random_packed(rng, LAYERS, EXPERTS, 2, hidden, width)
    return gate_up, random_packed(rng, LAYERS, EXPERTS, width, hidden)


def exact(x, gate_up, down, experts, shares) -> np.ndarray:
    """The sum of the chosen experts in f64, one choice at a time."""
    out = np.zeros(x.shape)
    for (token, place), expert in np.ndenumerate(experts):
        if expert < EXPERTS:
            gate, up = gate_up[LAYER, expert]
            matrices = gate, up, down[LAYER, expert]
            out[token] += shares[token, place] * formulas.swiglu(x[token][None], *matrices)[0]
    return out


def choices(tokens: int, per_token: int = 3, seed: int = 1):
    """Tokens, distinct experts for each, and shares."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(EXPERTS)[:per_token] for _ in range(tokens)])
    return experts.astype(np.int32), rng.random((tokens, per_token)).astype(np.float32)


def tokens_of(count: int, width: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


@functools.cache
def compiled(function=expert_matmul, product: str = "exact"):
    """As the step is compiled."""
    options = compiler_options("cpu")
    return jax.jit(lambda *args: function(*args, product=product), compiler_options=options)


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 256), (4, 3, 288), (3, 544)], ids=str)
def test_packing_round_trip(shape):
    packed, exact_weight = random_packed(np.random.default_rng(0), *shape)
    assert packed.words.dtype == np.int32
    assert packed.words.shape[-1] * 8 == -(-shape[-1] // 256) * 256
    np.testing.assert_array_equal(unpack(packed, jnp.dtype("float32")), exact_weight)


def test_packed_layout():
    """Nibble i of word c of a block holds element 32 i + c; every plane has one scale per row."""
    q = np.random.default_rng(0).integers(-8, 8, (3, 512))
    scale = np.arange(48, dtype=np.float32).reshape(3, 16)
    packed = pack(q, scale)
    for row, block, plane, word in np.ndindex(3, 2, 8, 32):
        nibble = (int(packed.words[row, 32 * block + word]) >> (4 * plane)) & 15
        assert nibble - 8 == q[row, 256 * block + 32 * plane + word]
        assert packed.scales[block, plane, row] == scale[row, 8 * block + plane]


def test_product_rounding():
    packed, exact_weight = random_packed(np.random.default_rng(0), 4, 64)
    exact_f32 = unpack(packed, jnp.dtype("float32"), "exact")
    rounded = unpack(packed, jnp.dtype("float32"), "bfloat16")
    np.testing.assert_array_equal(exact_f32, exact_weight.astype(np.float32))
    as_bf16 = exact_weight.astype(np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded, as_bf16.astype(np.float32))
    assert (exact_f32 != rounded).any()
    np.testing.assert_array_equal(unpack(packed, jnp.dtype("bfloat16"), "exact"), as_bf16)


@pytest.mark.parametrize(
    ("q", "scale", "message"),
    [
        (np.full((2, 32), 8), np.ones((2, 1)), "from 8 to 8, int4 from -8 to 7"),
        (np.zeros((2, 48), int), np.ones((2, 1)), "multiple of 32"),
        (np.zeros((2, 64), int), np.ones((2, 1)), r"scales are \(2, 1\)"),
    ],
)
def test_values_that_cannot_be_packed(q, scale, message):
    with pytest.raises(ValueError, match=message):
        pack(q, scale)


# 64 x 32: the tests' tiny model. 288 x 32: a second, partial block along the width.
@pytest.mark.parametrize(("width", "hidden"), [(64, 32), (288, 32)])
@pytest.mark.parametrize("form", ["packed", "plain"])
@pytest.mark.parametrize("function", [expert_matmul, expert_matmul_reference])
def test_against_f64(width, hidden, form, function):
    (gate_up, exact_gate_up), (down, exact_down) = stacks(width, hidden)
    if form == "plain":
        gate_up, down = (w.astype(np.float32) for w in (exact_gate_up, exact_down))
    x, (experts, shares) = tokens_of(7, width), choices(7)
    got = compiled(function)(x, gate_up, down, LAYER, experts, shares)
    assert got.dtype == jnp.float32
    want = exact(x, exact_gate_up, exact_down, experts, shares)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_more_choices_than_a_tile():
    """Experts with more tokens than a tile, with a partial last tile, and with none at all."""
    (gate_up, exact_gate_up), (down, exact_down) = stacks(64, 32)
    x, (experts, shares) = tokens_of(71, 64), choices(71)
    experts[experts == 2] = NOBODY
    experts[:, 0] = 4
    got = compiled()(x, gate_up, down, LAYER, experts, shares)
    want = exact(x, exact_gate_up, exact_down, experts, shares)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_nobody():
    """A choice that is no expert adds nothing, whatever its share; nor does a whole row of them."""
    (gate_up, exact_gate_up), (down, exact_down) = stacks(64, 32)
    x, (experts, shares) = tokens_of(7, 64), choices(7)
    experts[0], experts[3, 1] = NOBODY, NOBODY
    x[0], shares[0], shares[3, 1] = np.nan, np.inf, np.nan
    got = compiled()(x, gate_up, down, LAYER, experts, shares)
    np.testing.assert_array_equal(got[0], 0)
    want = exact(x[1:], exact_gate_up, exact_down, experts[1:], shares[1:])
    np.testing.assert_allclose(got[1:], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    everyone_idle = compiled()(x, gate_up, down, LAYER, np.full_like(experts, NOBODY), shares)
    np.testing.assert_array_equal(everyone_idle, 0)


def test_only_chosen_experts_are_read(monkeypatch):
    """A block's places that no choice fills read nothing more; called without `jit`, too."""
    read, read_some = [], xla._read_some

    def noting(stack, layer, expert_A):
        jax.debug.callback(lambda ids: read.append(set(ids.tolist())), expert_A)
        return read_some(stack, layer, expert_A)

    monkeypatch.setattr(xla, "_read_some", noting)
    (gate_up, exact_gate_up), (down, exact_down) = stacks(64, 32)
    x, experts, shares = tokens_of(1, 64), np.array([[3, NOBODY, 1]]), np.ones((1, 3), np.float32)
    got = expert_matmul(x, gate_up, down, LAYER, experts, shares)
    jax.effects_barrier()
    assert read == [{1, 3}, {1, 3}]  # gate and up, then down
    want = exact(x, exact_gate_up, exact_down, experts, shares)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("more", [0, 1])
def test_both_sides_of_the_switch(more):
    """As many choices as go side by side, and a token more, which go in tiles."""
    (gate_up, exact_gate_up), (down, exact_down) = stacks(64, 32)
    tokens = xla.MAX_PER_EXPERT * EXPERTS // 4 + more
    x, (experts, shares) = tokens_of(tokens, 64), choices(tokens, 4)
    got = compiled()(x, gate_up, down, LAYER, experts, shares)
    want = exact(x, exact_gate_up, exact_down, experts, shares)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


# Of 33 tokens the choices go side by side, of 71 in tiles.
@pytest.mark.parametrize("tokens", [33, 71])
def test_other_tokens_do_not_change_a_bit(tokens):
    """A token's place among its experts' moves with the others' choices; its sum does not."""
    (gate_up, _), (down, _) = stacks(288, 96)
    x, (experts, shares) = tokens_of(tokens, 288), choices(tokens)
    alone = compiled()(x, gate_up, down, LAYER, experts, shares)
    for seed in range(20):
        other_x = tokens_of(tokens, 288, seed + 10)
        other_experts, other_shares = choices(tokens, seed=seed)
        other_x[seed % 3 :: 3] = np.nan
        other_experts[seed % 5 :: 3] = NOBODY
        kept = np.random.default_rng(seed).permutation(tokens)[:5]
        for mine, others in ((x, other_x), (experts, other_experts), (shares, other_shares)):
            others[kept] = mine[kept]
        got = compiled()(other_x, gate_up, down, LAYER, other_experts, other_shares)
        np.testing.assert_array_equal(got[kept], alone[kept])


def test_widths_that_do_not_belong_together():
    (gate_up, _), (down, _) = stacks(64, 32)
    experts, shares = choices(2)
    with pytest.raises(ValueError, match="tokens are 32 wide, gate and up 64"):
        expert_matmul(jnp.zeros((2, 32)), gate_up, down, LAYER, experts, shares)


def test_unknown_implementation():
    (gate_up, _), (down, _) = stacks(64, 32)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        expert_matmul(tokens_of(2, 64), gate_up, down, LAYER, *choices(2), implementation="cuda")
