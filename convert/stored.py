"""Converted weights on disk, read: of every leaf what is asked for, and no more.

A piece is an Orbax checkpoint: arrays in zarr's format, in chunks, inside an OCDBT store.
TensorStore, with which Orbax reads too, is asked directly: Orbax restores whole arrays, or what a
sharding cuts out of them, and a piece holds any part of what is cut.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import EllipsisType

import numpy as np
import tensorstore

from jaxspec.convert.plan import Part
from jaxspec.convert.problems import CheckpointError

__all__ = ["RECORD", "StoredLeaf", "StoredPiece", "is_written", "open_piece", "sizes_of"]

RECORD = "files.json"
"""Sizes of a piece's files: there once the piece is complete."""
ARRAY = "/.zarray"
"""What zarr keeps beside the chunks of every array."""


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf of a piece on disk; what is cut out of it is read then, in whole chunks."""

    piece: Path
    array: tensorstore.TensorStore

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, cut: tuple[slice, ...] | EllipsisType) -> np.ndarray:
        """The values in a cut.

        Raises:
          CheckpointError: they cannot be read.
        """
        with _damage_of(self.piece):
            return np.asarray(self.array[cut].read().result())


@dataclasses.dataclass(frozen=True)
class StoredPiece:
    """A piece as it was written, its leaves still on disk."""

    name: str
    layer: int | None
    part: Part | None
    leaves: dict[str, StoredLeaf]


def open_piece(
    directory: Path, name: str, layer: int | None, part: Part | None = None
) -> StoredPiece:
    """A piece under `directory`; of what it holds, only names and shapes are read.

    Raises:
      CheckpointError: it is missing or damaged. A file cut short is found here: TensorStore's reads
        in flight fail one by one, and loudly on other threads.
    """
    path = directory.absolute() / name
    with _damage_of(path):
        recorded, found = json.loads((path / RECORD).read_text()), sizes_of(path)
        for file, size in recorded.items():
            if found.get(file) != size:
                raise ValueError(
                    f"{file}: {size} bytes were written, {found.get(file, 0)} are there"
                )
        store = {"driver": "ocdbt", "base": path.as_uri() + "/"}
        keys = tensorstore.KvStore.open(store).result().list().result()
        paths = [key.decode().removesuffix(ARRAY) for key in keys if key.decode().endswith(ARRAY)]
        opening = {
            leaf: tensorstore.open({"driver": "zarr", "kvstore": store | {"path": f"{leaf}/"}})
            for leaf in paths
        }
        leaves = {leaf: StoredLeaf(path, future.result()) for leaf, future in opening.items()}
    return StoredPiece(name, layer, part, leaves)


@contextlib.contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Raises CheckpointError for whatever cannot be read of a piece."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        directory = path.parent
        reason = str(error).split(" [tensorstore_spec")[0]
        raise CheckpointError(
            str(directory.parent),
            [f"{directory.name}/{path.name} is missing or damaged; convert again ({reason})"],
        ) from error


def is_written(directory: Path, name: str) -> bool:
    """Whether the piece is there and complete."""
    return (directory / name / RECORD).is_file()


def sizes_of(path: Path) -> dict[str, int]:
    """Bytes of every file under `path`."""
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
