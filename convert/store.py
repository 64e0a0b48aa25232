"""Converted weights on disk: one Orbax checkpoint per piece.

Orbax has a leaf in memory as a whole, and while it writes a copy of it (measured: 0.4 GB of arrays
take 0.8 GB). So a layer, or some of its experts, is a checkpoint of its own, which Orbax renames
into place when it is complete. Then `files.json` in it records every file's size: a file that is
missing or cut short is found before Orbax, whose reads in flight fail one by one, and loudly on
other threads, long after the first was reported.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from jaxspec.convert.manifest import write_whole
from jaxspec.convert.plan import Part, Piece
from jaxspec.convert.problems import CheckpointError

__all__ = ["is_written", "read_piece", "remove_unfinished", "writing_to"]

RECORD = "files.json"


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[Callable[[Piece], None]]:
    """A function that writes a piece under `directory`."""
    # Weights hardly compress, and trying takes half of the time.
    with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer:

        def write(piece: Piece) -> None:
            tree = traverse_util.unflatten_dict(piece.leaves, sep=".")
            path = directory.absolute() / piece.name
            checkpointer.save(path, tree)
            write_whole(path / RECORD, _sizes(path))

        yield write


def is_written(directory: Path, name: str) -> bool:
    """Whether the piece is there and complete."""
    return (directory / name / RECORD).is_file()


def remove_unfinished(directory: Path) -> None:
    """Removes what was being written when a conversion was killed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_written(directory, path.name):
            shutil.rmtree(path)


def read_piece(directory: Path, name: str, layer: int | None, part: Part | None = None) -> Piece:
    """A piece as it was written.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    path = directory.absolute() / name
    try:
        recorded, found = json.loads((path / RECORD).read_text()), _sizes(path)
        for file, size in recorded.items():
            if found.get(file) != size:
                raise ValueError(
                    f"{file}: {size} bytes were written, {found.get(file, 0)} are there"
                )
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split(" [tensorstore_spec")[0]
        raise CheckpointError(
            str(directory.parent),
            [f"{directory.name}/{name} is missing or damaged; convert again ({reason})"],
        ) from error
    leaves = traverse_util.flatten_dict(tree, sep=".")
    return Piece(name, layer, part, {path: np.asarray(leaf) for path, leaf in leaves.items()})


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of every file under `path`."""
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
