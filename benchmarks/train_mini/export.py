"""Writes the trained target in Kimi-K2.5's published layout.

`python export.py --data DIR --target DIR --out DIR` fills OUT.
"""

import argparse
import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import target
import tokenizer

from jaxspec.convert.export_configs import PACKED_INT4
from jaxspec.convert.shards import write_tensors

PREFIX = "language_model.model."
SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")


def bf16(array) -> np.ndarray:
    """Returns the array in bfloat16, rounded to nearest even."""
    return np.asarray(array, np.float32).astype(ml_dtypes.bfloat16)


def linear(weight_in_out) -> np.ndarray:
    """Returns a training weight `[in, out]` as torch's Linear stores it, `[out, in]`, in bf16."""
    return bf16(np.ascontiguousarray(np.asarray(weight_in_out).T))


def pack(weight_in_out: np.ndarray, group: int) -> dict[str, np.ndarray]:
    """Returns compressed-tensors' three tensors of one int4 matrix.

    Eight values share an int32 along the inputs, the first in the lowest four bits, each as
    value + 8.
    """
    value, scale = (np.asarray(part) for part in target.quantise(weight_in_out, group))
    rows, cols = weight_in_out.shape
    nibbles = (value.reshape(rows, cols).T + 8).astype(np.uint32).reshape(cols, rows // 8, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": linear(scale[:, 0]),
        "weight_shape": np.asarray([cols, rows], np.int32),
    }


def layer_tensors(config: target.Config, p: target.Params) -> dict[str, np.ndarray]:
    """Returns the tensors of one decoder layer by their names inside it."""
    names = {"q_a": "q_a_proj", "q_b": "q_b_proj", "kv_b": "kv_b_proj", "o": "o_proj"}
    names["kv_a"] = "kv_a_proj_with_mqa"
    out = {f"self_attn.{name}.weight": linear(p[key]) for key, name in names.items()}
    out["input_layernorm.weight"] = bf16(p["input_norm"])
    out["post_attention_layernorm.weight"] = bf16(p["post_norm"])
    for key in ("q_a", "kv_a"):
        out[f"self_attn.{key}_layernorm.weight"] = bf16(p[f"{key}_norm"])
    if "mlp" in p:
        return out | {f"mlp.{k}_proj.weight": linear(w) for k, w in p["mlp"].items()}
    out["mlp.gate.weight"] = linear(p["router"])
    out["mlp.gate.e_score_correction_bias"] = np.asarray(p["router_bias"], np.float32)
    out |= {f"mlp.shared_experts.{k}_proj.weight": linear(w) for k, w in p["shared"].items()}
    for matrix, stack in p["experts"].items():
        for expert, weight in enumerate(np.asarray(stack)):
            name = f"mlp.experts.{expert}.{matrix}_proj"
            packed = pack(weight, config.group_size)
            out |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    return out


def max_length(config: target.Config) -> int:
    """Returns how many positions YaRN stretches the rotary embedding to."""
    return int(config.rope_factor * config.rope_original_length)


def target_json(config: target.Config) -> dict:
    """Returns Kimi-K2.5's config.json in these sizes, the text model's nested in it."""
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


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_target(config: target.Config, params: target.Params, data: Path, out: Path) -> None:
    """Writes the target's directory."""
    cut = config.num_hidden_layers // 2 + 1
    shards = [{}, {}]
    for index, p in enumerate(params["layers"]):
        tensors = layer_tensors(config, p)
        shards[index >= cut] |= {f"{PREFIX}layers.{index}.{k}": v for k, v in tensors.items()}
    shards[1] |= {
        f"{PREFIX}embed_tokens.weight": bf16(params["embed"]),
        f"{PREFIX}norm.weight": bf16(params["norm"]),
        "language_model.lm_head.weight": linear(params["head"]),
    }
    for name, tensors in zip(SHARDS, shards, strict=True):
        write_tensors(out / name, tensors)
    total = sum(array.nbytes for tensors in shards for array in tensors.values())
    weight_map = {
        key: name for name, tensors in zip(SHARDS, shards, strict=True) for key in tensors
    }
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)
    content = target_json(config)
    write_json(out / "config.json", content)
    im_end = tokenizer.special_tokens(content["text_config"]["bos_token_id"])["<|im_end|>"]
    generation = {key: content[key] for key in ("bos_token_id", "pad_token_id")}
    generation["eos_token_id"] = [content["eos_token_id"], im_end]
    write_json(out / "generation_config.json", generation | {"max_length": max_length(config)})
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(data / name, out / name)
    template = Path(__file__).with_name("chat_template.jinja")
    shutil.copyfile(template, out / template.name)


def main() -> None:
    """Writes the directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True, help="train_target.py's --out")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    params = pickle.loads((args.target / "state.pkl").read_bytes())["params"]
    vocab_size = json.loads((args.data / "corpus.json").read_text())["vocab_size"]
    args.out.mkdir(parents=True, exist_ok=True)
    write_target(target.Config(vocab_size=vocab_size), params, args.data, args.out)


if __name__ == "__main__":
    main()
