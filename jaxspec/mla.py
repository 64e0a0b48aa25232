"""Multi-head latent attention, absorbed: queries meet the cached latents directly.

A head's key is k_up . latent and its value v_up . latent, so q . k = (q . k_up) . latent, and the
mixture of values is v_up of the mixture of latents. Nothing per head is ever cached or built
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import Latents
from jaxspec.collectives import attend_latents
from jaxspec.config import Numerics, TargetConfig
from jaxspec.dims import typed
from jaxspec.layers import RMSNorm, rotate, weight

__all__ = ["LatentAttention", "Pass"]


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
    """One layer's attention."""

    def __init__(self, config: TargetConfig, numerics: Numerics, rngs: nnx.Rngs) -> None:
        c, dtype = config, numerics.jnp_dtype
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.q_a = weight(rngs, dtype, c.hidden_size, c.q_lora_rank)
        self.q_a_norm = RMSNorm(c.q_lora_rank, c.latent_norm_eps, dtype)
        self.q_b = weight(rngs, dtype, c.q_lora_rank, heads, nope + rope)
        self.kv_a = weight(rngs, dtype, c.hidden_size, c.kv_lora_rank + rope)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, c.latent_norm_eps, dtype)
        self.k_up = weight(rngs, dtype, heads, nope, c.kv_lora_rank)
        self.v_up = weight(rngs, dtype, heads, c.kv_lora_rank, c.v_head_dim)
        self.out = weight(rngs, dtype, heads, c.v_head_dim, c.hidden_size)
        self.config, self.numerics = config, numerics

    @typed
    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        at: Pass,
        angles: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
        cache: Latents,
        layer: Int[Array, ""],
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T C"], Float[Array, "B T R"]]:
        """The output before the residual, and this call's rows for the cache: latent, rotary.

        On a mesh the output is of this device's heads, and `collectives.add` sums it.

        Args:
          cache: of all layers, read-only; `layer` is read.
        """
        c = self.config
        q_BTNA = jnp.einsum("btq,qna->btna", self.q_a_norm(x_BTD @ self.q_a[...]), self.q_b[...])
        q_nope_BTNH, q_rope_BTNR = jnp.split(q_BTNA, [c.qk_nope_head_dim], axis=-1)
        q_latent_BTNC = jnp.einsum("btnh,nhc->btnc", q_nope_BTNH, self.k_up[...])
        q_rotary_BTNR = rotate(q_rope_BTNR, angles, c.rotary.kind)
        latent_BTC, k_rope_BTR = jnp.split(x_BTD @ self.kv_a[...], [c.kv_lora_rank], axis=-1)
        latent_BTC = self.kv_a_norm(latent_BTC)
        rotary_BTR = rotate(k_rope_BTR[:, :, None], angles, c.rotary.kind)[:, :, 0]
        mixed_BTNC = attend_latents(
            self.numerics.mesh,
            q_latent_BTNC,
            q_rotary_BTNR,
            cache.latent,
            cache.rotary,
            layer,
            at.kv_len,
            latent_BTC,
            rotary_BTR,
            at.sees,
            scale=c.softmax_scale,
            implementation=self.numerics.implementation,
        )
        value_BTNO = jnp.einsum("btnc,nco->btno", mixed_BTNC, self.v_up[...])
        return jnp.einsum("btno,nod->btd", value_BTNO, self.out[...]), latent_BTC, rotary_BTR
