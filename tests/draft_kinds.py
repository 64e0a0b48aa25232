"""Tiny random drafts of every published kind, each in the layout of a project that writes it.

All of them are for the tiny target (`tests/tiny.py`): 4 layers, boundaries 0 to 4.
"""

from typing import Any

import numpy as np

from tests import tiny

Layout = tuple[dict[str, Any], dict[str, np.ndarray]]
"""`config.json` and the tensors."""

LLAMA = {
    key: tiny.DRAFT_CONFIG[key]
    for key in (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
    )
} | {"num_hidden_layers": 1, "num_attention_heads": 8}  # transformers: a divisor of the width
YARN = tiny.TARGET_CONFIG["rope_scaling"]
LATENT = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": tiny.TARGET_CONFIG["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 36,
    "kv_lora_rank": 44,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10,
    "v_head_dim": 18,
    "rms_norm_eps": 1e-5,
    "rope_theta": 900.0,
    "rope_scaling": YARN | {"beta_fast": 1.0, "mscale": 0.7, "mscale_all_dim": 0.9},
}
EXPERTS_OF_THE_TARGET = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}
"""What ModelOpt copies from the target into a draft's config."""


def safeailab() -> Layout:
    """No ids, no embedding, a pruned vocabulary; the first draft of all."""
    config = {**LLAMA, "draft_vocab_size": 20}
    return config, tensors_of(config) | vocabulary(20)


def specforge() -> Layout:
    """EAGLE-3.1's two norms, two boundaries, YaRN; the vocabulary whole and its maps trivial."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 24,
        "rope_scaling": YARN | {"mscale": 0.6},
        "fc_norm": True,
        "norm_output": True,
        "num_aux_hidden_states": 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3], "use_aux_hidden_state": True},
    }
    return config, tensors_of(config, num_boundaries=2, fc_norms=2) | vocabulary(24)


def speculators() -> Layout:
    """One norm before `fc`, the residual after `hidden_norm`, three layers; ids at the top."""
    layer = {**LLAMA, "num_hidden_layers": 3}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 20,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "transformer_layer_config": layer,
    }
    tensors = tensors_of(layer, first="layers.0.", num_layers=3, embed=True)
    tensors["input_norm.weight"] = tiny.near_one(np.random.default_rng(7), 3 * 64)
    # What three layers add is kept small, or rounding grows from one recurrent step to the next.
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = 0.5 * tensors[name]
    return config, tensors | vocabulary(20)


def modelopt_llama() -> Layout:
    """Four boundaries, the one after the last layer among them; `d2t` alone; 32 positions."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 20,
        "max_position_embeddings": 32,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4],
            "capture_convention": "before",
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    }
    tensors = tensors_of(config, first="layers.0.", num_boundaries=4) | vocabulary(20)
    del tensors["t2d"]
    return config, tensors


def modelopt_mla() -> Layout:
    """Latent attention in two layers; the target's embedding, a pruned head, YaRN."""
    config = {
        **LATENT,
        **EXPERTS_OF_THE_TARGET,
        "num_hidden_layers": 2,
        "draft_vocab_size": 20,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "eagle_decoder_type": ""},
    }
    tensors = tensors_of(config, first="layers.0.", num_layers=2) | vocabulary(20)
    del tensors["t2d"]
    return config, tensors


def torchspec() -> Layout:
    """EAGLE-3.1 with latent attention, embedding and whole head inside, no map; no YaRN."""
    config = {
        **{key: value for key, value in LATENT.items() if key != "rope_scaling"},
        "draft_vocab_size": 24,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    return config, tensors_of(config, embed=True, fc_norms=3, head_rows=24)


LAYOUTS = {
    "SafeAILab": safeailab,
    "SpecForge": specforge,
    "speculators": speculators,
    "ModelOpt Llama": modelopt_llama,
    "ModelOpt MLA": modelopt_mla,
    "TorchSpec": torchspec,
}


def vocabulary(draft_vocab: int) -> dict[str, np.ndarray]:
    """The maps of a vocabulary of so many of the target's 24 tokens, and a head for it."""
    rng = np.random.default_rng(3)
    vocab = tiny.TARGET_CONFIG["vocab_size"]
    kept = np.sort(rng.choice(vocab, draft_vocab, replace=False))
    return {
        "lm_head.weight": tiny.normal(rng, draft_vocab, 64, gain=2),
        "d2t": kept - np.arange(draft_vocab),
        "t2d": np.isin(np.arange(vocab), kept),
    }


def tensors_of(
    config: dict[str, Any],
    *,
    first: str = "midlayer.",
    num_boundaries: int = 3,
    num_layers: int = 1,
    embed: bool = False,
    fc_norms: int = 0,
    head_rows: int = 0,
) -> dict[str, np.ndarray]:
    """Random weights of everything but the maps, and the head that goes with them."""
    rng, width = np.random.default_rng(1), config["hidden_size"]
    tensors = {
        "fc.weight": tiny.normal(rng, width, num_boundaries * width),
        f"{first}hidden_norm.weight": tiny.near_one(rng, width),
        "norm.weight": tiny.near_one(rng, width),
    }
    for index in range(num_layers):
        name, inputs = (first, 2 * width) if index == 0 else (f"layers.{index}.", width)
        tensors |= {
            f"{name}input_layernorm.weight": tiny.near_one(rng, width),
            f"{name}post_attention_layernorm.weight": tiny.near_one(rng, width),
            **_attention(rng, f"{name}self_attn.", config, inputs),
            **tiny.mlp_tensors(rng, f"{name}mlp.", width, config["intermediate_size"]),
        }
    for index in range(fc_norms):
        tensors[f"fc_norm.{index}.weight"] = tiny.near_one(rng, width)
    if embed:
        tensors["embed_tokens.weight"] = tiny.normal(rng, config["vocab_size"], width, gain=8)
    if head_rows:
        tensors["lm_head.weight"] = tiny.normal(rng, head_rows, width, gain=2)
    return tensors


def _attention(
    rng: np.random.Generator, name: str, config: dict[str, Any], inputs: int
) -> dict[str, np.ndarray]:
    c, width, heads = config, config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in c:
        kv_heads, head_dim = c["num_key_value_heads"], c["head_dim"]
        rows = {"q": heads, "k": kv_heads, "v": kv_heads}
        out = {f"{n}_proj": tiny.normal(rng, rows[n] * head_dim, inputs) for n in "qkv"}
        out["o_proj"] = tiny.normal(rng, width, heads * head_dim, gain=0.5)
    else:
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        query, latent = c["q_lora_rank"], c["kv_lora_rank"]
        out = {
            "q_a_proj": tiny.normal(rng, query, inputs),
            "q_a_layernorm": tiny.near_one(rng, query),
            "q_b_proj": tiny.normal(rng, heads * (nope + rope), query, gain=2),
            "kv_a_proj_with_mqa": tiny.normal(rng, latent + rope, inputs),
            "kv_a_layernorm": tiny.near_one(rng, latent),
            "kv_b_proj": tiny.normal(rng, heads * (nope + value), latent),
            "o_proj": tiny.normal(rng, width, heads * value),
        }
    return {f"{name}{key}.weight": tensor for key, tensor in out.items()}
