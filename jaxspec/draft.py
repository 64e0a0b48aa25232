"""The EAGLE-3 draft: one decoder layer, or a few, over the target's fused features.

    x = fc(norms?(features))                 or the recurrent hidden state
    y = x + attention([input_norm(embedding), hidden_norm(x)])
    z = y + mlp(post_norm(y))                further layers are ordinary ones, each reading z
    logits = head(norm(z));  the next recurrent hidden state is z, or norm(z)

The attention is Llama's or latent (MLA), and the cache is of its kind.

Two entry points, and no third: `fuse` takes the target's features, always through `fc`; `recur`
takes the draft's own hidden state, never through it. Which one is meant is said by the caller and
by the type of what is passed; no code looks at a width to decide (arXiv:2503.01840).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.cache import DraftCache, Stripe
from jaxspec.collectives import add, all_logits, look_up, stripe_of
from jaxspec.config import DraftConfig, LatentDraftConfig, LlamaDraftConfig, Numerics
from jaxspec.contracts import Features, TargetIds, VocabMap
from jaxspec.dims import typed
from jaxspec.gqa import GroupedAttention, empty_key_values
from jaxspec.layers import (
    GatedMlp,
    RMSNorm,
    full_f32,
    rms_norm,
    rotary_angles,
    scan_layers,
    stack_layers,
    weight,
)
from jaxspec.mla import LatentAttention, Pass, empty_latents

__all__ = ["Borrowed", "Draft", "DraftPass"]


@dataclasses.dataclass(frozen=True)
class Borrowed:
    """The target's weights that a draft may use in place of its own; never kept in the draft."""

    embed: Float[Array, "V D"]
    head: Float[Array, "D V"]

    @classmethod
    def of(cls, target: Any) -> "Borrowed":
        """What a target lends: of any module with an `embed` and a `head`."""
        return cls(target.embed[...], target.head[...])


@dataclasses.dataclass(frozen=True)
class DraftPass:
    """What one pass over the draft gives.

    Attributes:
      recurrent: what `recur` takes at the next level: the final norm's input, or its output where
        the config has `norm_output`.
      rows: this call's rows for the draft's cache, [L,...].
    """

    recurrent: Float[Array, "B T D"]
    rows: DraftCache


class FeatureNorm(nnx.Module):
    """RMSNorm of the features before `fc`: of each of `chunks`, or, with one, of all together."""

    def __init__(self, chunks: int, width: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((chunks, width), dtype))
        self.eps = eps

    @typed
    def __call__(self, x_BTG: Float[Array, "B T G"]) -> Float[Array, "B T G"]:
        weight_KA = self.weight[...]
        chunks_BTKA = x_BTG.reshape(*x_BTG.shape[:2], *weight_KA.shape)
        return rms_norm(chunks_BTKA, weight_KA, self.eps).reshape(x_BTG.shape)


class LaterLayer(nnx.Module):
    """A layer after the first: an ordinary decoder layer, which no embedding enters."""

    def __init__(self, config: DraftConfig, numerics: Numerics, rngs: nnx.Rngs) -> None:
        c, dtype = config, numerics.jnp_dtype
        self.input_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.attention = _attention(config, numerics, rngs, c.hidden_size)
        self.post_norm = RMSNorm(c.hidden_size, c.rms_norm_eps, dtype)
        self.mlp = GatedMlp(c.hidden_size, c.intermediate_size, dtype, rngs)


def _feature_norm(config: DraftConfig, width: int, dtype: jnp.dtype) -> FeatureNorm | None:
    """The norm of features so wide in total, where the config has one."""
    if not (config.fc_norm or config.norm_before_fc):
        return None
    chunks = config.num_aux_hidden_states if config.fc_norm else 1
    return FeatureNorm(chunks, width // chunks, config.rms_norm_eps, dtype)


def _attention(config: DraftConfig, numerics: Numerics, rngs: nnx.Rngs, in_features: int) -> Any:
    """The attention of the config's kind, whose cache is the one that `empty_cache` gives."""
    if isinstance(config, LatentDraftConfig):
        return LatentAttention(config, numerics, rngs, in_features)
    assert isinstance(config, LlamaDraftConfig), "there are these two kinds"
    return GroupedAttention(config, numerics, rngs, in_features)


class Draft(nnx.Module):
    """`fc`, decoder layers, norm and head; embedding and head its own or the target's.

    `identity` names the weights (`name@fingerprint`) in reports.
    """

    def __init__(
        self,
        config: DraftConfig,
        numerics: Numerics,
        rngs: nnx.Rngs,
        identity: str = "draft@unnamed",
    ) -> None:
        c, dtype = config, numerics.jnp_dtype
        width, eps = c.hidden_size, c.rms_norm_eps
        features = c.num_aux_hidden_states * c.boundaries.width
        self.feature_norm = _feature_norm(config, features, dtype)
        self.fc = weight(rngs, dtype, features, width)
        self.input_norm = RMSNorm(width, eps, dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype)
        self.attention = _attention(config, numerics, rngs, 2 * width)
        self.post_norm = RMSNorm(width, eps, dtype)
        self.mlp = GatedMlp(width, c.intermediate_size, dtype, rngs)
        self.later = stack_layers(
            lambda rngs: LaterLayer(config, numerics, rngs), c.num_hidden_layers - 1, rngs
        )
        self.norm = RMSNorm(width, eps, dtype)
        self.embed = weight(rngs, dtype, c.vocab_size, width) if c.has_embedding else None
        self.head = weight(rngs, dtype, width, c.draft_vocab_size) if c.has_head else None
        self.target_of_draft = nnx.Variable(jnp.arange(c.draft_vocab_size, dtype=jnp.int32))
        self.config, self.numerics, self.identity = config, numerics, identity

    @property
    def vocab_map(self) -> VocabMap:
        return VocabMap(self.target_of_draft[...], self.config.vocab_size)

    def empty_cache(self, batch: int, slots: int) -> DraftCache:
        """A cache with room for `slots` tokens of each sequence; its contents mean nothing yet."""
        c, rows = self.config, (self.config.num_hidden_layers, batch, slots)
        if isinstance(c, LatentDraftConfig):
            return empty_latents(c, self.numerics, *rows)
        return empty_key_values(self.attention, self.numerics, *rows)

    @property
    def stripe(self) -> Stripe | None:
        """The slots of the cache that this device holds, for `cache.commit`; None is all."""
        is_latent = isinstance(self.config, LatentDraftConfig)
        return stripe_of(self.numerics.mesh) if is_latent else None

    @full_f32
    def fuse(
        self, features: Features, tokens: TargetIds, at: Pass, cache: DraftCache, target: Borrowed
    ) -> DraftPass:
        """One pass over rows that pair the features of a position with the token after it.

        Raises:
          ContractError: these are not the features this draft was trained on.
        """
        features_BTG = features.require(self.config.boundaries, "draft.fuse")
        ids_BT = TargetIds.require(tokens, self.config.vocab_size, "draft.fuse")
        if self.feature_norm is not None:
            features_BTG = self.feature_norm(features_BTG)
        return self._layers(features_BTG @ self.fc[...], ids_BT, at, cache, None, target)

    @full_f32
    def recur(
        self,
        recurrent_BTD: Float[Array, "B T D"],
        tokens: TargetIds,
        at: Pass,
        cache: DraftCache,
        earlier: DraftCache,
        target: Borrowed,
    ) -> DraftPass:
        """One pass over rows that pair the draft's own hidden state with the token it proposed.

        Args:
          earlier: scratch rows of the levels above; see `LatentAttention`.
        """
        ids_BT = TargetIds.require(tokens, self.config.vocab_size, "draft.recur")
        return self._layers(recurrent_BTD, ids_BT, at, cache, earlier, target)

    @typed
    def _layers(
        self,
        hidden_BTD: Float[Array, "B T D"],
        ids_BT: Int[Array, "B T"],
        at: Pass,
        cache: DraftCache,
        earlier: DraftCache | None,
        target: Borrowed,
    ) -> DraftPass:
        table_VD = target.embed if self.embed is None else self.embed[...]
        mesh = self.numerics.mesh
        embedding_BTD = self.input_norm(look_up(table_VD, ids_BT, mesh))
        normed_BTD = self.hidden_norm(hidden_BTD)
        residual_BTD = normed_BTD if self.config.norm_before_residual else hidden_BTD
        angles = rotary_angles(self.config.rotary, at.pos)
        y_BTD, first = self.attention(
            jnp.concatenate([embedding_BTD, normed_BTD], axis=-1), at, angles, cache, 0, earlier
        )
        x_BTD = add(residual_BTD, y_BTD, mesh=mesh)
        x_BTD = add(x_BTD, self.mlp(self.post_norm(x_BTD)), mesh=mesh)
        rows = jax.tree.map(lambda row: row[None], first)

        def later(x_BTD: jax.Array, layer: Any, index: jax.Array, _: jax.Array) -> Any:
            y_BTD, rows = layer.attention(
                layer.input_norm(x_BTD), at, angles, cache, index, earlier
            )
            x_BTD = add(x_BTD, y_BTD, mesh=mesh)
            return add(x_BTD, layer.mlp(layer.post_norm(x_BTD)), mesh=mesh), rows

        if self.later is not None:
            x_BTD, others = scan_layers(later, x_BTD, self.later, 1)
            rows = jax.tree.map(lambda *stacks: jnp.concatenate(stacks), rows, others)
        return DraftPass(self.norm(x_BTD) if self.config.norm_output else x_BTD, rows)

    @full_f32
    @typed
    def logits(
        self, recurrent_BTD: Float[Array, "B T D"], target: Borrowed
    ) -> Float[Array, "B T U"]:
        """Logits over the draft's vocabulary, f32."""
        head_DU = target.head if self.head is None else self.head[...]
        normed_BTD = recurrent_BTD if self.config.norm_output else self.norm(recurrent_BTD)
        logits = jnp.matmul(normed_BTD, head_DU, preferred_element_type=jnp.float32)
        return all_logits(logits, self.numerics.mesh)
