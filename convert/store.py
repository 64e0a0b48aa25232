"""Converted weights on disk: one Orbax checkpoint per piece.

Orbax has a leaf in memory as a whole, and while it writes a copy of it (measured: 0.4 GB of arrays
take 0.8 GB). So a layer, or some of its experts, is a checkpoint of its own, which Orbax renames
into place when it is complete. Then `files.json` in it records every file's size: a file that is
missing or cut short is found before Orbax, whose reads in flight fail one by one, and loudly on
other threads, long after the first was reported.
"""

import contextlib
import errno
import json
import logging
import os
import re
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
ROOM_FOR_METADATA = 2**18


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[Callable[[Piece], None]]:
    """A function that writes a piece under `directory`.

    Raises:
      OSError: the file system has no room, or fails.
    """
    # Weights hardly compress, and trying takes half of the time.
    with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer:
        directory.mkdir(exist_ok=True)

        def write(piece: Piece) -> None:
            tree = traverse_util.unflatten_dict(piece.leaves, sep=".")
            path = directory.absolute() / piece.name
            _check_room(path, sum(leaf.nbytes for leaf in piece.leaves.values()))
            with _as_os_error(path):
                checkpointer.save(path, tree)
            write_whole(path / RECORD, _sizes(path))

        yield write


def _check_room(path: Path, num_bytes: int) -> None:
    """Raises OSError where there is no room: TensorStore's threads would print it many times."""
    if shutil.disk_usage(path.parent).free < num_bytes + ROOM_FOR_METADATA:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Raises an error of the system as one; TensorStore makes it a ValueError with a number.

    Orbax logs it, once for each of its threads with a traceback, on top of raising it: not here.
    """
    log = logging.getLogger("absl")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    except ValueError as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        if found is None:
            raise
        code = int(found[1])
        raise OSError(code, os.strerror(code), str(path)) from error
    finally:
        log.disabled = was_disabled


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
