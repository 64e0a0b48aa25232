"""Grouped-query attention over a key/value cache and the rows of this call (Llama-type drafts)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.compat import ROWS_OF_ONE_QUERY
from jaxspec.kernels.online_softmax import Part, attend, merge, over_prefix

__all__ = ["ROW", "gqa_attention", "num_turns"]

BLOCK, MOST_TURNS, ROW = 256, 16, 1024
"""The cache is read so many slots at a time, or more: on a GPU, a turn of that loop is a dozen
small kernels and a look of the host at its condition. 128 turns, three times a step, would be 14 ms
at 32k slots on an H200, as `jaxspec plan` predicts it. But XLA copies a block before it is used, so
that one whose rows are wider than `ROW` (keys of eight heads of 128) has as many slots fewer."""


def _block(slots: int, row_width: int) -> int:
    """Slots in a turn of the loop over the filled part of a cache of so many."""
    turns = MOST_TURNS * max(1, -(-row_width // ROW))
    return min(slots, max(BLOCK, -(-slots // turns)))


def num_turns(kv_len: int, slots: int, row_width: int = ROW) -> int:
    """Turns of that loop, when the longest sequence has filled `kv_len` of its slots.

    Args:
      row_width: of the keys of one slot, all heads together that a device holds.
    """
    return -(-kv_len // _block(slots, row_width))


def gqa_attention(
    q_BTNH: jax.Array,
    key_LNBSH: jax.Array,
    value_LNBSH: jax.Array,
    layer: jax.Array | int,
    kv_len_B: jax.Array,
    new_key_NBTH: jax.Array,
    new_value_NBTH: jax.Array,
    sees_BTT: jax.Array | None,
) -> jax.Array:
    """Attention outputs [B,T,N,H] in the queries' dtype; softmax in f32, scale 1 / sqrt(H).

    Args:
      key_LNBSH, value_LNBSH: the whole cache, of all layers and of fewer heads than the queries
        (query head n reads head n // group); only `layer` is read. Slots at or past `kv_len_B`
        may hold anything, NaN included. Heads lead, because that is how the products read them:
        with slots before heads XLA keeps a transposed copy of the whole cache beside it.
      kv_len_B: filled slots of each sequence, all of which every query sees.
      new_key_NBTH, new_value_NBTH: further rows, which are not in the cache yet; they may be more
        than the queries.
      sees_BTT: [B, queries, rows], which of those rows each query sees; None means causal.

    Raises:
      ValueError: the query heads are not a multiple of the key heads.
    """
    heads, kv_heads = q_BTNH.shape[2], key_LNBSH.shape[1]
    if heads % kv_heads:
        raise ValueError(f"gqa_attention: {heads} query heads over {kv_heads} key heads")
    if sees_BTT is None:
        sees_BTT = jnp.tri(q_BTNH.shape[1], dtype=bool)[None]
    arguments = (
        q_BTNH,
        key_LNBSH,
        value_LNBSH,
        jnp.asarray(layer),
        kv_len_B,
        new_key_NBTH,
        new_value_NBTH,
        sees_BTT,
    )
    if q_BTNH.shape[1] > 1 or heads > kv_heads:
        return _attention(*arguments, rows_per_head=heads // kv_heads)
    return lax.platform_dependent(
        *arguments,
        cpu=functools.partial(_attention, rows_per_head=1),  # two take three times as long
        default=functools.partial(_attention, rows_per_head=ROWS_OF_ONE_QUERY),
    )


def _attention(
    q_BTNH: jax.Array,
    key_LNBSH: jax.Array,
    value_LNBSH: jax.Array,
    layer: jax.Array,
    kv_len_B: jax.Array,
    new_key_NBTH: jax.Array,
    new_value_NBTH: jax.Array,
    sees_BTT: jax.Array,
    *,
    rows_per_head: int,
) -> jax.Array:
    """As `gqa_attention`; queries of a key head are padded to `rows_per_head`."""
    batch, tokens, heads, width = q_BTNH.shape
    kv_heads, slots = key_LNBSH.shape[1], key_LNBSH.shape[3]
    dtype, scale, group = q_BTNH.dtype, width**-0.5, heads // kv_heads
    q_NBTGH = jnp.moveaxis(q_BTNH.reshape(batch, tokens, kv_heads, group, width), 2, 0)
    q_NBTGH = jnp.pad(q_NBTGH, [(0, 0)] * 3 + [(0, rows_per_head - group), (0, 0)])

    def part(key_NBSH: jax.Array, value_NBSH: jax.Array, is_seen_BTS: jax.Array) -> Part:
        scores_NBTGS = jnp.einsum(
            "nbtgh,nbsh->nbtgs", q_NBTGH, key_NBSH, preferred_element_type=jnp.float32
        )

        def weigh(weights_NBTGS: jax.Array) -> jax.Array:
            # A row that some query does not see may be NaN (an unfilled slot, a drafted token that
            # overflowed), and 0 * NaN is NaN. Who does see it gets the NaN from the scores.
            finite_NBSH = jnp.where(jnp.isfinite(value_NBSH), value_NBSH, 0)
            return jnp.einsum(
                "nbtgs,nbsh->nbtgh",
                weights_NBTGS.astype(dtype),
                finite_NBSH,
                preferred_element_type=jnp.float32,
            )

        return attend(scores_NBTGS * scale, is_seen_BTS[None, :, :, None], weigh)

    def part_of_block(first: jax.Array, is_seen_BS: jax.Array) -> Part:
        block = (1, kv_heads, batch, is_seen_BS.shape[1], width)

        def read(cache: jax.Array) -> jax.Array:
            return lax.dynamic_slice(cache, (layer, 0, 0, first, 0), block)[0]

        return part(read(key_LNBSH), read(value_LNBSH), is_seen_BS[:, None])

    rows = (kv_heads, batch, tokens, rows_per_head)
    empty = Part(jnp.zeros((*rows, width), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32))
    block = _block(slots, kv_heads * width)
    prefix = over_prefix(part_of_block, kv_len_B, slots=slots, block=block, empty=empty)
    whole = merge(prefix, part(new_key_NBTH, new_value_NBTH, sees_BTT))
    out_NBTGH = whole.out[:, :, :, :group]
    return jnp.moveaxis(out_NBTGH, 0, 2).reshape(q_BTNH.shape).astype(dtype)
