"""Writes tiny checkpoints in the layouts that are read, and breaks them in chosen ways."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests import tiny

FP8_BLOCK = (48, 40)
"""Divides neither side of most matrices: last blocks are partial."""
LAYERS = "model.layers."


def target_config(
    form: Literal["wrapper", "flat"] = "wrapper",
    quantization: Literal["int4", "fp8", "none"] = "int4",
) -> dict[str, Any]:
    """A target's `config.json`."""
    text = copy.deepcopy(tiny.TARGET_CONFIG)
    declared = {
        "int4": text.pop("quantization_config"),
        "fp8": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(FP8_BLOCK),
        },
    }.get(quantization)
    if declared is not None:
        text["quantization_config"] = declared
    if form == "flat":
        return text
    wrapper: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"patch_size": 14},
        "tie_word_embeddings": False,
        "eos_token_id": 22,
    }
    if declared is not None:
        wrapper["quantization_config"] = declared
    return wrapper


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config, with or without a wrapper around it."""
    return config.get("text_config", config)


def target_tensors(config: Mapping[str, Any], prefix: str = "model.") -> dict[str, np.ndarray]:
    """Random weights for that config, `model.` replaced by `prefix`, the head where it belongs."""
    text = dict(text_config(config))
    method = text.get("quantization_config", {}).get("quant_method")
    if method == "fp8":
        del text["quantization_config"]
    tensors = tiny.target_tensors(text)
    if method == "fp8":
        tensors = _in_fp8(tensors)
    head = "" if prefix == "model." else "language_model."
    return {
        f"{prefix}{name.removeprefix('model.')}"
        if name.startswith("model.")
        else head + name: tensor
        for name, tensor in tensors.items()
    }


def draft_layout(
    layout: Literal["specforge", "speculators", "safeailab"],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of one draft, in the layout of that project."""
    config, tensors = dict(tiny.DRAFT_CONFIG), tiny.draft_tensors(tiny.DRAFT_CONFIG)
    kept = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), kept)
    # Boundaries 1, 2 and 4 under either convention.
    if layout == "specforge":
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
            "use_aux_hidden_state": True,
            "capture_convention": "after",
        }
    elif layout == "speculators":
        layer = {key: config.pop(key) for key in list(config) if key not in ("architectures",)}
        config |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": layer.pop("draft_vocab_size"),
            "norm_before_residual": layer.pop("norm_before_residual"),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
            "capture_convention": "before",
            "transformer_layer_config": layer,
        }
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        }
    else:
        del tensors["embed_tokens.weight"]
    return config, tensors


def write(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    num_shards: int = 1,
) -> Path:
    """The directory, which holds that checkpoint: one file, or shards and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    names, index = list(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        save_file({name: np.ascontiguousarray(tensors[name]) for name in part}, directory / file)
        index |= dict.fromkeys(part, file)
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


def _in_fp8(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every matrix of the layers, but the router, in float8 under a scale per block."""
    out = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not name.startswith(LAYERS) or "mlp.gate.weight" in name:
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        scale = np.zeros((-(-rows // FP8_BLOCK[0]), -(-columns // FP8_BLOCK[1])), np.float32)
        stored = np.zeros_like(tensor)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = np.s_[
                    i * FP8_BLOCK[0] : (i + 1) * FP8_BLOCK[0],
                    j * FP8_BLOCK[1] : (j + 1) * FP8_BLOCK[1],
                ]
                scale[i, j] = np.abs(tensor[block]).max() / 448
                stored[block] = tensor[block] / scale[i, j]
        out[name] = stored.astype(ml_dtypes.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale
    return out
