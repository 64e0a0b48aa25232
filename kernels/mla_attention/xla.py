"""`mla_attention` in plain XLA: the prefix in blocks, then the new rows, merged by log-sum-exp."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.online_softmax import Part, attend, merge, over_prefix

__all__ = ["mla_attention_xla", "over_rows"]

BLOCK = 256


def over_rows(
    q_latent_BTNC: jax.Array,
    q_rotary_BTNR: jax.Array,
    latent_BSC: jax.Array,
    rotary_BSR: jax.Array,
    is_seen_BTNS: jax.Array,
    *,
    scale: float,
) -> Part:
    """The part of some rows, of which each query sees those it is told to."""
    dtype = q_latent_BTNC.dtype

    def scores(rows_BSA: jax.Array, q_BTNA: jax.Array) -> jax.Array:
        # Rows times queries: the other way around XLA:CPU transposes the rows first.
        return jnp.einsum("bsa,btna->bstn", rows_BSA, q_BTNA, preferred_element_type=jnp.float32)

    scores_BSTN = scores(latent_BSC, q_latent_BTNC) + scores(rotary_BSR, q_rotary_BTNR)
    scores_BTNS = jnp.moveaxis(scores_BSTN, 1, -1)

    def weigh(weights_BTNS: jax.Array) -> jax.Array:
        # A row that some query does not see may be NaN (an unfilled slot, a drafted token that
        # overflowed), and 0 * NaN is NaN. Who does see it gets the NaN from the scores.
        value_BSC = jnp.where(jnp.isfinite(latent_BSC), latent_BSC, 0)
        return jnp.einsum(
            "btns,bsc->btnc",
            weights_BTNS.astype(dtype),
            value_BSC,
            preferred_element_type=jnp.float32,
        )

    return attend(scores_BTNS * scale, is_seen_BTNS, weigh)


def mla_attention_xla(
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
    """See `mla_attention`."""
    batch, tokens, heads, latent_width = q_latent_BTNC.shape
    slots, rotary_width, dtype = latent_LBSC.shape[2], rotary_LBSR.shape[3], q_latent_BTNC.dtype

    part = functools.partial(over_rows, q_latent_BTNC, q_rotary_BTNR, scale=scale)

    def part_of_block(first: jax.Array, is_seen_BS: jax.Array) -> Part:
        rows = is_seen_BS.shape[1]

        def read(cache: jax.Array, width: int) -> jax.Array:
            return lax.dynamic_slice(cache, (layer, 0, first, 0), (1, batch, rows, width))[0]

        latent_BSC, rotary_BSR = read(latent_LBSC, latent_width), read(rotary_LBSR, rotary_width)
        return part(latent_BSC, rotary_BSR, is_seen_BS[:, None, None])

    empty = Part(
        jnp.zeros((batch, tokens, heads, latent_width), jnp.float32),
        jnp.full((batch, tokens, heads), -jnp.inf, jnp.float32),
    )
    prefix = over_prefix(part_of_block, kv_len_B, slots=slots, block=BLOCK, empty=empty)
    if sees_BTT is None:
        sees_BTT = jnp.tri(tokens, dtype=bool)[None]
    whole = merge(prefix, part(new_latent_BTC, new_rotary_BTR, sees_BTT[:, :, None]))
    return whole.out.astype(dtype), whole.lse
