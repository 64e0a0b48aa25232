"""DeepSeek-V3's mixture of experts: sigmoid router with a choice-only bias, routed and shared."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.collectives import held_experts
from jaxspec.config import Numerics, TargetConfig
from jaxspec.dims import typed
from jaxspec.kernels.expert_matmul import PackedInt4, expert_matmul
from jaxspec.kernels.expert_matmul.packing import BLOCK, GROUP, padded
from jaxspec.layers import full_f32, weight

__all__ = ["RoutedExperts", "Router", "Routing"]


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
      expert: chosen ids, best first.
      weight: f32 weights; the correction bias is not in them.
      margin: f32 gap between the last chosen and the first rejected choice score, of experts or
        of groups, whichever is smaller: what a difference between two implementations must
        exceed to flip a choice.
    """

    expert: Int[Array, "B T X"]
    weight: Float[Array, "B T X"]
    margin: Float[Array, "B T"]


class Router(nnx.Module):
    """Chooses experts, in f32 whatever the model's dtype (arXiv:2412.19437, section 2.1.2)."""

    def __init__(self, config: TargetConfig, rngs: nnx.Rngs) -> None:
        f32 = jnp.dtype("float32")
        self.weight = weight(rngs, f32, config.hidden_size, config.n_routed_experts)
        self.bias = nnx.Param(jnp.zeros((config.n_routed_experts,), f32))
        self.config = config

    @full_f32
    @typed
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Routing:
        """The choice for every token: the bias decides who is chosen, never with what weight."""
        c = self.config
        score_BTE = jax.nn.sigmoid(x_BTD.astype(jnp.float32) @ self.weight[...])
        choice_BTE, group_margin_BT = self._within_best_groups(
            score_BTE + self.bias[...][None, None]
        )
        # One more than is chosen, for the margin; a router that takes all experts has none.
        runners_up = min(1, c.n_routed_experts - c.num_experts_per_tok)
        best, expert = jax.lax.top_k(choice_BTE, c.num_experts_per_tok + runners_up)
        expert_BTX = expert[..., : c.num_experts_per_tok]
        margin_BT = best[..., c.num_experts_per_tok - 1] - best[..., -1]
        if not runners_up:
            margin_BT = jnp.full_like(margin_BT, jnp.inf)
        margin_BT = jnp.minimum(margin_BT, group_margin_BT)
        weight_BTX = jnp.take_along_axis(score_BTE, expert_BTX, axis=-1)
        if c.norm_topk_prob:
            weight_BTX = weight_BTX / (weight_BTX.sum(-1, keepdims=True) + 1e-20)
        return Routing(expert_BTX, weight_BTX * c.routed_scaling_factor, margin_BT)

    def _within_best_groups(self, choice_BTE: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choice scores, -inf outside the `topk_group` best groups (by their two best scores), and
        the gap between the last group kept and the first dropped one, infinite if none is."""
        c = self.config
        no_margin_BT = jnp.full(choice_BTE.shape[:-1], jnp.inf, choice_BTE.dtype)
        if c.topk_group == c.n_group:
            return choice_BTE, no_margin_BT
        grouped = choice_BTE.reshape(*choice_BTE.shape[:-1], c.n_group, -1)
        group_score = jax.lax.top_k(grouped, 2)[0].sum(-1)
        best_score, best_group = jax.lax.top_k(group_score, c.topk_group + 1)
        is_kept = jax.nn.one_hot(best_group[..., :-1], c.n_group, dtype=bool).any(-2)
        kept_BTE = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice_BTE.shape)
        return kept_BTE, best_score[..., -2] - best_score[..., -1]


class RoutedExperts(nnx.Module):
    """The routed experts of all sparse layers, one stack: never sliced, never scanned over.

    Packed experts are int32 words and scales (`kernels/expert_matmul/packing.py`); plain ones a
    weight each.
    """

    def __init__(self, config: TargetConfig, numerics: Numerics, rngs: nnx.Rngs) -> None:
        c, dtype = config, numerics.jnp_dtype
        stack = (c.num_sparse_layers, c.n_routed_experts)
        gate_up = (*stack, 2, c.moe_intermediate_size, c.hidden_size)
        down = (*stack, c.hidden_size, c.moe_intermediate_size)
        if c.num_bits is None:
            self.gate_up = weight(rngs, dtype, *gate_up)
            self.down = weight(rngs, dtype, *down)
        else:
            self.gate_up_words, self.gate_up_scales = _packed(rngs, *gate_up)
            self.down_words, self.down_scales = _packed(rngs, *down)
        self.config, self.numerics = config, numerics

    @typed
    def __call__(
        self, x_BTD: Float[Array, "B T D"], routing: Routing, layer: Int[Array, ""]
    ) -> Float[Array, "B T D"]:
        """The weighted sum of the chosen experts of sparse layer `layer`, in x's dtype.

        On a mesh it is that of the experts held here, and `collectives.add` sums it.
        """
        tokens = x_BTD.shape[0] * x_BTD.shape[1]
        out_MD = expert_matmul(
            x_BTD.reshape(tokens, -1),
            *self.stacks(),
            layer,
            held_experts(routing.expert, self.config.n_routed_experts, self.numerics.mesh).reshape(
                tokens, -1
            ),
            routing.weight.reshape(tokens, -1),
            product=self.numerics.expert_product,
            implementation=self.numerics.implementation,
        )
        return out_MD.reshape(x_BTD.shape).astype(x_BTD.dtype)

    def stacks(self) -> tuple[PackedInt4 | jax.Array, PackedInt4 | jax.Array]:
        """Gate and up of all layers, and down, as `expert_matmul` takes them."""
        return (
            self._stack("gate_up", self.config.hidden_size),
            self._stack("down", self.config.moe_intermediate_size),
        )

    def _stack(self, name: str, in_features: int) -> PackedInt4 | jax.Array:
        if self.config.num_bits is None:
            return getattr(self, name)[...]
        words, scales = getattr(self, f"{name}_words"), getattr(self, f"{name}_scales")
        return PackedInt4(words[...], scales[...], in_features)


def _packed(rngs: nnx.Rngs, *shape: int) -> tuple[nnx.Variable, nnx.Param]:
    """Random words and constant scales for matrices [..., out, in]."""
    *lead, out, in_features = shape
    width = padded(in_features)
    bits = jax.random.bits(rngs.params(), (*lead, out, width // 8), jnp.uint32)
    words = nnx.Variable(jax.lax.bitcast_convert_type(bits, jnp.int32))
    scales = nnx.Param(jnp.full((*lead, width // BLOCK, BLOCK // GROUP, out), 0.005, jnp.bfloat16))
    return words, scales
