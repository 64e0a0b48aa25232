"""How tokens are drawn: noise that depends on seed and position only, and top-k, top-p thresholds.

`token = argmax(log p + Gumbel(seed, position))` is a sample from p (the Gumbel-max trick). The
noise is keyed by the request's seed and by the absolute position of the token being chosen, never
by tree node, step or batch row. So a node's choice is what plain sampling would have chosen there,
the walk over the tree is the greedy one, and any tree gives the very tokens of plain sampling.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["LOWEST", "Sampling", "gumbel_noise", "keep_top", "sortable", "thresholds"]

LOWEST = jnp.iinfo(jnp.int32).min
"""A threshold that every score reaches."""


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

    @property
    def is_sampled(self) -> jax.Array:
        """[B], whether a sequence is sampled at all."""
        return self.temperature > 0

    @property
    def is_cut(self) -> jax.Array:
        """[B], whether top-k or top-p keeps tokens from being chosen."""
        return self.is_sampled & ((self.top_k > 0) | (self.top_p < 1))


def gumbel_noise(seed_B: jax.Array, pos_BP: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise [B,P,V] for the tokens at absolute positions `pos_BP`, f32."""

    def at(seed: jax.Array, pos: jax.Array) -> jax.Array:
        # Generator, its layout and mode are named, so that a user's defaults do not change the
        # tokens.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), pos)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="low")

    with jax.threefry_partitionable(True):
        return jax.vmap(jax.vmap(at, (None, 0)))(seed_B, pos_BP)


def keep_top(score_BJV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Which tokens top-k, then top-p over what is left, keep; equals of the last one kept stay too.

    Returns:
      [B,J,V] bool.
    """
    return sortable(score_BJV) >= thresholds(score_BJV, top_k_B, top_p_B)[:, :, None]


def thresholds(score_BJV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """[B,J] int32, the `sortable` score from which on tokens are kept.

    Both are thresholds on the scores, found by bisection over the 2^32 floats: 32 passes over the
    vocabulary in place of a sort.
    """
    order_BJV = sortable(score_BJV)
    k_B1 = jnp.where(top_k_B > 0, top_k_B, score_BJV.shape[-1])[:, None]
    last_BJ = _largest_threshold(
        lambda t_BJ: (order_BJV >= t_BJ[:, :, None]).sum(-1) >= k_B1, order_BJV.shape[:2]
    )
    is_kept_BJV = order_BJV >= last_BJ[:, :, None]
    probability = jax.nn.softmax(jnp.where(is_kept_BJV, score_BJV, -jnp.inf), axis=-1)
    nucleus_BJ = _largest_threshold(
        lambda t_BJ: (
            jnp.where(order_BJV >= t_BJ[:, :, None], probability, 0).sum(-1) >= top_p_B[:, None]
        ),
        order_BJV.shape[:2],
    )
    # The best token stays, even where top-p is so small that it is 0 in f32.
    nucleus_BJ = jnp.minimum(nucleus_BJ, order_BJV.max(-1))
    return jnp.maximum(last_BJ, jnp.where((top_p_B >= 1)[:, None], LOWEST, nucleus_BJ))


def sortable(x: jax.Array) -> jax.Array:
    """int32 values in the order of the floats: the bits, a negative float's being its magnitude's,
    negated. So -0 is 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, LOWEST - bits, bits)


def _largest_threshold(
    is_enough: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """The largest int32 t for which `is_enough(t)` holds; it must hold for the lowest."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # enough at low, not at high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = is_enough(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.full(shape, LOWEST, jnp.int32)
    highest = jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32)
    return lax.fori_loop(0, 32, halve, (lowest, highest))[0]
