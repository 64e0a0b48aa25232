"""A record against a target's own weights, layer by layer: each is given the record's own state.

So nothing compounds: a layer departs because of itself, and a fault in every layer is seen in every
layer. In lower precision than f32 a layer is judged by what these weights make of the same state in
that precision: both distances are from the layer in f32.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.aliases import PathLike, Progress
from jaxspec.errors import InputError
from jaxspec.isolation_findings import Isolation, Part, PartKind
from jaxspec.readings import Kind, Knobs, other_readings, run_layer
from jaxspec.record_comparison import NEAR_TIE, is_other_set, root_mean_square, row_errors
from jaxspec.record_file import RecordFile
from jaxspec.record_findings import CLEARLY, F32_TOLERANCE
from jaxspec.target import Target

__all__ = ["isolate_record"]

COARSE_TIE = 2e-2
"""The margin below which a router's choice may differ in lower precision than f32."""
SURE = 6.0
"""Standard errors from which what all rows together show is no chance."""


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
      coarse: the same weights in the record's dtype, bf16 for any below f32; not needed for f32.
      progress: called with "isolating", and how many of how many parts are done.

    Raises:
      InputError: the file is no record, or of a model of other sizes; `coarse` is missing.
    """
    record = RecordFile.open(Path(path))
    if record.dtype != "float32" and coarse is None:
        raise InputError(
            f"{path} is in {record.dtype}: it is judged by these weights in lower precision, too, "
            "and they were given in float32 alone"
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
        wanted["router"] = c.num_experts_per_tok
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
                if not part.is_near and kind not in tried:
                    tried.add(kind)
                    part = self._with_readings(part, before, after)
                elif self._coarse is not None and layer in (0, c.first_k_dense_replace):
                    part = self._with_faint(part, before, after)
            yield f"layer {layer}", part
            before = after
        yield "head", self._head(before)

    def _boundary(self, depth: int) -> np.ndarray | None:
        """The state [B,T,D] in f32, zero past each length; None where the record lacks it."""
        rows = self._rows_of("boundary", depth)
        if rows is None:
            return None
        state_BTD = np.zeros((*self._is_real_BT.shape, rows.shape[-1]), np.float32)
        state_BTD[self._is_real_BT] = rows
        return state_BTD

    def _rows_of(self, kind: str, number: int) -> np.ndarray | None:
        """The real rows of an array `kind.NNN`, however many digits it is written with."""
        for name in self._record.shapes:
            head, _, tail = name.rpartition(".")
            if head == kind and tail.isdigit() and int(tail) == number:
                return self._record.rows(name, self._is_real_BT)
        return None

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
            given.append(
                (self._coarse, jnp.asarray(last_BTD).astype(self._coarse.numerics.jnp_dtype))
            )
        ours, *own = (np.asarray(model.logits(x_BTD))[self._is_real_BT] for model, x_BTD in given)
        theirs = self._record.rows("logits", self._is_real_BT)
        return _part("head", "head", None, theirs, ours, own[0] if own else None)

    def _run(
        self, layer: int, x_BTD: np.ndarray, knobs: Knobs | None = None, *, is_coarse: bool = False
    ) -> "_Rows":
        split, x = self._split, jnp.asarray(x_BTD)
        if is_coarse:
            assert self._coarse is not None and self._coarse_split is not None
            split, x = self._coarse_split, x.astype(self._coarse.numerics.jnp_dtype)
        kind = self._kind(layer)
        index = layer - (self._config.first_k_dense_replace if kind == "sparse" else 0)
        y_BTD, routing = run_layer(*split, kind, x, jnp.int32(index), knobs)
        state_MD = np.asarray(y_BTD.astype(jnp.float32))[self._is_real_BT]
        if routing is None:
            return _Rows(state_MD, None)
        experts_MX, margin_M = (
            np.asarray(leaf)[self._is_real_BT] for leaf in (routing.expert, routing.margin)
        )
        return _Rows(state_MD, _Choice(experts_MX, margin_M))

    def _layer(self, layer: int, x_BTD: np.ndarray, y_BTD: np.ndarray) -> Part:
        ours, own = self._run(layer, x_BTD), None
        is_other_M, is_tie_M = self._other_experts(layer, ours)
        if self._coarse is not None:
            coarse = self._run(layer, x_BTD, is_coarse=True)
            is_tie_M = is_tie_M | ours.chooses_otherwise(coarse)
            own = coarse.states
        # Where ties reach every row, they are all there is to compare.
        is_kept_M = is_tie_M if is_tie_M.all() else ~is_tie_M
        rows = y_BTD[self._is_real_BT], ours.states
        theirs, expected = (state_MD[is_kept_M] for state_MD in rows)
        own = None if own is None else own[is_kept_M]
        part = dataclasses.replace(
            _part(f"layer {layer}", self._kind(layer), layer, theirs, expected, own),
            num_other=int(is_other_M.sum()),
            num_ties=int((~is_kept_M).sum()),
        )
        if part.is_near:
            return part
        experts = None if ours.choice is None else ours.choice.experts[is_kept_M]
        position_M = np.nonzero(self._is_real_BT)[1][is_kept_M]
        return dataclasses.replace(part, hint=_hint(part, theirs, expected, position_M, experts))

    def _other_experts(self, layer: int, rows: "_Rows") -> tuple[np.ndarray, np.ndarray]:
        """[M], where the record has other experts, and where a near-tie explains or may hide it."""
        nowhere = np.zeros(len(rows.states), bool)
        if rows.choice is None:
            return nowhere, nowhere
        is_near_M = rows.choice.margin < (NEAR_TIE if self._coarse is None else COARSE_TIE)
        chosen_MX = self._rows_of("router", layer)
        if chosen_MX is None:
            return nowhere, is_near_M if self._coarse is None else nowhere
        is_other_M = is_other_set(chosen_MX, rows.choice.experts)
        return is_other_M, is_other_M & is_near_M

    def _with_readings(self, part: Part, x_BTD: np.ndarray, y_BTD: np.ndarray) -> Part:
        """The part with the readings under which the record's state agrees."""
        assert part.layer is not None
        found, theirs = [], y_BTD[self._is_real_BT]
        for reading in other_readings(self._config, self._kind(part.layer)):
            rows = self._run(part.layer, x_BTD, reading.knobs)
            is_kept_M = ~self._other_experts(part.layer, rows)[1]
            if not is_kept_M.any():
                continue
            given = theirs[is_kept_M], rows.states[is_kept_M]
            read = _part(part.name, part.kind, part.layer, *given, None)
            if dataclasses.replace(read, own=part.own).is_near:
                found.append((read.rms, reading))
        found.sort(key=lambda one: one[0])
        readings = [reading for _, reading in found]
        return dataclasses.replace(
            part,
            readings=tuple(one.name for one in readings),
            blocks=tuple(one.block for one in readings),
        )

    def _with_faint(self, part: Part, x_BTD: np.ndarray, y_BTD: np.ndarray) -> Part:
        """The part with what all its rows together show of each reading.

        The record's distance from the same weights in its dtype, projected on the difference that
        the reading makes: rounding has no part in that direction, and averages out over the rows.
        """
        assert part.layer is not None
        ours, own = self._run(part.layer, x_BTD), self._run(part.layer, x_BTD, is_coarse=True)
        is_kept_M = ~(self._other_experts(part.layer, ours)[0] | ours.chooses_otherwise(own))
        size_M1 = np.linalg.norm(ours.states, axis=1, keepdims=True)
        size_M1 = np.maximum(size_M1, np.finfo(np.float32).tiny)
        away_MD = ((y_BTD[self._is_real_BT] - own.states) / size_M1)[is_kept_M]
        found = []
        for reading in other_readings(self._config, self._kind(part.layer)):
            read_MD = self._run(part.layer, x_BTD, reading.knobs).states
            share, error = _share_of(away_MD, ((read_MD - ours.states) / size_M1)[is_kept_M])
            if abs(share - 1) < 0.5 and share > SURE * error:
                found.append((share / error, reading, (reading.name, share, error)))
        found.sort(key=lambda one: -one[0])
        return dataclasses.replace(
            part,
            faint=tuple(one for *_, one in found),
            blocks=tuple(reading.block for _, reading, _ in found),
        )


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A router's experts [M,X], and by how much the last of them was chosen [M]."""

    experts: np.ndarray
    margin: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What a layer makes of the real positions, f32 [M,D]; a dense one chooses nothing."""

    states: np.ndarray
    choice: _Choice | None

    def chooses_otherwise(self, other: "_Rows") -> np.ndarray:
        """[M], where the two have other experts."""
        if self.choice is None or other.choice is None:
            return np.zeros(len(self.states), bool)
        return is_other_set(self.choice.experts, other.choice.experts)


def _share_of(away_MD: np.ndarray, difference_MD: np.ndarray) -> tuple[float, float]:
    """How much of a difference the rows show, by least squares, and the standard error of it."""
    of_row_M = np.square(difference_MD).sum(axis=1)
    total = max(float(of_row_M.sum()), float(np.finfo(np.float32).tiny))
    shown_M = (away_MD * difference_MD).sum(axis=1)
    share = float(shown_M.sum()) / total
    return share, float(np.linalg.norm(shown_M - share * of_row_M)) / total


def _part(
    name: str,
    kind: PartKind,
    layer: int | None,
    theirs: np.ndarray,
    ours: np.ndarray,
    own: np.ndarray | None,
) -> Part:
    """Distances of rows [M,.] from `ours`: the record's, and those of `own`, if given."""
    errors = row_errors(theirs, ours)
    known = None
    if own is not None:
        own_errors = row_errors(own, ours)
        known = root_mean_square(own_errors), float(own_errors.max())
    return Part(
        name, kind, layer, len(theirs), 0, 0, root_mean_square(errors), float(errors.max()), known
    )


def _hint(
    part: Part,
    theirs: np.ndarray,
    ours: np.ndarray,
    position_M: np.ndarray,
    experts_MX: np.ndarray | None,
) -> str | None:
    """What the far rows have in common: an expert, or others that they attend to."""
    errors = row_errors(theirs, ours)
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
