"""Writing safetensors files, a tensor or some rows of one at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxspec.convert.source import DTYPES

__all__ = ["ShardWriter", "widest_first", "write_tensors"]

NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = {"__metadata__": {"format": "pt"}}
"""What transformers asks for."""
LARGEST = {"dtype": "F8_E4M3", "data_offsets": [2**50, 2**50]}


class ShardWriter:
    """A file whose tensors come one after another; its header takes its place when all are there.

    Args:
      shapes: of all that will come. A header of theirs, at its longest, has room at the start; what
        is left of that is blank, as the format allows.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        longest = {name: LARGEST | {"shape": list(shape)} for name, shape in shapes.items()}
        self._header_bytes = -(-len(_encoded(METADATA | longest)) // 8) * 8
        self._shapes, self._end = shapes, 0
        self._header: dict[str, Any] = dict(METADATA)
        self._stream = path.open("wb")
        self._stream.seek(8 + self._header_bytes)

    def add(self, name: str, array: np.ndarray) -> None:
        """Appends a tensor, or further rows of the one that came last."""
        if name not in self._header:
            self._header[name] = {
                "dtype": NAMES[array.dtype],
                "shape": list(self._shapes[name]),
                "data_offsets": [self._end, self._end],
            }
        entry = self._header[name]
        assert entry["data_offsets"][1] == self._end, f"{name} was interrupted by another tensor"
        np.ascontiguousarray(array).tofile(self._stream)
        self._end += array.nbytes
        entry["data_offsets"][1] = self._end

    @property
    def data_bytes(self) -> int:
        return self._end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stream as stream:
            if kind is None:
                text = _encoded(self._header).ljust(self._header_bytes)
                stream.seek(0)
                stream.write(len(text).to_bytes(8, "little") + text)


def widest_first(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """So that each begins at a multiple of its element's size, which some readers ask for."""
    yield from sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A file of tensors that are all there."""
    with ShardWriter(path, {name: array.shape for name, array in tensors.items()}) as writer:
        for name, array in widest_first(tensors):
            writer.add(name, array)


def _encoded(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()
