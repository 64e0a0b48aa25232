"""Hyper-parameters of target and draft, under Hugging Face's names, and how they are computed.

These are plain values: reading them from a checkpoint's `config.json`, where every key must be
known, is `convert/configs.py`'s job.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from jaxspec.aliases import CacheLayout, Dtype
from jaxspec.contracts import Boundaries
from jaxspec.errors import InputError

__all__ = [
    "DraftConfig",
    "LatentDraftConfig",
    "LatentSizes",
    "Llama3Scaling",
    "LlamaDraftConfig",
    "MeshConfig",
    "Numerics",
    "RotaryConfig",
    "TargetConfig",
    "TreeConfig",
    "Yarn",
]

NUM_KEPT_CANDIDATES = 32
"""Draft candidates kept between steps: the widest tree that one state can serve."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071), in DeepSeek's form."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def magnitude(self, mscale: float) -> float:
        """DeepSeek's `get_mscale(factor, mscale)`: 1 where nothing is stretched."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Context extension of Llama 3.1, in transformers' terms (`rope_type: llama3`)."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary embedding of one model; at most one of `yarn` and `llama3` stretches its context.

    Convention: `pairs` rotates dims (2i, 2i+1), as DeepSeek and Kimi store them; `halves`
    rotates (i, i + width / 2), as Llama does. Weights of one kind are wrong under the other.
    """

    width: int
    theta: float
    kind: Literal["pairs", "halves"]
    yarn: Yarn | None = None
    llama3: Llama3Scaling | None = None

    @property
    def scaling(self) -> Yarn | Llama3Scaling | None:
        """What stretches its context."""
        return self.yarn or self.llama3

    def scaled_by(self, scaling: Yarn | Llama3Scaling | None) -> "RotaryConfig":
        """The same with another scaling, or none."""
        return dataclasses.replace(
            self,
            yarn=scaling if isinstance(scaling, Yarn) else None,
            llama3=scaling if isinstance(scaling, Llama3Scaling) else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """What latent attention (MLA) has to know, of a target or of a draft.

    Attributes beyond Hugging Face's:
      latent_norm_eps: epsilon of the two latent norms. The frameworks differ: transformers
        leaves it at its default 1e-6, vLLM and SGLang take `rms_norm_eps`.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float
    rotary: RotaryConfig

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(H + R), times YaRN's magnitude squared where `mscale_all_dim` is set."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        yarn = self.rotary.yarn
        if yarn is not None and yarn.mscale_all_dim:
            scale *= yarn.magnitude(yarn.mscale_all_dim) ** 2
        return scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(LatentSizes):
    """Shape of a DeepSeek-V3-type target (Kimi-K2, Kimi-K2.5's text model).

    Attributes beyond Hugging Face's:
      num_bits: 4 for packed int4 routed experts, None for plain ones.
    """

    vocab_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    rms_norm_eps: float
    max_position_embeddings: int
    num_bits: Literal[4] | None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_sparse_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of an EAGLE-3 draft, whatever its attention.

    Attributes beyond Hugging Face's:
      num_aux_hidden_states: boundaries that its `fc` takes, side by side.
      fc_norm: each of them goes through a norm of its own before `fc` (EAGLE-3.1).
      norm_before_fc: all of them together go through one (speculators).
      norm_output: the final norm's output is what the next step takes, not its input (EAGLE-3.1).
      norm_before_residual: the first layer's attention is added to the normed hidden state.
      boundaries: what its `fc` was trained on; see `contracts.Boundaries`.
      has_embedding, has_head: whether it owns one or borrows the target's.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 1
    num_attention_heads: int
    rms_norm_eps: float
    num_aux_hidden_states: int = 3
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool
    rotary: RotaryConfig
    boundaries: Boundaries
    has_embedding: bool
    has_head: bool

    @property
    def num_kept_candidates(self) -> int:
        """Candidates kept between steps, for trees of any shape."""
        return min(NUM_KEPT_CANDIDATES, self.draft_vocab_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaDraftConfig(DraftConfig):
    """A draft with Llama's attention: keys and values of fewer heads than the queries, cached."""

    num_key_value_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentDraftConfig(DraftConfig, LatentSizes):
    """A draft with latent attention (MLA), as its target has; latents are cached."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices in a grid, written DATAxMODEL, and how the target's cache lies on them.

    Attributes:
      data: groups of devices; each serves its share of the batch, and never waits for another.
      model: devices of a group, which share the weights and the work of every layer.
      cache: the latent cache serves all heads together, so heads cannot cut it. "replicated" keeps
        all of it on every device of a group; "slots" deals its slots out to them, for twice the
        collectives in a layer.
    """

    data: int
    model: int
    cache: CacheLayout = "replicated"

    @classmethod
    def parse(cls, text: str, cache: CacheLayout = "replicated") -> "MeshConfig":
        """The mesh written as `1x8`.

        Raises:
          InputError: it is written otherwise.
        """
        parts = text.lower().split("x")
        if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
            raise InputError(f"mesh {text!r}: expected DATAxMODEL, as in 1x8")
        data, model = map(int, parts)
        return cls(data, model, cache)

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How a model is computed, whatever its checkpoint.

    Attributes:
      dtype: of weights, activations and caches. Router, norms and softmax are f32 always.
      expert_product: an int4 expert's weight is q x scale. "exact" keeps that product in
        `dtype`; "bfloat16" first rounds it to bf16, as compressed-tensors and transformers do
        even when asked for f32.
      implementation: of the kernels that have several; None takes the best that can run here.
      mesh: the devices that share it; None is one device, and no communication.
    """

    dtype: Dtype = "bfloat16"
    expert_product: Literal["exact", "bfloat16"] = "exact"
    implementation: Literal["mosaic", "xla"] | None = None
    mesh: MeshConfig | None = None

    @property
    def jnp_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree, written LEVELSxBRANCHESxNODES.

    Attributes:
      levels: depth of the tree below its root (SGLang: `speculative-num-steps`).
      branches: candidates kept per level (`speculative-eagle-topk`); 1 is a chain.
      nodes: nodes verified, the root included (`speculative-num-draft-tokens`).
    """

    levels: int
    branches: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "TreeConfig":
        """The tree written as `3x4x16`.

        Raises:
          InputError: it is written otherwise, or no such tree exists.
        """
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise InputError(f"tree {text!r}: expected LEVELSxBRANCHESxNODES, as in 3x4x16")
        tree = cls(*map(int, parts))
        tree.check()
        return tree

    @property
    def num_candidates(self) -> int:
        """Candidates the levels offer to the re-rank: k + (levels - 1) * k * k."""
        return self.branches + (self.levels - 1) * self.branches**2

    def check(self) -> None:
        """Raises InputError where no such tree can be grown."""
        if min(self.levels, self.branches) < 1 or self.nodes < 2:
            raise InputError(f"tree {self}: levels and branches start at 1, nodes at 2")
        if self.branches > NUM_KEPT_CANDIDATES:
            raise InputError(
                f"tree {self}: {self.branches} branches, but only the draft's best "
                f"{NUM_KEPT_CANDIDATES} candidates are kept between steps"
            )
        if self.nodes - 1 > self.num_candidates:
            raise InputError(
                f"tree {self}: {self.nodes - 1} nodes below the root, but {self.levels} levels of "
                f"{self.branches} branches offer only {self.num_candidates}"
            )

    def __str__(self) -> str:
        return f"{self.levels}x{self.branches}x{self.nodes}"
