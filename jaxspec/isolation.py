"""A record against a target's own weights, layer by layer: each is given the record's own state.

So nothing compounds: a layer departs because of itself, and a fault in every layer is seen in every
layer. In lower precision than f32 a layer is judged by what these weights make of the same state in
that precision: both distances are from the layer in f32.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.aliases import PathLike, Progress
from jaxspec.errors import InputError
from jaxspec.readings import Kind, Knobs, other_readings, run_layer
from jaxspec.record_comparison import NEAR_TIE
from jaxspec.record_file import RecordFile
from jaxspec.record_findings import CLEARLY, F32_TOLERANCE
from jaxspec.target import Target

__all__ = ["Isolation", "Part", "isolate_record"]

FAR = 3.0
"""In lower precision, how much further than these weights' own worst row one may be."""
COARSE_TIE = 2e-2
"""The margin below which a router's choice may differ in lower precision than f32."""

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
      hint: what tells the rows that are far from the others, where no reading was found.
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

    @property
    def holds(self) -> bool:
        if self.own is None:
            return self.worst <= F32_TOLERANCE
        rms, worst = (max(one, F32_TOLERANCE) for one in self.own)
        return self.rms <= CLEARLY * rms and self.worst <= FAR * worst

    def finding(self) -> str:
        """What departs and how far, and what would explain it."""
        what = self.name if self.layer is None else f"{self.name} ({self.kind})"
        if self.own is None:
            text = f"{what}, by {self.worst:.1e} in the worst row, tolerance {F32_TOLERANCE:.0e}"
        else:
            text = f"{what}, rms {self.rms:.1e} where its own dtype explains {self.own[0]:.1e}"
        if self.readings:
            text += f"; the record is as with {self.readings[0]} ({self.blocks[0]})"
            if others := self.readings[1:]:
                text += f", or {', or '.join(others)}"
        elif self.hint is not None:
            text += f"; {self.hint}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "holds": self.holds}


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
            text += (
                f"{far[0].finding()}; it is the first of {len(far)} that depart from these weights"
            )
            other = next((one for one in far if one.readings[:1] != far[0].readings[:1]), None)
            if other is not None and (other.readings or other.kind != far[0].kind):
                text += f". Of another kind: {other.finding()}"
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


def isolate_record(
    path: PathLike,
    target: Target,
    coarse: Target | None = None,
    progress: Progress | None = None,
) -> Isolation:
    """The record's boundaries, each against what the layer makes of the one before it.

    Of the first layer of each kind that departs, known mistakes are tried (`readings.py`): those
    under which the record agrees name the fault.

    Args:
      target: in f32, on one device.
      coarse: the same weights in the record's dtype; needed unless that is f32.
      progress: called with "isolating", and how many of how many parts are done.

    Raises:
      InputError: the file is no record, or of a model of other sizes; `coarse` is missing.
    """
    record = RecordFile.open(Path(path))
    if record.dtype != "float32" and coarse is None:
        raise InputError(
            f"{path} is in {record.dtype}: it is judged by these weights in that dtype, and they "
            "were given in float32 alone"
        )
    comparison = _Comparison(record, target, None if record.dtype == "float32" else coarse)
    total = target.config.num_hidden_layers + 2
    parts, missing = [], []
    for name, part in comparison.parts():
        parts += [] if part is None else [part]
        missing += [name] if part is None else []
        if progress is not None:
            progress("isolating", len(parts) + len(missing), total)
    return Isolation(record.path, target.identity, record.dtype, tuple(parts), tuple(missing))


class _Comparison:
    """A record, and the models that each part is run in."""

    def __init__(self, record: RecordFile, target: Target, coarse: Target | None) -> None:
        self._record, self._target = record, target
        self._config = c = target.config
        slots = np.arange(record.tokens.shape[1])
        self._is_real_BT = slots < record.lengths[:, None]
        self._split = nnx.split(target)
        self._coarse, self._coarse_split = coarse, None if coarse is None else nnx.split(coarse)
        ids = record.tokens[self._is_real_BT]
        if ids.max() >= c.vocab_size or ids.min() < 0:
            raise InputError(
                f"{record.path}: tokens up to {ids.max()}, and {target.identity} has ids 0 to "
                f"{c.vocab_size - 1}: a record of another model"
            )
        wanted = {"boundary": c.hidden_size, "logits": c.vocab_size}
        for name, shape in record.shapes.items():
            size = wanted.get(name.split(".")[0])
            if size is not None and ".top" not in name and shape[2] != size:
                raise InputError(
                    f"{record.path}: {name} is {shape[2]} wide and {target.identity} {size}: a "
                    "record of another model"
                )

    def parts(self) -> Iterator[tuple[str, Part | None]]:
        """Every part by its name, None where the record lacks a side of it."""
        c, tried = self._config, set()
        first = self._boundary(0)
        yield "embedding", None if first is None else self._embedding(first)
        before = first
        for layer in range(c.num_hidden_layers):
            after = self._boundary(layer + 1)
            part = None
            if before is not None and after is not None:
                part, kind = self._layer(layer, before, after), self._kind(layer)
                if not part.holds and kind not in tried:
                    tried.add(kind)
                    part = self._with_readings(part, before, after)
            yield f"layer {layer}", part
            before = after
        yield "head", self._head(before)

    def _boundary(self, depth: int) -> np.ndarray | None:
        """The state [B,T,D] in f32, zero past each length; None where the record lacks it."""
        names = [n for n in self._record.shapes if n.startswith("boundary.")]
        name = next((n for n in names if int(n.split(".")[1]) == depth), None)
        if name is None:
            return None
        rows = self._record.rows(name, self._is_real_BT)
        state_BTD = np.zeros((*self._is_real_BT.shape, rows.shape[-1]), np.float32)
        state_BTD[self._is_real_BT] = rows
        return state_BTD

    def _kind(self, layer: int) -> Kind:
        return "dense" if layer < self._config.first_k_dense_replace else "sparse"

    def _embedding(self, first_BTD: np.ndarray) -> Part:
        ours = np.asarray(self._target.embed[...])[self._record.tokens[self._is_real_BT]]
        own = None
        if self._coarse is not None:
            own = np.asarray(self._coarse.embed[...]).astype(np.float32)
            own = own[self._record.tokens[self._is_real_BT]]
        return _part("embedding", "embedding", None, first_BTD[self._is_real_BT], ours, own)

    def _head(self, last_BTD: np.ndarray | None) -> Part | None:
        if last_BTD is None or "logits" not in self._record.shapes:
            return None
        given = [(self._target, jnp.asarray(last_BTD))]
        if self._coarse is not None:
            given.append((self._coarse, jnp.asarray(last_BTD).astype(self._record.dtype)))
        ours, *own = (np.asarray(model.logits(x_BTD))[self._is_real_BT] for model, x_BTD in given)
        theirs = self._record.rows("logits", self._is_real_BT)
        return _part("head", "head", None, theirs, ours, own[0] if own else None)

    def _run(
        self, layer: int, x_BTD: np.ndarray, knobs: Knobs | None = None, *, is_coarse: bool = False
    ) -> tuple[np.ndarray, Any]:
        """The layer's output rows [M,D] in f32, and its routing as rows."""
        split, x = self._split, jnp.asarray(x_BTD)
        if is_coarse:
            assert self._coarse is not None and self._coarse_split is not None
            split, x = self._coarse_split, x.astype(self._coarse.numerics.jnp_dtype)
        kind = self._kind(layer)
        index = layer - (self._config.first_k_dense_replace if kind == "sparse" else 0)
        y_BTD, routing = run_layer(*split, kind, x, jnp.int32(index), knobs)
        rows = jax.tree.map(lambda leaf: np.asarray(leaf)[self._is_real_BT], routing)
        return np.asarray(y_BTD.astype(jnp.float32))[self._is_real_BT], rows

    def _layer(self, layer: int, x_BTD: np.ndarray, y_BTD: np.ndarray) -> Part:
        ours, routing = self._run(layer, x_BTD)
        theirs, own = y_BTD[self._is_real_BT], None
        is_other_M = is_tie_M = np.zeros(len(theirs), bool)
        if routing is not None:
            is_other_M, is_tie_M = self._other_experts(layer, routing)
        is_kept_M = ~is_tie_M
        if self._coarse is not None:
            own, own_routing = self._run(layer, x_BTD, is_coarse=True)
            if own_routing is not None:
                is_kept_M &= _is_same_set(routing.expert, own_routing.expert)
        if not is_kept_M.any():  # nothing is left that ties do not reach
            is_kept_M = np.ones_like(is_kept_M)
        kept = [None if rows is None else rows[is_kept_M] for rows in (theirs, ours, own)]
        part = _part(f"layer {layer}", self._kind(layer), layer, *kept)
        part = dataclasses.replace(
            part, num_other=int(is_other_M.sum()), num_ties=int((~is_kept_M).sum())
        )
        if part.holds:
            return part
        experts = None if routing is None else routing.expert[is_kept_M]
        position_M = np.nonzero(self._is_real_BT)[1][is_kept_M]
        return dataclasses.replace(part, hint=_hint(part, *kept[:2], position_M, experts))

    def _other_experts(self, layer: int, routing: Any) -> tuple[np.ndarray, np.ndarray]:
        """[M], where the record has other experts, and where a near-tie explains or may hide it."""
        is_near_M = routing.margin < (NEAR_TIE if self._coarse is None else COARSE_TIE)
        name = f"router.{layer:03d}"
        if name not in self._record.shapes:
            unknown = np.zeros(len(is_near_M), bool)
            return unknown, is_near_M if self._coarse is None else unknown
        chosen = self._record.rows(name, self._is_real_BT)
        is_other_M = ~_is_same_set(chosen, routing.expert)
        return is_other_M, is_other_M & is_near_M

    def _with_readings(self, part: Part, x_BTD: np.ndarray, y_BTD: np.ndarray) -> Part:
        """The part with the readings under which the record's state agrees."""
        assert part.layer is not None
        found, theirs = [], y_BTD[self._is_real_BT]
        for reading in other_readings(self._config, self._kind(part.layer)):
            ours, routing = self._run(part.layer, x_BTD, reading.knobs)
            is_kept_M = np.ones(len(theirs), bool)
            if routing is not None:
                is_kept_M = ~self._other_experts(part.layer, routing)[1]
            if not is_kept_M.any():
                continue
            read = _part(part.name, part.kind, part.layer, theirs[is_kept_M], ours[is_kept_M], None)
            if dataclasses.replace(read, own=part.own).holds:
                found.append((read.rms, reading))
        found.sort(key=lambda one: one[0])
        readings = [reading for _, reading in found]
        return dataclasses.replace(
            part,
            readings=tuple(one.name for one in readings),
            blocks=tuple(str(one.block) for one in readings),
        )


def _part(
    name: str,
    kind: PartKind,
    layer: int | None,
    theirs: np.ndarray,
    ours: np.ndarray,
    own: np.ndarray | None,
) -> Part:
    """Distances of rows [M,.] from `ours`: the record's, and those of `own`, if given."""
    errors = _row_errors(theirs, ours)
    known = None
    if own is not None:
        own_errors = _row_errors(own, ours)
        known = _rms(own_errors), float(own_errors.max())
    return Part(name, kind, layer, len(theirs), 0, 0, _rms(errors), float(errors.max()), known)


def _row_errors(rows: np.ndarray, ours: np.ndarray) -> np.ndarray:
    away, size = np.linalg.norm(rows - ours, axis=1), np.linalg.norm(ours, axis=1)
    return away / np.maximum(size, np.finfo(np.float32).tiny)


def _rms(errors: np.ndarray) -> float:
    return float(np.sqrt(np.square(errors).mean()))


def _is_same_set(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (np.sort(one, axis=-1) == np.sort(other, axis=-1)).all(axis=-1)


def _hint(
    part: Part,
    theirs: np.ndarray,
    ours: np.ndarray,
    position_M: np.ndarray,
    experts_MX: np.ndarray | None,
) -> str | None:
    """What the far rows have in common: an expert, or others that they attend to."""
    errors = _row_errors(theirs, ours)
    is_far_M = errors > (F32_TOLERANCE if part.own is None else CLEARLY * part.own[1])
    if not is_far_M.any() or is_far_M.all():
        return None
    if experts_MX is not None:
        of_expert = {int(e): (experts_MX == e).any(-1) for e in np.unique(experts_MX[is_far_M])}
        hits = {e: of_M for e, of_M in of_expert.items() if of_M[is_far_M].all()}
        if hits:
            expert, of_M = min(hits.items(), key=lambda item: item[1].sum())
            return (
                f"the {int(is_far_M.sum())} rows that are far all chose expert {expert}, as "
                f"{int(of_M.sum())} rows do: that expert's weights"
            )
    if not is_far_M[position_M == 0].any() and is_far_M[position_M > 0].all():
        return "first positions agree, which attend to themselves alone: attention's scores"
    return None
