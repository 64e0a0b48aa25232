"""Times transformers' greedy generation from a target, in f32, a round at a time.

    python time_greedy.py DIR --tokens F [--max-new-tokens 64] [--threads N|default]

F is a JSON list of lists of ids: the prompts. For every line on stdin each one is generated from
once, alone and to the full number of tokens, and one JSON line on stdout says how fast that was:
`{"tokens_per_s"}`, prompt passes included. So another program can take turns with this one.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from records import read_tokens
from target_model import load_target
from transformers import GenerationConfig


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=Path, required=True, help="JSON list of lists of ids")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", default="default", help="of torch; default: its own choice")
    args = parser.parse_args()

    if args.threads != "default":
        torch.set_num_threads(int(args.threads))
    prompts = [torch.tensor([ids]) for ids in read_tokens(args.tokens)]
    model = load_target(args.directory)
    how = GenerationConfig(
        do_sample=False,
        min_new_tokens=args.max_new_tokens,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    for _ in sys.stdin:
        start = time.perf_counter()
        for ids in prompts:
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, generation_config=how)
            assert out.shape[1] == ids.shape[1] + args.max_new_tokens
        num_tokens = len(prompts) * args.max_new_tokens
        speed = num_tokens / (time.perf_counter() - start)
        print(json.dumps({"tokens_per_s": speed}), flush=True)


if __name__ == "__main__":
    main()
