"""Building blocks that target and draft share: weights, norm, MLP, rotary embedding."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.config import RotaryConfig
from jaxspec.dims import typed

__all__ = [
    "GatedMlp",
    "RMSNorm",
    "full_f32",
    "inverse_frequencies",
    "rms_norm",
    "rotary_angles",
    "rotate",
    "scan_layers",
    "stack_layers",
    "weight",
]


def full_f32[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """`function`, with products of f32 in f32: on a GPU they would be TF32. bf16 is untouched."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    return wrapped


def weight(rngs: nnx.Rngs, dtype: jnp.dtype, *shape: int, scale: float = 0.02) -> nnx.Param:
    """A parameter drawn from a normal distribution: the shape is what conversion must fill."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, dtype))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in f32 (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    @typed
    def __call__(self, x: Float[Array, "*B width"]) -> Float[Array, "*B width"]:
        """The normalised states, in x's dtype."""
        return rms_norm(x, self.weight[...], self.eps)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """What `RMSNorm` gives; `weight` is of the last axes."""
    x_f32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - weight.ndim) + weight.shape)
    return (x_f32 * scale * weight).astype(x.dtype)


class GatedMlp(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.gate = weight(rngs, dtype, width, hidden)
        self.up = weight(rngs, dtype, width, hidden)
        self.down = weight(rngs, dtype, hidden, width)

    @typed
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The block's output, before the residual is added."""
        gate_BTF, up_BTF = x_BTD @ self.gate[...], x_BTD @ self.up[...]
        return (jax.nn.silu(gate_BTF) * up_BTF) @ self.down[...]


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs) -> Any:
    """`depth` layers of a kind as one whose parameters lead with the layer axis; None for none."""
    if not depth:
        return None
    return nnx.split_rngs(splits=depth)(nnx.vmap(in_axes=(0,))(make))(rngs)


def scan_layers(
    body: Callable[..., tuple[Any, Any]], carry: Any, stack: nnx.Module, first_layer: int
) -> tuple[Any, Any]:
    """`lax.scan` of body(carry, layer, index in the model, index in the stack) over a stack."""
    graph, params = nnx.split(stack)
    depth = jax.tree.leaves(params)[0].shape[0]

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        params, index = xs
        return body(carry, nnx.merge(graph, params), index + first_layer, index)

    return jax.lax.scan(step, carry, (params, jnp.arange(depth)))


def inverse_frequencies(config: RotaryConfig) -> np.ndarray:
    """Radians per position of each rotated pair, f64 [width / 2].

    With YaRN, pairs that turn often within the original context keep their frequency, those that
    turn less than `beta_slow` times are slowed down by `factor`, and a linear ramp lies between
    (arXiv:2309.00071, section 3.2; DeepSeek-V3 `inference/model.py`).

    Llama 3.1's ramp is over the turns themselves, from `low_freq_factor` to `high_freq_factor` of
    them within the original context (transformers, `_compute_llama3_parameters`).
    """
    width, pair = config.width, np.arange(config.width // 2)
    frequency = config.theta ** (-2.0 * pair / width)
    if (llama3 := config.llama3) is not None:
        turns = llama3.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = llama3.low_freq_factor, llama3.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequency / llama3.factor * (1 - kept) + frequency * kept
    if config.yarn is None:
        return frequency
    yarn = config.yarn

    def pair_turning(times: float) -> float:
        context = yarn.original_max_position_embeddings
        return width * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), width - 1)
    ramp = np.clip((pair - low) / (high - low if high != low else 0.001), 0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)


@typed
def rotary_angles(
    config: RotaryConfig, pos_BT: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of every pair's angle at 0-based positions, f32.

    DeepSeek's YaRN also scales them by magnitude(mscale) / magnitude(mscale_all_dim), which is 1
    where the two are equal, as they are for Kimi.
    """
    frequency = jnp.asarray(inverse_frequencies(config), jnp.float32)
    angle_BTR = pos_BT.astype(jnp.float32)[:, :, None] * frequency[None, None]
    magnitude = 1.0
    if (yarn := config.yarn) is not None:
        magnitude = yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
    return jnp.cos(angle_BTR) * magnitude, jnp.sin(angle_BTR) * magnitude


@typed
def rotate(
    x_BTNR: Float[Array, "B T N R"],
    angles: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    kind: str,
) -> Float[Array, "B T N R"]:
    """The heads, each pair of dims turned by its angle; in f32, returned in x's dtype.

    Convention: see `RotaryConfig.kind`. `pairs` are turned where they stand, so cached keys are
    in checkpoint order (transformers de-interleaves them; the products are the same).
    """
    cos, sin = (angle[:, :, None, :] for angle in angles)
    x = x_BTNR.astype(jnp.float32)
    if kind == "pairs":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = jnp.split(x, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    if kind == "pairs":
        out = jnp.stack(turned, axis=-1).reshape(x.shape)
    else:
        out = jnp.concatenate(turned, axis=-1)
    return out.astype(x_BTNR.dtype)
