"""transformers' DeepseekV3ForCausalLM with the weights of a Kimi-K2.5, Kimi-K2 or DeepSeek-V3
directory, in f32.

transformers' own loading keeps packed experts as bf16(q x scale) even when asked for f32, so the
weights are put into it here: packed experts are unpacked by compressed-tensors, and the product
q x scale is exact unless asked for otherwise. Block fp8 becomes bf16 first.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

ExpertProduct = Literal["exact", "bfloat16"]

EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")
NOT_TEXT = ("vision_tower.", "mm_projector.")


def read_config(directory: Path) -> tuple[DeepseekV3Config, int]:
    """transformers' config of the text model, and the bits of its experts (0: plain)."""
    top = json.loads((directory / "config.json").read_text())
    text = top.get("text_config", top)
    fields = {name: text[name] for name in DeepseekV3Config.__annotations__ if name in text}
    fields["num_mtp_layers"] = text.get("num_nextn_predict_layers", 0)
    rotary = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    rotary["rope_type"] = rotary.pop("type", rotary.get("rope_type", "default"))
    rotary.setdefault("rope_theta", text.get("rope_theta", 10000.0))
    fields["rope_parameters"] = rotary
    config = DeepseekV3Config(**fields, attn_implementation="eager", experts_implementation="eager")
    return config, _expert_bits(directory, text.get("quantization_config"))


def load_target(directory: Path, expert_product: ExpertProduct = "exact") -> DeepseekV3ForCausalLM:
    """The model, in f32 and evaluation mode.

    Convention: transformers leaves the epsilon of the two latent norms at its default, 1e-6; here
    they get the config's `rms_norm_eps`, as in vLLM, SGLang and jaxspec.

    Args:
      expert_product: how q x scale of a packed expert is rounded; see `jaxspec.config.Numerics`.

    Raises:
      SystemExit: the quantisation is another one.
      RuntimeError: a tensor is missing, unknown or of another shape.
    """
    config, num_bits = read_config(directory)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    weights = _weights(directory, num_bits, expert_product)
    model.load_state_dict(weights, strict=True, assign=True)
    # Buffers that no checkpoint holds were made on the meta device with the rest.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return _with_epsilons(model).eval()


def load_theirs(directory: Path) -> DeepseekV3ForCausalLM:
    """The model as transformers itself loads the directory, asked for f32; what it leaves in bf16
    is then widened. It has to be flat, and to be called deepseek_v3, which transformers knows."""
    model = DeepseekV3ForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    torch.nn.Module.float(model)  # its own `float` refuses to touch a quantised model
    return _with_epsilons(model).eval()


def _with_epsilons(model: DeepseekV3ForCausalLM) -> DeepseekV3ForCausalLM:
    """The model with the config's epsilon in its latent norms."""
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = model.config.rms_norm_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = model.config.rms_norm_eps
    return model


def tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint directory, file by file."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            for name in names:
                yield name, file.get_tensor(name)


def _expert_bits(directory: Path, quantization: dict | None) -> int:
    if quantization is None or quantization.get("quant_method") == "fp8":
        return 0
    weights = quantization.get("config_groups", {}).get("group_0", {}).get("weights", {})
    if quantization.get("format") == "pack-quantized" and weights.get("symmetric"):
        return weights["num_bits"]
    raise SystemExit(
        f"{directory}: quantization_config {quantization.get('quant_method')!r} with format "
        f"{quantization.get('format')!r}; this program reads symmetric pack-quantized ones and fp8"
    )


def _weights(
    directory: Path, num_bits: int, expert_product: ExpertProduct
) -> dict[str, torch.Tensor]:
    """The state dict under transformers' names: routed experts fused and stacked, all f32."""
    state: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[tuple[int, str], dict[str, torch.Tensor]]] = {}
    for name, tensor in _widened(dict(tensors(directory)), directory):
        name = name.removeprefix("language_model.")
        if name.startswith(NOT_TEXT) or name.endswith("rotary_emb.inv_freq"):
            continue
        if match := EXPERT.fullmatch(name):
            experts, index, which, part = match.groups()
            parts.setdefault(experts, {}).setdefault((int(index), which), {})[part] = tensor
        else:
            state[name] = tensor.float()
    for experts, of in parts.items():
        indices = range(1 + max(index for index, _ in of))
        whole = {key: _expert(value, num_bits, expert_product) for key, value in of.items()}
        gate_up = [torch.cat([whole[i, "gate"], whole[i, "up"]]) for i in indices]
        state[f"{experts}.gate_up_proj"] = torch.stack(gate_up)
        state[f"{experts}.down_proj"] = torch.stack([whole[i, "down"] for i in indices])
    return state


def _widened(state: dict[str, torch.Tensor], directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, those in block fp8 as bf16 of the f32 product with their blocks' scales, as
    DeepSeek's own `fp8_cast_bf16.py` makes them."""
    config = json.loads((directory / "config.json").read_text())
    quantization = config.get("text_config", config).get("quantization_config") or {}
    rows, columns = quantization.get("weight_block_size", (1, 1))
    for name, tensor in state.items():
        scale = state.get(f"{name}_scale_inv")
        if scale is not None:
            whole = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            product = tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]
            tensor = product.bfloat16()
        if not name.endswith("_scale_inv"):
            yield name, tensor


def _expert(
    parts: dict[str, torch.Tensor], num_bits: int, expert_product: ExpertProduct
) -> torch.Tensor:
    """One expert's matrix [out, in] in f32, from its plain weight or its packed parts."""
    if not num_bits:
        return parts["weight"].float()
    shape = torch.Size(parts["weight_shape"].tolist())
    q = unpack_from_int32(parts["weight_packed"], num_bits, shape).float()
    scale = parts["weight_scale"].float()
    product = q * scale.repeat_interleave(shape[1] // scale.shape[1], dim=1)
    return product.bfloat16().float() if expert_product == "bfloat16" else product
