"""Reads an exported target back into training form, from the files alone (numpy, no jaxspec)."""

import json
from pathlib import Path

import numpy as np
import target
from safetensors.numpy import load_file


def dequantise(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Returns one int4 matrix `[out, in]` as the exact f32 product of value and scale."""
    words, scale = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    rows, cols = tensors[f"{name}.weight_shape"]
    value = ((words[..., None] >> (4 * np.arange(8))) & 15).reshape(rows, -1)[:, :cols] - 8
    group = cols // scale.shape[1]
    return value.astype(np.float32) * np.repeat(scale.astype(np.float32), group, 1)


def read_target(directory: Path) -> tuple[target.Config, target.Params]:
    """Returns the target's config and its parameters, the experts dequantised."""
    text = json.loads((directory / "config.json").read_text())["text_config"]
    names = target.Config.__dataclass_fields__
    rope = text["rope_scaling"]
    config = target.Config(
        **{name: text[name] for name in names if name in text},
        rope_factor=rope["factor"],
        rope_original_length=rope["original_max_position_embeddings"],
    )
    tensors: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)

    def vector(name: str) -> np.ndarray:
        return tensors[f"language_model.{name}"].astype(np.float32)

    def linear(name: str) -> np.ndarray:
        return np.ascontiguousarray(vector(f"{name}.weight").T)

    def mlp(name: str) -> dict:
        return {key: linear(f"{name}.{key}_proj") for key in ("gate", "up", "down")}

    def experts(name: str) -> dict:
        def stack(key: str) -> np.ndarray:
            each = range(config.n_routed_experts)
            found = [dequantise(tensors, f"language_model.{name}.{e}.{key}_proj") for e in each]
            return np.stack([weight.T for weight in found])

        return {key: stack(key) for key in ("gate", "up", "down")}

    def layer(index: int) -> dict:
        at = f"model.layers.{index}."
        out = {key: linear(f"{at}self_attn.{key}_proj") for key in ("q_a", "q_b", "kv_b", "o")}
        out |= {
            "kv_a": linear(f"{at}self_attn.kv_a_proj_with_mqa"),
            "input_norm": vector(f"{at}input_layernorm.weight"),
            "post_norm": vector(f"{at}post_attention_layernorm.weight"),
            "q_a_norm": vector(f"{at}self_attn.q_a_layernorm.weight"),
            "kv_a_norm": vector(f"{at}self_attn.kv_a_layernorm.weight"),
        }
        if index < text["first_k_dense_replace"]:
            return out | {"mlp": mlp(f"{at}mlp")}
        return out | {
            "router": linear(f"{at}mlp.gate"),
            "router_bias": vector(f"{at}mlp.gate.e_score_correction_bias"),
            "shared": mlp(f"{at}mlp.shared_experts"),
            "experts": experts(f"{at}mlp.experts"),
        }

    params = {
        "embed": vector("model.embed_tokens.weight"),
        "norm": vector("model.norm.weight"),
        "head": linear("lm_head"),
        "layers": [layer(i) for i in range(config.num_hidden_layers)],
    }
    return config, params
