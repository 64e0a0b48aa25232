"""Replays the founding story on the shipped pair, then sweeps the number of draft steps.

    python benchmarks/founding_story.py [--levels 1,2,3] [--num-prompts 96] [--rounds 7] [--out DIR]

The story: a draft trained on three captured states reached 74.7 % of its target's tokens in
validation, and its server an accept length of 1.12. It was given one state where three were
concatenated, and a guard on the width skipped `fc` without a word. The embedding was captured in
place of a layer, and boundaries were one off, on the way there.

- Each of these is given to the draft as it is: refused while tracing, by name. Then to a private
  copy whose `fuse` takes anything and guards by width as that server did: what acceptance it gives.
- Chains of 1 to 10 draft steps: accept length, time of a step and the share of verify in it, and
  tokens per second against plain decoding, all in turn.

Text is sampled at 0.8, as a small model's greedy text runs into loops. Prints two tables, writes
founding_story.json and .png, and ends with the JSON on one line. Exit status 1 if a wrong claim was
not refused, or gave more than the right one by two standard errors.
"""

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Spread, in_turn, ratio
from flax import nnx
from generate import NEW_TOKENS, STEPS, generator, verify

from jaxspec import (
    SHIPPED_DRAFT,
    SHIPPED_TARGET,
    ContractError,
    GenerateConfig,
    Generator,
    Numerics,
    Request,
    TreeConfig,
    load_draft,
    load_target,
)
from jaxspec.cache import DraftCache
from jaxspec.contracts import Features, TargetIds
from jaxspec.draft import Borrowed, Draft, DraftPass
from jaxspec.mla import Pass
from jaxspec.target import Target

TEMPERATURE = 0.8
TREE = TreeConfig.parse("3x1x4")
CONTEXT = 192
BATCH = 8
NUM_TIMED, NUM_SWEPT = 8, 24
"""Prompts of a timed run, and of a chain's accept length."""


class Unchecked(Draft):
    """The draft as that server had it: no claim is looked at, and a width decides about `fc`."""

    def fuse(
        self, features: Features, tokens: TargetIds, at: Pass, cache: DraftCache, target: Borrowed
    ) -> DraftPass:
        hidden_BTA = features.data
        if hidden_BTA.shape[-1] != self.config.hidden_size:
            hidden_BTA = hidden_BTA @ self.fc[...]
        return self._layers(hidden_BTA, tokens.ids, at, cache, None, target)


def unchecked(draft: Draft) -> Unchecked:
    """The same weights in the class that checks nothing."""

    def empty() -> Unchecked:
        return Unchecked(draft.config, draft.numerics, nnx.Rngs(0), draft.identity)

    graph, _ = nnx.split(nnx.eval_shape(empty))
    return nnx.merge(graph, nnx.split(draft)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--levels", default=",".join(map(str, range(1, 11))), help="to sweep")
    parser.add_argument("--num-prompts", type=int, default=96, help="of the held-out ones")
    parser.add_argument("--rounds", type=int, default=7, help="of every timing")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the results")
    args = parser.parse_args()
    numerics = Numerics(dtype="float32")
    target = load_target(SHIPPED_TARGET, numerics)
    draft = load_draft(SHIPPED_DRAFT, numerics, target=target)
    prompts = common.held_out_prompts("golden") + common.held_out_prompts("evaluation")
    # Every k-th one, so that few prompts are of both parts.
    prompts = prompts[:: max(len(prompts) // args.num_prompts, 1)][: args.num_prompts]
    requests = [Request(tuple(ids), TEMPERATURE, seed=seed) for seed, ids in enumerate(prompts)]

    story = replay(target, draft, requests)
    sweep = sweep_levels(target, draft, requests, list(map(int, args.levels.split(","))), args)
    figures = {
        "target": target.identity,
        "draft": draft.identity,
        "dtype": "float32",
        "temperature": TEMPERATURE,
        "num_prompts": len(prompts),
        "num_prompts_swept": min(NUM_SWEPT, len(prompts)),
        "rounds": args.rounds,
        "tree": str(TREE),
        "story": story,
        "sweep": sweep,
    }
    written = json.loads(common.write_result("founding_story", figures, args.out).read_text())
    plot(written, args.out / "founding_story.png")
    print(json.dumps(written))
    *wrong, right = story.values()
    is_told = all(one["refused"] for one in wrong) and not right["refused"]
    is_best = all(one["lost"] > -2 * one["lost_standard_error"] for one in wrong)
    return 0 if is_told and is_best else 1


def replay(target: Target, draft: Draft, requests: Sequence[Request]) -> dict[str, Any]:
    """Each capture: what the draft says to it, and the acceptance of the copy that says nothing."""
    right = draft.config.boundaries.ids
    stages = {
        "one state instead of three": right[-1:],
        "the embedding in place of a layer": (0, *right[1:]),
        "boundaries one too early": tuple(b - 1 for b in right),
        "boundaries one too late": tuple(b + 1 for b in right),
        "the right boundaries": right,
    }
    config = GenerateConfig(TREE, NEW_TOKENS, CONTEXT, BATCH, 16, ignore_eos=True)
    print(f"\ntree {TREE}, sampled at {TEMPERATURE}")
    print(f"{'captured':48}{'draft.fuse':12}{'accept_length':18}accepted / drafted")
    found, texts = {}, {}
    for name, ids in stages.items():
        capture = target.boundaries(ids, "the story's capture")
        refusal = None
        try:
            serving = Generator(target, draft, config, capture)
        except ContractError as error:
            refusal = str(error)
            serving = Generator(target, unchecked(draft), config, capture)
        completions = serving.run(requests).completions
        texts[name] = [(len(one.tokens) - 1, one.accepted) for one in completions]
        found[name] = {
            "boundaries": list(ids),
            "refused": refusal is not None,
            "message": refusal,
            **acceptance(texts[name], TREE.levels),
        }
        one = found[name]
        length = f"{one['accept_length']:.3f} +- {one['standard_error']:.3f}"
        verdict = "refused" if refusal else "taken"
        print(f"{f'{name} {ids}':48}{verdict:12}{length:18}{one['accept_rate']:.1%}")
    for name in list(found)[:-1]:
        cost, error = lost(texts[name], texts[list(found)[-1]])
        found[name] |= {"lost": cost, "lost_standard_error": error}
        print(f"{name} costs {cost:.3f} +- {error:.3f} of it")
    return found


def lost(
    texts: Sequence[tuple[int, Sequence[int]]], right: Sequence[tuple[int, Sequence[int]]]
) -> tuple[float, float]:
    """What accept length these lack, and its standard error over pairs of a request's texts."""
    lengths, residuals = [], []
    for side in (right, texts):
        emitted = np.array([count for count, _ in side], float)
        num_steps = np.array([len(accepted) for _, accepted in side], float)
        lengths.append(emitted.sum() / num_steps.sum())
        residuals.append((emitted - lengths[-1] * num_steps) / num_steps.sum())
    return float(lengths[0] - lengths[1]), float(np.linalg.norm(residuals[0] - residuals[1]))


def acceptance(texts: Sequence[tuple[int, Sequence[int]]], levels: int) -> dict[str, Any]:
    """Of texts, each its tokens from steps and what each step accepted: figures over all steps.

    The standard error takes each text as one observation.
    """
    emitted = np.array([count for count, _ in texts], float)
    num_steps = np.array([len(accepted) for _, accepted in texts], float)
    drafted = levels * num_steps.sum()
    length = emitted.sum() / num_steps.sum()
    away = np.linalg.norm(emitted - length * num_steps) / num_steps.sum()
    accepted = sum(sum(counts) for _, counts in texts)
    return {
        "accept_length": float(length),
        "standard_error": float(away),
        "accept_rate": accepted / drafted,
        "accept_rate_sglang_legacy": (accepted + num_steps.sum()) / (drafted + num_steps.sum()),
    }


def sweep_levels(
    target: Target,
    draft: Draft,
    requests: Sequence[Request],
    levels: Sequence[int],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Chains of so many draft steps: acceptance, time, and speed against plain decoding."""
    trees = {count: f"{count}x1x{count + 1}" for count in levels}
    runs = {n: generator(target, draft, 1, tree) for n, tree in {0: None, **trees}.items()}
    swept = requests[:: max(len(requests) // NUM_SWEPT, 1)]
    timed = swept[:NUM_TIMED]
    programs = {f"step {n}": functools.partial(step_s, run, timed) for n, run in runs.items()}
    programs |= {f"verify {n}": verify(target, 1, n + 1) for n in trees}
    took = in_turn(programs, args.rounds)
    print(f"\nchains, sampled at {TEMPERATURE}; times are of {args.rounds} rounds in turn")
    print(f"{'steps':8}{'accept_length':18}{'step, ms':24}{'verify / step':28}speed / plain")
    found = {}
    for count in trees:
        completions = runs[count].run(swept).completions
        of_text = acceptance([(len(one.tokens) - 1, one.accepted) for one in completions], count)
        # The timed texts' own accept length makes their tokens per second of a step's time.
        of_timed = [(len(one.tokens) - 1, one.accepted) for one in completions[:NUM_TIMED]]
        emitted = acceptance(of_timed, count)["accept_length"]
        step, plain = took[f"step {count}"], took["step 0"]
        step_ms, share = Spread.of(1e3 * step), ratio(took[f"verify {count}"] / STEPS, step)
        speed = ratio(emitted * plain, step)
        found[str(count)] = of_text | {
            "step_ms": step_ms.to_dict(),
            "step_over_plain": ratio(step, plain).to_dict(),
            "verify_share": share.to_dict(),
            "speed_over_plain": speed.to_dict(),
        }
        length = f"{of_text['accept_length']:.3f} +- {of_text['standard_error']:.3f}"
        print(f"{count:<8}{length:18}{step_ms!s:24}{share!s:28}{speed}")
    return found


def step_s(run: Generator, requests: Sequence[Request]) -> float:
    """Seconds of decoding for each step, the host's look at the tokens every 16 steps included."""
    done = run.run(requests)
    return done.decode_ms / 1e3 / sum(len(one.accepted) for one in done.completions)


def plot(figures: dict[str, Any], path: Path) -> None:
    """The story's accept lengths, those of the sweep, and what a step's time is made of."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    story, lengths, times = figure.subplots(1, 3, width_ratios=(1.5, 1, 1.2))
    stages = figures["story"]
    names = [f"{name}\n{tuple(one['boundaries'])}" for name, one in stages.items()]
    values = [one["accept_length"] for one in stages.values()]
    errors = [one["standard_error"] for one in stages.values()]
    colors = ["lightgrey" if one["refused"] else "dimgrey" for one in stages.values()]
    story.barh(names, [v - 1 for v in values], left=1, xerr=errors, color=colors, capsize=3)
    gain = max(values) - 1
    for place, (value, one) in enumerate(zip(values, stages.values(), strict=True)):
        told = "refused; unchecked " if one["refused"] else ""
        story.text(1 + 1.06 * gain, place, f"{told}{value:.2f}", va="center", fontsize=8)
    story.set_xlim(1, 1 + 1.75 * gain)
    story.invert_yaxis()
    story.tick_params(axis="y", labelsize=8)
    story.set(xlabel="accept_length", title=f"what the draft was given, tree {figures['tree']}")
    sweep = figures["sweep"]
    counts = list(map(int, sweep))
    of_sweep = [one["accept_length"] for one in sweep.values()]
    away = [one["standard_error"] for one in sweep.values()]
    lengths.errorbar(counts, of_sweep, yerr=away, fmt="o-", color="black", capsize=3)
    lengths.set(xlabel="draft steps", ylabel="accept_length", title="a longer chain", xticks=counts)
    kinds = {
        "speed_over_plain": ("tokens/s over plain decoding", "o-", "black"),
        "verify_share": ("share of verify in a step", "s--", "dimgrey"),
    }
    for key, (label, style, color) in kinds.items():
        spreads = [one[key] for one in sweep.values()]
        middle = np.array([one["median"] for one in spreads])
        low, high = (np.array([one[end] for one in spreads]) for end in ("low", "high"))
        bars = np.stack([middle - low, high - middle])
        times.errorbar(counts, middle, bars, fmt=style, color=color, capsize=3, label=label)
    times.axhline(1, color="grey", linewidth=0.8)
    times.set(xlabel="draft steps", title="on this CPU", xticks=counts, ylim=(0, None))
    times.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
