"""Converted weights on disk: one Orbax checkpoint per piece.

A stack of 60 layers cannot be written as one leaf in bounded memory, since Orbax reads a leaf
whole (measured: a 1.5 GB leaf takes 1.6 GB). So a layer is a checkpoint of its own, which Orbax
renames into place when it is complete. Then `files.json` in it records every file's size: a file
that is missing or cut short is found before Orbax, whose reads in flight fail one by one, and loudly
on other threads, long after the first was reported.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from jaxspec.convert.plan import Piece
from jaxspec.convert.problems import CheckpointError

__all__ = ["is_written", "read_piece", "remove_unfinished", "writing_to"]

RECORD = "files.json"


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[Callable[[Piece], None]]:
    """A function that writes a piece under `directory`."""
    with ocp.PyTreeCheckpointer() as checkpointer:

        def write(piece: Piece) -> None:
            tree = traverse_util.unflatten_dict(piece.leaves, sep=".")
            path = directory.absolute() / piece.name
            checkpointer.save(path, tree)
            unfinished = path / f"{RECORD}.tmp"
            unfinished.write_text(json.dumps(_sizes(path), indent=1) + "\n")
            unfinished.rename(path / RECORD)

        yield write


def is_written(directory: Path, name: str) -> bool:
    """Whether the piece is there and complete."""
    return (directory / name / RECORD).is_file()


def remove_unfinished(directory: Path) -> None:
    """Removes what was being written when a conversion was killed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_written(directory, path.name):
            shutil.rmtree(path)


def read_piece(directory: Path, name: str, layer: int | None) -> Piece:
    """A piece as it was written.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    path = directory.absolute() / name
    try:
        recorded, found = json.loads((path / RECORD).read_text()), _sizes(path)
        for file, size in recorded.items():
            if found.get(file) != size:
                raise ValueError(f"{file}: {size} bytes were written, {found.get(file, 0)} are there")
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split(" [tensorstore_spec")[0]
        raise CheckpointError(
            str(directory.parent),
            [f"{directory.name}/{name} is missing or damaged; convert again ({reason})"],
        ) from error
    leaves = traverse_util.flatten_dict(tree, sep=".")
    return Piece(name, layer, {path: np.asarray(leaf) for path, leaf in leaves.items()})


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of every file under `path`."""
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
