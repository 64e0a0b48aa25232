"""One layer of a target by itself, as its checkpoint says or read otherwise: known mistakes.

What a reading changes is data, so that one compiled program of a kind of layer tries them all.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.collectives import add
from jaxspec.config import RotaryConfig, TargetConfig
from jaxspec.kernels.expert_matmul import PackedInt4
from jaxspec.kernels.expert_matmul.packing import unpack
from jaxspec.layers import full_f32, rotary_angles
from jaxspec.mla import Pass, empty_latents
from jaxspec.moe import RoutedExperts, Router, Routing
from jaxspec.target import Target

__all__ = ["Kind", "Knobs", "Reading", "other_readings", "run_layer"]

Kind = Literal["dense", "sparse"]
Block = Literal["attention", "norms", "router", "routed experts", "shared expert", "MLP"]
ONES = -0x66666667
"""The int32 word whose eight nibbles are 9: q = 1."""
NORMS = {
    "all norms": ("eps", "latent_eps"),
    "the norms before attention and MLP": ("eps",),
    "the latent norms": ("latent_eps",),
}
"""The knobs that hold their epsilon."""


class Knobs(NamedTuple):
    """How a layer is read.

    Attributes:
      is_repaired: rotary pairs for halves, or halves for pairs, whichever is not declared.
      is_stretched: YaRN's frequencies.
      rotary, softmax: factors of cosine and sine, and of the softmax's scale.
      eps, latent_eps: of the layer's two norms, of attention's two.
      bias: share of the router's bias that is in the weights.
      is_normed, scaling: the weights of the chosen experts: their sum is 1, then times this.
      is_swapped, offset, is_rounded: of the routed experts: gate for up, what is added to every q,
        q x scale rounded to bf16.
      shared, is_shared_swapped: factor of the shared expert, its gate for its up; the latter of a
        dense layer's MLP too.
    """

    eps: float
    latent_eps: float
    is_normed: bool
    scaling: float
    is_repaired: bool = False
    is_stretched: bool = True
    rotary: float = 1.0
    softmax: float = 1.0
    bias: float = 0.0
    is_swapped: bool = False
    offset: float = 0.0
    is_rounded: bool = False
    shared: float = 1.0
    is_shared_swapped: bool = False


@dataclasses.dataclass(frozen=True)
class Reading:
    """A mistake: its name in a sentence, the block it is in, and the layer so read."""

    name: str
    block: Block
    knobs: Knobs


def other_readings(config: TargetConfig, kind: Kind) -> list[Reading]:
    """The mistakes that implementations are known to make, those that change such a layer."""
    c, yarn = config, config.rotary.yarn
    declared = Knobs(c.rms_norm_eps, c.latent_norm_eps, c.norm_topk_prob, c.routed_scaling_factor)
    found: list[Reading] = []

    def add_reading(name: str, block: Block, **knobs: Any) -> None:
        changed = declared._replace(**knobs)
        if all(changed != known for known in (declared, *(one.knobs for one in found))):
            found.append(Reading(name, block, changed))

    kinds = ("halves", "pairs") if c.rotary.kind == "pairs" else ("pairs", "halves")
    add_reading("rotary {} for {}".format(*kinds), "attention", is_repaired=True)
    if yarn is not None:
        add_reading("YaRN left out", "attention", is_stretched=False)
        scale = yarn.magnitude(yarn.mscale_all_dim) if yarn.mscale_all_dim else 1.0
        if scale != 1:
            unscaled = scale**-2
            where = "mscale on cosine and sine"
            add_reading("mscale left out", "attention", softmax=unscaled)
            add_reading(f"{where}, not on the softmax", "attention", softmax=unscaled, rotary=scale)
            add_reading(f"{where} as well as on the softmax", "attention", rotary=scale)
    for eps in (1e-6, 1e-5):
        for where, names in NORMS.items():
            add_reading(f"epsilon {eps:g} in {where}", "norms", **dict.fromkeys(names, eps))
    if kind == "dense":
        add_reading("gate and up swapped", "MLP", is_shared_swapped=True)
        return found
    norming = "not normed" if c.norm_topk_prob else "normed"
    add_reading("router bias in the weights", "router", bias=1.0)
    add_reading(f"weights {norming}", "router", is_normed=not c.norm_topk_prob)
    add_reading("scaling factor dropped", "router", scaling=1.0)
    add_reading("gate and up swapped in the routed experts", "routed experts", is_swapped=True)
    add_reading("gate and up swapped in the shared expert", "shared expert", is_shared_swapped=True)
    add_reading("shared expert left out", "shared expert", shared=0.0)
    if c.num_bits is not None:
        add_reading("int4 offset 7 for 8", "routed experts", offset=1.0)
        add_reading("q x scale rounded to bfloat16", "routed experts", is_rounded=True)
    return found


@functools.partial(jax.jit, static_argnames=("graph", "kind"))
@full_f32
def run_layer(
    graph: nnx.GraphDef,
    params: nnx.State,
    kind: Kind,
    x_BTD: jax.Array,
    index: jax.Array,
    knobs: Knobs | None = None,
) -> tuple[jax.Array, Routing | None]:
    """What layer `index` of the stack of that kind makes of whole sequences, and its routing.

    Args:
      graph, params: the target, split; on one device.
      knobs: None runs the model's own layer.
    """
    target = nnx.merge(graph, params)
    assert isinstance(target, Target)
    c, stack = target.config, target.dense if kind == "dense" else target.sparse
    layer = jax.tree.map(lambda leaf: leaf[index], stack)
    batch, length, _ = x_BTD.shape
    pos_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    at = Pass(pos_BT, jnp.zeros((batch,), jnp.int32))
    nothing = empty_latents(c, target.numerics, 1, batch, 1)
    angles = rotary_angles(c.rotary, pos_BT)
    if knobs is not None:
        _read_attention(layer, c, knobs)
        angles = _read_angles(c.rotary, pos_BT, knobs)
        _swap(layer.mlp if kind == "dense" else layer.shared, knobs.is_shared_swapped)
    y_BTD, _ = layer.attention(layer.input_norm(x_BTD), at, angles, nothing, 0)
    x_BTD = add(x_BTD, y_BTD, mesh=None)
    h_BTD = layer.post_norm(x_BTD)
    if kind == "dense":
        return add(x_BTD, layer.mlp(h_BTD), mesh=None), None
    routing, shared_BTD = layer.router(h_BTD), layer.shared(h_BTD)
    if knobs is None:
        y_BTD = target.experts(h_BTD, routing, index)
    else:
        weighed = _read_weights(layer.router, h_BTD, routing, knobs)
        y_BTD = _read_experts(target.experts, h_BTD, weighed, index, knobs)
        shared_BTD = shared_BTD * knobs.shared
    return add(x_BTD, y_BTD, shared_BTD, mesh=None), routing


def _read_attention(layer: Any, config: TargetConfig, knobs: Knobs) -> None:
    """Changes the layer, which is this trace's own.

    Other pairs are other columns side by side: q . k does not mind an order that both share.
    """
    c, attention = config, layer.attention
    order = np.arange(c.qk_rope_head_dim).reshape(2, -1).T
    if c.rotary.kind == "halves":
        order = np.arange(c.qk_rope_head_dim).reshape(-1, 2).T

    def reordered(weight: jax.Array, before: int) -> jax.Array:
        plain, rotary = jnp.split(weight, [before], axis=-1)
        rotary = jnp.where(knobs.is_repaired, rotary[..., order.ravel()], rotary)
        return jnp.concatenate([plain, rotary], axis=-1)

    attention.q_b[...] = knobs.softmax * reordered(attention.q_b[...], c.qk_nope_head_dim)
    attention.kv_a[...] = reordered(attention.kv_a[...], c.kv_lora_rank)
    for norm in (layer.input_norm, layer.post_norm):
        norm.eps = knobs.eps
    for norm in (attention.q_a_norm, attention.kv_a_norm):
        norm.eps = knobs.latent_eps


def _read_angles(
    rotary: RotaryConfig, pos_BT: jax.Array, knobs: Knobs
) -> tuple[jax.Array, jax.Array]:
    plain = rotary_angles(rotary.scaled_by(None), pos_BT)
    pairs = zip(rotary_angles(rotary, pos_BT), plain, strict=True)
    cos, sin = (knobs.rotary * jnp.where(knobs.is_stretched, *pair) for pair in pairs)
    return cos, sin


def _swap(mlp: Any, is_swapped: jax.Array | bool) -> None:
    gate, up = mlp.gate[...], mlp.up[...]
    mlp.gate[...] = jnp.where(is_swapped, up, gate)
    mlp.up[...] = jnp.where(is_swapped, gate, up)


def _read_weights(router: Router, h_BTD: jax.Array, routing: Routing, knobs: Knobs) -> Routing:
    """The choice as it is, its weights as the knobs say."""
    score_BTE = jax.nn.sigmoid(h_BTD.astype(jnp.float32) @ router.weight[...])
    score_BTE = score_BTE + knobs.bias * router.bias[...][None, None]
    weight_BTX = jnp.take_along_axis(score_BTE, routing.expert, axis=-1)
    normed_BTX = weight_BTX / (weight_BTX.sum(-1, keepdims=True) + 1e-20)
    weight_BTX = jnp.where(knobs.is_normed, normed_BTX, weight_BTX)
    return routing._replace(weight=weight_BTX * knobs.scaling)


def _read_experts(
    experts: RoutedExperts, h_BTD: jax.Array, routing: Routing, layer: jax.Array, knobs: Knobs
) -> jax.Array:
    """The routed experts in f32, one after another, all tokens through each."""
    gate_up, down = experts.stacks()
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1]).astype(jnp.float32)
    expert_MX, weight_MX = (x.reshape(len(h_MD), -1) for x in (routing.expert, routing.weight))

    def matrix(stack: PackedInt4 | jax.Array, expert: jax.Array) -> jax.Array:
        if not isinstance(stack, PackedInt4):
            return stack[layer, expert].astype(jnp.float32)
        words, scales = stack.words[layer, expert], stack.scales[layer, expert]
        packed, f32 = PackedInt4(words, scales, stack.in_features), jnp.dtype("float32")
        ones = dataclasses.replace(packed, words=jnp.full_like(words, ONES))
        weight = unpack(packed, f32) + knobs.offset * unpack(ones, f32)
        return jnp.where(knobs.is_rounded, unpack(packed, f32, "bfloat16"), weight)

    def one_more(expert: jax.Array, sum_MD: jax.Array) -> jax.Array:
        gate_FD, up_FD = matrix(gate_up, expert)
        gate_MF, up_MF = h_MD @ gate_FD.T, h_MD @ up_FD.T
        swapped_MF = jax.nn.silu(up_MF) * gate_MF
        hidden_MF = jnp.where(knobs.is_swapped, swapped_MF, jax.nn.silu(gate_MF) * up_MF)
        share_M = jnp.where(expert_MX == expert, weight_MX, 0).sum(-1)
        return sum_MD + share_M[:, None] * (hidden_MF @ matrix(down, expert).T)

    num_experts = experts.config.n_routed_experts
    out_MD = jax.lax.fori_loop(0, num_experts, one_more, jnp.zeros_like(h_MD))
    return out_MD.reshape(h_BTD.shape)
