"""`config.json` of a target: Kimi-K2.5's wrapper, and the flat Kimi-K2 and DeepSeek-V3 form.

Every key is used, or has to have the one value that is implemented, or is ignored for the reason
its table gives. What no table knows is an error: silence here becomes a wrong model later.
"""

import dataclasses
from typing import Any, Literal

from jaxspec.config import TargetConfig
from jaxspec.convert import known_keys
from jaxspec.convert.fields import Claim, Fields
from jaxspec.convert.problems import Problems
from jaxspec.convert.rotary import read_rotary
from jaxspec.convert.source import Source
from jaxspec.kernels.expert_matmul.packing import GROUP

__all__ = [
    "TRANSFORMERS_EPS",
    "WRAPPER",
    "LatentNormEps",
    "Quantization",
    "TargetFacts",
    "read_target_config",
]

LatentNormEps = Literal["rms_norm_eps", "transformers"]
"""The epsilon of the two latent norms: the config's own (vLLM, SGLang) or transformers' default."""
TRANSFORMERS_EPS = 1e-6

ARCHITECTURES = (
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "KimiK2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
WRAPPER = "kimi_k25"
FLAT = ("kimi_k2", "deepseek_v3")


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores its matrices.

    Attributes:
      kind: "int4" for routed experts packed by compressed-tensors, "fp8" for blocks under a
        scale each, "none" otherwise.
      group_size: elements of a row that share an int4 scale; read, never assumed.
      block: rows and columns that share an fp8 scale.
    """

    kind: Literal["none", "int4", "fp8"]
    group_size: int = 0
    block: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class TargetFacts:
    """What `config.json` says of a target.

    Attributes:
      num_unused_layers: multi-token-prediction layers that follow the decoder's own.
      claims: every fact, with where it was read.
    """

    model_type: str
    config: TargetConfig
    quantization: Quantization
    num_unused_layers: int
    claims: dict[str, Claim]


def read_target_config(
    source: Source,
    problems: Problems,
    latent_norm_eps: LatentNormEps = "rms_norm_eps",
) -> TargetFacts:
    """What the directory's configs say.

    Raises:
      CheckpointError: a key is unknown, missing, contradicted, or has a value that is not
        implemented; all of them together.
    """
    top = Fields(source.config, "config.json", problems)
    model_type = top.take("model_type", str)
    if model_type not in (WRAPPER, *FLAT):
        problems.add(
            f"config.json: model_type is {model_type!r}; supported: "
            f"{', '.join(map(repr, (WRAPPER, *FLAT)))}"
        )
        problems.raise_any()
    is_wrapper = model_type == WRAPPER
    text = top.nested("text_config") if is_wrapper else top
    levels = (top, text) if is_wrapper else (top,)
    if is_wrapper and not text.data:
        problems.add(f"config.json: model_type {WRAPPER!r} has a text_config; there is none")
        problems.raise_any()
    for fields in levels:
        _check_architectures(fields)
        known_keys.leave_housekeeping(fields)
    if is_wrapper:
        text.expect("model_type", *FLAT)
    sizes = _take_sizes(text)
    problems.raise_any()
    _check_sizes(text, sizes)
    rotary = read_rotary(text, sizes["qk_rope_head_dim"], "pairs")
    num_unused_layers = text.take("num_nextn_predict_layers", int, 0)
    if is_wrapper:
        _check_wrapper(top, text)
    quantization = _read_quantization(top, text)
    text.ignore(known_keys.TEXT)
    eos = _read_eos(source, levels, problems)
    for fields in levels:
        fields.finish()
    problems.raise_any()
    claims = text.claims | {"eos_token_ids": eos}
    eps = sizes["rms_norm_eps"]
    claims["latent_norm_eps"] = Claim(eps, "rms_norm_eps, as in vLLM and SGLang")
    if latent_norm_eps == "transformers":
        claims["latent_norm_eps"] = Claim(TRANSFORMERS_EPS, "transformers' default, as asked for")
    claims["rotary_kind"] = Claim(rotary.kind, f"model_type {model_type!r}")
    claims["quantization"] = Claim(
        dataclasses.asdict(quantization), top.place("quantization_config")
    )
    config = TargetConfig(
        **sizes,
        latent_norm_eps=claims["latent_norm_eps"].value,
        rotary=rotary,
        num_bits=4 if quantization.kind == "int4" else None,
        eos_token_ids=tuple(eos.value),
    )
    return TargetFacts(model_type, config, quantization, num_unused_layers, claims)


def _check_architectures(fields: Fields) -> None:
    """Makes an unknown architecture a problem; a config may name none."""
    for name in fields.take("architectures", list, []):
        if name not in ARCHITECTURES:
            fields.problems.add(
                f"{fields.place('architectures')} names {name!r}; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )


def _take_sizes(text: Fields) -> dict[str, Any]:
    """The fields of `TargetConfig` that stand in the config under the same name."""
    for key, supported in (
        ("hidden_act", ("silu", None)),
        ("attention_bias", (False, None)),
        ("tie_word_embeddings", (False, None)),
        ("moe_layer_freq", (1, None)),
        ("topk_method", ("noaux_tc", None)),
        ("scoring_func", ("sigmoid", None)),
        ("rope_interleave", (True, None)),
    ):
        text.expect(key, *supported)
    own = {"latent_norm_eps", "rotary", "num_bits", "eos_token_ids"}
    return {
        field.name: text.take(field.name, field.type)  # type: ignore[arg-type]
        for field in dataclasses.fields(TargetConfig)
        if field.name not in own
    }


def _check_sizes(text: Fields, sizes: dict[str, Any]) -> None:
    """Makes sizes that no model has, or that this one cannot have, a problem."""
    s = sizes
    for key, value in s.items():
        minimum = 0 if key == "first_k_dense_replace" else 1
        if type(value) is int and value < minimum:
            text.problems.add(f"{text.place(key)} is {value}; expected {minimum} or more")
    if s["first_k_dense_replace"] >= s["num_hidden_layers"]:
        text.problems.add(
            f"{text.place('first_k_dense_replace')} is {s['first_k_dense_replace']} of "
            f"{s['num_hidden_layers']} layers; at least one has to have experts"
        )
    if s["n_group"] < 1 or s["n_routed_experts"] % s["n_group"]:
        text.problems.add(
            f"{text.place('n_group')} is {s['n_group']}, which does not divide "
            f"n_routed_experts {s['n_routed_experts']}"
        )
    else:
        _check_groups(text, s["n_routed_experts"] // s["n_group"], s)
    if s["qk_rope_head_dim"] % 2:
        text.problems.add(f"{text.place('qk_rope_head_dim')} is {s['qk_rope_head_dim']}, odd")
    heads = s["num_attention_heads"]
    text.expect("num_key_value_heads", heads, None, why="latent attention shares one key")
    text.expect("qk_head_dim", s["qk_nope_head_dim"] + s["qk_rope_head_dim"], None)


def _check_groups(text: Fields, group_size: int, sizes: dict[str, Any]) -> None:
    """Makes groups of experts, of this size each, that nothing can be chosen from a problem."""
    groups, kept = sizes["n_group"], sizes["topk_group"]
    if kept > groups:
        text.problems.add(f"{text.place('topk_group')} is {kept}, more than n_group {groups}")
    elif kept < groups and group_size < 2:
        text.problems.add(
            f"{text.place('n_group')} is {groups}: one expert in each group, and a group is chosen "
            "by its two best"
        )
    elif kept * group_size < sizes["num_experts_per_tok"]:
        text.problems.add(
            f"{text.place('topk_group')} is {kept}: {kept * group_size} experts to choose from, "
            f"fewer than num_experts_per_tok {sizes['num_experts_per_tok']}"
        )


def _check_wrapper(top: Fields, text: Fields) -> None:
    """Makes a fact that stands in both objects with two values a problem."""
    top.ignore(known_keys.WRAPPER)
    for key in sorted(set(top.data) & set(text.data) - top.seen):
        top.ignore({key: "compared with text_config"})
        if top.data[key] != text.data[key]:
            top.problems.add(
                f"{top.place(key)} is {top.data[key]!r}, but {text.place(key)} is "
                f"{text.data[key]!r}"
            )
    if "tie_word_embeddings" not in text.data:
        top.expect("tie_word_embeddings", False, None)


def _read_quantization(top: Fields, text: Fields) -> Quantization:
    """The one quantisation that the config declares, at either level."""
    # Both levels are read, so that neither is left over; _check_wrapper compares them.
    found = top.nested("quantization_config")
    if text is not top:
        of_text = text.nested("quantization_config")
        found = found if found.data else of_text
    if not found.data:
        return Quantization("none")
    method = found.take("quant_method", str)
    if method == "compressed-tensors":
        return _read_compressed_tensors(found)
    if method == "fp8":
        return _read_fp8(found)
    found.problems.add(
        f"{found.place('quant_method')} is {method!r}; supported: 'compressed-tensors' (int4, "
        "pack-quantized), 'fp8' (blocks), or no quantization_config"
    )
    return Quantization("none")


def _read_compressed_tensors(fields: Fields) -> Quantization:
    fields.expect("format", "pack-quantized")
    fields.expect("kv_cache_scheme", None)
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        fields.expect(key, None, {})
    fields.ignore(
        {
            "global_compression_ratio": "a statistic",
            "ignore": "each tensor's own name says whether it is packed",
            "quantization_status": "a label",
            "version": "a label",
        }
    )
    groups, sizes = fields.nested("config_groups"), set()
    for name in groups.data:
        group = groups.nested(name)
        group.ignore({"targets": "each tensor's own name says whether it is packed"})
        group.expect("format", None, "pack-quantized")
        group.expect("input_activations", None)
        group.expect("output_activations", None)
        weights = group.nested("weights")
        weights.expect("num_bits", 4)
        weights.expect("type", "int")
        weights.expect("symmetric", True)
        weights.expect("strategy", "group", None)
        weights.expect("actorder", None, False, why="columns are in their own order")
        weights.expect("dynamic", False, None)
        weights.expect("block_structure", None)
        weights.ignore(
            {
                "observer": "how the scales were found",
                "observer_kwargs": "how the scales were found",
                "scale_dtype": "each tensor's own element type is read",
                "zp_dtype": "a symmetric format has no zero points",
            }
        )
        size = weights.take("group_size", int)
        if size < GROUP or size % GROUP:
            fields.problems.add(
                f"{weights.place('group_size')} is {size}; supported: multiples of {GROUP}"
            )
        sizes.add(size)
        weights.finish()
        group.finish()
    if len(sizes) != 1:
        fields.problems.add(
            f"{groups.where} has group sizes {sorted(sizes)}; supported: one for all experts"
        )
    fields.finish()
    return Quantization("int4", group_size=max(sizes, default=GROUP))


def _read_fp8(fields: Fields) -> Quantization:
    fields.expect("fmt", "e4m3", None)
    fields.expect("activation_scheme", "dynamic", None)
    fields.expect("scale_fmt", None, "ue8m0", why="either way the scales are stored as f32")
    fields.ignore(
        {
            "modules_to_not_convert": "each tensor's own element type is read",
            "ignored_layers": "each tensor's own element type is read",
        }
    )
    block = fields.take("weight_block_size", list)
    fields.finish()
    if len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        fields.problems.add(
            f"{fields.place('weight_block_size')} is {block}; expected [rows, columns]"
        )
        return Quantization("none")
    return Quantization("fp8", block=(block[0], block[1]))


def _read_eos(source: Source, levels: tuple[Fields, ...], problems: Problems) -> Claim:
    """Every id that ends a text, whichever of the configs says so.

    Kimi's `eos_token_id` is [EOS]; a turn of chat ends with <|im_end|>, which only the generation
    config or the tokenizer names.
    """
    generation = Fields(source.generation_config, "generation_config.json", problems)
    origins: dict[int, str] = {}
    for fields in (*levels, generation):
        for one in fields.take_ids("eos_token_id") or ():
            origins.setdefault(one, fields.place("eos_token_id"))
    for one, token in source.tokenizer_config.get("added_tokens_decoder", {}).items():
        if isinstance(token, dict) and token.get("content") == "<|im_end|>":
            origins.setdefault(int(one), "tokenizer_config.json: <|im_end|>")
    where = "; ".join(dict.fromkeys(origins.values())) or "no config names one"
    return Claim(list(origins), where)
