"""The two `config.json`: Kimi-K2.5's for the target, an EAGLE-3 Llama draft's."""

import dataclasses

import draft
import target
import tokenizer

from jaxspec.convert.export_configs import PACKED_INT4


def max_length(config: target.Config) -> int:
    """Returns how many positions YaRN stretches the rotary embedding to."""
    return int(config.rope_factor * config.rope_original_length)


def target_json(config: target.Config) -> dict:
    """Returns the target's config.json: the wrapper's, with the text model's nested in it."""
    specials = tokenizer.special_tokens(config.vocab_size - tokenizer.NUM_SPECIAL)
    ids = {f"{key}_token_id": specials[f"[{key.upper()}]"] for key in ("bos", "eos", "pad")}
    shared = {"tie_word_embeddings": False, "quantization_config": PACKED_INT4} | ids
    own = ("rope_factor", "rope_original_length", "group_size")
    text = {k: v for k, v in dataclasses.asdict(config).items() if k not in own} | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": config.num_attention_heads,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": max_length(config),
        "rope_scaling": {
            "type": "yarn",
            "factor": config.rope_factor,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": config.rope_original_length,
        },
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "text_config": text | shared,
    } | shared


def draft_json(config: draft.Config, target_config: target.Config) -> dict:
    """Returns the draft's config.json, as SpecForge writes it."""
    sizes = {k: v for k, v in dataclasses.asdict(config).items() if k != "boundaries"}
    return sizes | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target_config.vocab_size,
        "max_position_embeddings": max_length(target_config),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        # SpecForge's convention: k is the output of layer k, boundary k + 1.
        "eagle_config": {
            "capture_convention": "after",
            "eagle_aux_hidden_state_layer_ids": [b - 1 for b in config.boundaries],
            "use_aux_hidden_state": True,
        },
    }
