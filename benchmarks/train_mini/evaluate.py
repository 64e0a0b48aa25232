"""Measures an exported pair on held-out text, from its files and with the training form's forward.

`python evaluate.py --checkpoints DIR --data DIR --prompts FILE` prints one JSON object: the
target's loss, the draft's agreement and acceptance, and how often greedy text loops.
"""

import argparse
import functools
import json
import math
from pathlib import Path

import draft
import jax
import jax.numpy as jnp
import numpy as np
import read_export
import target
import tokenizer

LENGTH = 512  # tokens of a window, each read from an empty context
BATCH = 8
NUM_STEPS = 4
TEMPERATURE = 0.8
NEW_TOKENS = 64
MAX_PERIOD, MIN_REPEATS = 16, 4  # what counts as a loop
EXACT = 8.0  # capacity factor: every expert could take every token (16 experts, 2 per token)


@functools.partial(jax.jit, static_argnums=(0, 1))
def window_sums(config, draft_config, params, p, draft_ids, ids):
    """Returns sums over a batch of windows: loss, then a list of figures for each draft step."""
    logits, states, _, _ = target.forward(config, params, ids[:, :-1], EXACT, is_int4=False)
    logp = jax.nn.log_softmax(logits)
    loss = -jnp.take_along_axis(logp, ids[:, 1:, None], -1).sum()
    features = jnp.concatenate([states[b] for b in draft_config.boundaries], -1)
    steps = draft.unroll(draft_config, p, features, params["embed"], ids[:, :-1], NUM_STEPS)
    rows = []
    for s, out in enumerate(steps):
        want = logits[:, s + 1 : s + 1 + out.shape[1]]
        guess = draft_ids[out.argmax(-1)]
        probs = jax.nn.softmax(want / TEMPERATURE)
        accepted = jnp.take_along_axis(probs, guess[..., None], -1)
        covered = probs[..., draft_ids].max(-1)
        agree = guess == want.argmax(-1)
        rows.append([agree.sum(), accepted.sum(), probs.max(-1).sum(), covered.sum(), agree.size])
    return loss, jnp.asarray(rows, jnp.float32)


def measure_windows(config, params, draft_config, p, draft_ids, stream, limit):
    """Returns the held-out loss and the draft's figures, every step given the true tokens."""
    starts = np.arange(0, len(stream) - LENGTH - 1, LENGTH)
    starts = starts[: len(starts) // BATCH * BATCH]
    if limit:  # evenly spread over the held-out files
        starts = starts[np.linspace(0, len(starts) - 1, limit * BATCH).astype(int)]
    totals = []
    for i in range(0, len(starts), BATCH):
        ids = np.stack([stream[s : s + LENGTH + 1] for s in starts[i : i + BATCH]])
        sums = window_sums(config, draft_config, params, p, draft_ids, ids.astype(np.int32))
        totals.append(jax.tree.map(np.asarray, sums))
    loss, rows = (np.sum(part, 0, dtype=np.float64) for part in zip(*totals, strict=True))
    names = ("top1_agreement", "accepted_at_0.8", "ceiling_at_0.8", "ceiling_in_draft_vocabulary")
    steps = [dict(zip(names, (row[:-1] / row[-1]).round(4).tolist(), strict=True)) for row in rows]
    for step in steps:
        step["share_of_ceiling"] = round(step["accepted_at_0.8"] / step["ceiling_at_0.8"], 4)
    tokens = len(starts) * LENGTH
    return {"heldout_tokens": tokens, "nats_per_token": loss / tokens, "draft_steps": steps}


@functools.partial(jax.jit, static_argnums=(0, 4))
def continue_prompts(config, params, ids, lengths, temperature, key):
    """Returns the ids with NEW_TOKENS appended to every prompt; recomputes all of it per token."""
    rows = jnp.arange(ids.shape[0])

    def one_more(i, ids):
        logits = target.forward(config, params, ids, EXACT, is_int4=False)[0]
        last = logits[rows, lengths + i - 1]
        if temperature:
            noise = jax.random.gumbel(jax.random.fold_in(key, i), last.shape)
            last = last / temperature + noise
        return ids.at[rows, lengths + i].set(last.argmax(-1))

    return jax.lax.fori_loop(0, NEW_TOKENS, one_more, ids)


def has_loop(ids: np.ndarray) -> bool:
    """Whether some period of at most MAX_PERIOD tokens comes MIN_REPEATS times in a row."""
    for period in range(1, MAX_PERIOD + 1):
        run = 0
        for same in ids[period:] == ids[:-period]:
            run = run + 1 if same else 0
            if run >= period * (MIN_REPEATS - 1):
                return True
    return False


def measure_loops(config, params, prompts: list[list[int]], temperature: float):
    """Returns (share of prompts whose continuation loops, the continuations)."""
    width = max(map(len, prompts)) + NEW_TOKENS
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in prompts])
    out = []
    for i in range(0, len(prompts), BATCH):
        part = slice(i, i + BATCH)
        key = jax.random.key(i)
        done = continue_prompts(config, params, ids[part], lengths[part], temperature, key)
        out += [
            row[n : n + NEW_TOKENS] for row, n in zip(np.asarray(done), lengths[part], strict=True)
        ]
    return sum(map(has_loop, out)) / len(out), out


def write_logits(config, params, stream, path: Path) -> None:
    """Writes ids, logits and boundaries of two held-out windows, for check_export.py."""
    ids = stream[: 2 * 128].reshape(2, 128).astype(np.int32)
    logits, states, _, _ = target.forward(config, params, ids, EXACT, is_int4=False)
    arrays = {f"boundary_{b}": np.asarray(state) for b, state in enumerate(states)}
    np.savez(path, ids=ids, logits=np.asarray(logits), **arrays)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="for its held-out tokens")
    parser.add_argument("--prompts", type=Path, help="prompts.json, to measure loops")
    parser.add_argument("--batches", type=int, help="windows, in batches of 8; default all")
    parser.add_argument("--logits", type=Path, help="only write this file, for check_export.py")
    args = parser.parse_args()
    config, params = read_export.read_target(args.checkpoints / "mini-target")
    params = jax.tree.map(jnp.asarray, params)
    stream = np.load(args.data / "heldout.npy")
    if args.logits:
        write_logits(config, params, stream, args.logits)
        return
    draft_config, p, draft_ids = read_export.read_draft(args.checkpoints / "mini-draft")
    draft_ids = jnp.asarray(draft_ids, jnp.int32)
    report = measure_windows(config, params, draft_config, p, draft_ids, stream, args.batches)
    corpus = json.loads((args.data / "corpus.json").read_text())["heldout"]
    report["characters_per_token"] = corpus["characters_per_token"]
    nats_per_character = report["nats_per_token"] / corpus["characters_per_token"]
    report["bits_per_character"] = nats_per_character / math.log(2)
    if args.prompts:
        enc = tokenizer.read(args.checkpoints / "mini-target")
        texts = json.loads(args.prompts.read_text())["evaluation"]
        prompts = [enc.encode_ordinary(prompt["text"]) for prompt in texts]
        for name, temperature in (("greedy", 0.0), ("sampled_at_0.8", TEMPERATURE)):
            share, out = measure_loops(config, params, prompts, temperature)
            report[f"looping_share_{name}"] = share
            sample = prompts[0] + out[0].tolist()
            report[f"sample_{name}"] = enc.decode(sample)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
