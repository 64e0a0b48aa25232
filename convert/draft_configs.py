"""`config.json` of an EAGLE-3 draft, of the Llama type or with latent attention (MLA).

SafeAILab, SpecForge, ModelOpt and TorchSpec write one flat object; speculators nests the layer's
config. Facts stand at the top level or under `eagle_config`, and releases mix the two.
"""

from typing import Any, Literal

from jaxspec.aliases import Convention
from jaxspec.config import DraftConfig, LatentDraftConfig, LlamaDraftConfig
from jaxspec.contracts import Boundaries
from jaxspec.convert import known_keys
from jaxspec.convert.configs import TRANSFORMERS_EPS, LatentNormEps
from jaxspec.convert.fields import Claim, Fields
from jaxspec.convert.problems import Problems
from jaxspec.convert.rotary import RotaryChoice, read_rotary
from jaxspec.convert.source import Source

__all__ = ["AS_STATED", "UNTIED", "find", "read_draft"]

UNTIED = ""
"""The target in the boundaries of a draft that names none. Its ids may be (): the default, which
needs to know how many layers the target has."""

NUM_DEFAULT_BOUNDARIES = 3
AS_STATED = RotaryChoice()
"""The rotary embedding that the config states."""

Kind = Literal["llama", "latent"]


def read_draft(
    source: Source,
    problems: Problems,
    convention: Convention | None = None,
    choice: RotaryChoice = AS_STATED,
    latent_norm_eps: LatentNormEps = "rms_norm_eps",
) -> tuple[DraftConfig, dict[str, Claim]]:
    """The draft's config, tied to no target yet, and where each fact in it was read.

    Args:
      convention: what its boundary ids mean; None reads it from the checkpoint, or from the first
        id where that is enough.
      choice: of the rotary embedding, in place of what the config says.

    Raises:
      CheckpointError: a key is unknown or contradicted, a value is not implemented, or the ids
        could mean two things; all of them together.
    """
    top = Fields(source.config, "config.json", problems)
    is_speculators = "speculators_model_type" in top.data
    layer = top
    if is_speculators:
        top.expect("speculators_model_type", "eagle3")
        top.expect("tie_word_embeddings", False, None)
        top.ignore(known_keys.SPECULATORS)
        known_keys.leave_housekeeping(top)
        layer = top.nested("transformer_layer_config")
    eagle = top.nested("eagle_config")
    kind: Kind = "llama" if layer.data.get("kv_lora_rank") is None else "latent"
    sizes = _take_sizes(top, layer, kind)
    problems.raise_any()
    rotary_width = sizes["head_dim" if kind == "llama" else "qk_rope_head_dim"]
    if rotary_width % 2:
        problems.add(f"{layer.where}: {rotary_width} dims of a head are rotated, an odd number")
    pairing, why = _pairing(layer, kind)
    rotary = read_rotary(layer, rotary_width, pairing)
    flags = _read_flags(top, eagle, is_speculators)
    ids, origin = _read_boundaries(top, eagle, convention, is_speculators)
    width = top.take("target_hidden_size", int, sizes["hidden_size"])
    num_chunks = _num_chunks(source, top, ids, origin, width)
    for fields in (top, layer, eagle) if is_speculators else (top, eagle):
        fields.finish()
    problems.raise_any()
    claims = layer.claims | eagle.claims | top.claims
    claims["boundaries"] = Claim(list(ids), origin)
    claims["rotary_kind"] = Claim(rotary.kind, why)
    rotary = choice.apply(rotary, claims)
    common = {
        **sizes,
        **flags,
        **_read_owned(source, claims),
        "num_aux_hidden_states": num_chunks,
        "rotary": rotary,
        "boundaries": Boundaries(UNTIED, ids, width, origin),
    }
    if kind == "llama":
        return LlamaDraftConfig(**common), claims
    eps = Claim(sizes["rms_norm_eps"], "rms_norm_eps, as in vLLM and SGLang")
    if latent_norm_eps == "transformers":
        eps = Claim(TRANSFORMERS_EPS, "transformers' default, as asked for")
    claims["latent_norm_eps"] = eps
    return LatentDraftConfig(**common, latent_norm_eps=eps.value), claims


def find(source: Source, name: str) -> str:
    """The name as this checkpoint has it, with `model.` before it or without."""
    return f"model.{name}" if f"model.{name}" in source.tensors else name


def _take_sizes(top: Fields, layer: Fields, kind: Kind) -> dict[str, Any]:
    """The config's fields that stand there as they are; what else it says is checked."""
    layer.ignore(known_keys.LLAMA)
    known_keys.leave_housekeeping(layer)
    types = ("llama",) if kind == "llama" else ("kimi_k2", "deepseek_v3", "deepseek_v2")
    for key, supported in (
        ("model_type", (*types, None)),
        ("hidden_act", ("silu", None)),
        ("bias", (False, None)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("position_embedding_type", ("rope", None)),
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
        "num_hidden_layers": layer.take("num_hidden_layers", int, 1),
        "num_attention_heads": heads,
        "rms_norm_eps": layer.take("rms_norm_eps", float),
    }
    if kind == "llama":
        sizes["num_key_value_heads"] = layer.take("num_key_value_heads", int, heads)
        sizes["head_dim"] = layer.take("head_dim", int, width // max(heads, 1))
        kv_heads = sizes["num_key_value_heads"]
        if kv_heads > 0 and heads % kv_heads:
            layer.problems.add(
                f"{layer.place('num_key_value_heads')} is {kv_heads}, which does not divide "
                f"num_attention_heads {heads}"
            )
    else:
        layer.ignore(known_keys.LATENT_DRAFT)
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        sizes |= {name: layer.take(name, int) for name in (*names, "v_head_dim")}
        layer.expect("num_key_value_heads", heads, None, why="latent attention shares one key")
        layer.expect("qk_head_dim", sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"], None)
    for key, value in sizes.items():
        if type(value) is int and value < 1 and key in layer.claims | top.claims:
            layer.problems.add(f"{layer.place(key)} is {value}; expected 1 or more")
    if sizes["draft_vocab_size"] > vocab_size:
        top.problems.add(
            f"{top.place('draft_vocab_size')} is {sizes['draft_vocab_size']}, more than vocab_size "
            f"{vocab_size}"
        )
    return sizes


def _pairing(layer: Fields, kind: Kind) -> tuple[Literal["pairs", "halves"], str]:
    """Which dims are turned together, and why."""
    if kind == "llama":
        return "halves", "Llama-type attention"
    if layer.take("rope_interleave", bool, True):
        return "pairs", "latent attention"
    return "halves", layer.place("rope_interleave")


def _read_flags(top: Fields, eagle: Fields, is_speculators: bool) -> dict[str, bool]:
    """The variants of the architecture, from either level: engines have read both.

    `use_aux_norm` is an older name of `fc_norm` (SGLang).
    """
    top.expect("use_aux", True, None)
    flags = {}
    for name, names in (
        ("fc_norm", ("fc_norm", "use_aux_norm")),
        ("norm_before_fc", ("norm_before_fc",)),
        ("norm_output", ("norm_output",)),
        ("norm_before_residual", ("norm_before_residual",)),
    ):
        # Serving engines disagree about this default, so only the file's own word counts.
        is_required = is_speculators and name == "norm_before_residual"
        stated = {
            fields.place(key): fields.take(key, bool)
            for fields in (top, eagle)
            for key in names
            if fields.data.get(key) is not None or (is_required and fields is top)
        }
        for fields in (top, eagle):
            fields.ignore(dict.fromkeys(names, "null counts as absent"))
        if len(set(stated.values())) > 1:
            said = " but ".join(f"{where} is {value}" for where, value in stated.items())
            top.problems.add(said)
        flags[name] = any(stated.values())
        if not stated:
            top.claims[name] = Claim(False, f"default; {top.where} has no {name}")
    if flags["norm_output"] and not is_speculators:
        top.claims["norm_output"] = Claim(
            True, "read as EAGLE-3.1's; SpecForge before its PR 879 wrote it of EAGLE-3 drafts too"
        )
    if flags["fc_norm"] and flags["norm_before_fc"]:
        top.problems.add(
            f"{top.where}: fc_norm and norm_before_fc are both true; the features go through one "
            "kind of norm"
        )
    return flags


def _read_owned(source: Source, claims: dict[str, Claim]) -> dict[str, bool]:
    """Whether embedding and head are the draft's own; the tensors say it."""
    own = {}
    for part, name in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        name = find(source, name)
        own[f"has_{part}"] = name in source.tensors
        claims[part] = (
            Claim("own", name) if own[f"has_{part}"] else Claim("the target's", f"no tensor {name}")
        )
    return own


def _num_chunks(source: Source, top: Fields, ids: tuple[int, ...], origin: str, width: int) -> int:
    """How many boundaries `fc` takes; ids that say otherwise than its width are a problem."""
    info = source.tensors.get(find(source, "fc.weight"))
    takes = info.shape[1] if info is not None and len(info.shape) == 2 else None
    if ids:
        num_chunks = len(ids)
    elif takes is not None and takes % width == 0:
        num_chunks = takes // width
    else:
        num_chunks = NUM_DEFAULT_BOUNDARIES
    top.expect("num_aux_hidden_states", num_chunks, None, why="one for each boundary")
    if ids and takes is not None and takes != num_chunks * width:
        top.problems.add(
            f"{origin}: {num_chunks} boundaries of {width} each are {num_chunks * width} wide, and "
            f"tensor fc.weight takes {takes}"
        )
    return num_chunks


def _read_boundaries(
    top: Fields, eagle: Fields, convention: Convention | None, is_speculators: bool
) -> tuple[tuple[int, ...], str]:
    """The boundaries and where they were read; () for the default of every framework."""
    key = "eagle_aux_hidden_state_layer_ids"
    for option in ("use_aux_hidden_state", "use_last_layernorm", "next_layer_regular"):
        eagle.expect(option, True, None)
    eagle.expect("use_input_layernorm_in_first_layer", True, None)
    eagle.expect("use_mtp_layernorm", False, None)
    eagle.ignore(known_keys.EAGLE)
    found = {
        fields.place(key): fields.take_ids(key)
        for fields in (top, eagle)
        if fields.data.get(key) not in (None, [])
    }
    for fields in (top, eagle):
        fields.ignore({key: "empty: the default"})
        fields.expect("capture_convention", None, "before", "after")
    stated = top.data.get("capture_convention") or eagle.data.get("capture_convention")
    problems, given = top.problems, {where: ids for where, ids in found.items() if ids}
    if not given:
        return (), f"no {key} in config.json: the default (2, n // 2, n - 3) of EAGLE and vLLM"
    if len(set(given.values())) > 1:
        problems.add(" but ".join(f"{where} is {list(ids)}" for where, ids in given.items()))
    where, ids = next(iter(given.items()))
    if is_speculators and convention is None and stated is None:
        read_as, why = "before", "speculators counts from 0, the embedding output, to n"
    else:
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
        "with --capture-convention before|after (for export and train-draft: of convert, first)"
    )
    return "before", ""
