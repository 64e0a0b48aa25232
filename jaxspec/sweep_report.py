"""What a sweep found: from the lines of its log to figures with intervals, and a sentence."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.config import TreeConfig

__all__ = [
    "PLAIN",
    "TOLERANCE",
    "BatchReport",
    "Check",
    "Figure",
    "Prediction",
    "SettingReport",
    "SweepReport",
    "TreeReport",
    "report_of",
]

PLAIN = "plain"
"""The name of decoding without a tree among the timed ones."""
TOLERANCE = 0.03
"""By how much an accept_length from the walk may miss that of the real steps, relative."""
FEWEST_TEXTS, FEWEST_ROUNDS = 5, 3
"""Below which there is no interval."""
RESAMPLES = 4000


@dataclasses.dataclass(frozen=True)
class Figure:
    """A value, and where 95 % of resampled texts and rounds have it; None of too few of them."""

    value: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.interval[0]:.2f} to {self.interval[1]:.2f})"

    @property
    def beats_one(self) -> bool | None:
        """Whether all of the interval is above 1, or all below; None where it is neither."""
        if self.interval is None or self.interval[0] <= 1 <= self.interval[1]:
            return None
        return self.interval[0] > 1


@dataclasses.dataclass(frozen=True)
class Check:
    """The same steps of the same texts: tokens of each that the real ones gave, and the walk's."""

    real: float
    walked: float

    @property
    def difference(self) -> float:
        """Of the walk, relative."""
        return self.walked / self.real - 1

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= TOLERANCE


@dataclasses.dataclass(frozen=True)
class TreeReport:
    """A tree at one batch size, measured.

    Attributes:
      accept_length: tokens of a step, bonus included, along all texts.
      step_ms: of a step with all places running; the median of the rounds.
      speed: over plain decoding: accept_length times the quotient of the step times, which is
        taken round by round.
      tokens_per_s: of all places: plain decoding's, so many times.
      is_rival: whether it cannot be told from the fastest one.
      check: of the steps that were timed; None where a text had ended before.
    """

    tree: str
    accept_length: Figure
    step_ms: float
    speed: Figure
    tokens_per_s: float
    is_rival: bool
    check: Check | None


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """One batch size.

    Attributes:
      plain_ms, plain_tokens_per_s: of plain decoding.
      trees: the fastest first.
      whole: tokens per second of the fastest over plain decoding's, in runs over whole texts that
        had no part in choosing it; its interval is over rounds. None where there were none yet.
    """

    batch_size: int
    num_rounds: int
    plain_ms: float
    plain_tokens_per_s: float
    trees: tuple[TreeReport, ...]
    whole: Figure | None

    @property
    def best(self) -> TreeReport:
        return self.trees[0]

    def finding(self) -> str:
        """What to take, in a sentence."""
        best = self.best
        rivals = [one.tree for one in self.trees[1:] if one.is_rival]
        others = f" (not to be told from it: {', '.join(rivals)})" if rivals else ""
        said = f"batch {self.batch_size}: {best.tree} is the fastest tree{others}"
        if self.whole is None:
            return f"{said}, {best.speed} times plain decoding"
        verdict = {
            True: "it pays",
            False: "it does not pay: decode plainly",
            None: "not to be told from plain decoding",
        }[self.whole.beats_one]
        return f"{said}; over whole texts {self.whole} times plain decoding: {verdict}"


@dataclasses.dataclass(frozen=True)
class SettingReport:
    """What was timed under some environment variables; {} is the caller's own environment."""

    env: Mapping[str, str]
    batches: tuple[BatchReport, ...]

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env.items())


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step on H200s that are not there, with the accept_length that was measured here.

    Attributes:
      model: what was planned.
      trees: tree -> (tokens per second, of all sequences; speed over plain decoding).
    """

    model: str
    mesh: str
    batch_size: int
    trees: Mapping[str, tuple[float, float]]

    @property
    def best(self) -> str:
        return max(self.trees, key=lambda tree: self.trees[tree][0])


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """Which tree is fastest.

    Attributes:
      looping: ids of the texts that repeat themselves, and are left out.
      surprise: nats a token that the target finds in the prompts; guessing has `uniform`.
      accept_length: of every tree of the grid, timed or not, along all texts.
      predicted: on H200s; empty where it was not asked for.
      machine, command: where and how all but that was measured.
    """

    target: str
    draft: str
    dtype: str
    temperature: float
    num_texts: int
    num_tokens: int
    looping: tuple[str, ...]
    surprise: float
    uniform: float
    accept_length: Mapping[str, Figure]
    settings: tuple[SettingReport, ...]
    machine: str
    command: str
    predicted: tuple[Prediction, ...] = ()

    @property
    def checks(self) -> dict[str, Check]:
        """Of each timed tree that could be checked, all batch sizes and settings together."""
        found: dict[str, list[Check]] = {}
        for setting in self.settings:
            for batch in setting.batches:
                for one in batch.trees:
                    if one.check is not None:
                        found.setdefault(one.tree, []).append(one.check)
        return {
            tree: Check(float(np.mean([c.real for c in some])),
                        float(np.mean([c.walked for c in some])))
            for tree, some in found.items()
        }  # fmt: skip

    @property
    def holds(self) -> bool:
        """Whether the walk's accept lengths are those of the real steps, of every timed tree."""
        return all(check.holds for check in self.checks.values())

    def finding(self) -> str:
        """The best tree of each batch size, a line each, and whether the walk was right."""
        lines = []
        for setting in self.settings:
            prefix = f"{setting.name}, " if setting.env else ""
            lines += [prefix + batch.finding() for batch in setting.batches]
        checks = self.checks
        if checks:
            tree = max(checks, key=lambda one: abs(checks[one].difference))
            worst = checks[tree]
            said = "agrees" if worst.holds else "DOES NOT AGREE"
            lines.append(
                f"the walk {said} with the real steps (trees: {len(checks)}): "
                f"{worst.difference:+.1%} at most ({tree}: {worst.walked:.3f} walked, "
                f"{worst.real:.3f} real)"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object: what was measured, and apart from it what is predicted."""
        given = dataclasses.asdict(self)
        predicted = given.pop("predicted")
        for one, said in zip(predicted, self.predicted, strict=True):
            one |= {"kind": "predicted", "best": said.best}
            one["trees"] = {
                tree: {"tokens_per_s": per_s, "speed": speed}
                for tree, (per_s, speed) in said.trees.items()
            }
        for setting, said in zip(given["settings"], self.settings, strict=True):
            for batch, of in zip(setting["batches"], said.batches, strict=True):
                batch["best"] = of.best.tree
        checks = {
            tree: {**dataclasses.asdict(check), "difference": check.difference}
            for tree, check in self.checks.items()
        }
        return {
            "kind": "measured",
            **given,
            "checks": checks,
            "holds": self.holds,
            "predicted": predicted,
        }


def report_of(
    header: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], command: str
) -> SweepReport:
    """The report of a sweep's log; see `sweep` for its lines."""
    (texts,) = (one for one in entries if one["what"] == "texts")
    walked: dict[str, list[list[int]]] = {}
    for one in entries:
        if one["what"] == "walk":
            walked |= one["steps"]
    walked = dict(sorted(walked.items(), key=lambda item: _size(item[0])))
    kept = [text for text in texts["texts"] if not text["loops"]]
    draws = np.random.default_rng(0).integers(len(kept), size=(RESAMPLES, len(kept)))
    rounds = [one for one in entries if one["what"] == "round"]
    wholes = [one for one in entries if one["what"] == "whole"]
    envs = list({_key(one["env"]): one["env"] for one in rounds}.values())
    settings = []
    for env in envs:
        mine = [one for one in rounds if one["env"] == env]
        whole = [one for one in wholes if one["env"] == env]
        sizes = list(dict.fromkeys(one["batch_size"] for one in mine))
        batches = [
            _batch(size, walked, draws, *([o for o in s if o["batch_size"] == size]
                                          for s in (mine, whole)))
            for size in sizes
        ]  # fmt: skip
        settings.append(SettingReport(env, tuple(batches)))
    flags = header["flags"]
    return SweepReport(
        target=header["target_hash"],
        draft=header["draft_hash"],
        dtype=flags["dtype"],
        temperature=flags["temperature"],
        num_texts=len(kept),
        num_tokens=sum(len(text["output_ids"]) for text in kept),
        looping=tuple(text["id"] for text in texts["texts"] if text["loops"]),
        surprise=texts["surprise"],
        uniform=texts["uniform"],
        accept_length={tree: _accept_length(steps, draws)[0] for tree, steps in walked.items()},
        settings=tuple(settings),
        machine=header["machine"],
        command=command,
    )


def _size(tree: str) -> tuple[int, int, int]:
    return dataclasses.astuple(TreeConfig.parse(tree))


def _key(env: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(env.items()))


def _accept_length(steps: Sequence[Sequence[int]], draws: np.ndarray) -> tuple[Figure, np.ndarray]:
    """The figure of all texts, and of the drawn ones, [draws].

    Args:
      steps: drafted tokens accepted in each step of each text.
    """
    num_steps = np.array([len(one) for one in steps], float)
    emitted = num_steps + [sum(one) for one in steps]
    drawn = emitted[draws].sum(1) / np.maximum(num_steps[draws].sum(1), 1)
    value = float(emitted.sum() / num_steps.sum())
    return Figure(value, _interval(drawn) if len(steps) >= FEWEST_TEXTS else None), drawn


def _interval(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def _batch(
    batch_size: int,
    walked: Mapping[str, Sequence[Sequence[int]]],
    draws: np.ndarray,
    rounds: Sequence[Mapping[str, Any]],
    wholes: Sequence[Mapping[str, Any]],
) -> BatchReport:
    """One batch size, from its rounds and its runs over whole texts."""
    names = [name for name in rounds[0]["cells"] if all(name in one["cells"] for one in rounds)]
    ms = {
        name: np.array([one["cells"][name]["ms"] / one["cells"][name]["steps"] for one in rounds])
        for name in names
    }
    drawn_rounds = np.random.default_rng(1).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    has_interval = len(rounds) >= FEWEST_ROUNDS and draws.shape[1] >= FEWEST_TEXTS
    found, drawn = [], {}
    plain_ms = float(np.median(ms[PLAIN]))
    plain_per_s = 1e3 * batch_size / plain_ms
    for name in names:
        if name == PLAIN:
            continue
        length, lengths = _accept_length(walked[name], draws)
        against = np.log(ms[PLAIN] / ms[name])
        drawn[name] = lengths * np.exp(against[drawn_rounds].mean(1))
        value = length.value * math.exp(against.mean())
        speed = Figure(value, _interval(drawn[name]) if has_interval else None)
        step_ms = float(np.median(ms[name]))
        check = _check(walked[name], name, rounds)
        per_s = speed.value * plain_per_s
        found.append(TreeReport(name, length, step_ms, speed, per_s, False, check))
    found.sort(key=lambda one: -one.speed.value)
    best = drawn[found[0].tree]
    found[1:] = [
        dataclasses.replace(
            one,
            is_rival=not has_interval or bool(np.percentile(best - drawn[one.tree], 2.5) <= 0),
        )
        for one in found[1:]
    ]
    whole = _whole([one for one in wholes if one["tree"] == found[0].tree])
    return BatchReport(batch_size, len(rounds), plain_ms, plain_per_s, tuple(found), whole)


def _whole(wholes: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Tokens per second of the tree over plain decoding's, round by round."""
    if not wholes:
        return None

    def per_s(name: str) -> np.ndarray:
        return np.array([sum(o["cells"][name]["emitted"]) / o["cells"][name]["ms"] for o in wholes])

    against = np.log(per_s(wholes[0]["tree"]) / per_s(PLAIN))
    draws = np.random.default_rng(1).integers(len(against), size=(RESAMPLES, len(against)))
    drawn = np.exp(against[draws].mean(1))
    has_interval = len(wholes) >= FEWEST_ROUNDS
    return Figure(math.exp(against.mean()), _interval(drawn) if has_interval else None)


def _check(
    walked: Sequence[Sequence[int]], name: str, rounds: Sequence[Mapping[str, Any]]
) -> Check | None:
    """The timed steps of a tree against the walk, of the texts that went on beyond them."""
    real = walk = steps = 0
    for one in rounds:
        cell = one["cells"][name]
        for text, emitted in zip(one["texts"], cell["emitted"], strict=True):
            if len(walked[text]) > cell["steps"]:
                steps += cell["steps"]
                real += emitted
                walk += cell["steps"] + sum(walked[text][: cell["steps"]])
    return Check(real / steps, walk / steps) if steps else None
