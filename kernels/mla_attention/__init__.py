"""Absorbed multi-head latent attention over a latent cache and the rows of this call."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.kernels.hopper import why_not_hopper
from jaxspec.kernels.mla_attention.mosaic import mla_attention_mosaic, supported
from jaxspec.kernels.mla_attention.xla import mla_attention_xla, over_rows
from jaxspec.kernels.online_softmax import Part, merge

__all__ = ["Implementation", "mla_attention", "why_not_mosaic"]

Implementation = Literal["mosaic", "xla"]


def mla_attention(
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
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Latent outputs [B,T,N,C] in the queries' dtype and natural log-sum-exps [B,T,N] in f32.

    One latent row serves all heads as key and as value, so the scores of a head are
    `q_latent . latent + q_rotary . rotary` and its output is a mixture of latents
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2, with the up-projections absorbed).

    Args:
      latent_LBSC, rotary_LBSR: the whole cache, of all layers; only `layer` is read. Slots at or
        past `kv_len_B` may hold anything, NaN included.
      kv_len_B: filled slots of each sequence, all of which every query sees.
      new_latent_BTC, new_rotary_BTR: rows that are not in the cache yet. Those of the queries
        themselves come last; there may be more, of earlier calls, before them.
      sees_BTT: [B, queries, rows], which of the new rows each query sees (a tree's ancestors and
        itself); None means causal (one token, a chain, a prompt chunk).
      scale: softmax scale.
      implementation: None takes "mosaic" where `why_not_mosaic` has no objection, else "xla".
        "mosaic" has code for Hopper GPUs only; it can be compiled for one that is not there.

    Raises:
      ValueError: shapes or dtypes that do not belong together, or that "mosaic" does not take.
    """
    _check(q_latent_BTNC, q_rotary_BTNR, latent_LBSC, rotary_LBSR, new_latent_BTC, new_rotary_BTR)
    if sees_BTT is not None:
        _check_tree(q_latent_BTNC, new_latent_BTC, sees_BTT)
    elif new_latent_BTC.shape[1] != q_latent_BTNC.shape[1]:
        raise ValueError(
            f"mla_attention: {new_latent_BTC.shape[1]} new rows for {q_latent_BTNC.shape[1]} "
            "queries; which of them each one sees has to be said"
        )
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(
            f"mla_attention: no implementation {implementation!r}; there are 'mosaic' and 'xla'"
        )
    if implementation is None:
        reason = why_not_mosaic(q_latent_BTNC, q_rotary_BTNR, latent_LBSC, sees_BTT is not None)
        implementation = "mosaic" if reason is None else "xla"
    if implementation == "xla":
        attend = mla_attention_xla
    else:
        attend = _mosaic_and_earlier_rows
    return attend(
        q_latent_BTNC,
        q_rotary_BTNR,
        latent_LBSC,
        rotary_LBSR,
        layer,
        kv_len_B,
        new_latent_BTC,
        new_rotary_BTR,
        sees_BTT,
        scale=scale,
    )


def _mosaic_and_earlier_rows(
    q_latent: jax.Array,
    q_rotary: jax.Array,
    latent: jax.Array,
    rotary: jax.Array,
    layer: jax.Array | int,
    kv_len: jax.Array,
    new_latent: jax.Array,
    new_rotary: jax.Array,
    sees: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The kernel over the cache and the queries' own rows; earlier rows, a few, by plain XLA."""
    num_earlier = new_latent.shape[1] - q_latent.shape[1]
    own = None if sees is None else sees[:, :, num_earlier:]
    out, lse = mla_attention_mosaic(
        q_latent,
        q_rotary,
        latent,
        rotary,
        layer,
        kv_len,
        new_latent[:, num_earlier:],
        new_rotary[:, num_earlier:],
        own,
        scale=scale,
    )
    if not num_earlier:
        return out, lse
    assert sees is not None, "checked: more rows than queries come with a mask"
    earlier = over_rows(
        q_latent,
        q_rotary,
        new_latent[:, :num_earlier],
        new_rotary[:, :num_earlier],
        sees[:, :, None, :num_earlier],
        scale=scale,
    )
    out, lse = merge(Part(out.astype(jnp.float32), lse), earlier)
    return out.astype(q_latent.dtype), lse


def why_not_mosaic(q_latent: Any, q_rotary: Any, latent: Any, has_tree: bool) -> str | None:
    """Why a call of these arrays, or shapes, runs in plain XLA here; None if it runs Mosaic's."""
    return why_not_hopper() or supported(q_latent, q_rotary, latent, has_tree=has_tree)


def _check_tree(q_latent: jax.Array, new_latent: jax.Array, sees: jax.Array) -> None:
    batch, tokens = q_latent.shape[:2]
    wanted = (batch, tokens, new_latent.shape[1])
    if sees.shape != wanted:
        raise ValueError(
            f"mla_attention: sees is {sees.shape} where q_latent {q_latent.shape} and new_latent "
            f"{new_latent.shape} make it {wanted}"
        )
    if sees.dtype != bool:
        raise ValueError(f"mla_attention: sees is {sees.dtype} where bool is needed")


def _check(q_latent, q_rotary, latent, rotary, new_latent, new_rotary) -> None:
    batch, tokens, heads, latent_width = q_latent.shape
    rotary_width = q_rotary.shape[-1]
    slots, rows = latent.shape[2], max(new_latent.shape[1], tokens)
    wanted = {
        "q_rotary": (q_rotary, (batch, tokens, heads, rotary_width)),
        "latent": (latent, (latent.shape[0], batch, slots, latent_width)),
        "rotary": (rotary, (latent.shape[0], batch, slots, rotary_width)),
        "new_latent": (new_latent, (batch, rows, latent_width)),
        "new_rotary": (new_rotary, (batch, rows, rotary_width)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"mla_attention: {name} is {array.shape} where q_latent {q_latent.shape} and "
                f"latent {latent.shape} make it {shape}"
            )
        if array.dtype != q_latent.dtype:
            raise ValueError(
                f"mla_attention: {name} is {array.dtype} where q_latent is {q_latent.dtype}"
            )
