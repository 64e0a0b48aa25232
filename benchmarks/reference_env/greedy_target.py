"""Writes what transformers generates greedily from a target, in f32.

    python greedy_target.py DIR --tokens F --out G.safetensors [--max-new-tokens 64] [--batch]

F is a JSON list of lists of ids: the prompts. Each one runs alone through
`DeepseekV3ForCausalLM.generate`, or, with --batch, beside those of the same length, so that nothing
is padded; it does not stop at end-of-sequence. The file holds, for every
generated token [B, N]: `tokens` int32; `logit_margin`, the gap between its logit and the next best
one; and `router_margin`, how near the nearest expert choice (see record_target.py) was in the call
that gave it: the whole prompt's for the first token, one token's for the others. Another f32
program may part from these tokens only where one of the two is tiny.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import transformers
from record_target import Tap
from records import read_tokens
from safetensors.torch import save_file
from target_model import load_target
from transformers import DeepseekV3ForCausalLM, GenerationConfig


@torch.no_grad()
def greedy(
    model: DeepseekV3ForCausalLM, tap: Tap, prompts: list[list[int]], num_tokens: int
) -> dict[str, torch.Tensor]:
    """Arrays [B, N] of prompts of one length."""
    tap.clear()
    how = GenerationConfig(
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)
    top_BN2 = torch.stack(out.logits, dim=1).topk(2).values
    of_call = [
        torch.stack([layer.view(len(prompts), -1).min(-1).values for layer in call]).min(0).values
        for call in zip(*tap.margin.values(), strict=True)
    ]
    return {
        "tokens": out.sequences[:, ids.shape[1] :].int(),
        "logit_margin": top_BN2[..., 0] - top_BN2[..., 1],
        "router_margin": torch.stack(of_call, dim=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=Path, required=True, help="JSON list of lists of ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", action="store_true", help="prompts of a length together")
    parser.add_argument("--model", help="name kept in the file; default the directory's")
    args = parser.parse_args()

    prompts = read_tokens(args.tokens)
    model = load_target(args.directory)
    # What `how` leaves open is taken from here.
    model.generation_config.eos_token_id = None
    tap = Tap.on(model)
    groups: dict[object, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(len(prompt) if args.batch else (index,), []).append(index)
    of_prompt, start = {}, time.perf_counter()
    for indices in groups.values():
        print(f"\rprompt {indices[0] + 1} of {len(prompts)}", end="", file=sys.stderr)
        found = greedy(model, tap, [prompts[i] for i in indices], args.max_new_tokens)
        for place, index in enumerate(indices):
            of_prompt[index] = {name: array[place] for name, array in found.items()}
    num_tokens, seconds = len(prompts) * args.max_new_tokens, time.perf_counter() - start
    print(f": {num_tokens} tokens, {num_tokens / seconds:.1f} a second", file=sys.stderr)
    in_order = [of_prompt[index] for index in range(len(prompts))]
    arrays = {name: torch.stack([of[name] for of in in_order]) for name in in_order[0]}
    metadata = {
        "format": "jaxspec-greedy-1",
        "framework": "transformers",
        "framework_version": transformers.__version__,
        "model": args.model or args.directory.name,
        "dtype": "float32",
    }
    save_file(arrays, args.out, metadata)


if __name__ == "__main__":
    main()
