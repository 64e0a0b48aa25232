"""Llama's attention, grouped queries over rotated keys and values (arXiv:2305.13245)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import KeyValues, with_earlier
from jaxspec.config import LlamaDraftConfig, Numerics
from jaxspec.dims import typed
from jaxspec.kernels.gqa_attention import gqa_attention
from jaxspec.layers import rotate, weight
from jaxspec.mla import Pass

__all__ = ["GroupedAttention", "empty_key_values"]


class GroupedAttention(nnx.Module):
    """One layer's attention.

    Args:
      in_features: width of what it reads.
    """

    def __init__(
        self, config: LlamaDraftConfig, numerics: Numerics, rngs: nnx.Rngs, in_features: int
    ) -> None:
        c, dtype = config, numerics.jnp_dtype
        self.query = weight(rngs, dtype, in_features, c.num_attention_heads, c.head_dim)
        self.key = weight(rngs, dtype, in_features, c.num_key_value_heads, c.head_dim)
        self.value = weight(rngs, dtype, in_features, c.num_key_value_heads, c.head_dim)
        self.out = weight(rngs, dtype, c.num_attention_heads, c.head_dim, c.hidden_size)
        self.config = config

    @typed
    def __call__(
        self,
        x_BTA: Float[Array, "B T A"],
        at: Pass,
        angles: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
        cache: KeyValues,
        layer: Int[Array, ""] | int,
        earlier: KeyValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """The output before the residual, and this call's rows of this layer, [N,B,T,H].

        The arguments are those of `mla.LatentAttention`, with another kind of cache.
        """
        kind = self.config.rotary.kind

        def project(kernel: nnx.Param) -> jax.Array:
            return jnp.einsum("bta,anh->btnh", x_BTA, kernel[...])

        q_BTNH = rotate(project(self.query), angles, kind)
        rows = jax.tree.map(
            lambda x_BTNH: jnp.moveaxis(x_BTNH, 2, 0),
            KeyValues(rotate(project(self.key), angles, kind), project(self.value)),
        )
        seen = with_earlier(rows, earlier, layer)
        mixed_BTNH = gqa_attention(
            q_BTNH, cache.key, cache.value, layer, at.kv_len, seen.key, seen.value, at.sees
        )
        return jnp.einsum("btnh,nhd->btd", mixed_BTNH, self.out[...]), rows


def empty_key_values(attention: GroupedAttention, numerics: Numerics, *rows: int) -> KeyValues:
    """A cache for [layers, sequences, slots]; its contents mean nothing yet.

    It has the heads that `attention` holds: within a program on a mesh, this device's.
    """
    layers, batch, slots = rows
    heads, width = attention.key.get_value().shape[-2:]
    shape = (layers, heads, batch, slots, width)
    return KeyValues(jnp.zeros(shape, numerics.jnp_dtype), jnp.zeros(shape, numerics.jnp_dtype))
