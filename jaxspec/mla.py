"""Multi-head latent attention, absorbed: queries meet the cached latents directly.

A head's key is k_up . latent and its value v_up . latent, so q . k = (q . k_up) . latent, and the
mixture of values is v_up of the mixture of latents. Nothing per head is ever cached or built
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import Latents, with_earlier
from jaxspec.collectives import attend_latents, padded_slots
from jaxspec.config import LatentSizes, Numerics
from jaxspec.dims import typed
from jaxspec.layers import RMSNorm, rotate, weight

__all__ = ["LatentAttention", "Pass", "empty_latents"]


@dataclasses.dataclass(frozen=True)
class Pass:
    """Where the tokens of one call stand.

    Attributes:
      pos: 0-based positions.
      kv_len: cached tokens that all of them see.
      sees: which tokens of this call each one sees; None means causal.
      is_real: False for padding, on which no expert is spent; None means all are real.
    """

    pos: Int[Array, "B T"]
    kv_len: Int[Array, "B"]
    sees: Bool[Array, "B T S"] | None = None
    is_real: Bool[Array, "B T"] | None = None


class LatentAttention(nnx.Module):
    """One layer's attention.

    Args:
      in_features: width of what it reads; None is `hidden_size`, the width of what it gives.
    """

    def __init__(
        self,
        config: LatentSizes,
        numerics: Numerics,
        rngs: nnx.Rngs,
        in_features: int | None = None,
    ) -> None:
        c, dtype, width = config, numerics.jnp_dtype, in_features or config.hidden_size
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.q_a = weight(rngs, dtype, width, c.q_lora_rank)
        self.q_a_norm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype)
        self.q_b = weight(rngs, dtype, c.q_lora_rank, heads, nope + rope)
        self.kv_a = weight(rngs, dtype, width, c.kv_lora_rank + rope)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, dtype)
        self.k_up = weight(rngs, dtype, heads, nope, c.kv_lora_rank)
        self.v_up = weight(rngs, dtype, heads, c.kv_lora_rank, c.v_head_dim)
        self.out = weight(rngs, dtype, heads, c.v_head_dim, c.hidden_size)
        self.config, self.numerics = config, numerics

    @typed
    def __call__(
        self,
        x_BTA: Float[Array, "B T A"],
        at: Pass,
        angles: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
        cache: Latents,
        layer: Int[Array, ""] | int,
        earlier: Latents | None = None,
    ) -> tuple[Float[Array, "B T D"], Latents]:
        """The output before the residual, and this call's rows of this layer: [B,T,C], [B,T,R].

        On a mesh the output is of this device's heads, and `collectives.add` sums it.

        Args:
          cache: of all layers, read-only; `layer` is read.
          earlier: scratch rows of earlier calls of this step, [L,B,T',.]; `at.sees` then covers
            them first and this call's rows after them.
        """
        c = self.config
        q_BTNA = jnp.einsum("btq,qna->btna", self.q_a_norm(x_BTA @ self.q_a[...]), self.q_b[...])
        q_nope_BTNH, q_rope_BTNR = jnp.split(q_BTNA, [c.qk_nope_head_dim], axis=-1)
        q_latent_BTNC = _head_by_head(q_nope_BTNH, self.k_up[...])
        q_rotary_BTNR = rotate(q_rope_BTNR, angles, c.rotary.kind)
        latent_BTC, k_rope_BTR = jnp.split(x_BTA @ self.kv_a[...], [c.kv_lora_rank], axis=-1)
        rotary_BTR = rotate(k_rope_BTR[:, :, None], angles, c.rotary.kind)[:, :, 0]
        rows = Latents(self.kv_a_norm(latent_BTC), rotary_BTR)
        seen = with_earlier(rows, earlier, layer)
        mixed_BTNC = attend_latents(
            self.numerics.mesh,
            q_latent_BTNC,
            q_rotary_BTNR,
            cache.latent,
            cache.rotary,
            layer,
            at.kv_len,
            seen.latent,
            seen.rotary,
            at.sees,
            scale=c.softmax_scale,
            implementation=self.numerics.implementation,
        )
        value_BTNO = _head_by_head(mixed_BTNC, self.v_up[...])
        return jnp.einsum("btno,nod->btd", value_BTNO, self.out[...]), rows


def _head_by_head(x_BTNA: jax.Array, weight_NAC: jax.Array) -> jax.Array:
    """Each head's rows times its own matrix: [B,T,N,C].

    With the heads first: of `einsum("btna,nac->btnc")` XLA:CPU makes a product that is four times
    slower for two to eight rows.
    """
    batch, tokens, heads, _ = x_BTNA.shape
    x_NMA = jnp.moveaxis(x_BTNA.reshape(batch * tokens, heads, -1), 1, 0)
    return jnp.moveaxis(x_NMA @ weight_NAC, 0, 1).reshape(batch, tokens, heads, -1)


def empty_latents(config: LatentSizes, numerics: Numerics, *rows: int) -> Latents:
    """A cache for [layers, sequences, slots]; its contents mean nothing yet."""
    c, dtype, (layers, batch, slots) = config, numerics.jnp_dtype, rows
    rows = (layers, batch, padded_slots(slots, numerics.mesh))
    return Latents(
        jnp.zeros((*rows, c.kv_lora_rank), dtype), jnp.zeros((*rows, c.qk_rope_head_dim), dtype)
    )
