"""EAGLE-3 drafts of the Llama type: their configs, their claims, their tensors.

Three layouts are read: SpecForge and SGLang (`midlayer.`, ids under `eagle_config`), speculators
and vLLM (`layers.0.`, the layer's config nested), SafeAILab (no ids, no embedding). Names and
configs are told apart separately, since releases mix them.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from jaxspec.config import DraftConfig, RotaryConfig
from jaxspec.contracts import Boundaries
from jaxspec.convert import transforms
from jaxspec.convert.configs import HOUSEKEEPING, read_rotary
from jaxspec.convert.fields import Claim, Fields
from jaxspec.convert.plan import Reader, Rule, UnusedRule, Want
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source

__all__ = ["Convention", "DraftFacts", "draft_rules", "is_draft", "read_draft", "unused_in_draft"]

Convention = Literal["before", "after"]
"""Whether an id k means the state before layer k (EAGLE, vLLM) or after it (SpecForge)."""

NUM_DEFAULT_BOUNDARIES = 3
LAYER_PREFIXES = ("midlayer.", "layers.0.")
MLA_KEYS = ("q_lora_rank", "kv_lora_rank")

LLAMA_IGNORED = HOUSEKEEPING | {
    "architectures": "the tensors say what the draft is",
    "attention_dropout": "training only",
    "eos_token_id": "the target's counts",
    "max_position_embeddings": "never limits anything: rotary angles are computed for any position",
    "max_window_layers": "read with use_sliding_window",
    "pretraining_tp": "a sharding of the training run",
}
SPECULATORS_IGNORED = HOUSEKEEPING | {
    "architectures": "the tensors say what the draft is",
    "embed_requires_grad": "training only",
    "has_no_defaults_at_init": "a label",
    "speculators_config": "names the verifier it was trained for and how many tokens to propose",
    "speculators_version": "a label",
}
EAGLE_IGNORED = {
    "parallel_draft_step": "how many tokens to propose",
    "eagle_decoder_type": "a label",
}


@dataclasses.dataclass(frozen=True)
class DraftFacts:
    """What a draft's checkpoint says; with a target it becomes a `DraftConfig`.

    Attributes:
      sizes: the fields of `DraftConfig` that need no target.
      ids: the boundaries its `fc` was trained on, or None for the default (2, n // 2, n - 3),
        which needs the target's number of layers n.
      chunk_width: width of each captured state that `fc` takes.
      origin: where the boundaries were read, and under which convention.
      target: identity of the target it is tied to, if the checkpoint says so.
      claims: every fact, with where it was read.
    """

    sizes: dict[str, int | float | bool]
    rotary: RotaryConfig
    ids: tuple[int, ...] | None
    chunk_width: int
    origin: str
    target: str | None
    claims: dict[str, Claim]

    def config_for(self, boundaries: Boundaries) -> DraftConfig:
        """The draft's config under a claim of its boundaries."""
        return DraftConfig(**self.sizes, rotary=self.rotary, boundaries=boundaries)  # type: ignore[arg-type]


def is_draft(source: Source) -> bool:
    """Whether a checkpoint is a draft: it has an `fc`, or its config speaks of one."""
    marks = ("speculators_model_type", "eagle_config", "draft_vocab_size")
    return any(f"{prefix}fc.weight" in source.tensors for prefix in ("", "model.")) or any(
        mark in source.config for mark in marks
    )


def read_draft(
    source: Source, problems: Problems, convention: Convention | None = None
) -> DraftFacts:
    """What the draft's config and headers say.

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
    if is_speculators:
        top.expect("speculators_model_type", "eagle3")
        top.ignore(SPECULATORS_IGNORED)
        layer = top.nested("transformer_layer_config")
    else:
        layer = top
    layer.expect("model_type", "llama", None)
    layer.ignore(LLAMA_IGNORED)
    sizes = _take_sizes(top, layer)
    problems.raise_any()
    rotary = read_rotary(layer, sizes["head_dim"], "halves")
    _expect_plain_eagle3(top)
    ids, origin = _read_boundaries(top, convention)
    target_width = top.take("target_hidden_size", int, sizes["hidden_size"])
    num_aux = top.take("num_aux_hidden_states", int, 0)
    num_ids = len(ids) if ids else NUM_DEFAULT_BOUNDARIES
    if num_aux and num_aux != num_ids:
        problems.add(
            f"{top.place('num_aux_hidden_states')} is {num_aux}, but there are {num_ids} boundaries"
        )
    for fields in {id(top): top, id(layer): layer}.values():
        fields.finish()
    embed, head = _find(source, "embed_tokens.weight"), _find(source, "lm_head.weight")
    sizes |= {"has_embedding": embed in source.tensors, "has_head": head in source.tensors}
    if not sizes["has_head"] and sizes["draft_vocab_size"] < sizes["vocab_size"]:
        problems.add(
            f"tensor {head} is missing, and the target's head cannot take its place: draft_vocab_size "
            f"is {sizes['draft_vocab_size']}, vocab_size {sizes['vocab_size']}"
        )
    claims = layer.claims | top.claims
    for name, tensor in (("embedding", embed), ("head", head)):
        is_own = tensor in source.tensors
        claims[name] = Claim("own" if is_own else "target's", tensor if is_own else f"no {tensor}")
    claims["boundaries"] = Claim(list(ids) if ids else None, origin)
    claims["rotary_kind"] = Claim(rotary.kind, "Llama-type attention")
    return DraftFacts(sizes, rotary, ids, target_width, origin, None, claims)


def unused_in_draft() -> list[UnusedRule]:
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


def draft_rules(source: Source, facts: DraftFacts, problems: Problems) -> Iterator[Rule]:
    """The rules of a draft.

    Raises:
      CheckpointError: the vocabulary map is missing; its values are checked when it is built.
    """
    s, width = facts.sizes, facts.sizes["hidden_size"]
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
    want = lambda name, *shape: Want(_find(source, f"{name}.weight"), shape)
    layer = prefixes[0]
    num_chunks = len(facts.ids) if facts.ids else NUM_DEFAULT_BOUNDARIES
    yield _transposed("fc", want("fc", width, num_chunks * facts.chunk_width))
    for leaf, name in (
        ("input_norm", f"{layer}input_layernorm"),
        ("hidden_norm", f"{layer}hidden_norm"),
        ("post_norm", f"{layer}post_attention_layernorm"),
        ("norm", "norm"),
    ):
        yield _copy(f"{leaf}.weight", want(name, width))
    heads, kv_heads, head = s["num_attention_heads"], s["num_key_value_heads"], s["head_dim"]
    for leaf, name, count in (
        ("query", "q_proj", heads),
        ("key", "k_proj", kv_heads),
        ("value", "v_proj", kv_heads),
    ):
        yield _to_heads(leaf, want(f"{layer}self_attn.{name}", count * head, 2 * width), int(count))
    out = want(f"{layer}self_attn.o_proj", width, heads * head)
    yield Rule(
        "draft",
        None,
        ("attention.out",),
        (out,),
        lambda reader: (transforms.heads_in(reader.read(out), int(heads)),),
    )
    hidden = s["intermediate_size"]
    for part, *shape in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
        yield _transposed(f"mlp.{part}", want(f"{layer}mlp.{part}_proj", *shape))
    if s["has_embedding"]:
        yield _copy("embed", want("embed_tokens", s["vocab_size"], width))
    if s["has_head"]:
        yield _transposed("head", want("lm_head", s["draft_vocab_size"], width))
    yield _vocab_map(source, int(s["draft_vocab_size"]), int(s["vocab_size"]), problems)


def _find(source: Source, name: str) -> str:
    """The name as this checkpoint has it, with `model.` before it or without."""
    return f"model.{name}" if f"model.{name}" in source.tensors else name


def _take_sizes(top: Fields, layer: Fields) -> dict[str, int | float | bool]:
    for key, supported in (
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
    vocab_size = layer.take("vocab_size", int)
    heads, width = layer.take("num_attention_heads", int), layer.take("hidden_size", int)
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
    for key, value in sizes.items():
        if type(value) is int and value < 1:
            layer.problems.add(f"{layer.place(key)} is {value}; expected 1 or more")
    if sizes["num_key_value_heads"] and heads % sizes["num_key_value_heads"]:
        layer.problems.add(
            f"{layer.place('num_key_value_heads')} is {sizes['num_key_value_heads']}, which does not "
            f"divide num_attention_heads {heads}"
        )
    if sizes["draft_vocab_size"] > vocab_size:
        top.problems.add(
            f"{top.place('draft_vocab_size')} is {sizes['draft_vocab_size']}, more than vocab_size "
            f"{vocab_size}"
        )
    if "speculators_model_type" in top.data:
        # Serving engines disagree about its default, so only the file's own word counts.
        sizes["norm_before_residual"] = top.take("norm_before_residual", bool)
    else:
        sizes["norm_before_residual"] = top.take("norm_before_residual", bool, False)
    return sizes


def _expect_plain_eagle3(top: Fields) -> None:
    """Makes variants of the architecture that are not implemented a problem, by name."""
    for key in ("fc_norm", "norm_before_fc", "norm_output", "use_aux_norm"):
        top.expect(key, False, None, why="EAGLE-3.1 is not implemented")
    top.expect("use_aux", True, None)


def _read_boundaries(
    top: Fields, convention: Convention | None
) -> tuple[tuple[int, ...] | None, str]:
    """The boundaries and where they were read; None for the default of every framework."""
    eagle = top.nested("eagle_config")
    eagle.expect("use_aux_hidden_state", True, None)
    eagle.expect("use_input_layernorm_in_first_layer", True, None)
    eagle.expect("use_last_layernorm", True, None)
    eagle.expect("use_mtp_layernorm", False, None)
    eagle.expect("next_layer_regular", True, None)
    eagle.ignore(EAGLE_IGNORED)
    key = "eagle_aux_hidden_state_layer_ids"
    found = {fields.place(key): fields.take_ids(key) for fields in (top, eagle)}
    stated = eagle.take("capture_convention", str, "") or top.take("capture_convention", str, "")
    eagle.finish()
    problems, given = top.problems, {where: ids for where, ids in found.items() if ids}
    if not given:
        return None, f"no {key} in config.json: the default (2, n // 2, n - 3) of EAGLE and vLLM"
    if len(set(given.values())) > 1:
        problems.add(" but ".join(f"{where} is {list(ids)}" for where, ids in given.items()))
    where, ids = next(iter(given.items()))
    if stated not in ("", "before", "after"):
        problems.add(f"{eagle.place('capture_convention')} is {stated!r}; expected before or after")
        return None, where
    why = ""
    if convention is not None:
        why = "as asked for"
    elif stated:
        convention, why = ("before" if stated == "before" else "after"), "the config says so"
    elif ids[0] in (1, 2):
        convention, why = ("after" if ids[0] == 1 else "before"), f"the first id is {ids[0]}"
    else:
        problems.add(
            f"{where} is {list(ids)}, which could mean boundaries {list(ids)} (convention 'before': "
            f"EAGLE, vLLM) or {[one + 1 for one in ids]} ('after': SpecForge, TorchSpec); say which "
            "with --capture-convention before|after"
        )
        return ids, where
    boundaries = ids if convention == "before" else tuple(one + 1 for one in ids)
    if min(boundaries) < 0:
        problems.add(f"{where} is {list(ids)}: no boundary comes before the embedding output, 0")
    elif 0 in boundaries and why == f"the first id is {ids[0]}":
        problems.add(
            f"{where} is {list(ids)}: read as {convention!r} that captures boundary 0, the embedding "
            "output, which no draft is known to want; ask for it with --capture-convention"
        )
    return boundaries, f"{where} {list(ids)}, convention {convention!r} ({why})"


def _vocab_map(source: Source, draft_vocab: int, vocab: int, problems: Problems) -> Rule:
    """The rule of `target_of_draft`, from `d2t` (offsets) and, to compare with it, `t2d`."""
    d2t_name, t2d_name = _find(source, "d2t"), _find(source, "t2d")
    if d2t_name not in source.tensors and draft_vocab < vocab:
        problems.add(
            f"tensor {d2t_name} is missing: draft_vocab_size is {draft_vocab} of vocab_size {vocab}, "
            "and nothing else says which tokens those are"
        )
    d2t = Want(d2t_name, (draft_vocab,), ("I64", "I32")) if d2t_name in source.tensors else None
    t2d = Want(t2d_name, (vocab,), ("BOOL",)) if t2d_name in source.tensors else None

    def build(reader: Reader) -> tuple[np.ndarray, ...]:
        ids = np.arange(draft_vocab, dtype=np.int64)
        if d2t is not None:
            ids = ids + reader.read(d2t)
        num_outside = int(((ids < 0) | (ids >= vocab)).sum())
        if num_outside:
            at = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
            reader.report(
                f"tensor {d2t_name}: {num_outside} of {draft_vocab} draft ids map outside the "
                f"target's vocabulary of {vocab}, the first is draft id {at}, to {int(ids[at])}; its "
                "values are offsets from the draft id"
            )
        elif len(np.unique(ids)) != draft_vocab:
            values, counts = np.unique(ids, return_counts=True)
            reader.report(
                f"tensor {d2t_name}: {draft_vocab - len(values)} draft ids are duplicates, as target "
                f"id {int(values[counts > 1][0])}; every draft id needs a token of its own"
            )
        elif t2d is not None:
            is_kept = np.zeros(vocab, bool)
            is_kept[ids] = True
            num_wrong = int((is_kept != reader.read(t2d)).sum())
            if num_wrong:
                reader.report(
                    f"tensors {d2t_name} and {t2d_name} disagree about {num_wrong} of {vocab} tokens"
                )
        return (ids.astype(np.int32),)

    wants = tuple(want for want in (d2t, t2d) if want is not None)
    return Rule("draft", None, ("target_of_draft",), wants, build)


def _copy(leaf: str, want: Want) -> Rule:
    return Rule("draft", None, (leaf,), (want,), lambda reader: (reader.read(want),))


def _transposed(leaf: str, want: Want) -> Rule:
    build = lambda reader: (transforms.transpose(reader.read(want)),)
    return Rule("draft", None, (leaf,), (want,), build)


def _to_heads(leaf: str, want: Want, heads: int) -> Rule:
    build = lambda reader: (transforms.heads_out(reader.read(want), heads),)
    return Rule("draft", None, (f"attention.{leaf}",), (want,), build)
