"""The target: a DeepSeek-V3-type decoder (Kimi-K2, Kimi-K2.5) that reports its boundaries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import Latents, Stripe
from jaxspec.collectives import add, all_logits, look_up, stripe_of
from jaxspec.config import Numerics, TargetConfig
from jaxspec.contracts import Boundaries, ContractError, Features, TargetIds
from jaxspec.dims import typed
from jaxspec.layers import (
    GatedMlp,
    RMSNorm,
    full_f32,
    rotary_angles,
    scan_layers,
    stack_layers,
    weight,
)
from jaxspec.mla import LatentAttention, Pass, empty_latents
from jaxspec.moe import RoutedExperts, Router, Routing

__all__ = ["Ends", "Target", "TargetPass"]


class DenseLayer(nnx.Module):
    """A decoder layer whose MLP every token goes through."""

    def __init__(self, config: TargetConfig, numerics: Numerics, rngs: nnx.Rngs) -> None:
        c, dtype = config, numerics.jnp_dtype
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attention = LatentAttention(config, numerics, rngs)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = GatedMlp(c.hidden_size, c.intermediate_size, dtype, rngs)


class SparseLayer(nnx.Module):
    """A decoder layer with a router and shared experts; the routed ones are one stack outside."""

    def __init__(self, config: TargetConfig, numerics: Numerics, rngs: nnx.Rngs) -> None:
        c, dtype = config, numerics.jnp_dtype
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attention = LatentAttention(config, numerics, rngs)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.router = Router(config, rngs)
        shared = c.n_shared_experts * c.moe_intermediate_size
        self.shared = GatedMlp(c.hidden_size, shared, dtype, rngs)


@dataclasses.dataclass(frozen=True)
class TargetPass:
    """What one pass over the target gives.

    Attributes:
      hidden: the last boundary, before the final norm.
      features: the captured boundaries, under their claim; None where none were asked for.
      rows: this call's rows for the cache, [L,B,T,...].
      experts, router_margin: the sparse layers' choices; see `moe.Routing`.
    """

    hidden: Float[Array, "B T D"]
    features: Features | None
    rows: Latents
    experts: Int[Array, "L1 B T X"]
    router_margin: Float[Array, "L1 B T"]


class Ends(nnx.Module):
    """What stands before a target's layers and after them: embedding, final norm and head."""

    def __init__(
        self,
        embed: nnx.Param,
        norm: RMSNorm,
        head: nnx.Param,
        config: TargetConfig,
        numerics: Numerics,
        identity: str,
    ) -> None:
        self.embed, self.norm, self.head = embed, norm, head
        self.config, self.numerics, self.identity = config, numerics, identity

    @full_f32
    @typed
    def logits(
        self, hidden_BTD: Float[Array, "B T D"], *, is_normed: bool = False
    ) -> Float[Array, "B T V"]:
        """Logits of the next token, f32, from the last boundary, or from what its norm gave."""
        with jax.named_scope("head"):
            normed_BTD = hidden_BTD if is_normed else self.norm(hidden_BTD)
            logits = jnp.matmul(normed_BTD, self.head[...], preferred_element_type=jnp.float32)
            return all_logits(logits, self.numerics.mesh)

    def on_one_device(self) -> "Ends":
        """These, whole, where the whole of them lies on a mesh."""
        if self.numerics.mesh is None:
            return self
        c, numerics = self.config, dataclasses.replace(self.numerics, mesh=None)
        params = self.embed, self.norm.weight, self.head
        embed, weight, head = (jnp.asarray(jax.device_get(one[...])) for one in params)
        norm = RMSNorm(c.hidden_size, c.rms_norm_eps, numerics.jnp_dtype)
        norm.weight.set_value(weight)
        return Ends(nnx.Param(embed), norm, nnx.Param(head), c, numerics, self.identity)


class Target(Ends):
    """Embedding, dense layers, sparse layers, final norm and head.

    Layers of a kind are one stack under `lax.scan`. `identity` names the weights
    (`name@fingerprint`) in every claim this model stamps.
    """

    def __init__(
        self, config: TargetConfig, numerics: Numerics, identity: str, rngs: nnx.Rngs
    ) -> None:
        c, dtype = config, numerics.jnp_dtype
        embed = weight(rngs, dtype, c.vocab_size, c.hidden_size)
        self.dense = stack_layers(
            lambda rngs: DenseLayer(config, numerics, rngs), c.first_k_dense_replace, rngs
        )
        self.sparse = stack_layers(
            lambda rngs: SparseLayer(config, numerics, rngs), c.num_sparse_layers, rngs
        )
        self.experts = RoutedExperts(config, numerics, rngs)
        norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        head = weight(rngs, dtype, c.hidden_size, c.vocab_size)
        super().__init__(embed, norm, head, config, numerics, identity)

    def boundaries(self, ids: tuple[int, ...], origin: str) -> Boundaries:
        """The claim of features of this target.

        Raises:
          ContractError: there is no such boundary.
        """
        last = self.config.num_hidden_layers
        if not ids or min(ids) < 0 or max(ids) > last:
            raise ContractError(
                f"boundaries {ids} [{origin}]: {self.identity} has boundaries 0 (the embedding "
                f"output) to {last} (before the final norm)"
            )
        return Boundaries(self.identity, ids, self.config.hidden_size, origin)

    def asked_for(self, want: Boundaries) -> Boundaries:
        """This target's own claim of the boundaries that a draft wants.

        Raises:
          ContractError: there is no such boundary.
        """
        return self.boundaries(want.ids, "target capture, as the draft's claim asks")

    def empty_cache(self, batch: int, slots: int) -> Latents:
        """A cache with room for `slots` tokens of each sequence; its contents mean nothing yet."""
        return empty_latents(
            self.config, self.numerics, self.config.num_hidden_layers, batch, slots
        )

    @property
    def stripe(self) -> Stripe | None:
        """The slots of the cache that this device holds, for `cache.commit`; None is all."""
        return stripe_of(self.numerics.mesh)

    @full_f32
    def __call__(
        self, tokens: TargetIds, at: Pass, cache: Latents, capture: Boundaries | None
    ) -> TargetPass:
        """One pass over the tokens of this call; the cache is read and not written.

        Args:
          capture: the boundaries to report; features are stamped with it. None reports none.

        Raises:
          ContractError: ids of another vocabulary, or a capture claim of another target.
        """
        if capture is not None and capture.target != self.identity:
            raise ContractError(
                f"target: asked to capture {capture}\n  but this target is {self.identity}"
            )
        c, mesh = self.config, self.numerics.mesh
        ids_BT = TargetIds.require(tokens, c.vocab_size, "target")
        x_BTD = look_up(self.embed[...], ids_BT, mesh)
        angles = rotary_angles(c.rotary, at.pos)
        # boundary -> slot of the capture buffer; the last slot takes what nobody asked for. A
        # boundary asked for twice is captured once and repeated below.
        wanted = () if capture is None else capture.ids
        distinct = sorted(set(wanted))
        slot_of = [
            distinct.index(b) if b in distinct else len(distinct)
            for b in range(c.num_hidden_layers + 1)
        ]
        captured_KBTD = jnp.zeros((len(distinct) + 1, *x_BTD.shape), x_BTD.dtype)
        carry = (x_BTD, captured_KBTD)

        def attend(layer: Any, x_BTD: jax.Array, index: jax.Array) -> tuple[jax.Array, Latents]:
            with jax.named_scope("attention"):
                y_BTD, rows = layer.attention(layer.input_norm(x_BTD), at, angles, cache, index)
                return add(x_BTD, y_BTD, mesh=mesh), rows

        def dense(carry, layer, index, _):
            x_BTD, captured_KBTD = carry
            captured_KBTD = captured_KBTD.at[jnp.asarray(slot_of)[index]].set(x_BTD)
            x_BTD, rows = attend(layer, x_BTD, index)
            with jax.named_scope("dense"):
                x_BTD = add(x_BTD, layer.mlp(layer.post_norm(x_BTD)), mesh=mesh)
            return (x_BTD, captured_KBTD), (rows,)

        def sparse(carry, layer, index, sparse_index):
            x_BTD, captured_KBTD = carry
            captured_KBTD = captured_KBTD.at[jnp.asarray(slot_of)[index]].set(x_BTD)
            x_BTD, rows = attend(layer, x_BTD, index)
            with jax.named_scope("experts"):
                h_BTD = layer.post_norm(x_BTD)
                routing = self._without_padding(layer.router(h_BTD), at)
                routed_BTD = self.experts(h_BTD, routing, sparse_index)
                x_BTD = add(x_BTD, routed_BTD, layer.shared(h_BTD), mesh=mesh)
            return (x_BTD, captured_KBTD), (rows, routing.expert, routing.margin)

        num_dense = c.first_k_dense_replace
        dense_rows = ()
        if num_dense:
            carry, dense_rows = scan_layers(dense, carry, self.dense, 0)
        carry, (sparse_rows, expert_LBTX, margin_LBT) = scan_layers(
            sparse, carry, self.sparse, num_dense
        )
        x_BTD, captured_KBTD = carry
        captured_KBTD = captured_KBTD.at[slot_of[-1]].set(x_BTD)
        parts = (*dense_rows, sparse_rows)
        rows = jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *parts)
        features = None
        if capture is not None:
            data_BTG = jnp.concatenate([captured_KBTD[slot_of[b]] for b in wanted], axis=-1)
            features = Features(data_BTG, capture)
        return TargetPass(x_BTD, features, rows, expert_LBTX, margin_LBT)

    def _without_padding(self, routing: Routing, at: Pass) -> Routing:
        """The routing, with no expert for tokens that are not real."""
        if at.is_real is None:
            return routing
        nobody = self.config.n_routed_experts
        return routing._replace(expert=jnp.where(at.is_real[:, :, None], routing.expert, nobody))
