"""The EAGLE-3 draft (Llama type): one decoder layer over the target's fused features.

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

from jaxspec.cache import KeyValues
from jaxspec.collectives import add, all_logits, look_up
from jaxspec.config import DraftConfig, Numerics
from jaxspec.contracts import Features, TargetIds, VocabMap
from jaxspec.dims import typed
from jaxspec.kernels.gqa_attention import gqa_attention
from jaxspec.layers import GatedMlp, RMSNorm, full_f32, rotary_angles, rotate, weight
from jaxspec.mla import Pass

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
      recurrent: the pre-norm output, which `recur` takes at the next level.
      rows: this call's rows for the draft's cache, [1,N,B,T,H].
    """

    recurrent: Float[Array, "B T D"]
    rows: KeyValues


class DraftAttention(nnx.Module):
    """Attention whose queries, keys and values read [embedding, hidden], 2 D wide."""

    def __init__(self, config: DraftConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        c = config
        self.query = weight(rngs, dtype, 2 * c.hidden_size, c.num_attention_heads, c.head_dim)
        self.key = weight(rngs, dtype, 2 * c.hidden_size, c.num_key_value_heads, c.head_dim)
        self.value = weight(rngs, dtype, 2 * c.hidden_size, c.num_key_value_heads, c.head_dim)
        self.out = weight(rngs, dtype, c.num_attention_heads, c.head_dim, c.hidden_size)
        self.config = config

    @typed
    def __call__(
        self, x_BTA: Float[Array, "B T A"], at: Pass, cache: KeyValues, earlier: KeyValues | None
    ) -> tuple[Float[Array, "B T D"], KeyValues]:
        """The output before the residual, and this call's rows.

        Args:
          cache: committed rows, read-only.
          earlier: scratch rows of earlier calls of this step, [1,N,B,T',H]; `at.sees` then
            covers them first and this call's rows after them.
        """
        angles = rotary_angles(self.config.rotary, at.pos)
        kind = self.config.rotary.kind

        def project(kernel: nnx.Param) -> jax.Array:
            return jnp.einsum("bta,anh->btnh", x_BTA, kernel[...])

        q_BTNH = rotate(project(self.query), angles, kind)
        rows = jax.tree.map(
            lambda x_BTNH: jnp.moveaxis(x_BTNH, 2, 0)[None],
            KeyValues(rotate(project(self.key), angles, kind), project(self.value)),
        )
        seen = rows
        if earlier is not None:
            seen = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-2), earlier, rows)
        mixed_BTNH = gqa_attention(
            q_BTNH, cache.key, cache.value, 0, at.kv_len, seen.key[0], seen.value[0], at.sees
        )
        return jnp.einsum("btnh,nhd->btd", mixed_BTNH, self.out[...]), rows


class Draft(nnx.Module):
    """`fc`, one decoder layer, norm and head; embedding and head its own or the target's.

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
        self.fc = weight(rngs, dtype, c.boundaries.total_width, width)
        self.input_norm = RMSNorm(width, eps, dtype)
        self.hidden_norm = RMSNorm(width, eps, dtype)
        self.attention = DraftAttention(config, dtype, rngs)
        self.post_norm = RMSNorm(width, eps, dtype)
        self.mlp = GatedMlp(width, c.intermediate_size, dtype, rngs)
        self.norm = RMSNorm(width, eps, dtype)
        self.embed = weight(rngs, dtype, c.vocab_size, width) if c.has_embedding else None
        self.head = weight(rngs, dtype, width, c.draft_vocab_size) if c.has_head else None
        self.target_of_draft = nnx.Variable(jnp.arange(c.draft_vocab_size, dtype=jnp.int32))
        self.config, self.numerics, self.identity = config, numerics, identity

    @property
    def vocab_map(self) -> VocabMap:
        return VocabMap(self.target_of_draft[...], self.config.vocab_size)

    def empty_cache(self, batch: int, slots: int) -> KeyValues:
        """A cache with room for `slots` tokens of each sequence; its contents mean nothing yet."""
        c, dtype = self.config, self.numerics.jnp_dtype
        shape = (1, c.num_key_value_heads, batch, slots, c.head_dim)
        return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @full_f32
    def fuse(
        self, features: Features, tokens: TargetIds, at: Pass, cache: KeyValues, target: Borrowed
    ) -> DraftPass:
        """One pass over rows that pair the features of a position with the token after it.

        Raises:
          ContractError: these are not the features this draft was trained on.
        """
        features_BTG = features.require(self.config.boundaries, "draft.fuse")
        ids_BT = TargetIds.require(tokens, self.config.vocab_size, "draft.fuse")
        return self._layer(features_BTG @ self.fc[...], ids_BT, at, cache, None, target)

    @full_f32
    def recur(
        self,
        recurrent_BTD: Float[Array, "B T D"],
        tokens: TargetIds,
        at: Pass,
        cache: KeyValues,
        earlier: KeyValues,
        target: Borrowed,
    ) -> DraftPass:
        """One pass over rows that pair the draft's own hidden state with the token it proposed.

        Args:
          earlier: scratch rows of the levels above; see `DraftAttention`.
        """
        ids_BT = TargetIds.require(tokens, self.config.vocab_size, "draft.recur")
        return self._layer(recurrent_BTD, ids_BT, at, cache, earlier, target)

    @typed
    def _layer(
        self,
        hidden_BTD: Float[Array, "B T D"],
        ids_BT: Int[Array, "B T"],
        at: Pass,
        cache: KeyValues,
        earlier: KeyValues | None,
        target: Borrowed,
    ) -> DraftPass:
        table_VD = target.embed if self.embed is None else self.embed[...]
        mesh = self.numerics.mesh
        embedding_BTD = self.input_norm(look_up(table_VD, ids_BT, mesh))
        normed_BTD = self.hidden_norm(hidden_BTD)
        residual_BTD = normed_BTD if self.config.norm_before_residual else hidden_BTD
        y_BTD, rows = self.attention(
            jnp.concatenate([embedding_BTD, normed_BTD], axis=-1), at, cache, earlier
        )
        x_BTD = add(residual_BTD, y_BTD, mesh=mesh)
        return DraftPass(add(x_BTD, self.mlp(self.post_norm(x_BTD)), mesh=mesh), rows)

    @full_f32
    @typed
    def logits(
        self, recurrent_BTD: Float[Array, "B T D"], target: Borrowed
    ) -> Float[Array, "B T U"]:
        """Logits over the draft's vocabulary, f32."""
        head_DU = target.head if self.head is None else self.head[...]
        logits = jnp.matmul(self.norm(recurrent_BTD), head_DU, preferred_element_type=jnp.float32)
        return all_logits(logits, self.numerics.mesh)
