"""EAGLE-3 drafts: which checkpoints are one, and the parameters their tensors become.

Six projects' layouts are read. They differ in what stands before the layer (`midlayer.`:
SafeAILab, SpecForge, TorchSpec; `layers.0.`: speculators, ModelOpt, TorchSpec too), in which
tensors they leave to the target, and in whether they say which boundaries they mean. Names and
configs are told apart separately, since releases mix them.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np

from jaxspec.config import DraftConfig, LatentDraftConfig, LlamaDraftConfig
from jaxspec.convert import transforms
from jaxspec.convert.configs import Quantization
from jaxspec.convert.draft_configs import find
from jaxspec.convert.matrices import Matrices
from jaxspec.convert.names import latent_attention_rules
from jaxspec.convert.plan import (
    FLOAT,
    HALF,
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

__all__ = ["DraftNames", "draft_names", "draft_rules", "is_draft", "unused_draft_tensors"]

FIRST_LAYERS = ("midlayer.", "layers.0.")


def is_draft(source: Source) -> bool:
    """Whether a checkpoint is a draft: it has an `fc`, or its config speaks of one."""
    marks = ("speculators_model_type", "eagle_config", "draft_vocab_size")
    return find(source, "fc.weight") in source.tensors or any(
        mark in source.config for mark in marks
    )


@dataclasses.dataclass(frozen=True)
class DraftNames:
    """How a checkpoint names a draft's tensors.

    Attributes:
      first_layer: what stands before the first layer's.
      full: a name as it is in the file, with `model.` before it or without.
      has_d2t, has_t2d: whether these maps of the vocabularies are there.
    """

    first_layer: str
    full: Callable[[str], str] = str
    has_d2t: bool = True
    has_t2d: bool = True


def draft_names(source: Source, problems: Problems) -> DraftNames:
    """The names of a checkpoint.

    Raises:
      CheckpointError: the decoder layer has no known name.
    """
    mark = "self_attn.o_proj.weight"
    found = [one for one in FIRST_LAYERS if find(source, one + mark) in source.tensors]
    if len(found) != 1:
        problems.add(
            f"expected one of {' and '.join(FIRST_LAYERS)} before {mark}; found "
            f"{' and '.join(found) or 'neither'}"
        )
        problems.raise_any()

    def full(name: str) -> str:
        return find(source, name)

    has = {f"has_{name}": full(name) in source.tensors for name in ("d2t", "t2d")}
    return DraftNames(found[0], full, **has)


def unused_draft_tensors() -> list[UnusedRule]:
    """The tensors of a draft checkpoint that no parameter is built from."""
    return [
        UnusedRule(
            re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
            "stale: rotary frequencies are computed from the config",
        ),
        UnusedRule(
            re.compile(r"verifier_(norm|lm_head)\.weight"),
            "the target's own weight, kept for training",
        ),
    ]


def draft_rules(names: DraftNames, config: DraftConfig, problems: Problems) -> Iterator[Rule]:
    """The rules of a draft, piece by piece; f16 is among the element types of its weights."""
    for rule in _rules(names, config, problems):
        wants = [
            dataclasses.replace(want, dtypes=(*FLOAT, HALF)) if want.dtypes == FLOAT else want
            for want in rule.wants
        ]
        yield dataclasses.replace(rule, wants=tuple(wants))


def _rules(names: DraftNames, config: DraftConfig, problems: Problems) -> Iterator[Rule]:
    c, width = config, config.hidden_size

    def rule(leaf: str, name: str, shape: tuple[int, ...]) -> Rule:
        transform = transforms.transpose if len(shape) == 2 else None
        want = Want(names.full(f"{name}.weight"), shape)
        return simple_rule(f"draft.{leaf}", None, leaf, want, transform)

    chunks, features = c.num_aux_hidden_states, c.num_aux_hidden_states * c.boundaries.width
    if c.fc_norm:
        each = [f"fc_norm.{index}.weight" for index in range(chunks)]
        yield _feature_norm([Want(names.full(name), (c.boundaries.width,)) for name in each])
    elif c.norm_before_fc:
        yield _feature_norm([Want(names.full("input_norm.weight"), (features,))])
    yield rule("fc", "fc", (width, features))
    # In this order, which the fingerprint of a draft depends on.
    input_norm, post_norm, *blocks = _layer_rules(names, c, 0)
    yield input_norm
    yield rule("hidden_norm.weight", f"{names.first_layer}hidden_norm", (width,))
    yield post_norm
    yield rule("norm.weight", "norm", (width,))
    yield from blocks
    for index in range(1, c.num_hidden_layers):
        yield from limit_piece(_layer_rules(names, c, index))
    if c.has_embedding:
        embed = Want(names.full("embed_tokens.weight"), (c.vocab_size, width))
        yield from vocabulary_rules("draft.embed", "embed", embed, None)
    if c.has_head:
        head = Want(names.full("lm_head.weight"), (c.draft_vocab_size, width))
        yield from vocabulary_rules("draft.head", "head", head, transforms.transpose)
    elif c.draft_vocab_size < c.vocab_size:
        problems.add(
            "tensor lm_head.weight is missing, and the target's head cannot take its place: "
            f"draft_vocab_size is {c.draft_vocab_size}, vocab_size {c.vocab_size}"
        )
    yield _vocab_map(names, c.draft_vocab_size, c.vocab_size, problems)


def _feature_norm(wants: list[Want]) -> Rule:
    """The rule of the norms before `fc`, one row each."""

    def build(reader: Reader) -> tuple[np.ndarray, ...]:
        return (np.stack([reader.read(want) for want in wants]),)

    def restore(weight_KA: np.ndarray) -> dict[str, np.ndarray]:
        return {want.name: row for want, row in zip(wants, weight_KA, strict=True)}

    leaf = "feature_norm.weight"
    return Rule(f"draft.{leaf}", None, (leaf,), tuple(wants), build, restore)


def _layer_rules(names: DraftNames, config: DraftConfig, index: int) -> Iterator[Rule]:
    """The rules of one layer: each a piece in the first one, one piece together in the others."""
    c, width, hidden = config, config.hidden_size, config.intermediate_size
    name = names.first_layer if index == 0 else f"layers.{index}."
    before, layer = ("", None) if index == 0 else ("later.", index - 1)
    in_features = 2 * width if index == 0 else width

    def piece(leaf: str) -> str:
        return f"draft.{leaf}" if index == 0 else f"draft_layer_{index:03d}"

    def rule(
        leaf: str,
        tensor: str,
        shape: tuple[int, ...],
        transform: Callable[..., np.ndarray] | None = transforms.transpose,
        *args: int,
    ) -> Rule:
        want = Want(names.full(f"{name}{tensor}.weight"), shape)
        return simple_rule(piece(leaf), layer, before + leaf, want, transform, *args)

    yield rule("input_norm.weight", "input_layernorm", (width,), None)
    yield rule("post_norm.weight", "post_attention_layernorm", (width,), None)
    if isinstance(c, LatentDraftConfig):
        attention = names.full(f"{name}self_attn.q_a_proj.weight").removesuffix("q_a_proj.weight")
        plain = Matrices(None, Quantization("none"))
        yield from latent_attention_rules(
            attention, piece("attention"), layer, f"{before}attention", c, plain, in_features
        )
    else:
        assert isinstance(c, LlamaDraftConfig), "there are these two kinds"
        for leaf, tensor, heads in (
            ("query", "q_proj", c.num_attention_heads),
            ("key", "k_proj", c.num_key_value_heads),
            ("value", "v_proj", c.num_key_value_heads),
        ):
            shape = (heads * c.head_dim, in_features)
            tensor = f"self_attn.{tensor}"
            yield rule(f"attention.{leaf}", tensor, shape, transforms.heads_out, heads)
        heads, shape = c.num_attention_heads, (width, c.num_attention_heads * c.head_dim)
        yield rule("attention.out", "self_attn.o_proj", shape, transforms.heads_in, heads)
    yield rule("mlp.gate", "mlp.gate_proj", (hidden, width))
    yield rule("mlp.up", "mlp.up_proj", (hidden, width))
    yield rule("mlp.down", "mlp.down_proj", (width, hidden))


def _vocab_map(names: DraftNames, draft_vocab: int, vocab: int, problems: Problems) -> Rule:
    """The rule of `target_of_draft`, from `d2t` (offsets) and, to compare with it, `t2d`."""
    d2t = Want(names.full("d2t"), (draft_vocab,), ("I64", "I32")) if names.has_d2t else None
    t2d = Want(names.full("t2d"), (vocab,), ("BOOL",)) if names.has_t2d else None
    if d2t is None and draft_vocab < vocab:
        problems.add(
            f"tensor d2t is missing: draft_vocab_size is {draft_vocab} of vocab_size {vocab}, and "
            "nothing else says which tokens those are"
        )

    def build(reader: Reader) -> tuple[np.ndarray, ...]:
        ids = np.arange(draft_vocab, dtype=np.int64)
        if d2t is not None:
            ids = ids + reader.read(d2t)
        is_kept = None if t2d is None else reader.read(t2d)
        _check_vocab_map(reader, ids, vocab, is_kept)
        return (ids.astype(np.int32),)

    def restore(ids: np.ndarray) -> dict[str, np.ndarray]:
        tensors = {}
        if d2t is not None:
            tensors[d2t.name] = ids - np.arange(draft_vocab, dtype=np.int64)
        if t2d is not None:
            tensors[t2d.name] = np.isin(np.arange(vocab), ids)
        return tensors

    wants = tuple(want for want in (d2t, t2d) if want is not None)
    return Rule("draft.target_of_draft", None, ("target_of_draft",), wants, build, restore)


def _check_vocab_map(
    reader: Reader, ids: np.ndarray, vocab: int, is_kept: np.ndarray | None
) -> None:
    """Reports ids out of range, twice, or other than the ones `t2d` keeps."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        reader.report(
            f"tensor d2t: {len(outside)} of {len(ids)} draft ids map outside the target's "
            f"vocabulary of {vocab}, the first is draft id {outside[0]}, to {ids[outside[0]]}; "
            "its values are offsets from the draft id"
        )
        return
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        reader.report(
            f"tensor d2t: {len(ids) - len(values)} draft ids are duplicates, as of target id "
            f"{values[counts > 1][0]}; every draft id needs a token of its own"
        )
    elif is_kept is not None:
        num_wrong = int((np.isin(np.arange(vocab), ids) != is_kept).sum())
        if num_wrong:
            reader.report(f"tensors d2t and t2d disagree about {num_wrong} of {vocab} tokens")
