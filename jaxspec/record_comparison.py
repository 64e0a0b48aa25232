"""Two records of the same tokens, array by array: are they the same thing, and where do they part?

A row is one position of one sequence. Its error is |a - b| / |b|, in norms over the row. Two
programs in f32 agree row by row, but where a router's choice is nearly a tie they may choose other
experts; what such a choice reaches is left out, and counted. In bf16 choices differ everywhere and
errors grow with depth, so there the middle row is judged.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.aliases import PathLike
from jaxspec.errors import InputError
from jaxspec.record_file import RANKS, RecordFile, claimed_boundaries
from jaxspec.record_findings import (
    F32_TOLERANCE,
    ArrayComparison,
    Kind,
    LogitsComparison,
    RecordComparison,
    RouterComparison,
)

__all__ = ["compare_records", "is_other_set", "root_mean_square", "row_errors"]

NEAR_TIE = 1e-4
"""A router's margin below which two f32 programs may choose differently."""
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Largest relative error of rounding to a dtype."""
ROUNDINGS_PER_LAYER = 8
LOG_PROBABILITIES = "log-probabilities"
"""A record's metadata say under `logits` that `logits.top` are these: what engines give."""
SMALLEST = 1e-30
"""In place of the norm of a row of zeros, which another must meet exactly."""


def compare_records(
    a: PathLike,
    b: PathLike,
    reference: PathLike | None = None,
    require: Sequence[Kind] = (),
    *,
    aligns: bool = False,
) -> RecordComparison:
    """The comparison of all arrays that both records hold.

    Args:
      reference: a record of the same tokens in f32. Each side is then judged by its distance from
        it: in bf16 two right programs differ, but neither is much further away than the other.
      require: kinds of arrays that must have been compared.
      aligns: compare the tokens that both begin with, sequence by sequence, where they differ.

    Raises:
      InputError: a file is no record; the records are of other tokens or of models of other sizes.
    """
    one, other = RecordFile.open(Path(a)), RecordFile.open(Path(b))
    third = None if reference is None else RecordFile.open(Path(reference))
    if third is not None and third.dtype != "float32":
        raise InputError(f"{reference}: a reference is in float32, and this is {third.dtype}")
    records = [one, other] if third is None else [one, other, third]
    is_kept_BT = _common_tokens(records, aligns)
    is_exact = one.dtype == other.dtype == "float32"
    shared, not_compared = _shared(records)

    routers, reached_at = _routers(one, other, shared, is_kept_BT, is_exact)
    arrays, logits, out_of_reach = [], [], []
    deepest = max([_depth(name) for name in shared if name.startswith("boundary.")], default=0)
    deepest = max([deepest, *(router.layer + 1 for router in routers)])

    def rows_at(depth: int) -> np.ndarray:
        """The positions that no differing near-tie of a layer above `depth` reaches."""
        is_left = is_kept_BT.copy()
        for layer, is_reached_BT in reached_at:
            if layer < depth:
                is_left &= ~is_reached_BT
        return is_left

    for name in sorted(shared, key=_order):
        if name.startswith(("router", "logits.top_ids")):
            continue
        depth = _depth(name) if name.startswith("boundary.") else deepest
        is_row_BT = rows_at(depth)
        if not is_row_BT.any():
            not_compared[name] = "a near-tie of a router reaches every row"
            out_of_reach.append(name)
            continue
        given = [record.rows(name, is_row_BT) for record in records]
        if name == "logits.top":
            given, top = _on_common_ids(records, given, is_row_BT)
            logits.append(top)
        elif name in ("logits", "draft.logits"):
            logits.append(_logits(name, given[0], given[1]))
        parts = {name: given}
        if name == "features":
            parts = _chunks(records, given)
        for part, values in parts.items():
            if min(x.shape[-1] for x in values):
                dtypes = one.dtype, other.dtype
                arrays.append(_array(part, depth, values, is_row_BT, dtypes))
    compared = {_kind(x.name) for x in (*arrays, *routers, *logits)}
    return RecordComparison(
        one.path,
        other.path,
        None if third is None else third.path,
        (one.dtype, other.dtype),
        int(is_kept_BT.sum()),
        tuple(arrays),
        tuple(routers),
        tuple(logits),
        int((is_kept_BT & ~rows_at(deepest)).sum()),
        not_compared,
        (*out_of_reach, *(kind for kind in require if kind not in compared)),
    )


def _common_tokens(records: Sequence[RecordFile], aligns: bool) -> np.ndarray:
    """[B,T], the positions where all records have the same tokens, and had them before."""
    batch = min(len(record.tokens) for record in records)
    slots = min(record.tokens.shape[1] for record in records)
    first = records[0]
    is_kept_BT = np.ones((batch, slots), bool)
    for record in records:
        is_kept_BT &= np.arange(slots) < record.lengths[:batch, None]
        is_same_BT = record.tokens[:batch, :slots] == first.tokens[:batch, :slots]
        is_kept_BT &= np.logical_and.accumulate(is_same_BT, axis=1)
    if not aligns:
        for record in records[1:]:
            _check_tokens(first, record)
    if not is_kept_BT.any():
        raise InputError(
            f"{' and '.join(str(record.path) for record in records)}: not one token in common"
        )
    return is_kept_BT


def _check_tokens(one: RecordFile, other: RecordFile) -> None:
    """Raises an InputError that says where two records have other tokens."""
    what = f"{one.path} and {other.path} are of other tokens"
    lengths = one.lengths.tolist(), other.lengths.tolist()
    if lengths[0] != lengths[1]:
        raise InputError(
            f"{what}: lengths {lengths[0]} and {lengths[1]}; --align compares what both begin with"
        )
    slots = max(lengths[0])
    is_other_BT = one.tokens[:, :slots] != other.tokens[:, :slots]
    is_other_BT &= np.arange(slots) < one.lengths[:, None]
    if is_other_BT.any():
        b, t = (int(index[0]) for index in np.nonzero(is_other_BT))
        raise InputError(
            f"{what}: in sequence {b} at position {t} {one.tokens[b, t]} and {other.tokens[b, t]}; "
            "--align compares what both begin with"
        )


def _shared(records: Sequence[RecordFile]) -> tuple[set[str], dict[str, str]]:
    """The arrays to compare, and why the others are not.

    Raises:
      InputError: an array that all have is of other sizes, so the models are others.
    """
    shared, not_compared = set(), {}
    for name in sorted({name for record in records for name in record.shapes}):
        if name in ("tokens", "lengths"):
            continue
        if not any(re.fullmatch(form, name) for form in RANKS):
            not_compared[name] = "no name of the format"
            continue
        lacking = [str(record.path) for record in records if name not in record.shapes]
        if lacking:
            not_compared[name] = f"not in {' nor in '.join(lacking)}"
            continue
        if name not in ("logits.top", "logits.top_ids"):
            sizes = {record.shapes[name][2:] for record in records}
            if len(sizes) > 1:
                raise InputError(
                    "records of other models: "
                    + ", ".join(f"{r.path} has {name} {list(r.shapes[name])}" for r in records)
                )
        shared.add(name)
    for one, other in (("logits.top", "logits.top_ids"), ("logits.top_ids", "logits.top")):
        if one in shared and other not in shared:
            shared.remove(one)
            not_compared[one] = f"without {other} it says nothing"
    return shared, not_compared


def _routers(
    one: RecordFile, other: RecordFile, shared: set[str], is_kept_BT: np.ndarray, is_exact: bool
) -> tuple[list[RouterComparison], list[tuple[int, np.ndarray]]]:
    """Layer by layer, and which positions [B,T] each layer's differing near-ties reach.

    A choice that differs reaches its own position and, through attention, the later ones. Choices
    that differ because an earlier one did are not counted again.
    """
    routers, reached_at = [], []
    is_clean_BT = is_kept_BT.copy()
    for name in sorted((name for name in shared if name.startswith("router.")), key=_depth):
        layer = _depth(name)
        is_other = is_other_set(*(record.rows(name, is_clean_BT) for record in (one, other)))
        margin = _margins(one, other, name, is_clean_BT)
        is_tie = is_other & (margin < NEAR_TIE)
        largest = float(margin[is_other].max()) if is_other.any() else None
        routers.append(
            RouterComparison(
                name,
                layer,
                len(is_other),
                int(is_other.sum()),
                None if largest is not None and np.isnan(largest) else largest,
                int(is_tie.sum()),
                is_exact,
            )
        )
        if is_exact and is_tie.any():
            is_reached_BT = np.zeros_like(is_clean_BT)
            is_reached_BT[is_clean_BT] = is_tie
            is_reached_BT = np.logical_or.accumulate(is_reached_BT, axis=1)
            reached_at.append((layer, is_reached_BT))
            is_clean_BT = is_clean_BT & ~is_reached_BT
    return routers, reached_at


def _margins(one: RecordFile, other: RecordFile, name: str, is_kept_BT: np.ndarray) -> np.ndarray:
    """Of the kept rows, the smaller of the recorded margins; NaN where neither file has them."""
    name = name.replace("router", "router_margin")
    found = [record.rows(name, is_kept_BT) for record in (one, other) if name in record.shapes]
    return np.minimum.reduce(found) if found else np.full(int(is_kept_BT.sum()), np.nan)


def _array(
    name: str,
    depth: int,
    given: Sequence[np.ndarray],
    is_row_BT: np.ndarray,
    dtypes: tuple[str, str],
) -> ArrayComparison:
    a, b = given[0], given[1]
    own = [_tolerance(dtype, depth) for dtype in dtypes]
    errors = row_errors(a, b)
    worst = int(errors.argmax())
    at = tuple(int(index[worst]) for index in np.nonzero(is_row_BT))
    reference_errors = None
    if len(given) == 3:
        of_a, of_b = (row_errors(x, given[2]) for x in (a, b))
        reference_errors = root_mean_square(of_a), root_mean_square(of_b)
    return ArrayComparison(
        name,
        depth,
        len(a),
        _ratio(np.linalg.norm(a - b), np.linalg.norm(b)),
        float(np.median(errors)),
        float(errors[worst]),
        (at[0], at[1]),
        float(_cosine_differences(a, b).max()),
        float(np.abs(a - b).max()),
        max(own),
        "worst" if max(own) == F32_TOLERANCE else "middle",
        reference_errors,
        None if dtypes[0] == dtypes[1] else (own[0], own[1]),
    )


def row_errors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b| / |b| of each row."""
    away, size = np.linalg.norm(a - b, axis=1), np.linalg.norm(b, axis=1)
    return away.astype(np.float64) / np.maximum(size.astype(np.float64), SMALLEST)


def root_mean_square(errors: np.ndarray) -> float:
    """Of the rows' errors."""
    return float(np.sqrt(np.square(errors).mean()))


def is_other_set(one_MX: np.ndarray, other_MX: np.ndarray) -> np.ndarray:
    """[M], whether two choices are of other experts, whatever their order."""
    return (np.sort(one_MX, axis=-1) != np.sort(other_MX, axis=-1)).any(axis=-1)


def _ratio(away: float, size: float) -> float:
    return float(away) / max(float(size), SMALLEST)


def _cosine_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """1 - cosine of each pair of rows, from the distance of the unit rows: exact where small."""
    size = np.linalg.norm(a, axis=1, keepdims=True), np.linalg.norm(b, axis=1, keepdims=True)
    tiny = np.finfo(np.float32).tiny
    unit_a, unit_b = (x / np.maximum(n, tiny) for x, n in zip((a, b), size, strict=True))
    return 0.5 * np.square(unit_a - unit_b).sum(axis=1)


def _logits(name: str, a: np.ndarray, b: np.ndarray) -> LogitsComparison:
    best_a, best_b = a.argmax(axis=1), b.argmax(axis=1)
    p_a, p_b = (_log_softmax(x.astype(np.float64)) for x in (a, b))
    of_b = np.take_along_axis(a, best_b[:, None], axis=1)
    return LogitsComparison(
        name,
        float((best_a == best_b).mean()),
        float((np.exp(p_b) * (p_b - p_a)).sum(axis=1).mean()),
        int((a > of_b).sum(axis=1).max()) + 1,
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def _on_common_ids(
    records: Sequence[RecordFile], given: Sequence[np.ndarray], is_row_BT: np.ndarray
) -> tuple[list[np.ndarray], LogitsComparison]:
    """Of each row's best logits, those whose ids all records have, zero elsewhere.

    A row without such an id is a's alone: as far from b as can be. Where a side holds
    log-probabilities, logits less a number that is the row's own, rows are taken less their mean.
    """
    is_shifted = any(r.metadata.get("logits") == LOG_PROBABILITIES for r in records)
    ids = [record.rows("logits.top_ids", is_row_BT) for record in records]
    common: list[np.ndarray] = [np.zeros_like(given[0]) for _ in records]
    for m in range(len(given[0])):
        shared = ids[0][m]
        for other in ids[1:]:
            shared = shared[np.isin(shared, other[m])]
        for values, found, row in zip(given, ids, common, strict=True):
            of_id = dict(zip(found[m].tolist(), values[m].tolist(), strict=True))
            kept = np.array([of_id[i] for i in shared.tolist()], np.float32)
            row[m, : len(shared)] = kept - kept.mean() if is_shifted and len(kept) else kept
        if not len(shared):
            common[0][m] = given[0][m]
    best_a, best_b = (
        i[np.arange(len(i)), x.argmax(1)] for i, x in zip(ids[:2], given[:2], strict=True)
    )
    ranks = [np.flatnonzero(row == best) for row, best in zip(ids[0], best_b, strict=True)]
    known = [int(rank[0]) + 1 for rank in ranks if len(rank)]
    rank = max(known) if len(known) == len(ranks) else None
    return common, LogitsComparison("logits.top", float((best_a == best_b).mean()), None, rank)


def _chunks(
    records: Sequence[RecordFile], given: Sequence[np.ndarray]
) -> dict[str, list[np.ndarray]]:
    """The features' chunks by the boundary that both sides say they are.

    Raises:
      InputError: the records say that their features are other boundaries.
    """
    claims = {record.path: claimed_boundaries(record.path, record.metadata) for record in records}
    said = {claim for claim in claims.values() if claim is not None}
    if len(said) > 1:
        raise InputError(
            "features of other boundaries: "
            + ", ".join(f"{path} says {claim}" for path, claim in claims.items())
        )
    if not said:
        return {"features": list(given)}
    ids = said.pop()
    width, rest = divmod(given[0].shape[1], len(ids))
    if rest:
        raise InputError(
            f"{records[0].path}: features are {given[0].shape[1]} wide, which {len(ids)} "
            f"boundaries {ids} cannot be"
        )
    return {
        f"features[{i}] (boundary {b})": [x[:, i * width : (i + 1) * width] for x in given]
        for i, b in enumerate(ids)
    }


def _tolerance(dtype: str, depth: int) -> float:
    """In f32 1e-5 for the worst row. In lower precision the middle row's error: roundings of the
    dtype's unit, `ROUNDINGS_PER_LAYER` a layer, added as a random walk adds them."""
    unit = UNIT.get(dtype, UNIT["bfloat16"])
    return F32_TOLERANCE if dtype == "float32" else unit * (1 + ROUNDINGS_PER_LAYER * depth) ** 0.5


def _depth(name: str) -> int:
    return int(name.rsplit(".", 1)[1])


def _order(name: str) -> tuple[int, int]:
    """Boundaries by their depth, features, logits, the draft's."""
    heads = ("boundary", "features", "logits", "draft")
    place = next((i for i, head in enumerate(heads) if name.startswith(head)), len(heads))
    return place, _depth(name) if place == 0 else 0


def _kind(name: str) -> str:
    return re.split(r"[.\[]", name)[0]
