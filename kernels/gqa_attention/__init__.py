"""Grouped-query attention over a key/value cache and the rows of this call (Llama-type drafts)."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.online_softmax import Part, attend, merge, over_prefix

__all__ = ["gqa_attention"]

BLOCK = 256


def gqa_attention(
    q_BTNH: jax.Array,
    key_LBSNH: jax.Array,
    value_LBSNH: jax.Array,
    layer: jax.Array | int,
    kv_len_B: jax.Array,
    new_key_BTNH: jax.Array,
    new_value_BTNH: jax.Array,
    sees_BTT: jax.Array | None,
) -> jax.Array:
    """Attention outputs [B,T,N,H] in the queries' dtype; softmax in f32, scale 1 / sqrt(H).

    Args:
      key_LBSNH, value_LBSNH: the whole cache, of all layers and of fewer heads than the queries
        (query head n reads head n // group); only `layer` is read. Slots at or past `kv_len_B`
        may hold anything, NaN included.
      kv_len_B: filled slots of each sequence, all of which every query sees.
      new_key_BTNH, new_value_BTNH: further rows, which are not in the cache yet; they may be more
        than the queries.
      sees_BTT: [B, queries, rows], which of those rows each query sees; None means causal.

    Raises:
      ValueError: the query heads are not a multiple of the key heads.
    """
    batch, tokens, heads, width = q_BTNH.shape
    slots, kv_heads = key_LBSNH.shape[2:4]
    if heads % kv_heads:
        raise ValueError(f"gqa_attention: {heads} query heads over {kv_heads} key heads")
    dtype, scale = q_BTNH.dtype, width**-0.5
    q_BTNGH = q_BTNH.reshape(batch, tokens, kv_heads, heads // kv_heads, width)

    def part(key_BSNH: jax.Array, value_BSNH: jax.Array, is_seen: jax.Array) -> Part:
        scores_BTNGS = jnp.einsum(
            "btngh,bsnh->btngs", q_BTNGH, key_BSNH, preferred_element_type=jnp.float32
        )

        def weigh(weights_BTNGS: jax.Array) -> jax.Array:
            return jnp.einsum(
                "btngs,bsnh->btngh",
                weights_BTNGS.astype(dtype),
                value_BSNH,
                preferred_element_type=jnp.float32,
            )

        return attend(scores_BTNGS * scale, is_seen[:, :, None, None], weigh)

    def part_of_block(first: jax.Array, is_seen_BS: jax.Array) -> Part:
        block = (1, batch, is_seen_BS.shape[1], kv_heads, width)

        def read(cache: jax.Array) -> jax.Array:
            return lax.dynamic_slice(cache, (layer, 0, first, 0, 0), block)[0]

        # An unfilled slot may hold NaN, and 0 * NaN is NaN: the values are masked as well.
        value_BSNH = jnp.where(is_seen_BS[:, :, None, None], read(value_LBSNH), 0)
        return part(read(key_LBSNH), value_BSNH, is_seen_BS[:, None])

    rows = (batch, tokens, kv_heads, heads // kv_heads)
    empty = Part(jnp.zeros((*rows, width), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32))
    prefix = over_prefix(part_of_block, kv_len_B, slots=slots, block=BLOCK, empty=empty)
    if sees_BTT is None:
        sees_BTT = jnp.tri(tokens, dtype=bool)[None]
    whole = merge(prefix, part(new_key_BTNH, new_value_BTNH, sees_BTT))
    return whole.out.reshape(q_BTNH.shape).astype(dtype)
