"""The tensors of a target, by Hugging Face's names, and the parameters they become."""

import re
from collections.abc import Callable, Iterator

import numpy as np

from jaxspec.config import LatentSizes, TargetConfig
from jaxspec.convert import transforms
from jaxspec.convert.matrices import Matrices, experts_rules
from jaxspec.convert.plan import (
    Reader,
    Rule,
    UnusedRule,
    Want,
    limit_piece,
    simple_rule,
    vocabulary_rules,
)
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source

__all__ = [
    "find_prefix",
    "latent_attention_rules",
    "target_rules",
    "unused_target_tensors",
]

PREFIXES = ("language_model.model.", "language_model.", "model.")
"""In front of `embed_tokens` and `layers`: Kimi-K2.5, its NVFP4 release, and flat checkpoints."""
HEADS = ("language_model.lm_head.weight", "lm_head.weight")


def find_prefix(source: Source, problems: Problems) -> tuple[str, str]:
    """The prefix of the decoder's tensors in this checkpoint, and the name of its head.

    Raises:
      CheckpointError: no prefix, or more than one, has an embedding.
    """
    embeddings = [f"{prefix}embed_tokens.weight" for prefix in PREFIXES]
    found = [name for name in embeddings if name in source.tensors]
    if len(found) != 1:
        problems.add(
            f"expected one embedding among {', '.join(embeddings)}; found "
            f"{', '.join(found) or 'none'}"
        )
        problems.raise_any()
    prefix = found[0].removesuffix("embed_tokens.weight")
    heads = [head for head in HEADS if head in source.tensors]
    # A second head stays unclaimed, and is reported as a tensor that nothing knows.
    return prefix, heads[0] if heads else HEADS[prefix == "model."]


def unused_target_tensors(prefix: str, config: TargetConfig, num_extra: int) -> list[UnusedRule]:
    """The tensors of a target checkpoint that no parameter is built from.

    Args:
      num_extra: multi-token-prediction layers, numbered after the decoder's own.
    """
    layers, first = re.escape(f"{prefix}layers."), config.num_hidden_layers
    unused = [
        UnusedRule(
            re.compile(layers + r"\d+\.self_attn\.rotary_emb\.inv_freq"),
            "stale: rotary frequencies are computed from the config",
        ),
        UnusedRule(
            re.compile(r"(vision_tower|mm_projector|multi_modal_projector)\..*"),
            "vision: present and not converted",
        ),
    ]
    for index in range(first, first + num_extra):
        reason = "multi-token-prediction layer: present and not converted"
        unused.append(UnusedRule(re.compile(rf"{layers}{index}\..*"), reason))
    return unused


def target_rules(
    matrices: Matrices, prefix: str, head: str, config: TargetConfig
) -> Iterator[Rule]:
    """The rules of a target, piece by piece in the order of the model."""
    c = config
    vocab = (c.vocab_size, c.hidden_size)
    embed = Want(f"{prefix}embed_tokens.weight", vocab)
    yield from vocabulary_rules("embed", "embed", embed, None)
    for index in range(c.num_hidden_layers):
        yield from limit_piece(_Layer(matrices, prefix, index, config).rules())
    yield simple_rule("norm", None, "norm.weight", Want(f"{prefix}norm.weight", (c.hidden_size,)))
    yield from vocabulary_rules("head", "head", Want(head, vocab), transforms.transpose)


class _Layer:
    """The rules of one decoder layer."""

    def __init__(self, matrices: Matrices, prefix: str, index: int, config: TargetConfig) -> None:
        num_dense = config.first_k_dense_replace
        self.matrices, self.config = matrices, config
        self.name, self.piece = f"{prefix}layers.{index}.", f"layer_{index:03d}"
        self.is_dense = index < num_dense
        self.stack = "dense" if self.is_dense else "sparse"
        self.layer = index if self.is_dense else index - num_dense

    def rules(self) -> Iterator[Rule]:
        """All of them; [out, in] of each matrix stands here as in the file."""
        c = self.config
        yield self.norm("input_norm", "input_layernorm", c.hidden_size)
        yield self.norm("post_norm", "post_attention_layernorm", c.hidden_size)
        yield from self.attention()
        if self.is_dense:
            yield from self.mlp("mlp", "mlp.", c.intermediate_size)
            return
        yield self.router()
        shared = c.n_shared_experts * c.moe_intermediate_size
        yield from self.mlp("shared", "mlp.shared_experts.", shared)
        experts = f"{self.name}mlp.experts."
        yield from experts_rules(self.matrices, self.piece, self.layer, experts, c)

    def attention(self) -> Iterator[Rule]:
        return latent_attention_rules(
            f"{self.name}self_attn.",
            self.piece,
            self.layer,
            f"{self.stack}.attention",
            self.config,
            self.matrices,
        )

    def mlp(self, leaf: str, name: str, hidden: int) -> Iterator[Rule]:
        width = self.config.hidden_size
        yield self.matrix(f"{leaf}.gate", f"{name}gate_proj", (hidden, width))
        yield self.matrix(f"{leaf}.up", f"{name}up_proj", (hidden, width))
        yield self.matrix(f"{leaf}.down", f"{name}down_proj", (width, hidden))

    def router(self) -> Rule:
        """In f32 whatever the file's type: a routing decision is never rounded."""
        c = self.config
        weight = Want(f"{self.name}mlp.gate.weight", (c.n_routed_experts, c.hidden_size))
        bias = Want(f"{self.name}mlp.gate.e_score_correction_bias", (c.n_routed_experts,))

        def build(reader: Reader) -> tuple[np.ndarray, ...]:
            weight_DE = transforms.transpose(reader.read(weight))
            return weight_DE.astype(np.float32), reader.read(bias).astype(np.float32)

        def restore(weight_DE: np.ndarray, bias_E: np.ndarray) -> dict[str, np.ndarray]:
            weight_ED = transforms.transpose(transforms.narrowed(weight_DE))
            return {weight.name: weight_ED, bias.name: bias_E}

        leaves = ("sparse.router.weight", "sparse.router.bias")
        return Rule(self.piece, self.layer, leaves, (weight, bias), build, restore)

    def norm(self, leaf: str, name: str, size: int) -> Rule:
        want = Want(f"{self.name}{name}.weight", (size,))
        return simple_rule(self.piece, self.layer, f"{self.stack}.{leaf}.weight", want)

    def matrix(self, leaf: str, name: str, shape: tuple[int, int]) -> Rule:
        want = self.matrices.plain(self.name + name, *shape)
        leaf = f"{self.stack}.{leaf}"
        return simple_rule(self.piece, self.layer, leaf, want, transforms.transpose)


def latent_attention_rules(
    name: str,
    piece: str,
    layer: int | None,
    leaf: str,
    sizes: LatentSizes,
    matrices: Matrices,
    in_features: int | None = None,
) -> Iterator[Rule]:
    """The rules of one layer's latent attention, of a target or a draft.

    Args:
      name: what stands before the tensors' names.
      leaf: what stands before the parameters'.
      in_features: width of what it reads; None is `hidden_size`.
    """
    c, width = sizes, in_features or sizes.hidden_size
    query, latent, rotary = c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim
    heads, key, value = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim

    def matrix(
        part: str,
        tensor: str,
        shape: tuple[int, int],
        transform: Callable[..., np.ndarray] = transforms.transpose,
        *args: int,
    ) -> Rule:
        want = matrices.plain(name + tensor, *shape)
        return simple_rule(piece, layer, f"{leaf}.{part}", want, transform, *args)

    def norm(part: str, tensor: str, size: int) -> Rule:
        want = Want(f"{name}{tensor}.weight", (size,))
        return simple_rule(piece, layer, f"{leaf}.{part}.weight", want)

    yield matrix("q_a", "q_a_proj", (query, width))
    yield norm("q_a_norm", "q_a_layernorm", query)
    q_b = (heads * (key + rotary), query)
    yield matrix("q_b", "q_b_proj", q_b, transforms.heads_out, heads)
    yield matrix("kv_a", "kv_a_proj_with_mqa", (latent + rotary, width))
    yield norm("kv_a_norm", "kv_a_layernorm", latent)
    kv_b = matrices.plain(f"{name}kv_b_proj", heads * (key + value), latent)
    yield Rule(
        piece,
        layer,
        (f"{leaf}.k_up", f"{leaf}.v_up"),
        (kv_b,),
        lambda reader: transforms.split_kv(reader.read(kv_b), heads, key),
        lambda k_up, v_up: {kv_b.name: transforms.join_kv(k_up, v_up)},
    )
    out = (c.hidden_size, heads * value)
    yield matrix("out", "o_proj", out, transforms.heads_in, heads)
