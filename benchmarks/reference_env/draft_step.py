"""Writes loss and gradients of one EAGLE-3 training step, through speculators, in f32.

    python draft_step.py DIR --inputs I.safetensors --out O.safetensors --steps 3 --decay 0.8

The inputs are of one sequence: `tokens` [T], `features` [T,G], `logits` [T,U], the target's over
the draft's vocabulary, and `is_learned` [T] bool, whether the target's distribution at a position
counts. The output holds `loss` (Kullback-Leibler, the weighted sum of the steps) and the gradient
of every tensor of the draft's directory, under its name there.
"""

import argparse
from pathlib import Path

import torch
from draft_model import load_draft
from safetensors.torch import load_file, save_file
from speculators.losses.eager import kl_div_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--decay", type=float, required=True)
    parser.add_argument("--model", help="ignored: which directory it is, for a record's readers")
    args = parser.parse_args()
    given = load_file(args.inputs)
    model = load_draft(args.directory, None, None)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    # The logits are there already; the model would compute them from the target's last state.
    model.verifier_norm, model.verifier_lm_head = torch.nn.Identity(), torch.nn.Identity()
    # Row i pairs the features of position i with token i + 1, and learns what stands there.
    count = len(given["tokens"]) - 1
    _, loss, _ = model(
        hidden_states=given["features"][None, :-1],
        input_ids=given["tokens"][None, 1:].long(),
        document_ids=torch.zeros(1, count, dtype=torch.long),
        loss_mask=given["is_learned"][None, 1:],
        position_ids=torch.arange(count)[None],
        verifier_last_hidden_states=given["logits"][None, 1:],
        ttt_steps=args.steps,
        ttt_step_loss_decay=args.decay,
        loss_config={"kl_div": (kl_div_loss, 1.0)},  # the default one needs Triton
    )
    loss.backward()
    found = {
        name.replace("layers.0.", "midlayer.", 1): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    save_file({"loss": loss.detach()[None]} | found, args.out)


if __name__ == "__main__":
    main()
