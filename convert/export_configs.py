"""`config.json` of what is exported, from what a converted checkpoint knows of itself."""

import dataclasses
from typing import Any

from jaxspec.aliases import Convention
from jaxspec.config import (
    DraftConfig,
    LatentDraftConfig,
    LlamaDraftConfig,
    RotaryConfig,
    TargetConfig,
)
from jaxspec.convert.configs import WRAPPER
from jaxspec.convert.problems import Problems
from jaxspec.kernels.expert_matmul.packing import GROUP

__all__ = [
    "IDS",
    "PACKED_INT4",
    "WRAPPER_ARCHITECTURE",
    "draft_json",
    "speculators_json",
    "target_json",
]

PACKED_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
                "actorder": None,
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
    # All but routed experts: the last pattern is of mlp.gate_proj, not of mlp.experts.0.gate_proj.
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
WRAPPER_ARCHITECTURE = "KimiK25ForConditionalGeneration"
IDS = "eagle_aux_hidden_state_layer_ids"
MAX_POSITIONS = 262144
"""Kimi-K2.5's, for a draft whose config has no scaling that says how far it goes. Other engines
size a table by it, and a short one is garbage past its end."""


def target_json(config: TargetConfig, model_type: str) -> dict[str, Any]:
    """Of a target: Kimi-K2.5's wrapper for that type, or the flat form of DeepSeek-V3."""
    own = {"latent_norm_eps", "rotary", "num_bits", "eos_token_ids"}
    sizes = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in own
    }
    shared: dict[str, Any] = {"tie_word_embeddings": False}
    if config.eos_token_ids:
        shared["eos_token_id"] = list(config.eos_token_ids)
    if config.num_bits:
        shared["quantization_config"] = PACKED_INT4
    text = sizes | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2" if model_type == WRAPPER else model_type,
        "num_key_value_heads": config.num_attention_heads,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        **_rotary_json(config.rotary),
    }
    if model_type != WRAPPER:
        return text | shared | {"torch_dtype": "bfloat16"}
    return {
        "architectures": [WRAPPER_ARCHITECTURE],
        "model_type": WRAPPER,
        "dtype": "bfloat16",
        "text_config": text | shared,
    } | shared


def draft_json(
    config: DraftConfig, convention: Convention, dtype: str, problems: Problems
) -> dict[str, Any]:
    """Of a draft as SpecForge, ModelOpt and TorchSpec write it: one flat object.

    Args:
      convention: how the ids are written; they mean the same.
      dtype: of the tensors.
    """
    is_latent = isinstance(config, LatentDraftConfig)
    name = "Eagle3DeepseekV2ForCausalLM" if is_latent else "LlamaForCausalLMEagle3"
    found = {"architectures": [name], **_layer_json(config, problems), "torch_dtype": dtype}
    if config.has_head:  # without one, engines know by its absence that the target's is meant
        found["draft_vocab_size"] = config.draft_vocab_size
    if config.boundaries.width != config.hidden_size:
        found["target_hidden_size"] = config.boundaries.width
    for flag in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"):
        if getattr(config, flag):
            found[flag] = True
    found["num_aux_hidden_states"] = config.num_aux_hidden_states
    if ids := _ids(config, convention):
        found["eagle_config"] = {
            IDS: ids,
            "use_aux_hidden_state": True,
            "capture_convention": convention,
        }
    return found


def speculators_json(
    config: DraftConfig, verifier: str | None, levels: int, dtype: str, problems: Problems
) -> dict[str, Any]:
    """Of a draft as speculators writes it; its ids are boundaries, 0 to n.

    Args:
      verifier: the target's directory; None leaves it open.
      levels: tokens to propose, of the trees that it is served with.
    """
    if isinstance(config, LatentDraftConfig):
        problems.add(
            "latent attention, which speculators does not have; export it with --layout specforge"
        )
    layer = _layer_json(config, problems)
    is_wide = config.boundaries.width != config.hidden_size
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.boundaries.width if is_wide else None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": config.num_aux_hidden_states,
        IDS: _ids(config, "before") or None,
        "capture_convention": "before",
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": levels}],
            "verifier": {"name_or_path": verifier, "architectures": ["DeepseekV3ForCausalLM"]},
        },
    }


def _layer_json(config: DraftConfig, problems: Problems) -> dict[str, Any]:
    """The decoder layers' part of a draft's config."""
    c, scaling = config, config.rotary.scaling
    found: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": MAX_POSITIONS
        if scaling is None
        else max(MAX_POSITIONS, int(scaling.factor * scaling.original_max_position_embeddings)),
        **_rotary_json(c.rotary),
    }
    if isinstance(c, LatentDraftConfig):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        found |= {name: getattr(c, name) for name in (*names, "v_head_dim")}
        found |= {"model_type": "kimi_k2", "num_key_value_heads": c.num_attention_heads}
        if c.rotary.kind == "halves":
            found["rope_interleave"] = False
        return found
    assert isinstance(c, LlamaDraftConfig), "there are these two kinds"
    if c.rotary.kind != "halves":
        problems.add("a Llama-type draft that turns pairs of dims: no layout has a word for it")
    return found | {
        "model_type": "llama",
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "mlp_bias": False,
    }


def _rotary_json(rotary: RotaryConfig) -> dict[str, Any]:
    yarn = rotary.yarn
    scaling = None if yarn is None else {"type": "yarn", **dataclasses.asdict(yarn)}
    if rotary.llama3 is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(rotary.llama3)}
    return {"rope_theta": rotary.theta, "rope_scaling": scaling}


def _ids(config: DraftConfig, convention: Convention) -> list[int]:
    shift = 0 if convention == "before" else 1
    return [boundary - shift for boundary in config.boundaries.ids]
