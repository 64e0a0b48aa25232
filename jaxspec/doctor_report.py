"""What the doctor found: figures of each reading, the verdicts, and the finding in a sentence."""

import dataclasses
from typing import Any, Literal

__all__ = [
    "LEAST",
    "DoctorReport",
    "Figures",
    "Observed",
    "ReadingReport",
    "TreeFigures",
    "Verdict",
]

Verdict = Literal["better", "indistinguishable", "worse"]
LEAST_LENGTH = 0.01
"""Tokens per step that near-ties of rounding may make between two engines."""
LEAST = 0.002
"""Nats per token below which a difference is none, however sure: as bf16 makes one of f32."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of a draft on some texts, teacher-forced.

    Attributes:
      score: expected log-probability, nats, of the target's own token; a hundredth of the draft's
        mass is spread over the vocabulary first. Of all depths together.
      top1, topk: how often the target's likeliest token is the first guess, or among the first k;
        by depth.
      accept_length: tokens per step, bonus included, of a chain that goes along what the target
        wrote, or along the prompts where it wrote nothing.
    """

    score: float
    top1: tuple[float, ...]
    topk: tuple[float, ...]
    accept_length: float


@dataclasses.dataclass(frozen=True)
class ReadingReport:
    """One reading against the declared one.

    Attributes:
      fault, change: what is wrong with the declared one if this one is right, and what to change.
      gain: in score over the declared one, nats per token; `interval`, over texts, 95 % for all
        readings together.
    """

    family: str
    name: str
    fault: str
    change: str
    gain: float
    interval: tuple[float, float]
    figures: Figures

    @property
    def verdict(self) -> Verdict:
        """Better or worse only where the whole interval is so, and more than nothing is gained."""
        low, high = self.interval
        if low > 0 and self.gain > LEAST:
            return "better"
        return "worse" if high < 0 and self.gain < -LEAST else "indistinguishable"

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "verdict": self.verdict}


@dataclasses.dataclass(frozen=True)
class Observed:
    """What another engine's steps gave, and what these weights give on the very tokens it emitted.

    Attributes:
      accept_length: the engine's; `replayed` of the draft as declared, `ceiling` of a draft that
        knew the target. All are tokens from steps per step.
      interval: of replayed - accept_length, 95 % over requests; None of too few requests.
    """

    engine: str
    num_requests: int
    accept_length: float
    replayed: float
    ceiling: float
    interval: tuple[float, float] | None

    @property
    def blames(self) -> Literal["engine", "draft"] | None:
        """The engine where these weights clearly give more, or less, than it got; None: unknown."""
        if self.interval is None:
            return None
        low, high = self.interval
        return "engine" if low > LEAST_LENGTH or high < -LEAST_LENGTH else "draft"

    def finding(self) -> str:
        """Who is at fault, in a sentence."""
        said = (
            f"{self.engine} got {self.accept_length:.2f}; these weights on these tokens give "
            f"{self.replayed:.2f}"
        )
        if self.interval is None:
            return f"{said}: {self.num_requests} requests are too few to say who is at fault"
        low, high = self.interval
        said += f" +- {(high - low) / 2:.2f}, of at best {self.ceiling:.2f}"
        if self.blames == "draft":
            return f"{said}: the engine does what they say, so what is missing is the draft's"
        if high < 0:
            return f"{said}: less than the engine got, which served other weights or another draft"
        return f"{said}: the engine is at fault"


@dataclasses.dataclass(frozen=True)
class TreeFigures:
    """Tokens per step, bonus included, of a tree along the texts.

    Attributes:
      tree: as in "3x4x16".
      accept_length: with the draft as its checkpoint states it.
      ceiling: of the same tree grown from the target's own probabilities, at temperature 1.
    """

    tree: str
    accept_length: float
    ceiling: float


@dataclasses.dataclass(frozen=True)
class DoctorReport:
    """A draft as declared, and under other readings.

    Attributes:
      claim: the boundaries that its checkpoint states, and where.
      num_rows: tokens after which it guessed, the same ones under all readings.
      looping: ids of the texts that were left out because they repeat themselves.
      ceiling: the figures of a draft that knew the target's own probabilities.
      readings: the best first.
      rivals: those that beat the declared one too, and cannot be told from the best.
      machine, command: where and how this was measured.
      observed: another engine's run against these weights; None where none was given.
      of_tree: figures of a tree that was asked for; None where only the chain was.
    """

    target: str
    draft: str
    claim: str
    dtype: str
    levels: int
    top: int
    num_texts: int
    num_rows: int
    looping: tuple[str, ...]
    declared: Figures
    ceiling: Figures
    readings: tuple[ReadingReport, ...]
    rivals: tuple[str, ...]
    machine: str
    command: str
    observed: Observed | None = None
    of_tree: TreeFigures | None = None

    @property
    def best(self) -> ReadingReport | None:
        """The reading that explains the target better than the declared one; None for none."""
        return next((one for one in self.readings if one.verdict == "better"), None)

    @property
    def is_as_declared(self) -> bool:
        return self.best is None

    @property
    def holds(self) -> bool:
        """Whether nothing was found to change, in the draft or in the engine that was observed."""
        blames = None if self.observed is None else self.observed.blames
        return self.is_as_declared and blames != "engine"

    def finding(self) -> str:
        """The most likely fault and what to change."""
        who = "" if self.observed is None else f"{self.observed.finding()}. "
        return who + self._of_the_draft()

    def _of_the_draft(self) -> str:
        best, now = self.best, self.declared
        share = f"top-1 {now.top1[0]:.1%}, accept_length {_of(now, self.ceiling)}"
        if (tree := self.of_tree) is not None:
            share += (
                f", of the tree {tree.tree} {tree.accept_length:.2f} of at best {tree.ceiling:.2f}"
            )
        if best is None:
            return (
                f"as declared: none of {len(self.readings)} other readings explains the target "
                f"better. {share}"
            )
        others = ", or ".join(self.rivals)
        or_else = (
            f" (or {others}: these texts cannot tell; longer or more ones may)" if others else ""
        )
        return (
            f"not as declared: {best.fault}; {best.name} is what it fits best{or_else}. Change "
            f"{best.change}. {share}; so read {best.figures.top1[0]:.1%} and "
            f"{best.figures.accept_length:.2f}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            **dataclasses.asdict(self),
            "readings": [one.to_dict() for one in self.readings],
            "best": None if self.best is None else self.best.name,
            "is_as_declared": self.is_as_declared,
            "observed": None
            if self.observed is None
            else {**dataclasses.asdict(self.observed), "blames": self.observed.blames},
            "holds": self.holds,
            "finding": self.finding(),
            "kind": "measured",
        }


def _of(figures: Figures, ceiling: Figures) -> str:
    return f"{figures.accept_length:.2f} of at best {ceiling.accept_length:.2f} on this text"
