"""Caches of committed tokens, and the one way rows get into them.

A cache is read-only during a pass. The rows of that pass come back as scratch [L,B,T,...], and
`commit` scatters the accepted ones in one go: nothing is copied, and a row is never read after it
was overwritten. Whole stacks are handed to the attention kernels with a layer index; slicing a
layer out would copy it (measured: 16 GB a step at full size).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.dims import typed

__all__ = ["DraftCache", "KeyValues", "Latents", "Stripe", "commit", "with_earlier"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["latent", "rotary"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Latents:
    """What MLA keeps of a token, in every layer and for all heads together.

    Attributes:
      latent: [L,B,S,C] normed KV latent (rows of a pass: [L,B,T,C]).
      rotary: [L,B,S,R] rotated shared key.
    """

    latent: Float[Array, "L B S C"]
    rotary: Float[Array, "L B S R"]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key", "value"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KeyValues:
    """What a Llama-type draft keeps of a token: rotated keys, and values.

    Attributes:
      key, value: [L,N,B,S,H], heads before slots as the products read them (rows: [L,N,B,T,H]).
    """

    key: Float[Array, "L N B S H"]
    value: Float[Array, "L N B S H"]


DraftCache = KeyValues | Latents
"""What a draft keeps, by its attention. Who carries it along does not look inside: in each of them
the last three axes are sequence, slot and width, and the first is the layer."""


@dataclasses.dataclass(frozen=True)
class Stripe:
    """What a device holds of a cache that is cut by slots: every `num`-th slot, from `index` on.

    Dealt out and not in runs, so that all devices have the same work at every length. Attention
    does not ask in which order keys lie: their positions are rotated into them.
    """

    index: Int[Array, ""]
    num: int

    def num_filled(self, kv_len_B: Int[Array, "B"]) -> Int[Array, "B"]:
        """How many of the first `kv_len` slots are held here."""
        return (kv_len_B + self.num - 1 - self.index) // self.num


@typed
def commit[Cache: Latents | KeyValues](
    cache: Cache,
    rows: Cache,
    row_BP: Int[Array, "B P"],
    start_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    stripe: Stripe | None = None,
) -> Cache:
    """The cache with rows[row[b, i]] at slot start[b] + i, for i < count[b] and slots that exist.

    Writes past the capacity are dropped, never clamped onto the last slot.

    Args:
      stripe: the slots that this cache holds, of those that `start` counts; None holds all.
    """

    step = jnp.arange(row_BP.shape[1])[None]
    batch = jnp.arange(row_BP.shape[0])[:, None]

    # In every cache the last three axes are sequence, slot and width.
    def scatter(slots: jax.Array, rows: jax.Array) -> jax.Array:
        index_BP1 = row_BP.reshape(*(1,) * (rows.ndim - 3), *row_BP.shape, 1)
        picked = jnp.take_along_axis(rows, index_BP1, axis=-2)
        # A dropped row gets a slot of its own past the end, so that no two rows share one.
        num_slots = slots.shape[-2]
        is_kept_BP, slot_BP = step < count_B[:, None], start_B[:, None] + step
        if stripe is not None:
            is_kept_BP &= slot_BP % stripe.num == stripe.index
            slot_BP //= stripe.num
        slot_BP = jnp.where(is_kept_BP, slot_BP, num_slots + step)
        return slots.at[..., batch, slot_BP, :].set(picked, mode="drop", unique_indices=True)

    return jax.tree.map(scatter, cache, rows)


def joined[Cache: Latents | KeyValues](earlier: Cache, rows: Cache) -> Cache:
    """The rows of a call after those of earlier calls."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-2), earlier, rows)


def with_earlier[Cache: Latents | KeyValues](
    rows: Cache, earlier: Cache | None, layer: jax.Array | int
) -> Cache:
    """A layer's rows of this call after those of earlier calls, which hold all layers."""
    if earlier is None:
        return rows
    return jax.tree.map(
        lambda before, new: jnp.concatenate([before[layer], new], axis=-2), earlier, rows
    )
