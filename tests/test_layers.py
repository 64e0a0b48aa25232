import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import Llama3Scaling, RotaryConfig, Yarn
from jaxspec.layers import GatedMlp, RMSNorm, inverse_frequencies, rotary_angles, rotate
from tests import tiny
from tests.reference import formulas

PAIRS = [0, 1, 8, 16, 20, 24, 31]
"""The pairs whose frequencies the table of known values gives."""
# What a rotary embedding of 64 dims gives under each configuration, to the digits printed there:
# YaRN's correction range, frequencies, squared magnitude, softmax scale of 128 + 64 wide heads.
KNOWN = {
    "Kimi-K2.5": (
        (50000.0, Yarn(64.0, 4096, 32.0, 1.0, 1.0, 1.0)),
        (8, 20),
        "1 7.131110849e-01 6.687403050e-02 1.537296735e-03 1.807023387e-05 4.672964941e-06 "
        "4.382206456e-07",
        ("2.004739702", "0.144679626"),
    ),
    "Kimi-K2-Instruct": (
        (50000.0, Yarn(32.0, 4096, 1.0, 1.0, 1.0, 1.0)),
        (19, 20),
        "1 7.131110849e-01 6.687403050e-02 4.472135955e-03 3.614046774e-05 9.345929883e-06 "
        "8.764412912e-07",
        ("1.813260434", "0.130860800"),
    ),
    "beta_fast 1": (
        (50000.0, Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0)),
        (19, 20),
        "1 7.131110849e-01 6.687403050e-02 4.472135955e-03 1.807023387e-05 4.672964941e-06 "
        "4.382206456e-07",
        ("2.004739702", "0.144679626"),
    ),
    "base 10000": (
        (10000.0, Yarn(64.0, 4096, 1.0, 1.0, 1.0, 1.0)),
        (22, 23),
        "1 7.498942093e-01 1.000000000e-01 1.000000000e-02 3.162277660e-03 1.5625e-05 "
        "2.083627238e-06",
        ("2.004739702", "0.144679626"),
    ),
}


def agrees(value: float, printed: str) -> bool:
    """Whether `printed` is `value`, rounded to the digits it shows, nine at least."""
    digits = max(len(printed.split("e")[0].replace(".", "").lstrip("0")), 9)
    return abs(value / float(printed) - 1) <= 0.51 * 10.0 ** (1 - digits)


@pytest.mark.parametrize("name", KNOWN)
def test_yarn_known_values(name):
    (theta, yarn), span, frequencies, (squared, scale) = KNOWN[name]
    got = inverse_frequencies(RotaryConfig(64, theta, "pairs", yarn))
    for pair, printed in zip(PAIRS, frequencies.split(), strict=True):
        assert agrees(got[pair], printed), (pair, got[pair], printed)
    as_dict = {
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
    assert formulas.correction_range(64, theta, as_dict) == span
    np.testing.assert_allclose(
        got, formulas.inverse_frequencies(64, theta, as_dict), rtol=1e-12, atol=0
    )
    assert agrees(yarn.magnitude(1.0) ** 2, squared)
    text = tiny.TARGET_CONFIG | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    text["rope_scaling"] = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **as_dict}
    assert agrees(tiny.target_config(text).softmax_scale, scale)


LLAMA3 = {
    0: 1.00000000e00, 1: 8.14617217e-01, 8: 1.93922758e-01, 24: 7.29266508e-03, 28: 3.21144611e-03,
    29: 2.16657063e-03, 31: 8.56751460e-04, 33: 3.12693650e-04, 34: 1.78507791e-04,
    36: 7.78465546e-05, 40: 3.42810235e-05, 48: 6.64786967e-06, 63: 3.06892588e-07,
}  # fmt: skip
"""Of transformers 5.24's `ROPE_INIT_FUNCTIONS["llama3"]`, in f32, for Llama 3.1's own numbers: kept
to pair 28, on the ramp from there to pair 34, an eighth after that."""


def test_llama3_known_values():
    config = RotaryConfig(128, 5e5, "halves", llama3=Llama3Scaling(8.0, 8192, 1.0, 4.0))
    got = inverse_frequencies(config)
    np.testing.assert_allclose(got[list(LLAMA3)], list(LLAMA3.values()), rtol=2e-6)
    plain = inverse_frequencies(RotaryConfig(128, 5e5, "halves"))
    np.testing.assert_array_equal(got[:29], plain[:29])
    assert (got[29:35] < plain[29:35]).all()
    assert (got[29:34] > plain[29:34] / 8).all()
    np.testing.assert_allclose(got[35:], plain[35:] / 8, rtol=1e-15)
    cos, _ = rotary_angles(config, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_array_equal(cos, 1.0)


def test_softmax_scale_without_mscale_all_dim():
    plain = tiny.TARGET_CONFIG | {"rope_scaling": None}
    assert tiny.target_config(plain).softmax_scale == pytest.approx(24**-0.5, rel=1e-15)
    unscaled = tiny.TARGET_CONFIG["rope_scaling"] | {"mscale_all_dim": 0.0}
    text = tiny.TARGET_CONFIG | {"rope_scaling": unscaled}
    assert tiny.target_config(text).softmax_scale == pytest.approx(24**-0.5, rel=1e-15)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "expected"),
    # transformers' attention factor of a Llama-type YaRN, which names neither: 0.1 ln 8 + 1.
    [
        (1.0, 0.0, 1.2079441541679836),
        (1.0, 1.0, 1.0),
        (0.5, 1.0, 1.1039720770839918 / 1.2079441541679836),
    ],
)
def test_cosines_carry_the_ratio_of_magnitudes(mscale, mscale_all_dim, expected):
    yarn = Yarn(8.0, 256, 2.0, 1.0, mscale, mscale_all_dim)
    cos, sin = rotary_angles(RotaryConfig(8, 100.0, "halves", yarn), jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, expected, rtol=1e-6)
    np.testing.assert_array_equal(sin, 0)


@pytest.mark.parametrize("kind", ["pairs", "halves"])
def test_rotation(kind):
    config = RotaryConfig(8, 1000.0, kind)
    pos = np.array([[0, 1, 2, 63, 4095]])
    x = np.random.default_rng(0).normal(size=(1, 5, 3, 8)).astype(np.float32)
    got = rotate(jnp.asarray(x), rotary_angles(config, jnp.asarray(pos)), kind)
    angle = pos[:, :, None, None] * formulas.inverse_frequencies(8, 1000.0, None)
    turn = {"pairs": formulas.rotate_pairs, "halves": formulas.rotate_halves}[kind]
    # At position 4095 an f32 angle is known to 2e-4.
    np.testing.assert_allclose(got[:, :4], turn(x.astype(np.float64), angle)[:, :4], atol=3e-5)
    np.testing.assert_allclose(got, turn(x.astype(np.float64), angle), atol=1e-3)
    np.testing.assert_array_equal(got[:, 0], x[:, 0])


@pytest.mark.parametrize("kind", ["pairs", "halves"])
def test_rotation_is_relative(kind):
    """q . k depends on the distance alone, so a common shift changes nothing."""
    config = RotaryConfig(8, 1000.0, kind, Yarn(8.0, 256, 2.0, 1.0, 1.0, 1.0))
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def at(x, pos):
        return rotate(x, rotary_angles(config, jnp.full((1, 1), pos)), kind)

    near, far = at(q, 7) * at(k, 3), at(q, 107) * at(k, 103)
    np.testing.assert_allclose(near.sum(), far.sum(), rtol=1e-4)
    assert abs(float(near.sum() - (at(q, 8) * at(k, 3)).sum())) > 1e-3


def test_kinds_differ():
    x = jnp.arange(8.0).reshape(1, 1, 1, 8)
    angles = rotary_angles(RotaryConfig(8, 1000.0, "pairs"), jnp.ones((1, 1), jnp.int32))
    assert not np.allclose(rotate(x, angles, "pairs"), rotate(x, angles, "halves"))


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
def test_rms_norm(eps):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 16)), rng.normal(size=16)
    norm = RMSNorm(16, eps, jnp.dtype("float32"))
    norm.weight[...] = jnp.asarray(weight, jnp.float32)
    got = norm(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, formulas.rms_norm(x, weight, eps), rtol=2e-6)


def test_rms_norm_is_computed_in_f32():
    """In bf16, the mean of squares of large states would lose most of its digits."""
    x = 300 + np.random.default_rng(0).normal(size=(1, 1, 64))
    x_bf16 = jnp.asarray(x, jnp.bfloat16)
    got = RMSNorm(64, 1e-6, jnp.dtype("bfloat16"))(x_bf16)
    assert got.dtype == jnp.bfloat16
    exact = formulas.rms_norm(np.asarray(x_bf16, np.float64), np.ones(64), 1e-6)
    # One rounding to bf16: half a unit in the eighth binary digit.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8)


def test_gated_mlp():
    mlp = GatedMlp(16, 24, jnp.dtype("float32"), nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 3, 16))
    weights = (np.asarray(w[...], np.float64).T for w in (mlp.gate, mlp.up, mlp.down))
    np.testing.assert_allclose(
        mlp(jnp.asarray(x, jnp.float32)), formulas.swiglu(x, *weights), rtol=1e-4, atol=1e-9
    )
