"""Checkpoint directories as Kimi-K2.5 and Kimi-K2-Instruct are published: names, shapes, dtypes.

Every tensor stands in the headers and has its place in the files. What is not filled is a hole: a
complete Kimi-K2.5 of 554 GiB takes 40 MB of disk, its headers and its index. The lists reproduce
the published counts, 208,550 and 139,644 tensors.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.convert.source import DTYPES

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Safetensors' element type and the shape of each tensor of one file."""
Fill = Callable[[str, np.dtype, tuple[int, ...]], np.ndarray | None]
"""Values of a tensor; None leaves a hole, which reads as zeros."""

TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
}
YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 4096}
INT4 = {
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
                "group_size": 32,
                "actorder": None,
                "dynamic": False,
                "observer": "minmax",
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def kimi_k25_config(**changed: Any) -> dict[str, Any]:
    """`config.json` of Kimi-K2.5, some fields of its text model changed."""
    text = TEXT | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "pad_token_id": 163839,
        "rope_scaling": YARN | {"factor": 64.0, "beta_fast": 32.0},
        "quantization_config": INT4,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text | changed,
        "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
        "quantization_config": INT4,
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "pad_token_id": 163839,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "use_unified_vision_chunk": True,
        "dtype": "bfloat16",
    }


def kimi_k2_instruct_config() -> dict[str, Any]:
    """`config.json` of Kimi-K2-Instruct."""
    return TEXT | {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0},
        "quantization_config": FP8,
    }


def kimi_k25_files(config: dict[str, Any]) -> dict[str, Tensors]:
    """What each file of Kimi-K2.5 holds: a layer each, then embedding and head, then vision."""
    text, prefix = config["text_config"], "language_model."
    shards = [
        _layer(text, index, f"{prefix}model.", _packed_expert)
        for index in range(text["num_hidden_layers"])
    ]
    shards += [_ends(text, prefix), _projector(text), _vision()]
    count = len(shards)
    return {f"model-{n:05d}-of-{count:06d}.safetensors": s for n, s in enumerate(shards, 1)}


def kimi_k2_instruct_files(config: dict[str, Any]) -> dict[str, Tensors]:
    """What each file of Kimi-K2-Instruct holds: a layer each; embedding and head in the last."""
    shards = []
    for index in range(config["num_hidden_layers"]):
        layer: Tensors = {}
        for name, (dtype, shape) in _layer(config, index, "model.", _plain_expert).items():
            layer[name] = (dtype, shape)
            if len(shape) == 2 and not name.endswith("mlp.gate.weight"):
                layer[name] = ("F8_E4M3", shape)
                blocks = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
                layer[f"{name}_scale_inv"] = ("F32", blocks)
        # One stray table of frequencies in each layer.
        layer[f"model.layers.{index}.self_attn.rotary_emb.inv_freq"] = ("BF16", (56,))
        shards.append(layer)
    shards[-1] |= _ends(config, "")
    count = len(shards)
    return {f"model-{n}-of-{count}.safetensors": s for n, s in enumerate(shards, 1)}


def write(
    directory: Path,
    config: dict[str, Any],
    files: dict[str, Tensors],
    fill: Fill = lambda name, dtype, shape: None,
) -> Path:
    """The directory, which holds that checkpoint.

    `weight_shape`s hold their values whatever `fill` says: nothing converts without them.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    for file, tensors in files.items():
        _write_shard(directory / file, tensors, fill)
        index |= dict.fromkeys(tensors, file)
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


def random_weights(seed: int) -> Fill:
    """Values that a model can be run with: of the right size, repeated from a short stretch."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(1_000_003).astype(np.float32)
    bits = rng.integers(0, 2**32, 1_000_003, np.uint32)

    def fill(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        size, at = math.prod(shape), int(rng.integers(len(bits)))
        if name.endswith("weight_packed"):
            return np.resize(np.roll(bits, at), size).view(dtype).reshape(shape)
        if name.endswith("weight_scale"):  # q is 4.6 on average
            width = shape[1] * 32
            return np.full(shape, width**-0.5 / 4.6, dtype)
        values = np.roll(normal, at)
        if len(shape) == 1:
            values = values * 0.1 + (0 if name.endswith("bias") else 1)
        elif "embed_tokens" not in name:
            values = values * np.float32(shape[1] ** -0.5)
        return np.resize(values.astype(dtype), size).reshape(shape)

    return fill


def _write_shard(path: Path, tensors: Tensors, fill: Fill) -> None:
    # Values of 8 bytes each lie side by side at the end: scattered, each would take a page of disk.
    names = sorted(tensors, key=lambda name: name.endswith("weight_shape"))
    header, at = {}, 0
    for name in names:
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        for name in names:
            dtype, shape = tensors[name]
            if name.endswith("weight_shape"):
                packed, _ = tensors[name.replace("weight_shape", "weight_packed")]
                rows, words = tensors[name.replace("weight_shape", "weight_packed")][1]
                assert packed == "I32"
                values = np.array([rows, 8 * words], np.int32)
            else:
                values = fill(name, DTYPES[dtype], shape)
            if values is not None:
                assert values.shape == shape and values.dtype == DTYPES[dtype], name
                stream.seek(start + header[name]["data_offsets"][0])
                stream.write(values.tobytes())
        stream.truncate(start + at)


def _ends(text: dict[str, Any], prefix: str) -> Tensors:
    shape = (text["vocab_size"], text["hidden_size"])
    return {
        f"{prefix}model.embed_tokens.weight": ("BF16", shape),
        f"{prefix}model.norm.weight": ("BF16", shape[1:]),
        f"{prefix}lm_head.weight": ("BF16", shape),
    }


def _layer(
    text: dict[str, Any],
    index: int,
    prefix: str,
    expert: Callable[[str, int, int], Iterator[tuple[str, str, tuple[int, ...]]]],
) -> Tensors:
    """One decoder layer; plain matrices in bf16."""
    width, heads, name = text["hidden_size"], text["num_attention_heads"], f"layers.{index}."
    query, latent, rotary = text["q_lora_rank"], text["kv_lora_rank"], text["qk_rope_head_dim"]
    key, value = text["qk_nope_head_dim"], text["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_a_proj": (query, width),
        "self_attn.q_a_layernorm": (query,),
        "self_attn.q_b_proj": (heads * (key + rotary), query),
        "self_attn.kv_a_proj_with_mqa": (latent + rotary, width),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (key + value), latent),
        "self_attn.o_proj": (width, heads * value),
    }
    is_dense = index < text["first_k_dense_replace"]
    hidden = text["intermediate_size"] if is_dense else text["moe_intermediate_size"]
    mlp = "mlp." if is_dense else "mlp.shared_experts."
    for kind in ("gate", "up"):
        shapes[f"{mlp}{kind}_proj"] = (hidden, width)
    shapes[f"{mlp}down_proj"] = (width, hidden)
    tensors: Tensors = {
        f"{prefix}{name}{key}.weight": ("BF16", shape) for key, shape in shapes.items()
    }
    if is_dense:
        return tensors
    experts = text["n_routed_experts"]
    tensors[f"{prefix}{name}mlp.gate.weight"] = ("BF16", (experts, width))
    tensors[f"{prefix}{name}mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
    for number in range(experts):
        for kind, out, into in (
            ("gate", hidden, width),
            ("up", hidden, width),
            ("down", width, hidden),
        ):
            matrix = f"{prefix}{name}mlp.experts.{number}.{kind}_proj"
            for suffix, dtype, shape in expert(matrix, out, into):
                tensors[f"{matrix}.{suffix}"] = (dtype, shape)
    return tensors


def _packed_expert(matrix: str, out: int, into: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield "weight_packed", "I32", (out, into // 8)
    yield "weight_scale", "BF16", (out, into // 32)
    yield "weight_shape", "I32", (2,)


def _plain_expert(matrix: str, out: int, into: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield "weight", "BF16", (out, into)


def _projector(text: dict[str, Any]) -> Tensors:
    merged, width = 4608, text["hidden_size"]
    return {
        "mm_projector.pre_norm.weight": ("BF16", (1152,)),
        "mm_projector.pre_norm.bias": ("BF16", (1152,)),
        "mm_projector.proj.0.weight": ("BF16", (merged, merged)),
        "mm_projector.proj.0.bias": ("BF16", (merged,)),
        "mm_projector.proj.2.weight": ("BF16", (width, merged)),
        "mm_projector.proj.2.bias": ("BF16", (width,)),
    }


def _vision() -> Tensors:
    width, hidden = 1152, 4304
    tensors: Tensors = {
        "vision_tower.patch_embed.proj.weight": ("BF16", (width, 3, 14, 14)),
        "vision_tower.patch_embed.proj.bias": ("BF16", (width,)),
        "vision_tower.patch_embed.pos_emb.weight": ("BF16", (64, 64, width)),
        "vision_tower.encoder.final_layernorm.weight": ("BF16", (width,)),
        "vision_tower.encoder.final_layernorm.bias": ("BF16", (width,)),
    }
    for block in range(27):
        name = f"vision_tower.encoder.blocks.{block}."
        for part, shape in {
            "norm0": (width,),
            "norm1": (width,),
            "wqkv": (3 * width, width),
            "wo": (width, width),
            "mlp.fc0": (hidden, width),
            "mlp.fc1": (width, hidden),
        }.items():
            tensors[f"{name}{part}.weight"] = ("BF16", shape)
            tensors[f"{name}{part}.bias"] = ("BF16", shape[:1])
    return tensors
