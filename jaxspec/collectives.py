"""All that devices say to each other, nearly always within a group: along the mesh's axis `model`.

A step runs whole inside one `shard_map` (`sharding.py`), on local heads, experts and columns of the
vocabulary, and crosses devices only here. `mesh` None is one device, and each of these functions is
then what it says without a mesh.

Devices of a group cannot come to differ. The residual stream, the router's scores and the logits
are the same bits on each: an all-gather copies bits, and an all-reduce hands everybody the same
sums. Every decision (experts, tree, tokens, what is accepted, when to stop) is taken from them,
by the same program, on every device alike; none is taken from a part that only one device has.
Groups say nothing to each other: their loops may turn differently often. Only in training they do,
where all take part in one loss, and in every gradient.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.cache import Stripe
from jaxspec.config import MeshConfig
from jaxspec.dims import typed
from jaxspec.kernels.mla_attention import Implementation, mla_attention
from jaxspec.kernels.online_softmax import Part, merge

__all__ = [
    "add",
    "all_logits",
    "attend_latents",
    "held_experts",
    "look_up",
    "over_groups",
    "padded_slots",
    "share",
    "stripe_of",
    "whole_gradient",
]

GROUP = "model"
GROUPS = "data"


def _is_alone(mesh: MeshConfig | None) -> bool:
    """Whether a device shares nothing. XLA would keep collectives among one (jax 0.11.2)."""
    return mesh is None or mesh.model == 1


@typed
def add(
    x_BTD: Float[Array, "B T D"], *parts: Float[Array, "B T D"], mesh: MeshConfig | None
) -> Float[Array, "B T D"]:
    """The residual stream with the outputs of a block, each device's part of them, added.

    The one all-reduce that attention, and the one that an MLP or a mixture of experts costs.
    """
    if not _is_alone(mesh):
        parts = (lax.psum(sum(parts[1:], parts[0]), GROUP),)
    for part in parts:
        x_BTD = x_BTD + part
    return x_BTD


@typed
def look_up(
    table_VD: Float[Array, "V D"], ids_BT: Int[Array, "B T"], mesh: MeshConfig | None
) -> Float[Array, "B T D"]:
    """Rows of an embedding that is cut by vocabulary: each comes from the device that holds it.

    The sum is exact, since all other devices give zeros.
    """
    if _is_alone(mesh):
        return table_VD[ids_BT]
    num_held = table_VD.shape[0]
    row_BT = ids_BT - lax.axis_index(GROUP) * num_held
    is_held_BT = (row_BT >= 0) & (row_BT < num_held)
    found_BTD = table_VD.at[row_BT].get(mode="clip")
    return lax.psum(jnp.where(is_held_BT[:, :, None], found_BTD, 0), GROUP)


def all_logits(logits: jax.Array, mesh: MeshConfig | None) -> jax.Array:
    """Logits [B,T,V] of the whole vocabulary, from a head that is cut by vocabulary.

    Whole, and not each device's best: top-k, top-p and the noise are those of one device, exactly.
    At full size and 16 nodes it is 10 MB a step and sequence, of which a device receives 7 / 8.
    """
    if _is_alone(mesh):
        return logits
    return lax.all_gather(logits, GROUP, axis=2, tiled=True)


@typed
def held_experts(
    expert_BTX: Int[Array, "B T X"], num_experts: int, mesh: MeshConfig | None
) -> Int[Array, "B T X"]:
    """The chosen experts by their place on this device; those of others are no expert here."""
    if mesh is None or _is_alone(mesh):
        return expert_BTX
    num_held = num_experts // mesh.model
    place_BTX = expert_BTX - lax.axis_index(GROUP) * num_held
    return jnp.where((place_BTX >= 0) & (place_BTX < num_held), place_BTX, num_held)


def stripe_of(mesh: MeshConfig | None) -> Stripe | None:
    """The slots of the target's cache that this device holds; None is all."""
    if mesh is None or _is_alone(mesh) or mesh.cache == "replicated":
        return None
    return Stripe(lax.axis_index(GROUP), mesh.model)


def over_groups(x: jax.Array, mesh: MeshConfig | None) -> jax.Array:
    """The sum over all groups of what each has of its sequences."""
    return x if mesh is None or mesh.data == 1 else lax.psum(x, GROUPS)


def share(value: jax.Array, mesh: MeshConfig | None) -> jax.Array:
    """This device's share of a value that all devices have alike: what is to be differentiated.

    A gradient within a `shard_map` is that of the sum, over all devices, of what each returns: the
    transposed exchanges carry to each device what all of them owe to its part. Of a value that
    every device has, the sum would be as many times too large.
    """
    return value if mesh is None else value / (mesh.data * mesh.model)


def whole_gradient(
    gradient: dict[str, jax.Array], cuts: Mapping[str, Any], mesh: MeshConfig | None
) -> dict[str, jax.Array]:
    """The gradient by this device's copies and parts of the parameters, as one by the parameters.

    The copies of a parameter add up: over the groups, and within one where it is not cut.

    Args:
      cuts: how each parameter is cut; see `sharding.spec_of`.
    """
    if mesh is None:
        return gradient
    sizes = {GROUPS: mesh.data, GROUP: mesh.model}

    def summed(name: str, part: jax.Array) -> jax.Array:
        over = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in cuts[name])
        return lax.psum(part, over) if over else part

    return {name: summed(name, part) for name, part in gradient.items()}


def padded_slots(slots: int, mesh: MeshConfig | None) -> int:
    """The slots of a target's cache, at least `slots`, of which every device holds as many."""
    if mesh is None or mesh.cache == "replicated":
        return slots
    return -(-slots // mesh.model) * mesh.model


def attend_latents(
    mesh: MeshConfig | None,
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
    implementation: Implementation | None,
) -> jax.Array:
    """Latent outputs of this device's heads, over a cache that it holds all of, or a stripe.

    With stripes (context-parallel): gather the queries of all heads, attend over the slots held
    here, send every head's part to the device that has the head, merge there by log-sum-exp. Two
    collectives a layer. See `mla_attention` for the arguments.
    """

    def attend(q_latent: jax.Array, q_rotary: jax.Array, kv_len: jax.Array, sees: Any) -> Part:
        return Part(
            *mla_attention(
                q_latent,
                q_rotary,
                latent_LBSC,
                rotary_LBSR,
                layer,
                kv_len,
                new_latent_BTC,
                new_rotary_BTR,
                sees,
                scale=scale,
                implementation=implementation,
            )
        )

    stripe = stripe_of(mesh)
    if mesh is None or stripe is None:
        return attend(q_latent_BTNC, q_rotary_BTNR, kv_len_B, sees_BTT).out
    batch, tokens, num_held, width = q_latent_BTNC.shape
    # One gather of both parts of the queries, and one exchange of outputs and log-sum-exps.
    q_BTNA = jnp.concatenate([q_latent_BTNC, q_rotary_BTNR], axis=-1)
    q_BTNA = lax.all_gather(q_BTNA, GROUP, axis=2, tiled=True)
    # Everybody has the rows of this call, and they count once: on the first device.
    if sees_BTT is None:
        sees_BTT = jnp.broadcast_to(jnp.tri(tokens, dtype=bool), (batch, tokens, tokens))
    sees_BTT &= stripe.index == 0
    q_latent, q_rotary = jnp.split(q_BTNA, [width], axis=-1)
    mine = attend(q_latent, q_rotary, stripe.num_filled(kv_len_B), sees_BTT)
    part_BTNA = jnp.concatenate([mine.out.astype(jnp.float32), mine.lse[..., None]], axis=-1)
    part_BTANA = part_BTNA.reshape(batch, tokens, mesh.model, num_held, width + 1)
    part_ABTNA = lax.all_to_all(part_BTANA, GROUP, split_axis=2, concat_axis=0)
    parts = [Part(part[..., :-1], part[..., -1]) for part in part_ABTNA]
    return functools.reduce(merge, parts).out.astype(q_latent_BTNC.dtype)
