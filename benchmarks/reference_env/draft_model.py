"""speculators' Eagle3DraftModel with the weights of an EAGLE-3 draft directory, in f32."""

import json
from pathlib import Path

import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from target_model import tensors
from transformers import LlamaConfig

EMBED = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
"""Only how many they are matters to the model."""
VOCABULARY_MAPS = ("d2t", "t2d")
"""Read by trainers and servers, never by the forward pass: logits stay in the draft's ids."""


def load_draft(
    directory: Path, target: Path | None, is_norm_before_residual: bool | None
) -> Eagle3DraftModel:
    """The model, in f32 and evaluation mode, from SpecForge's layout (`midlayer.`) or speculators'
    own (`layers.0.`).

    Convention: `norm_before_residual` adds the attention to the normed hidden state rather than to
    the hidden state itself. speculators writes it into its configs; SpecForge, SGLang and SafeAILab
    have no such choice and do not (False).

    Args:
      target: where the embedding is read if the draft has none.
      is_norm_before_residual: None takes the config's `norm_before_residual`, or False.

    Raises:
      RuntimeError: a tensor is missing, unknown or of another shape.
      SystemExit: there is no embedding.
    """
    config = json.loads((directory / "config.json").read_text())
    if is_norm_before_residual is None:
        is_norm_before_residual = config.get("norm_before_residual", False)
    layer = config.get("transformer_layer_config", config)
    flags = {name: config.get(name, False) for name in ("fc_norm", "norm_before_fc", "norm_output")}
    rotary = dict(layer.get("rope_scaling") or layer.get("rope_parameters") or {})
    rotary["rope_type"] = rotary.pop("type", rotary.get("rope_type", "default"))
    rotary.setdefault("rope_theta", layer.get("rope_theta", 10000.0))
    fields = {name: layer[name] for name in LlamaConfig.__annotations__ if name in layer}
    fields |= {"rope_parameters": rotary}
    llama = LlamaConfig(**fields, attn_implementation="eager")
    verifier = VerifierConfig(name_or_path=None, architectures=["DeepseekV3ForCausalLM"])
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=llama,
            draft_vocab_size=config.get("draft_vocab_size", llama.vocab_size),
            norm_before_residual=is_norm_before_residual,
            eagle_aux_hidden_state_layer_ids=config.get("eagle_config", config).get(IDS),
            **flags,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
                default_proposal_method="greedy",
                verifier=verifier,
            ),
        )
    )
    state = {
        name.replace("midlayer.", "layers.0.", 1): tensor.float()
        for name, tensor in tensors(directory)
        if name not in VOCABULARY_MAPS
    }
    if EMBED not in state:
        state[EMBED] = _target_embedding(directory, target)
    # Only a trainer reads the target's norm and head: they give the distribution to learn.
    may_miss = {"verifier_norm.weight", "verifier_lm_head.weight", *VOCABULARY_MAPS}
    missing, unknown = model.float().load_state_dict(state, strict=False)
    if set(missing) - may_miss or unknown:
        raise RuntimeError(f"{directory}: missing {set(missing) - may_miss}, unknown {unknown}")
    return model.eval()


def _target_embedding(directory: Path, target: Path | None) -> torch.Tensor:
    if target is None:
        raise SystemExit(f"{directory}: the draft has no {EMBED}; name its target with --target")
    for name, tensor in tensors(target):
        if name.endswith(f"model.{EMBED}"):
            return tensor.float()
    raise SystemExit(f"{target}: no model.{EMBED}")
