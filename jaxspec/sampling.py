"""Choosing a token from logits: argmax, or an exact sample by noise that depends on position only.

`token = argmax(log p + Gumbel(seed, position))` is a sample from p (the Gumbel-max trick). The
noise is keyed by the request's seed and by the absolute position of the token being chosen, never
by tree node, step or batch row. So a node's choice is what plain sampling would have chosen there,
the walk over the tree is the greedy one, and any tree gives the very tokens of plain sampling.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxspec.dims import typed

__all__ = ["Sampling", "choose", "gumbel_noise", "keep_top"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["seed", "temperature", "top_k", "top_p"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each sequence's tokens are chosen.

    Attributes:
      seed: [B] uint32.
      temperature: [B] f32; 0 is greedy, exactly.
      top_k: [B] int32, keep the k most probable tokens; 0 keeps all.
      top_p: [B] f32 in (0, 1], then keep the most probable ones that reach this share; 1 keeps all.
    """

    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any


@typed
def gumbel_noise(
    seed_B: Integer[Array, "B"], pos_BP: Int[Array, "B P"], vocab_size: int
) -> Float[Array, "B P V"]:
    """Standard Gumbel noise for the tokens at absolute positions `pos_BP`, f32."""

    def at(seed: jax.Array, pos: jax.Array) -> jax.Array:
        # Generator and mode are named, so that a user's defaults do not change the tokens.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), pos)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="low")

    return jax.vmap(jax.vmap(at, (None, 0)))(seed_B, pos_BP)


@typed
def choose(
    logits_BJV: Float[Array, "B J V"],
    depth_BJ: Int[Array, "B J"],
    length_B: Int[Array, "B"],
    sampling: Sampling,
    *,
    levels: int,
) -> Int[Array, "B J"]:
    """The token that follows each node.

    Args:
      depth_BJ: of each node; a root stands at position `length_B`, so the token after a node is
        the one at position length + depth + 1.
      levels: the greatest depth.

    NaN logits count as -inf. Of equal scores the lowest id wins.
    """
    logits_BJV = jnp.where(jnp.isnan(logits_BJV), -jnp.inf, logits_BJV)
    is_sampled_B = sampling.temperature > 0

    def greedy() -> jax.Array:
        return jnp.argmax(logits_BJV, axis=-1)

    def sampled() -> jax.Array:
        temperature_B = jnp.where(is_sampled_B, sampling.temperature, 1.0)
        # Below their maximum, so that no temperature makes a second one infinite.
        below_BJV = logits_BJV - logits_BJV.max(-1, keepdims=True)
        score_BJV = below_BJV / temperature_B[:, None, None]
        is_cut = is_sampled_B & ((sampling.top_k > 0) | (sampling.top_p < 1))
        score_BJV = lax.cond(
            is_cut.any(),
            lambda: jnp.where(
                keep_top(score_BJV, sampling.top_k, sampling.top_p), score_BJV, -jnp.inf
            ),
            lambda: score_BJV,
        )
        # One draw per depth, not per node: siblings' children share theirs.
        pos_BP = length_B[:, None] + 1 + jnp.arange(levels + 1)[None]
        noise_BPV = gumbel_noise(sampling.seed, pos_BP, logits_BJV.shape[-1])
        noise_BJV = jnp.take_along_axis(noise_BPV, depth_BJ[:, :, None], axis=1)
        token_BJ = jnp.argmax(score_BJV + noise_BJV, axis=-1)
        return jnp.where(is_sampled_B[:, None], token_BJ, greedy())

    return lax.cond(is_sampled_B.any(), sampled, greedy).astype(jnp.int32)


@typed
def keep_top(
    score_BJV: Float[Array, "B J V"], top_k_B: Int[Array, "B"], top_p_B: Float[Array, "B"]
) -> Bool[Array, "B J V"]:
    """Which tokens top-k, then top-p over what is left, keep; equals of the last one kept stay too.

    Both are thresholds on the scores, found by bisection over the 2^32 floats: 32 passes over the
    vocabulary in place of a sort.
    """
    order_BJV = _sortable(score_BJV)
    k_B = jnp.where(top_k_B > 0, top_k_B, score_BJV.shape[-1])[:, None]
    is_kept = order_BJV >= _largest_threshold(
        lambda t_BJ: (order_BJV >= t_BJ[:, :, None]).sum(-1) >= k_B, order_BJV.shape[:2]
    )
    probability = jax.nn.softmax(jnp.where(is_kept, score_BJV, -jnp.inf), axis=-1)
    nucleus_BJ1 = _largest_threshold(
        lambda t_BJ: (
            jnp.where(order_BJV >= t_BJ[:, :, None], probability, 0).sum(-1) >= top_p_B[:, None]
        ),
        order_BJV.shape[:2],
    )
    # The best token stays, even where top-p is so small that it is 0 in f32.
    nucleus_BJ1 = jnp.minimum(nucleus_BJ1, order_BJV.max(-1, keepdims=True))
    return is_kept & ((order_BJV >= nucleus_BJ1) | (top_p_B >= 1)[:, None, None])


def _sortable(x: jax.Array) -> jax.Array:
    """int32 values in the order of the floats: the bits, with negative ones mirrored."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_threshold(is_enough: Any, shape: tuple[int, ...]) -> jax.Array:
    """The largest int32 t for which `is_enough(t)` holds, [..., 1]; it must hold for the lowest."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # enough at low, not at high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = is_enough(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.full(shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    highest = jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32)
    return lax.fori_loop(0, 32, halve, (lowest, highest))[0][..., None]
