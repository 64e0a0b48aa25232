"""EAGLE-3 drafts of the Llama type: their configs, their claims, their tensors.

Three layouts are read: SpecForge and SGLang (`midlayer.`, ids under `eagle_config`), speculators
and vLLM (`layers.0.`, the layer's config nested), SafeAILab (no ids, no embedding). Names and
configs are told apart separately, since releases mix them.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxspec.aliases import Convention
from jaxspec.config import DraftConfig
from jaxspec.contracts import Boundaries
from jaxspec.convert import known_keys, transforms
from jaxspec.convert.configs import read_rotary
from jaxspec.convert.fields import Claim, Fields
from jaxspec.convert.plan import Reader, Rule, UnusedRule, Want, simple_rule, vocabulary_rules
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source

__all__ = [
    "NUM_DEFAULT_BOUNDARIES",
    "UNTIED",
    "draft_rules",
    "is_draft",
    "read_draft",
    "unused_draft_tensors",
]

UNTIED = ""
"""The target in the boundaries of a draft that names none. Its ids may be (): the default, which
needs to know how many layers the target has."""

NUM_DEFAULT_BOUNDARIES = 3
LAYER_PREFIXES = ("midlayer.", "layers.0.")
MLA_KEYS = ("q_lora_rank", "kv_lora_rank")


def is_draft(source: Source) -> bool:
    """Whether a checkpoint is a draft: it has an `fc`, or its config speaks of one."""
    marks = ("speculators_model_type", "eagle_config", "draft_vocab_size")
    return any(f"{prefix}fc.weight" in source.tensors for prefix in ("", "model.")) or any(
        mark in source.config for mark in marks
    )


def read_draft(
    source: Source, problems: Problems, convention: Convention | None = None
) -> tuple[DraftConfig, dict[str, Claim]]:
    """The draft's config, tied to no target yet, and where each fact in it was read.

    Args:
      convention: what its boundary ids mean; None reads it from the checkpoint, or from the first
        id where that is enough.

    Raises:
      CheckpointError: a key is unknown or contradicted, a value is not implemented, or the ids
        could mean two things; all of them together.
    """
    top = Fields(source.config, "config.json", problems)
    mla = [key for key in MLA_KEYS if source.config.get(key) is not None]
    if mla:
        problems.add(
            f"config.json: {' and '.join(mla)} make this an MLA draft "
            f"(architectures {source.config.get('architectures')}); supported: the Llama type"
        )
        problems.raise_any()
    is_speculators = "speculators_model_type" in top.data
    layer = top
    if is_speculators:
        top.expect("speculators_model_type", "eagle3")
        top.ignore(known_keys.SPECULATORS)
        known_keys.leave_housekeeping(top)
        layer = top.nested("transformer_layer_config")
    sizes = _take_sizes(top, layer, is_speculators)
    problems.raise_any()
    rotary = read_rotary(layer, sizes["head_dim"], "halves")
    _expect_plain_eagle3(top)
    ids, origin = _read_boundaries(top, convention)
    width = top.take("target_hidden_size", int, sizes["hidden_size"])
    num_ids = len(ids) or NUM_DEFAULT_BOUNDARIES
    top.expect("num_aux_hidden_states", num_ids, None, why="one for each boundary")
    for fields in (top, layer) if is_speculators else (top,):
        fields.finish()
    claims = layer.claims | top.claims
    claims["boundaries"] = Claim(list(ids), origin)
    claims["rotary_kind"] = Claim(rotary.kind, "Llama-type attention")
    own = {}
    for part, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        name = _find(source, name)
        own[f"has_{part}"] = name in source.tensors
        claims[part] = (
            Claim("own", name) if own[f"has_{part}"] else Claim("the target's", f"no tensor {name}")
        )
    boundaries = Boundaries(UNTIED, ids, width, origin)
    return DraftConfig(**sizes, **own, rotary=rotary, boundaries=boundaries), claims


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


def draft_rules(source: Source, config: DraftConfig, problems: Problems) -> Iterator[Rule]:
    """The rules of a draft.

    Raises:
      CheckpointError: the decoder layer has no known name.
    """
    c, width, hidden = config, config.hidden_size, config.intermediate_size
    prefixes = [
        prefix
        for prefix in LAYER_PREFIXES
        if _find(source, f"{prefix}self_attn.q_proj.weight") in source.tensors
    ]
    if len(prefixes) != 1:
        problems.add(
            f"expected one of {' and '.join(LAYER_PREFIXES)} before self_attn.q_proj.weight; found "
            f"{' and '.join(prefixes) or 'neither'}"
        )
        problems.raise_any()
    layer, attention = prefixes[0], f"{prefixes[0]}self_attn."

    def rule(
        leaf: str,
        name: str,
        shape: tuple[int, ...],
        transform: Callable[..., np.ndarray] | None = transforms.transpose,
        *args: int,
    ) -> Rule:
        want = Want(_find(source, f"{name}.weight"), shape)
        return simple_rule(f"draft.{leaf}", None, leaf, want, transform, *args)

    num_chunks = len(c.boundaries.ids) or NUM_DEFAULT_BOUNDARIES
    yield rule("fc", "fc", (width, num_chunks * c.boundaries.width))
    yield rule("input_norm.weight", f"{layer}input_layernorm", (width,), None)
    yield rule("hidden_norm.weight", f"{layer}hidden_norm", (width,), None)
    yield rule("post_norm.weight", f"{layer}post_attention_layernorm", (width,), None)
    yield rule("norm.weight", "norm", (width,), None)
    for leaf, name, heads in (
        ("query", "q_proj", c.num_attention_heads),
        ("key", "k_proj", c.num_key_value_heads),
        ("value", "v_proj", c.num_key_value_heads),
    ):
        shape = (heads * c.head_dim, 2 * width)
        yield rule(f"attention.{leaf}", attention + name, shape, transforms.heads_out, heads)
    heads, shape = c.num_attention_heads, (width, c.num_attention_heads * c.head_dim)
    yield rule("attention.out", f"{attention}o_proj", shape, transforms.heads_in, heads)
    yield rule("mlp.gate", f"{layer}mlp.gate_proj", (hidden, width))
    yield rule("mlp.up", f"{layer}mlp.up_proj", (hidden, width))
    yield rule("mlp.down", f"{layer}mlp.down_proj", (width, hidden))
    if c.has_embedding:
        embed = Want(_find(source, "embed_tokens.weight"), (c.vocab_size, width))
        yield from vocabulary_rules("draft.embed", "embed", embed, None)
    if c.has_head:
        head = Want(_find(source, "lm_head.weight"), (c.draft_vocab_size, width))
        yield from vocabulary_rules("draft.head", "head", head, transforms.transpose)
    elif c.draft_vocab_size < c.vocab_size:
        problems.add(
            "tensor lm_head.weight is missing, and the target's head cannot take its place: "
            f"draft_vocab_size is {c.draft_vocab_size}, vocab_size {c.vocab_size}"
        )
    yield _vocab_map(source, c.draft_vocab_size, c.vocab_size, problems)


def _find(source: Source, name: str) -> str:
    """The name as this checkpoint has it, with `model.` before it or without."""
    return f"model.{name}" if f"model.{name}" in source.tensors else name


def _take_sizes(top: Fields, layer: Fields, is_speculators: bool) -> dict[str, Any]:
    """The fields of `DraftConfig` that the config has as they are; what else it says is checked."""
    layer.ignore(known_keys.LLAMA)
    known_keys.leave_housekeeping(layer)
    for key, supported in (
        ("model_type", ("llama", None)),
        ("hidden_act", ("silu", None)),
        ("num_hidden_layers", (1,)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("tie_word_embeddings", (False, None)),
        ("use_sliding_window", (False, None)),
        ("sliding_window", (None,)),
        ("quantization_config", (None,)),
    ):
        layer.expect(key, *supported)
    vocab_size, width = layer.take("vocab_size", int), layer.take("hidden_size", int)
    heads = layer.take("num_attention_heads", int)
    sizes = {
        "vocab_size": vocab_size,
        "draft_vocab_size": top.take("draft_vocab_size", int, vocab_size),
        "hidden_size": width,
        "intermediate_size": layer.take("intermediate_size", int),
        "num_attention_heads": heads,
        "num_key_value_heads": layer.take("num_key_value_heads", int, heads),
        "head_dim": layer.take("head_dim", int, width // max(heads, 1)),
        "rms_norm_eps": layer.take("rms_norm_eps", float),
    }
    if is_speculators:
        # Serving engines disagree about its default, so only the file's own word counts.
        sizes["norm_before_residual"] = top.take("norm_before_residual", bool)
    else:
        sizes["norm_before_residual"] = top.take("norm_before_residual", bool, False)
    for key, value in sizes.items():
        if type(value) is int and value < 1:
            layer.problems.add(f"{layer.place(key)} is {value}; expected 1 or more")
    kv_heads = sizes["num_key_value_heads"]
    if kv_heads > 0 and heads % kv_heads:
        layer.problems.add(
            f"{layer.place('num_key_value_heads')} is {kv_heads}, which does not divide "
            f"num_attention_heads {heads}"
        )
    if sizes["draft_vocab_size"] > vocab_size:
        top.problems.add(
            f"{top.place('draft_vocab_size')} is {sizes['draft_vocab_size']}, more than vocab_size "
            f"{vocab_size}"
        )
    return sizes


def _expect_plain_eagle3(top: Fields) -> None:
    """Makes variants of the architecture that are not implemented a problem, by name."""
    for key in ("fc_norm", "norm_before_fc", "norm_output", "use_aux_norm"):
        top.expect(key, False, None, why="EAGLE-3.1 is not implemented")
    top.expect("use_aux", True, None)


def _read_boundaries(top: Fields, convention: Convention | None) -> tuple[tuple[int, ...], str]:
    """The boundaries and where they were read; () for the default of every framework."""
    eagle, key = top.nested("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    for option in ("use_aux_hidden_state", "use_last_layernorm", "next_layer_regular"):
        eagle.expect(option, True, None)
    eagle.expect("use_input_layernorm_in_first_layer", True, None)
    eagle.expect("use_mtp_layernorm", False, None)
    eagle.ignore(known_keys.EAGLE)
    found = {fields.place(key): fields.take_ids(key) for fields in (top, eagle)}
    for fields in (top, eagle):
        fields.expect("capture_convention", None, "before", "after")
    stated = top.data.get("capture_convention") or eagle.data.get("capture_convention")
    eagle.finish()
    problems, given = top.problems, {where: ids for where, ids in found.items() if ids}
    if not given:
        return (), f"no {key} in config.json: the default (2, n // 2, n - 3) of EAGLE and vLLM"
    if len(set(given.values())) > 1:
        problems.add(" but ".join(f"{where} is {list(ids)}" for where, ids in given.items()))
    where, ids = next(iter(given.items()))
    read_as, why = _read_convention(problems, where, ids, convention, stated)
    boundaries = ids if read_as == "before" else tuple(one + 1 for one in ids)
    if min(boundaries) < 0:
        problems.add(f"{where} is {list(ids)}: no boundary comes before 0, the embedding output")
    return boundaries, f"{where} {list(ids)}, convention {read_as!r} ({why})"


def _read_convention(
    problems: Problems,
    where: str,
    ids: tuple[int, ...],
    asked_for: Convention | None,
    stated: str | None,
) -> tuple[str, str]:
    """What the ids mean, and why they are read so.

    A first id of 1 is what SpecForge's default layers give, a first id of 2 what EAGLE's do; any
    other first id leaves it open. So boundary 0, the embedding, is read only when asked for.
    """
    if asked_for is not None:
        return asked_for, "as asked for"
    if stated is not None:
        return stated, "the config says so"
    if ids[0] in (1, 2) and 0 not in ids:
        return {1: "after", 2: "before"}[ids[0]], f"the first id is {ids[0]}"
    problems.add(
        f"{where} is {list(ids)}, which could mean boundaries {list(ids)} (convention 'before': "
        f"EAGLE, vLLM) or {[one + 1 for one in ids]} ('after': SpecForge, TorchSpec); say which "
        "with --capture-convention before|after"
    )
    return "before", ""


def _vocab_map(source: Source, draft_vocab: int, vocab: int, problems: Problems) -> Rule:
    """The rule of `target_of_draft`, from `d2t` (offsets) and, to compare with it, `t2d`."""
    d2t_name, t2d_name = _find(source, "d2t"), _find(source, "t2d")
    d2t = Want(d2t_name, (draft_vocab,), ("I64", "I32")) if d2t_name in source.tensors else None
    t2d = Want(t2d_name, (vocab,), ("BOOL",)) if t2d_name in source.tensors else None
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

    wants = tuple(want for want in (d2t, t2d) if want is not None)
    return Rule("draft.target_of_draft", None, ("target_of_draft",), wants, build)


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
