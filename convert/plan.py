"""What a conversion will read and build, decided from headers alone, and the doing of it.

A plan lists rules. A rule names the source tensors it wants and the leaves of the model it builds
from them. Checking a plan against the headers finds everything that is missing, unknown, provided
twice, or of the wrong shape or element type before a byte of data is read.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from jaxspec.convert import transforms
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source

__all__ = [
    "FLOAT",
    "Piece",
    "Reader",
    "Rule",
    "UnusedRule",
    "Want",
    "check_plan",
    "leaf_dtypes",
    "make_pieces",
    "simple_rule",
]

FLOAT = ("BF16", "F32")
"""Element types of plain weights."""


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


@dataclasses.dataclass(frozen=True)
class Rule:
    """Leaves of the model, and how they are built.

    Attributes:
      piece: the unit that is built, written and loaded at once: a layer, the embedding, ...
      layer: index in the stack that the leaves belong to; None for leaves that are not stacked.
      leaves: paths, as in `sparse.attention.q_a`.
      wants: everything `build` reads.
      build: gives the leaves' arrays, in order, without the layer axis.
    """

    piece: str
    layer: int | None
    leaves: tuple[str, ...]
    wants: tuple[Want, ...]
    build: Callable[["Reader"], tuple[np.ndarray, ...]]


def simple_rule(
    piece: str,
    layer: int | None,
    leaf: str,
    want: Want,
    transform: Callable[..., np.ndarray] | None = None,
    *args: int,
) -> Rule:
    """The rule of one leaf that is one tensor, as it is or as `transform(tensor, *args)`."""

    def build(reader: "Reader") -> tuple[np.ndarray, ...]:
        tensor = reader.read(want)
        return (tensor if transform is None else transform(tensor, *args),)

    return Rule(piece, layer, (leaf,), (want,), build)


@dataclasses.dataclass(frozen=True)
class UnusedRule:
    """Tensors that are left where they are, for a reason that the manifest repeats."""

    pattern: re.Pattern[str]
    reason: str


@dataclasses.dataclass(frozen=True)
class Piece:
    """Built leaves of one piece, by path."""

    name: str
    layer: int | None
    leaves: dict[str, np.ndarray]


class Reader:
    """Reads what rules want; weights that are no numbers become problems."""

    def __init__(self, source: Source, problems: Problems, fp8_block: tuple[int, int]) -> None:
        self._source, self._problems, self._fp8_block = source, problems, fp8_block

    def read(self, want: Want) -> np.ndarray:
        """The tensor; bf16 where it was stored as float8 with scales."""
        array = self._finite(want)
        if want.fp8_scale is None:
            return array
        scale = self._finite(want.fp8_scale)
        return transforms.dequantize_fp8(array, scale, self._fp8_block)

    def report(self, problem: str) -> None:
        """Notes something wrong with the values of a tensor."""
        self._problems.add(problem)

    def _finite(self, want: Want) -> np.ndarray:
        array = self._source.read(want.name)
        if array.dtype.kind in "iub":
            return array
        is_bad = ~np.isfinite(array)
        if is_bad.any():
            where = tuple(int(axis[0]) for axis in np.nonzero(is_bad))
            self._problems.add(
                f"tensor {want.name} in {self._source.tensors[want.name].file}: "
                f"{int(is_bad.sum())} of {array.size} values are NaN or infinite, the first at "
                f"{list(where)}"
            )
        return array


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
    wanted: collections.Counter[str] = collections.Counter()
    for want in itertools.chain.from_iterable(rule.wants for rule in rules):
        for one in (want, want.fp8_scale):
            if one is not None:
                wanted[one.name] += 1
                _check_tensor(one, source, problems)
    for name, count in wanted.items():
        assert count == 1, f"{count} rules read {name}"
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
    plain = "float32" if "F32" in stored else "bfloat16"
    fixed = {"words": "int32", "scales": "bfloat16", "router": "float32", "draft": "int32"}
    # experts.down_words, experts.down_scales, sparse.router.bias, target_of_draft
    return tuple(
        next((dtype for mark, dtype in fixed.items() if mark in re.split(r"[._]", leaf)), plain)
        for leaf in rule.leaves
    )


def make_pieces(rules: list[Rule], reader: Reader, skip: Collection[str] = ()) -> Iterator[Piece]:
    """The pieces of a plan one after another, but for those named in `skip`.

    One piece is in memory at a time.
    """
    for name, group in itertools.groupby(rules, key=lambda rule: rule.piece):
        if name in skip:
            continue
        leaves: dict[str, np.ndarray] = {}
        layer: Any = None
        for rule in group:
            layer = rule.layer
            leaves.update(zip(rule.leaves, rule.build(reader), strict=True))
        yield Piece(name, layer, leaves)


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
