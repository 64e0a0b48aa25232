"""What a record is against a target's weights, part by part, and what departs, in a sentence."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from jaxspec.record_findings import CLEARLY, F32_TOLERANCE

__all__ = ["Isolation", "Part", "PartKind"]

FAR = 3.0
"""In lower precision, how much further than these weights' own worst row one may be."""

PartKind = Literal["embedding", "dense", "sparse", "head"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One layer, the embedding or the head (with the final norm before it).

    Attributes:
      layer: its index; None of embedding and head.
      num_rows: compared; left out are `num_ties` in which other experts were chosen by a margin
        that rounding explains.
      num_other: rows in which the record has other experts than its own state leads to.
      rms, worst: |record - f32| / |f32| of the rows.
      own: of the same weights in the record's dtype, (rms, worst); None for a record in f32.
      readings: under which the record agrees, the nearest one first: the fault's likely names.
      blocks: where in the layer each of `readings`, or of `faint`, is.
      hint: what tells the rows that are far from the others, where no reading was found.
      faint: readings that no row betrays and all rows together do, and how much of the difference
        that each makes the record shows, with its standard error; the clearest first.
    """

    name: str
    kind: PartKind
    layer: int | None
    num_rows: int
    num_other: int
    num_ties: int
    rms: float
    worst: float
    own: tuple[float, float] | None
    readings: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    hint: str | None = None
    faint: tuple[tuple[str, float, float], ...] = ()

    @property
    def is_near(self) -> bool:
        """Whether its rows, and in f32 its experts, are as far as rounding takes them."""
        if self.own is None:
            return self.worst <= F32_TOLERANCE and self.num_other <= self.num_ties
        rms, worst = (max(one, F32_TOLERANCE) for one in self.own)
        return self.rms <= CLEARLY * rms and self.worst <= FAR * worst

    @property
    def holds(self) -> bool:
        return self.is_near and not self.faint

    def finding(self) -> str:
        """What departs and how far, and what would explain it."""
        what = self.name if self.layer is None else f"{self.name} ({self.kind})"
        if self.faint:
            name, share, error = self.faint[0]
            text = (
                f"{what} departs, fainter than rounding in each row: all together show "
                f"{share:.2f} +- {error:.2f} of what {name} does ({self.blocks[0]})"
            )
            if others := [other for other, *_ in self.faint[1:]]:
                text += f", or {', or '.join(others)}"
            return text
        if self.own is None:
            tolerance = f"tolerance {F32_TOLERANCE:.0e}"
            text = f"{what} departs, by {self.worst:.1e} in the worst row, {tolerance}"
            if self.num_other > self.num_ties:
                others = self.num_other - self.num_ties
                text += f", and has other experts in {others} of {self.num_rows} rows"
        else:
            text = f"{what} departs, rms {self.rms:.1e} where its dtype explains {self.own[0]:.1e}"
        if self.readings:
            text += f"; the record is as with {self.readings[0]} ({self.blocks[0]})"
            if others := self.readings[1:]:
                text += f", or {', or '.join(others)}"
        elif self.hint is not None:
            text += f"; {self.hint}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_near": self.is_near, "holds": self.holds}


@dataclasses.dataclass(frozen=True)
class Isolation:
    """Every part of a target that a record shows both sides of.

    Attributes:
      not_compared: parts of which a side is missing.
    """

    record: Path
    target: str
    dtype: str
    parts: tuple[Part, ...]
    not_compared: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether something was compared and nothing departs."""
        return bool(self.parts) and all(part.holds for part in self.parts)

    def finding(self) -> str:
        """The first parts that depart, in a sentence."""
        if not self.parts:
            return f"{self.record}: nothing was compared: no two boundaries that follow each other"
        far = [part for part in self.parts if not part.holds]
        text = f"{self.record}: "
        if not far:
            text += f"all of {len(self.parts)} parts are as these weights have them"
        else:
            rest = f"{len(far) - 1} later parts depart too" if far[1:] else "no other does"
            text += f"{far[0].finding()}; {rest}"
            other = next((x for x in far if x.readings[:1] not in ((), far[0].readings[:1])), None)
            if other is not None:
                text += f". Another kind of layer: {other.finding()}"
        if self.not_compared:
            text += f"; not compared: {', '.join(self.not_compared)}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "kind": "isolation",
            "record": str(self.record),
            "target": self.target,
            "dtype": self.dtype,
            "parts": [part.to_dict() for part in self.parts],
            "not_compared": list(self.not_compared),
            "finding": self.finding(),
            "holds": self.holds,
        }
