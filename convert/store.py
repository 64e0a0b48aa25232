"""Converted weights on disk: one Orbax checkpoint per piece.

A stack of 60 layers cannot be written as one leaf in bounded memory, since Orbax reads a leaf
whole (measured: a 1.5 GB leaf takes 1.6 GB). So a layer is a checkpoint of its own, which Orbax
renames into place when it is complete.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util

from jaxspec.convert.plan import Piece
from jaxspec.convert.problems import CheckpointError

__all__ = ["is_written", "read_piece", "remove_unfinished", "writing_to"]


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[Callable[[Piece], None]]:
    """A function that writes a piece under `directory`."""
    with ocp.PyTreeCheckpointer() as checkpointer:

        def write(piece: Piece) -> None:
            tree = traverse_util.unflatten_dict(piece.leaves, sep=".")
            checkpointer.save(directory.absolute() / piece.name, tree)

        yield write


def is_written(directory: Path, name: str) -> bool:
    """Whether the piece is there and complete."""
    return (directory / name).is_dir()


def remove_unfinished(directory: Path) -> None:
    """Removes what Orbax was writing when it was killed."""
    for path in directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)


def read_piece(directory: Path, name: str, layer: int | None) -> Piece:
    """A piece as it was written.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.restore(directory.absolute() / name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split(" [tensorstore_spec")[0]
        raise CheckpointError(
            str(directory.parent),
            [f"{directory.name}/{name} is missing or damaged; convert again ({reason})"],
        ) from error
    leaves = traverse_util.flatten_dict(tree, sep=".")
    return Piece(name, layer, {path: np.asarray(leaf) for path, leaf in leaves.items()})
