"""Checks an exported pair against independent code, in the reference environment (torch).

Needs torch, transformers, compressed-tensors, safetensors. First write this side's numbers with
`python evaluate.py --checkpoints DIR --logits FILE`; then `python check_export.py --checkpoints DIR
--logits FILE` unpacks the experts with compressed-tensors' own function, loads the f32 weights into
transformers' DeepseekV3ForCausalLM and compares logits and boundaries.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

MAX_RELATIVE = 1e-4


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Returns the text model's f32 weights by flat DeepSeek-V3 names, experts fused per layer."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    raw = {}
    for shard in sorted(set(index["weight_map"].values())):
        raw |= load_file(directory / shard)
    assert set(raw) == set(index["weight_map"])
    found = {}
    for name, tensor in raw.items():
        flat = name.removeprefix("language_model.")
        if flat.endswith("weight_packed"):
            base = name.removesuffix("_packed")
            shape = torch.Size(raw[f"{base}_shape"].tolist())
            value = unpack_from_int32(tensor, 4, shape).float()
            scale = raw[f"{base}_scale"].float()
            found[flat.removesuffix("_packed")] = value * scale.repeat_interleave(32, 1)
        elif not flat.endswith(("weight_scale", "weight_shape")):
            found[flat] = tensor.float()
    return found


def load(directory: Path) -> DeepseekV3ForCausalLM:
    """Returns transformers' model with the weights, every RMSNorm at the config's epsilon."""
    text = json.loads((directory / "config.json").read_text())["text_config"]
    text = {k: v for k, v in text.items() if k not in ("quantization_config", "architectures")}
    config = DeepseekV3Config(**text)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
    weights = read_weights(directory)
    fused = {}
    for layer in range(text["first_k_dense_replace"], text["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts."
        each = range(text["n_routed_experts"])
        gate, up, down = (
            torch.stack([weights.pop(f"{at}{e}.{key}_proj.weight") for e in each])
            for key in ("gate", "up", "down")
        )
        fused |= {f"{at}gate_up_proj": torch.cat([gate, up], 1), f"{at}down_proj": down}
    model.load_state_dict(weights | fused, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on meta
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = text["rms_norm_eps"]  # transformers leaves 1e-6
    return model.float().eval()


def main() -> None:
    """Prints the largest relative differences; fails above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--logits", type=Path, required=True)
    args = parser.parse_args()
    ours = np.load(args.logits)
    model = load(args.checkpoints / "mini-target")
    with torch.no_grad():
        out = model(torch.from_numpy(ours["ids"]).long(), output_hidden_states=True)
    theirs = {"logits": out.logits.numpy()}
    for b in range(model.config.num_hidden_layers):
        theirs[f"boundary_{b}"] = out.hidden_states[b].numpy()
    worst = 0.0
    for name, want in theirs.items():
        scale = np.abs(want).max(-1)
        error = (np.abs(ours[name] - want).max(-1) / scale).max()
        worst = max(worst, error)
        print(f"{name}: {error:.2e} of the row's largest value, {want.shape}")
    if not worst < MAX_RELATIVE:
        raise SystemExit(f"differs by {worst:.2e}, more than {MAX_RELATIVE}")


if __name__ == "__main__":
    main()
