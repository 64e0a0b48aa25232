"""Attention in parts: each part a normalised output and a log-sum-exp, merged exactly.

softmax over a union of key sets is the average of the parts' outputs, weighted by exp(lse). An
empty part has lse = -inf and out = 0, never NaN. Log-sum-exps here are natural logarithms.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Part", "attend", "merge", "over_prefix"]


class Part(NamedTuple):
    """Attention over some of the keys.

    Attributes:
      out: [..., width] f32, normalised over this part alone; 0 where the part is empty.
      lse: [...] f32, log-sum-exp of this part's scores; -inf where it is empty.
    """

    out: jax.Array
    lse: jax.Array


def merge(a: Part, b: Part) -> Part:
    """The attention over both parts' keys together."""
    top = jnp.maximum(a.lse, b.lse)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weight_a, weight_b = jnp.exp(a.lse - finite_top), jnp.exp(b.lse - finite_top)
    total = weight_a + weight_b
    divisor = jnp.where(total > 0, total, 1.0)[..., None]
    out = (weight_a[..., None] * a.out + weight_b[..., None] * b.out) / divisor
    return Part(out, finite_top + jnp.log(total))


def attend(scores: jax.Array, is_seen: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Part:
    """The part of one block of keys.

    Args:
      scores: [..., keys] f32; may be anything, NaN included, where not seen.
      is_seen: bool, broadcastable to `scores`.
      weigh: softmax numerators [..., keys] f32 -> their sum over values [..., width] f32.
    """
    scores = jnp.where(is_seen, scores, -jnp.inf)
    top = scores.max(-1)
    finite_top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(scores - finite_top[..., None])
    total = weights.sum(-1)
    out = weigh(weights) / jnp.where(total > 0, total, 1.0)[..., None]
    return Part(out, finite_top + jnp.log(total))


def over_prefix(
    part_of_block: Callable[[jax.Array, jax.Array], Part],
    kv_len_B: jax.Array,
    *,
    slots: int,
    block: int,
    empty: Part,
) -> Part:
    """The part of a cache's prefix, one block of slots at a time.

    Only blocks that some sequence has filled are read, so the time follows the lengths and not
    the capacity, and no copy larger than a block is ever made.

    Args:
      part_of_block: (first slot, is_seen [B, block]) -> the part of that block.
      kv_len_B: filled slots of each sequence.
      slots: capacity of the cache; `block` is cut to it. Of none there is no loop, and the whole
        can be differentiated.
      empty: the part to start from, for its shape.
    """
    if not slots:
        return empty
    block = min(block, slots)
    longest = jnp.minimum(kv_len_B.max(), slots)

    def body(j: jax.Array, seen: Part) -> Part:
        # The last block may reach past the capacity: it is moved back, and the slots that an
        # earlier block has already served are left out.
        first = jnp.minimum(j * block, slots - block)
        slot = first + jnp.arange(block)[None]
        is_seen = (slot >= j * block) & (slot < kv_len_B[:, None])
        return merge(seen, part_of_block(first, is_seen))

    return lax.fori_loop(0, (longest + block - 1) // block, body, empty)
