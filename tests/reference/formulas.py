"""What target and draft share: RMSNorm, softmax, SwiGLU, rotary embedding with YaRN."""

import math

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def softmax(scores: np.ndarray) -> np.ndarray:
    exponent = np.exp(scores - scores.max(-1, keepdims=True))
    return exponent / exponent.sum(-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) * up(x)); weights are [out, in], as torch keeps them."""
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def causal(length: int) -> np.ndarray:
    return np.tril(np.ones((length, length), bool))


def magnitude(factor: float, mscale: float) -> float:
    """YaRN's get_mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_of(config: dict) -> dict | None:
    """The YaRN parameters of a config, under either of its two spellings; None without YaRN."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope if rope.get("type", rope.get("rope_type")) == "yarn" else None


def theta_of(config: dict) -> float:
    return config.get("rope_theta") or config["rope_parameters"]["rope_theta"]


def inverse_frequencies(width: int, theta: float, yarn: dict | None) -> np.ndarray:
    """Radians per position of every pair, one pair at a time."""
    out = []
    for i in range(width // 2):
        extrapolated = theta ** (-2 * i / width)
        if yarn is None:
            out.append(extrapolated)
            continue
        low, high = correction_range(width, theta, yarn)
        mask = 1 - min(max((i - low) / (high - low), 0), 1)
        out.append(extrapolated / yarn["factor"] * (1 - mask) + extrapolated * mask)
    return np.array(out)


def correction_range(width: int, theta: float, yarn: dict) -> tuple[float, float]:
    """The pairs between which YaRN's ramp runs."""

    def corr(rotations: float) -> float:
        original = yarn["original_max_position_embeddings"]
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(corr(yarn.get("beta_fast", 32))), 0)
    high = min(math.ceil(corr(yarn.get("beta_slow", 1))), width - 1)
    return low, high + 0.001 if low == high else high


def cos_sin_factor(yarn: dict | None) -> float:
    """What YaRN multiplies cosines and sines by: get_mscale's ratio, 1 for Kimi."""
    if yarn is None:
        return 1.0
    upper = magnitude(yarn["factor"], yarn.get("mscale", 1))
    return upper / magnitude(yarn["factor"], yarn.get("mscale_all_dim", 0))


def rotate_pairs(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """x [..., width], dims (2i, 2i + 1) turned as one complex number by angle [..., width/2]."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = turned.real, turned.imag
    return out


def rotate_halves(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """x [..., width] with dims (i, i + width/2) turned by angle [..., width/2]: Llama's form."""
    first, second = np.split(x, 2, axis=-1)
    swapped = np.concatenate([-second, first], axis=-1)
    both = np.concatenate([angle, angle], axis=-1)
    return x * np.cos(both) + swapped * np.sin(both)
