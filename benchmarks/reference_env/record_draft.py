"""Writes the record of an EAGLE-3 draft over a target's record, through speculators, in f32.

    python record_draft.py DIR --record TARGET.safetensors --out R.safetensors [--target DIR]

Row t pairs the features of position t with the token at t + 1 (the last row: the target's argmax)
and stands at position t. `draft.logits` and `draft.hidden` (what the next step takes: the last
layer's output, or with `norm_output` the final norm's) are of that first depth. `draft.logits.S`,
`draft.hidden.S` for S = 1, 2, .. are of the S-th recurrent step, in which every row goes on from
its own hidden state of step S - 1, with token `draft.tokens.S`, one position further, and sees the
first depth's rows up to its own and its own rows of the steps between.

That is speculators' training forward, which is teacher-forced: what it computes inside is exactly
what a chain of drafted tokens computes from every position at once. It returns only token ids, so
the logits and hidden states are taken from its head and its layer by hooks; positions are passed
in, since its default starts at 1.
"""

import argparse
from importlib.metadata import version
from pathlib import Path

import torch
from draft_model import load_draft
from records import read_record, stack_rows, write_record
from speculators.models.eagle3 import Eagle3DraftModel


@torch.no_grad()
def record(
    model: Eagle3DraftModel, features_TG: torch.Tensor, tokens_T: torch.Tensor, num_steps: int
) -> dict[str, torch.Tensor]:
    """Arrays [T, ...] of one sequence at the first depth and `num_steps` recurrent steps.

    Args:
      tokens_T: the token paired with each row at the first depth.
    """
    hidden, logits, fed = [], [], []
    last = model.norm if model.config.norm_output else model.layers[-1]
    hooks = [
        last.register_forward_hook(lambda _, args, out: hidden.append(out[0])),
        model.lm_head.register_forward_hook(lambda _, args, out: logits.append(out[0])),
        model.embed_tokens.register_forward_hook(lambda _, args, out: fed.append(args[0][0])),
    ]
    model(
        hidden_states=features_TG[None],
        input_ids=tokens_T[None],
        document_ids=torch.zeros_like(tokens_T)[None],
        position_ids=torch.arange(len(tokens_T))[None],
        ttt_steps=num_steps + 1,
    )
    for hook in hooks:
        hook.remove()
    kinds = {"hidden": hidden, "logits": logits, "tokens": [ids.int() for ids in fed]}
    return {
        f"draft.{kind}" + (f".{step}" if step else ""): of_step
        for kind, steps in kinds.items()
        for step, of_step in enumerate(steps)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--record", type=Path, required=True, help="the target's, with features")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", type=Path, help="for the embedding, if the draft has none")
    parser.add_argument("--steps", type=int, default=3, help="recurrent steps")
    parser.add_argument("--norm-before-residual", choices=["true", "false"])
    parser.add_argument("--model", help="name kept in the record; default the directory's")
    args = parser.parse_args()

    of_target, target_metadata = read_record(args.record)
    if "features" not in of_target:
        raise SystemExit(f"{args.record}: no `features`; record the target with --features IDS")
    choice = {"true": True, "false": False, None: None}[args.norm_before_residual]
    model = load_draft(args.directory, args.target, choice)
    of_sequence = []
    for row, length in enumerate(of_target["lengths"].tolist()):
        best = of_target["logits"][row, length - 1].argmax()
        tokens = torch.cat([of_target["tokens"][row, 1:length].long(), best[None]])
        features = of_target["features"][row, :length].float()
        of_sequence.append(record(model, features, tokens, args.steps))
    arrays = {name: stack_rows([of[name] for of in of_sequence]) for name in of_sequence[0]}
    kept = {name: of_target[name] for name in ("tokens", "lengths", "features")}
    metadata = {
        "framework": "speculators",
        "framework_version": version("speculators"),
        "model": args.model or args.directory.name,
        "dtype": "float32",
        "boundaries": target_metadata["boundaries"],
        "norm_before_residual": str(model.config.norm_before_residual),
    }
    write_record(args.out, {**kept, **arrays}, metadata)


if __name__ == "__main__":
    main()
