"""How tokens are drawn: noise that depends on seed and position only, and what may be drawn.

`token = argmax(log p + Gumbel(seed, position))` is a sample from p (the Gumbel-max trick). The
noise is keyed by the request's seed and by the absolute position of the token being chosen, never
by tree node, step or batch row. So a node's choice is what plain sampling would have chosen there,
the walk over the tree is the greedy one, and any tree gives the very tokens of plain sampling.

The noise comes from uniforms k / 2^23, so it ends at 15.9, and near there in steps: a token of
probability 1e-6 is drawn 5 % too seldom, one of 1e-7 by half (`benchmarks/draws.py` sees it).

Convention: temperature first, then top-k, top-p and min-p, each over what is left by those before,
as in transformers' `generate`. vLLM cuts by min-p before top-k and top-p, so that a share of top-p
is one of fewer tokens there.
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
    data_fields=["seed", "temperature", "top_k", "top_p", "min_p"],
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
      min_p: [B] f32 in [0, 1], then keep those at least this times as probable as the most
        probable one; 0 keeps all.
    """

    seed: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any

    @classmethod
    def of(
        cls,
        batch: int,
        *,
        seed: Any = 0,
        temperature: Any = 0.0,
        top_k: Any = 0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
    ) -> "Sampling":
        """Of so many sequences: each setting is one value for all of them, or one for each."""

        def fill(value: Any, dtype: Any) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))

        return cls(
            fill(seed, jnp.uint32),
            fill(temperature, jnp.float32),
            fill(top_k, jnp.int32),
            fill(top_p, jnp.float32),
            fill(min_p, jnp.float32),
        )

    @property
    def is_sampled(self) -> jax.Array:
        """[B], whether a sequence is sampled at all."""
        return self.temperature > 0

    @property
    def is_cut(self) -> jax.Array:
        """[B], whether top-k, top-p or min-p keeps tokens from being chosen."""
        return self.is_sampled & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))


def gumbel_noise(seed_B: jax.Array, pos_BP: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise [B,P,V] for the tokens at absolute positions `pos_BP`, f32."""

    def at(seed: jax.Array, pos: jax.Array) -> jax.Array:
        # Generator, its layout and mode are named, so that a user's defaults do not change the
        # tokens.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), pos)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="low")

    with jax.threefry_partitionable(True):
        return jax.vmap(jax.vmap(at, (None, 0)))(seed_B, pos_BP)


def keep_top(score_BJV: jax.Array, sampling: Sampling) -> jax.Array:
    """Which tokens top-k, top-p and min-p keep, [B,J,V] bool; equals of the last one stay too.

    Args:
      score_BJV: logits over temperature; whatever is added to all of a row changes nothing.
    """
    return sortable(score_BJV) >= thresholds(score_BJV, sampling)[:, :, None]


def thresholds(score_BJV: jax.Array, sampling: Sampling) -> jax.Array:
    """[B,J] int32, the `sortable` score from which on tokens are kept.

    All three are thresholds on the scores. Those of top-k and top-p are found by bisection over the
    2^32 floats: 32 passes over the vocabulary in place of a sort. Min-p's is log(min_p) below the
    greatest score, whatever share of the others top-k and top-p left.
    """
    order_BJV, greatest_BJ = sortable(score_BJV), score_BJV.max(-1)
    top_k_B, top_p_B = sampling.top_k, sampling.top_p
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
    nucleus_BJ = jnp.where((top_p_B >= 1)[:, None], LOWEST, nucleus_BJ)
    least_BJ = sortable(greatest_BJ + jnp.log(sampling.min_p)[:, None])
    least_BJ = jnp.where((sampling.min_p > 0)[:, None], least_BJ, LOWEST)
    return jnp.maximum(jnp.maximum(last_BJ, nucleus_BJ), least_BJ)


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
