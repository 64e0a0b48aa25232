"""What a comparison of two records found, and where they part, in a sentence."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = [
    "CLEARLY",
    "F32_TOLERANCE",
    "KINDS",
    "ArrayComparison",
    "Kind",
    "LogitsComparison",
    "RecordComparison",
    "RouterComparison",
]

Kind = Literal["boundary", "features", "router", "logits", "draft"]
KINDS: tuple[Kind, ...] = get_args(Kind)
F32_TOLERANCE = 1e-5
"""Relative error of a row between two programs in f32."""
FAR = 0.5
"""Relative error of a row that no dtype's rounding explains: half of the row is another."""
CLEARLY = 1.5
"""With a reference, a side is flagged where its error exceeds the other's so many times."""


@dataclasses.dataclass(frozen=True)
class ArrayComparison:
    """One floating-point array, row by row.

    Attributes:
      depth: layers that the values went through.
      error: of all rows together, |a - b| / |b|; `middle` and `worst`, of single rows.
      worst_at: (sequence, position) of the worst row.
      cosine_difference: the worst row's largest 1 - cosine.
      largest: largest |a - b| of an element.
      tolerance: that `judged`, the worst or the middle row's error, must not exceed.
      reference_errors: root mean squares of the rows' errors of a and of b against the reference,
        if there is one; then that decides, and not the tolerance. A middle would hide a fault of
        one expert, which few rows meet; a norm over all rows is that of the few massive ones.
      own_tolerances: of a and of b, where their dtypes differ: the coarser one is further from a
        reference without being wrong, so that each is then judged by its own.
    """

    name: str
    depth: int
    num_rows: int
    error: float
    middle: float
    worst: float
    worst_at: tuple[int, int]
    cosine_difference: float
    largest: float
    tolerance: float
    judges: Literal["worst", "middle"]
    reference_errors: tuple[float, float] | None = None
    own_tolerances: tuple[float, float] | None = None

    @property
    def judged(self) -> float:
        """The error that is compared with the tolerance."""
        return self.worst if self.judges == "worst" else self.middle

    @property
    def is_far(self) -> bool:
        """Whether a row differs by more than rounding could make, though the middle one may not."""
        return self.worst > FAR

    @property
    def flagged(self) -> str | None:
        """Which side is further from the reference than the other could explain; None is neither.

        Without a reference: "both", where they differ by more than the tolerance, or a row by far.
        """
        if self.reference_errors is None:
            return None if self.judged <= self.tolerance and not self.is_far else "both"
        a, b = self.reference_errors
        if self.own_tolerances is not None:
            over = [error / own for error, own in zip((a, b), self.own_tolerances, strict=True)]
            return None if max(over) <= 1 else "ab"[over.index(max(over))]
        if max(a, b) <= F32_TOLERANCE or max(a, b) <= CLEARLY * min(a, b):
            return None
        return "a" if a > b else "b"

    @property
    def holds(self) -> bool:
        return self.flagged is None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "flagged": self.flagged, "holds": self.holds}


@dataclasses.dataclass(frozen=True)
class RouterComparison:
    """The experts of one layer.

    Attributes:
      num_rows, num_other: rows compared, and those in which the sets of experts differ.
      margin: the largest margin of a choice that differs; None where none does, or no margins
        were recorded.
      num_ties: of those that differ, how many had a margin below `NEAR_TIE`.
      is_exact: whether other choices than ties are a finding, as they are in f32.
    """

    name: str
    layer: int
    num_rows: int
    num_other: int
    margin: float | None
    num_ties: int
    is_exact: bool

    @property
    def holds(self) -> bool:
        return not self.is_exact or self.num_other == self.num_ties

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "holds": self.holds}


@dataclasses.dataclass(frozen=True)
class LogitsComparison:
    """What two sets of logits say of the next token.

    Attributes:
      top1: share of rows with the same best token.
      kl: mean divergence KL(b | a) in nats; None where only the best logits were recorded.
      rank: the worst rank, from 1, that a's logits give to b's best token; None if unknown.
    """

    name: str
    top1: float
    kl: float | None
    rank: int | None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class RecordComparison:
    """All that two records have in common.

    Attributes:
      num_left_out: rows of the deepest boundary that a near-tie of a router had reached.
      not_compared: why, by the name of the array.
      missing: what `require` named and was not compared, and arrays that both hold of which
        near-ties left no row.
    """

    a: Path
    b: Path
    reference: Path | None
    dtypes: tuple[str, str]
    num_tokens: int
    arrays: tuple[ArrayComparison, ...]
    routers: tuple[RouterComparison, ...]
    logits: tuple[LogitsComparison, ...]
    num_left_out: int
    not_compared: dict[str, str]
    missing: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was compared at all."""
        return not (self.arrays or self.routers or self.logits)

    @property
    def holds(self) -> bool:
        """Whether something was compared, all that was asked for, and nothing differs."""
        compared = (*self.arrays, *self.routers)
        return not self.is_empty and not self.missing and all(one.holds for one in compared)

    @property
    def boundaries(self) -> tuple[ArrayComparison, ...]:
        return tuple(one for one in self.arrays if one.name.startswith("boundary."))

    def finding(self) -> str:
        """Where the records part, in a sentence."""
        if self.is_empty:
            return "nothing was compared: the records have no array in common"
        where = self._parting()
        if where is None:
            is_all = not (self.not_compared or self.missing)
            where = "they agree" if is_all else "they agree in what was compared"
            if self.reference is None and any(one.judges == "middle" for one in self.arrays):
                where += " as far as middle rows tell: an f32 record as --reference judges all rows"
        if self.num_left_out:
            where += (
                f"; near-ties of routers reach {self.num_left_out} of {self.num_tokens} rows, "
                "which are left out in the layers after them"
            )
        for name in self.missing:
            why = self.not_compared.get(name, "not in both records")
            where += f"; {name} was not compared: {why}"
        others = [name for name in self.not_compared if name not in self.missing]
        if others:
            where += f"; not compared: {', '.join(others)}"
        return where

    def _parting(self) -> str | None:
        last = None
        for one in self.boundaries:
            if not one.holds:
                return f"{one.name} is the first to differ{_side(one)}; {self._between(last, one)}"
            last = one
        for router in self.routers:
            if not router.holds:
                return (
                    f"{router.name} chooses other experts in {router.num_other} of "
                    f"{router.num_rows} rows, by a margin of up to {_margin(router.margin)}, "
                    "though the states before it agree: its router"
                )
        causes = {
            "logits": "the final norm or the head",
            "features": "what is captured as features",
            "draft.logits": "the draft",
        }
        for one in self.arrays:
            if not one.holds:
                cause = causes.get(one.name.removesuffix(".top").split("[")[0], one.name)
                return f"{one.name} differ{_side(one)}, and no boundary before does: {cause}"
        return None

    def _between(self, last: ArrayComparison | None, first: ArrayComparison) -> str:
        """What lies between the last boundary that agrees and the first that does not."""
        if first.depth == 0:
            return "between the tokens and it lies the embedding"
        if last is None:
            return f"no boundary before it was compared: it is among layers 0 to {first.depth - 1}"
        of_layer = {router.layer: router for router in self.routers}
        parts = []
        for layer in range(last.depth, first.depth):
            router = of_layer.get(layer)
            if router is None:
                kind = "of a kind that no router tells" if not of_layer else "dense"
                parts.append(f"layer {layer} ({kind})")
            else:
                others = f"other experts in {router.num_other} of {router.num_rows} rows"
                if router.num_other:
                    others += f", by a margin of up to {_margin(router.margin)}"
                parts.append(f"layer {layer} (sparse, {others})")
        return f"between {last.name}, which agrees, and it lies {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "kind": "records",
            "a": str(self.a),
            "b": str(self.b),
            "reference": None if self.reference is None else str(self.reference),
            "dtypes": list(self.dtypes),
            "num_tokens": self.num_tokens,
            "num_left_out": self.num_left_out,
            "arrays": [one.to_dict() for one in self.arrays],
            "routers": [one.to_dict() for one in self.routers],
            "logits": [one.to_dict() for one in self.logits],
            "not_compared": self.not_compared,
            "missing": list(self.missing),
            "finding": self.finding(),
            "holds": self.holds,
        }


def _margin(margin: float | None) -> str:
    return "unknown size (no record holds the margins)" if margin is None else f"{margin:.1e}"


def _side(one: ArrayComparison) -> str:
    """Which record is at fault, where a reference tells."""
    if one.reference_errors is None and one.judged <= one.tolerance:
        return f" (error {one.worst:.1e} at {one.worst_at[0]}:{one.worst_at[1]}, beyond rounding)"
    if one.reference_errors is None:
        return f" (error {one.judged:.1e} of the {one.judges} row, tolerance {one.tolerance:.1e})"
    a, b = one.reference_errors
    return f" ({one.flagged} is at fault: a is {a:.1e} from the reference, b {b:.1e})"
