"""Measures the shipped pair on held-out prompts and text, through the real step.

    python benchmarks/evaluate_mini.py [--seeds 3] [--windows 128]

- accept_length sampled at 0.8, and its ceiling, for the trees 3x1x4 and 3x4x16;
- accept_length of greedy text, counted before a loop begins, and the share of prompts that loop;
- on held-out text, teacher-forced, at depths 1 to 4: how often the draft's guess is the target's
  likeliest token, how probable it is at 0.8, and how probable the best guess would be;
- the target's loss on that text, by jaxspec's own forward.

The prompts are those of tests/golden/prompts.json; the text is what benchmarks/train_mini/data.py
keeps back from this interpreter's standard library, so the Python must be the one named in
prompts.json. Prints a table, writes results/mini.json, and ends with that object on one line. Exit
status 1 if the pair is less than what is claimed of it.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import standard_error
from flax import nnx

sys.path.append(str(Path(__file__).parent / "train_mini"))
import data

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_TARGET,
    GenerateConfig,
    Generator,
    Numerics,
    RecordConfig,
    Request,
    Tokenizer,
    TreeConfig,
    load_draft,
    load_target,
    load_tokenizer,
    record,
)
from jaxspec.ceiling import accept_ceiling
from jaxspec.doctor_texts import loop_start
from jaxspec.draft import Borrowed, Draft
from jaxspec.figures import accept_per_depth
from jaxspec.requests import Completion
from jaxspec.target import Target
from jaxspec.training import see, unroll

TREES = ("3x1x4", "3x4x16")
TEMPERATURE = 0.8
NEW_TOKENS = 64
CONTEXT = 192
BATCH = 8
WINDOW = 256
"""Tokens of a piece of held-out text, read from an empty context."""
MIN_LOOP = 4
"""Tokens of the shortest loop: one of them, four times."""
DEPTHS = 4
"""At which guesses are looked at."""

CLAIMS = {
    "top1_agreement": 0.75,
    "share_of_ceiling, first depth": 0.9,
    "share_of_ceiling, third depth": 0.8,
    "accept_length 3x1x4": 2.2,
    "accept_length 3x4x16": 2.9,
}
"""What is claimed at least."""
MOST = {
    "bits_per_character": 3.3 / math.log(2) / (28.7 / 9.4),
    "MiB": 16,
}
"""What is claimed at most. 3.3 nats per token of a vocabulary of 2048, under which this text's 28.7
million characters were 9.4 million tokens; and the pair's files together."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="samples of every prompt")
    parser.add_argument("--windows", type=int, default=128, help=f"of {WINDOW} held-out tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    numerics = Numerics(dtype=args.dtype)
    target = load_target(SHIPPED_TARGET, numerics)
    draft = load_draft(SHIPPED_DRAFT, numerics, target=target)
    tokenizer = load_tokenizer(SHIPPED_TARGET)
    prompts = common.held_out_prompts("golden") + common.held_out_prompts("evaluation")
    print(f"{target.identity}, {draft.identity}, {args.dtype}, {len(prompts)} prompts")

    windows = held_out_windows(tokenizer, args.windows)
    figures: dict[str, Any] = {
        "target": target.identity,
        "draft": draft.identity,
        "dtype": args.dtype,
        "num_prompts": len(prompts),
        "num_seeds": args.seeds,
        "temperature": TEMPERATURE,
        "held_out_text": loss(target, tokenizer, windows) | guesses(target, draft, windows),
    }
    show("held-out text", figures["held_out_text"])
    for tree in TREES:
        config = GenerateConfig(
            TreeConfig.parse(tree), NEW_TOKENS, CONTEXT, BATCH, 16, ignore_eos=True
        )
        generator = Generator(target, draft, config)
        figures[tree] = {
            "sampled": sampled(target, draft, generator, prompts, args.seeds),
            "greedy": greedy(generator, prompts),
        }
        show(f"tree {tree}, sampled at {TEMPERATURE}", figures[tree]["sampled"])
        show(f"tree {tree}, greedy", figures[tree]["greedy"])
    figures["claims"] = claims(figures)
    show("claims", figures["claims"])
    name = "mini" if args.dtype == "float32" else f"mini-{args.dtype}"
    print(json.dumps(json.loads(common.write_result(name, figures).read_text())))
    return 0 if all(claim["holds"] for claim in figures["claims"].values()) else 1


def sampled(
    target: Target,
    draft: Draft,
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    num_seeds: int,
) -> dict[str, Any]:
    """Acceptance of sampled text, and what a draft that knew the target would have reached."""
    requests = [
        Request(tuple(ids), TEMPERATURE, seed=1000 * seed + index)
        for index, ids in enumerate(prompts)
        for seed in range(num_seeds)
    ]
    completions = generator.run(requests).completions
    ceiling = accept_ceiling(
        target, requests, [done.tokens for done in completions], generator.config.tree, draft
    )
    emitted = [len(done.tokens) - 1 for done in completions]
    reached = accept_length(emitted, [len(done.accepted) for done in completions], num_seeds)
    best = accept_length(emitted, [len(text.accepted) for text in ceiling.texts], num_seeds)
    steps = [count for done in completions for count in done.accepted]
    return {
        "accept_length": reached,
        "accept_ceiling": best,
        "share_of_ceiling": _share(reached, best),
        "accept_per_depth": list(accept_per_depth(steps, generator.config.tree.levels)),
        "ceiling_per_depth": list(ceiling.accept_per_depth),
        "first_token": ceiling.draft_first_token,
        "first_token_ceiling": ceiling.first_token,
        "top1_agreement": ceiling.top1_agreement,
        "looping_share": float(
            np.mean([loop_start(done.tokens, MIN_LOOP) is not None for done in completions])
        ),
    }


def greedy(generator: Generator, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Acceptance of greedy text before it loops, and over all of it."""
    completions = generator.run([Request(tuple(ids)) for ids in prompts]).completions
    before = [before_loop(done) for done in completions]
    return {
        "accept_length_before_a_loop": accept_length(*zip(*before, strict=True)),
        "looping_share": float(
            np.mean([loop_start(done.tokens, MIN_LOOP) is not None for done in completions])
        ),
        "accept_length_loops_included": accept_length(
            [len(done.tokens) - 1 for done in completions],
            [len(done.accepted) for done in completions],
        ),
    }


def before_loop(done: Completion) -> tuple[int, int]:
    """Tokens and steps of a completion up to its loop; a step that reaches into it is left out."""
    begin = loop_start(done.tokens, MIN_LOOP)
    if begin is None:
        return len(done.tokens) - 1, len(done.accepted)
    emitted = np.cumsum([count + 1 for count in done.accepted])
    steps = int((1 + emitted <= begin).sum())  # the first token is prefill's
    return int(emitted[steps - 1]) if steps else 0, steps


def accept_length(
    emitted: Sequence[int], steps: Sequence[int], per_prompt: int = 1
) -> dict[str, float]:
    """Tokens per step, and its standard error: texts of one prompt are not independent.

    Args:
      per_prompt: consecutive texts of the same prompt.
    """
    tokens = np.asarray(emitted, np.float64).reshape(-1, per_prompt).sum(1)
    counts = np.asarray(steps, np.float64).reshape(-1, per_prompt).sum(1)
    value = tokens.sum() / counts.sum()
    # Of a ratio of sums, to first order: the error of the mean of what each prompt adds to it.
    error = standard_error(tokens - value * counts) / counts.mean()
    return {"value": float(value), "standard_error": float(error)}


def held_out_windows(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """Windows [count, WINDOW + 1], spread evenly over the held-out files, one after the other."""
    source = json.loads(common.PROMPTS.read_text())["source"]
    python = f"CPython {sys.version.split()[0]}'s"
    if python not in source:
        raise SystemExit(
            f"this is {python[:-2]}, and what was held out is known for another one: {source}"
        )
    _, held_out = data.split()
    end = tokenizer.special_ids["[EOS]"]
    stream = np.array([i for text in held_out.values() for i in [*tokenizer.encode(text), end]])
    starts = np.arange(0, len(stream) - WINDOW - 1, WINDOW)
    chosen = starts[np.linspace(0, len(starts) - 1, count).astype(int)]
    return np.stack([stream[start : start + WINDOW + 1] for start in chosen])


def loss(target: Target, tokenizer: Tokenizer, windows: np.ndarray) -> dict[str, float]:
    """The target's mean negative log-likelihood of the windows' tokens, their first one given."""
    end = tokenizer.special_ids["[EOS]"]
    nats, characters = [], 0
    for some in np.split(windows, range(BATCH, len(windows), BATCH)):
        logits = (
            record(target, None, some[:, :-1].tolist(), RecordConfig(boundaries=()))
            .arrays["logits"]
            .astype(np.float64)
        )
        top = logits.max(-1, keepdims=True)
        total = top[..., 0] + np.log(np.exp(logits - top).sum(-1))
        nats.append(total - np.take_along_axis(logits, some[:, 1:, None], axis=-1)[..., 0])
        for ids in some[:, 1:].tolist():  # the end of a file counts as one character
            text = [i for i in ids if i != end]
            characters += len(tokenizer.decode(text)) + len(ids) - len(text)
    of_window = np.concatenate(nats).mean(1)
    per_token = float(of_window.mean())
    tokens = windows[:, 1:].size
    return {
        "num_tokens": tokens,
        "nats_per_token": per_token,
        "standard_error": standard_error(of_window),
        "characters_per_token": characters / tokens,
        "nats_per_character": per_token * tokens / characters,
        "bits_per_character": per_token * tokens / characters / math.log(2),
    }


def guesses(target: Target, draft: Draft, windows: np.ndarray) -> dict[str, list[float]]:
    """The draft's guesses on the windows, depth by depth, the true text before each.

    Past the first depth the draft goes on from its own hidden state, in place of features.
    """
    graph, params = nnx.split((target, draft))

    @jax.jit
    def sums(params: nnx.State, tokens_BT: jax.Array) -> jax.Array:
        target, draft = nnx.merge(graph, params)
        capture = target.asked_for(draft.config.boundaries)
        features, hidden_BTD = see(target, tokens_BT, jnp.ones(tokens_BT.shape, bool), capture)
        logits_BTV, lent = target.logits(hidden_BTD), Borrowed.of(target)
        found = []
        for step, logits_BTU in enumerate(unroll(draft, lent, features, tokens_BT, DEPTHS)):
            said_BTV = logits_BTV[:, step + 1 :]
            first_BT = jnp.argmax(logits_BTU[:, : -step - 1], axis=-1)
            guess_BT = draft.vocab_map.targets[first_BT]
            probs_BTV = jax.nn.softmax(said_BTV / TEMPERATURE)
            accepted = jnp.take_along_axis(probs_BTV, guess_BT[..., None], axis=-1)
            agrees_BT = guess_BT == jnp.argmax(said_BTV, axis=-1)
            found.append([jnp.mean(x) for x in (agrees_BT, accepted, probs_BTV.max(-1))])
        return jnp.asarray(found)

    parts = [
        sums(params, jnp.asarray(some[:, :-1], jnp.int32))
        for some in np.split(windows, range(BATCH, len(windows), BATCH))
    ]
    agrees, accepted, most = np.mean(parts, axis=0).T.tolist()
    return {
        "top1_agreement": agrees,
        "accepted": accepted,
        "ceiling": most,
        "share_of_ceiling": [part / whole for part, whole in zip(accepted, most, strict=True)],
    }


def claims(figures: dict[str, Any]) -> dict[str, Any]:
    """Every claim about the pair, what was measured, and whether it holds."""
    text = figures["held_out_text"]
    measured = {
        "top1_agreement": text["top1_agreement"][0],
        "share_of_ceiling, first depth": text["share_of_ceiling"][0],
        "share_of_ceiling, third depth": text["share_of_ceiling"][2],
        **{
            f"accept_length {tree}": figures[tree]["sampled"]["accept_length"]["value"]
            for tree in TREES
        },
    }
    found = {
        name: {"at_least": least, "measured": measured[name], "holds": measured[name] >= least}
        for name, least in CLAIMS.items()
    }
    files = (*SHIPPED_TARGET.iterdir(), *SHIPPED_DRAFT.iterdir())
    measured = {
        "bits_per_character": text["bits_per_character"],
        "MiB": sum(file.stat().st_size for file in files) / 2**20,
    }
    found |= {
        name: {"at_most": most, "measured": measured[name], "holds": measured[name] <= most}
        for name, most in MOST.items()
    }
    return found


def show(title: str, figures: dict[str, Any]) -> None:
    """A table."""
    print(f"\n{title}")
    for name, value in figures.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_short(part)}" for key, part in value.items())
        elif isinstance(value, list):
            value = " ".join(map(_short, value))
        print(f"  {name:34}{_short(value)}")


def _share(part: dict[str, float], whole: dict[str, float]) -> float:
    return part["value"] / whole["value"]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
