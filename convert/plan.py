"""What a conversion will read and build, decided from headers alone, and the doing of it.

A plan lists rules. A rule names the source tensors it wants and the leaves of the model it builds
from them. Checking a plan against the headers finds everything that is missing, unknown, provided
twice, or of the wrong shape or element type before a byte of data is read.
"""

import dataclasses
import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator

import ml_dtypes
import numpy as np

from jaxspec.convert import transforms
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import DTYPES, Source

__all__ = [
    "FLOAT",
    "HALF",
    "Part",
    "Piece",
    "Reader",
    "Rule",
    "UnusedRule",
    "Want",
    "build_piece",
    "check_plan",
    "cut",
    "leaf_dtypes",
    "limit_piece",
    "simple_rule",
    "vocabulary_rules",
]

FLOAT = ("BF16", "F32")
"""Element types of plain weights."""
HALF = "F16"
"""That of old drafts, which is read into f32: bf16 would round it."""


@dataclasses.dataclass(frozen=True)
class Want:
    """A tensor that a rule reads.

    Attributes:
      dtypes: safetensors' names of the element types that are taken.
      fp8_scale: the tensor of block scales, where the weight is float8.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT
    fp8_scale: "Want | None" = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.fp8_scale is None else (self.name, self.fp8_scale.name)


PIECE_BYTES = 512 * 1024**2
"""A layer, its experts, and an embedding or a head are cut into pieces of at most this size, or of
one matrix, so that neither writing nor loading takes memory in proportion to a layer."""


ALIGNMENT = 64
"""Bytes: arrays that begin at a multiple of it XLA reads where they are, others it copies."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of a leaf's rows along one axis, which is counted without the layer axis."""

    axis: int
    first: int
    count: int

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.count)


def cut(piece: str, axis: int, count: int, row_bytes: int) -> Iterator[tuple[str, Part | None]]:
    """Name and part of each piece that `count` rows of so many bytes are cut into.

    All are of one length if a length between half of the largest and the largest divides `count`:
    then devices that share the rows evenly are likely to share the pieces evenly. What needs no
    cutting stays whole, under the name given.
    """
    largest = max(1, PIECE_BYTES // row_bytes)
    if count <= largest:
        yield piece, None
        return
    length = next((n for n in range(largest, largest // 2, -1) if count % n == 0), largest)
    for first in range(0, count, length):
        yield f"{piece}.{first:06d}", Part(axis, first, min(length, count - first))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Leaves of the model, and how they are built.

    Attributes:
      piece: the unit that is built, written and loaded at once: a layer, some of its experts, ...
      layer: index in the stack that the leaves belong to; None for leaves that are not stacked.
      leaves: paths, as in `sparse.attention.q_a`.
      wants: everything `build` reads.
      build: gives the leaves' arrays, in order, without the layer axis.
      restore: the way back, from the same arrays to tensors by name; of a part, some rows of one.
      part: what of the leaves it builds; None: all.
    """

    piece: str
    layer: int | None
    leaves: tuple[str, ...]
    wants: tuple[Want, ...]
    build: Callable[["Reader"], tuple[np.ndarray, ...]]
    restore: Callable[..., dict[str, np.ndarray]]
    part: Part | None = None

    @property
    def names(self) -> Iterator[str]:
        """The tensors it reads."""
        return itertools.chain.from_iterable(want.names for want in self.wants)

    def source_bytes(self, source: Source) -> int:
        """Bytes of what it reads."""
        total = sum(source.tensors[name].num_bytes for name in self.names)
        # A part of a vocabulary reads some rows of one matrix; that of a layer whole experts.
        if self.part is not None and len(self.wants) == 1:
            total = total * self.part.count // self.wants[0].shape[0]
        return total


def simple_rule(
    piece: str,
    layer: int | None,
    leaf: str,
    want: Want,
    transform: Callable[..., np.ndarray] | None = None,
    *args: int,
) -> Rule:
    """The rule of one leaf that is one tensor, as it is or as `transform(tensor, *args)`.

    Args:
      transform: a transposition, and then at most a cut of an axis into two.
    """

    def build(reader: "Reader") -> tuple[np.ndarray, ...]:
        tensor = reader.read(want)
        return (tensor if transform is None else transform(tensor, *args),)

    def restore(leaf: np.ndarray) -> dict[str, np.ndarray]:
        return {want.name: leaf if transform is None else transforms.restored(leaf, want.shape)}

    return Rule(piece, layer, (leaf,), (want,), build, restore)


def limit_piece(rules: Iterable[Rule]) -> Iterator[Rule]:
    """The rules of one piece, in as many as their size asks for; parts are cut already."""
    number, num_bytes = 0, 0
    for rule in rules:
        if rule.part is None:
            # As bf16, or as int32 where they are packed. What is a vector does not matter.
            wants = [
                (DTYPES[want.dtypes[0]].itemsize, math.prod(want.shape)) for want in rule.wants
            ]
            rule_bytes = sum(max(2, itemsize) * size for itemsize, size in wants)
            if num_bytes and num_bytes + rule_bytes > PIECE_BYTES:
                number, num_bytes = number + 1, 0
            num_bytes += rule_bytes
            if number:
                rule = dataclasses.replace(rule, piece=f"{rule.piece}.{number}")
        yield rule


def vocabulary_rules(
    piece: str, leaf: str, want: Want, transform: Callable[[np.ndarray], np.ndarray] | None
) -> Iterator[Rule]:
    """The rules of an embedding [vocabulary, width] or, transposed, a head: some rows each."""
    axis, (count, width) = 0 if transform is None else 1, want.shape
    for name, part in cut(piece, axis, count, 2 * width):

        def build(reader: "Reader", part: Part | None = part) -> tuple[np.ndarray, ...]:
            rows = reader.read(want, None if part is None else part.rows)
            return (rows if transform is None else transform(rows),)

        def restore(rows: np.ndarray) -> dict[str, np.ndarray]:
            return {want.name: rows if transform is None else transforms.transpose(rows)}

        yield Rule(name, None, (leaf,), (want,), build, restore, part)


@dataclasses.dataclass(frozen=True)
class UnusedRule:
    """Tensors that are left where they are, for a reason that the manifest repeats."""

    pattern: re.Pattern[str]
    reason: str


@dataclasses.dataclass(frozen=True)
class Piece:
    """Built leaves of one piece, by path, or the same part of each."""

    name: str
    layer: int | None
    part: Part | None
    leaves: dict[str, np.ndarray]


class Reader:
    """Reads what rules want; weights that are no numbers become problems."""

    def __init__(self, source: Source, problems: Problems, fp8_block: tuple[int, int]) -> None:
        self._source, self._problems, self._fp8_block = source, problems, fp8_block
        self._lent = weakref.WeakValueDictionary[int, np.ndarray]()
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array to build in, values undefined; one that was given back, if there is one.

        The first touch of fresh memory can take longer than all that is done in it.
        """
        fits = (i for i, a in enumerate(self._free) if (a.shape, a.dtype) == (shape, dtype))
        if (index := next(fits, None)) is not None:
            array = self._free.pop(index)
        else:
            num_bytes = math.prod(shape) * dtype.itemsize
            raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            array = raw[start : start + num_bytes].view(dtype).reshape(shape)
        self._lent[id(array)] = array
        return array

    def give_back(self, piece: Piece) -> None:
        """Takes the arrays that were lent for a piece that is needed no more."""
        for leaf in piece.leaves.values():
            if (array := self._lent.pop(id(leaf), None)) is not None:
                self._free.append(array)

    def read(
        self, want: Want, rows: range | None = None, into: np.ndarray | None = None
    ) -> np.ndarray:
        """The tensor, or some rows of it; bf16 of float8 with scales, f32 of f16.

        Args:
          into: an array of its shape and element type that may be used for it.
        """
        array = self._finite(want, rows, into)
        if array.dtype == DTYPES[HALF]:
            array = array.astype(np.float32)
        if want.fp8_scale is None:
            return array
        assert rows is None, "blocks of scales are not cut"
        scale = self._finite(want.fp8_scale)
        return transforms.dequantize_fp8(array, scale, self._fp8_block)

    def report(self, problem: str) -> None:
        """Notes something wrong with the values of a tensor."""
        self._problems.add(problem)

    def _finite(
        self, want: Want, rows: range | None = None, into: np.ndarray | None = None
    ) -> np.ndarray:
        array = self._source.read(want.name, rows, into)
        if not _holds_non_finite(array):
            return array
        is_bad = ~np.isfinite(array)
        where = [int(axis[0]) for axis in np.nonzero(is_bad)]
        if rows is not None:
            where[0] += rows.start
        self._problems.add(
            f"tensor {want.name} in {self._source.tensors[want.name].file}: "
            f"{int(is_bad.sum())} of {array.size} values are NaN or infinite, the first at {where}"
        )
        return array


def _holds_non_finite(array: np.ndarray) -> bool:
    """Whether some value is NaN or infinite. In stretches: no mask of its size is made."""
    if array.dtype.kind in "iub":
        return False
    flat = array.reshape(-1)
    stretches = (flat[at : at + 2**20] for at in range(0, flat.size, 2**20))
    if array.dtype == ml_dtypes.bfloat16:  # all bits of the exponent: eight times as fast
        return any((part.view(np.uint16) & 0x7F80 == 0x7F80).any() for part in stretches)
    return not all(np.isfinite(part).all() for part in stretches)


def check_plan(
    rules: list[Rule],
    unused: list[UnusedRule],
    source: Source,
    problems: Problems,
) -> list[dict[str, str]]:
    """The tensors that stay unused, `{"tensor", "reason"}` each.

    Every tensor has to be wanted, or unused for a reason; what is neither becomes a problem, and so
    does one that is wanted and not there, or of another shape or element type.
    """
    wanted: dict[str, tuple[str, ...]] = {}
    for rule in rules:
        for one in itertools.chain.from_iterable((want, want.fp8_scale) for want in rule.wants):
            if one is None:
                continue
            if one.name in wanted:
                is_cut = rule.part is not None and wanted[one.name] == rule.leaves
                assert is_cut, f"two rules read {one.name}"
                continue
            wanted[one.name] = rule.leaves
            _check_tensor(one, source, problems)
    left = []
    for name, info in source.tensors.items():
        if name in wanted:
            continue
        reason = next((rule.reason for rule in unused if rule.pattern.fullmatch(name)), None)
        if reason is None:
            problems.add(
                f"tensor {name} in {info.file} ({info.dtype} {list(info.shape)}): nothing in this "
                "model has that name"
            )
        else:
            left.append({"tensor": name, "reason": reason})
    return left


def leaf_dtypes(rule: Rule, source: Source) -> tuple[str, ...]:
    """Element types of the leaves that a rule will build, from headers alone."""
    stored = {source.tensors[want.name].dtype for want in rule.wants}
    plain = "float32" if stored & {"F32", HALF} else "bfloat16"
    fixed = {"words": "int32", "scales": "bfloat16", "router": "float32", "draft": "int32"}
    # experts.down_words, experts.down_scales, sparse.router.bias, target_of_draft
    return tuple(
        next((dtype for mark, dtype in fixed.items() if mark in re.split(r"[._]", leaf)), plain)
        for leaf in rule.leaves
    )


def build_piece(rules: list[Rule], reader: Reader) -> Piece:
    """The piece that these rules, all of one piece, build."""
    leaves: dict[str, np.ndarray] = {}
    for rule in rules:
        leaves.update(zip(rule.leaves, rule.build(reader), strict=True))
    return Piece(rules[0].piece, rules[0].layer, rules[0].part, leaves)


def _check_tensor(want: Want, source: Source, problems: Problems) -> None:
    info = source.tensors.get(want.name)
    if info is None:
        problems.add(
            f"tensor {want.name} is missing; expected {' or '.join(want.dtypes)} {list(want.shape)}"
        )
        return
    where = f"tensor {want.name} in {info.file}"
    if info.shape != want.shape:
        problems.add(f"{where} has shape {list(info.shape)}; expected {list(want.shape)}")
    if info.dtype not in want.dtypes:
        problems.add(f"{where} is {info.dtype}; expected {' or '.join(want.dtypes)}")
