"""Writes held-out prompts, the same whenever it runs on this Python.

`python prompts.py --checkpoint DIR --out FILE --shipped FILE`: into `tests/golden/prompts.json` 64
golden prompts and 32 for evaluation, which ship with the pair as a prompt file of their own. Each
begins at an unindented line of a held-out file and is 16 to 96 tokens long.
"""

import argparse
import json
import platform
from pathlib import Path

import data
import numpy as np
import tokenizer

NUM_GOLDEN, NUM_EVALUATION = 64, 32
MIN_TOKENS, MAX_TOKENS = 16, 96


def candidates(text: str) -> list[int]:
    """Returns where unindented, non-empty lines of a file begin."""
    starts, at = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip() and not line[0].isspace():
            starts.append(at)
        at += len(line)
    return starts


def main() -> None:
    """Chooses the prompts, one file after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="for its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shipped", type=Path, required=True)
    args = parser.parse_args()
    enc, rng = tokenizer.read(args.checkpoint), np.random.default_rng(0)
    _, heldout = data.split()
    files, chosen, tried = list(heldout), [], 0
    while len(chosen) < NUM_GOLDEN + NUM_EVALUATION:
        name = files[tried % len(files)]
        tried += 1
        starts = candidates(heldout[name])
        start = starts[rng.integers(len(starts))]
        length = int(rng.integers(MIN_TOKENS, MAX_TOKENS + 1))
        ids = enc.encode_ordinary(heldout[name][start : start + 400])[:length]
        text = enc.decode(ids)
        is_stable = text.isascii() and enc.encode_ordinary(text) == ids and len(ids) == length
        if is_stable and text not in {prompt["text"] for prompt in chosen}:
            chosen.append({"file": name, "num_tokens": length, "text": text})
    content = {
        "source": f"held-out files of CPython {platform.python_version()}'s standard library, "
        "by benchmarks/train_mini/prompts.py",
        "golden": chosen[:NUM_GOLDEN],
        "evaluation": chosen[NUM_GOLDEN:],
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")
    shipped = (
        {"id": f"{index} {prompt['file']}", "prompt": prompt["text"]}
        for index, prompt in enumerate(content["evaluation"])
    )
    args.shipped.write_text("".join(f"{json.dumps(line)}\n" for line in shipped))


if __name__ == "__main__":
    main()
