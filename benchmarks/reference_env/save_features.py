"""Writes one sample of features as SpecForge or speculators saves it with torch.

    python save_features.py specforge|speculators IN.safetensors OUT [--padding N]

IN holds `tokens` [T], `loss_mask` [T] and `states` [K+1,T,D], the last of which is what the project
keeps for the target's own probabilities. States are saved in bf16. SpecForge's HF variant pads the
ids of a batch, and not the states: --padding N does so.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file


def specforge(
    tokens: torch.Tensor, mask: torch.Tensor, states: torch.Tensor
) -> dict[str, torch.Tensor]:
    """As SpecForge's scripts/prepare_hidden_states.py does."""
    return {
        "input_ids": tokens.view(-1),
        "loss_mask": mask.view(-1),
        "hidden_state": states[-1].clone().unsqueeze(0),
        "aux_hidden_state": torch.cat(list(states[:-1]), dim=-1).clone().unsqueeze(0),
    }


def speculators(
    tokens: torch.Tensor, mask: torch.Tensor, states: torch.Tensor
) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """As speculators' scripts/data_generation_offline.py did until 0.4."""
    return {
        "input_ids": tokens,
        "hidden_states": [state.contiguous() for state in states],
        "loss_mask": mask[: len(tokens)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("project", choices=["specforge", "speculators"])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--padding", type=int, default=0)
    args = parser.parse_args()
    given = load_file(args.source)
    tokens, mask = (
        torch.nn.functional.pad(given[name].long(), (0, args.padding))
        for name in ("tokens", "loss_mask")
    )
    save = {"specforge": specforge, "speculators": speculators}[args.project]
    torch.save(save(tokens, mask, given["states"].bfloat16()), args.out)


if __name__ == "__main__":
    main()
