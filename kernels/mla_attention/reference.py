"""The definition of correct for `mla_attention`: one softmax over everything seen, in f32."""

import jax
import jax.numpy as jnp

__all__ = ["mla_attention_reference"]


def mla_attention_reference(
    q_latent_BTNC: jax.Array,
    q_rotary_BTNR: jax.Array,
    latent_LBSC: jax.Array,
    rotary_LBSR: jax.Array,
    layer: jax.Array | int,
    kv_len_B: jax.Array,
    new_latent_BTC: jax.Array,
    new_rotary_BTR: jax.Array,
    sees_BTT: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """As `mla_attention`, with all keys side by side; f32 out."""
    batch, tokens = q_latent_BTNC.shape[:2]
    slots = latent_LBSC.shape[2]

    def f32(array: jax.Array) -> jax.Array:
        return array.astype(jnp.float32)

    is_filled = jnp.arange(slots)[None] < kv_len_B[:, None]
    if sees_BTT is None:
        sees_BTT = jnp.broadcast_to(jnp.tri(tokens, dtype=bool), (batch, tokens, tokens))
    is_seen = jnp.concatenate(
        [jnp.broadcast_to(is_filled[:, None], (batch, tokens, slots)), sees_BTT], axis=-1
    )

    def filled(cache: jax.Array) -> jax.Array:
        # where() and not a product: an unfilled slot may hold NaN.
        return jnp.where(is_filled[:, :, None], f32(cache[layer]), 0.0)

    latent = jnp.concatenate([filled(latent_LBSC), f32(new_latent_BTC)], axis=1)
    rotary = jnp.concatenate([filled(rotary_LBSR), f32(new_rotary_BTR)], axis=1)
    scores = scale * (
        jnp.einsum("btnc,bsc->btns", f32(q_latent_BTNC), latent)
        + jnp.einsum("btnr,bsr->btns", f32(q_rotary_BTNR), rotary)
    )
    scores = jnp.where(is_seen[:, :, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("btns,bsc->btnc", weights, latent)
    return out, jax.nn.logsumexp(scores, axis=-1)
