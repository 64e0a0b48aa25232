"""Converted weights, written to disk: one Orbax checkpoint per piece.

Orbax has a leaf in memory as a whole. So a layer, or some of its experts, is a checkpoint of its
own, which Orbax renames into place when it is complete. Then `files.json` in it records every
file's size.
"""

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax import traverse_util

from jaxspec.config import MeshConfig
from jaxspec.convert.manifest import write_whole
from jaxspec.convert.page_cache import uncache
from jaxspec.convert.plan import Piece
from jaxspec.convert.stored import RECORD, is_written, sizes_of
from jaxspec.sharding import spec_of

__all__ = ["remove_unfinished", "writing_to"]

ROOM_FOR_METADATA = 2**18
FILE_BYTES = 2**26
"""Size at which the store begins another file. It has one in memory until it writes it."""
NUM_CHUNKS = 16
"""Chunks of a leaf, along the axis that a mesh cuts. A chunk is read as a whole: processes that
share a mesh's axis evenly, up to 16 of them, read nothing that they do not need."""


class _InChunks(ocp.type_handlers.NumpyHandler):
    """Orbax's writer of numpy arrays, except for the chunks.

    Orbax offers one chunk, one for each row, or cuts through the longest axis, whichever that is.
    Were this method of its not called any more, checkpoints would be right, and read whole.

    Attributes:
      context: TensorStore's, of one piece: it remembers what lies under a path.
    """

    context: tensorstore.Context

    async def _open_and_write(
        self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any
    ) -> None:
        shape = chunk_shape(tspec["kvstore"]["path"], value.shape)
        tspec["metadata"]["chunks"] = list(shape)
        await super()._open_and_write(value, tspec, self.context)


def chunk_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the chunks of a leaf, its last ones along an axis cut off at the leaf's end."""
    spec = spec_of(path, len(shape), MeshConfig(1, 2))  # any mesh: they all cut the same axis
    return tuple(
        size if axis is None else -(-size // NUM_CHUNKS)
        for size, axis in itertools.zip_longest(shape, spec)
    )


@contextlib.contextmanager
def writing_to(directory: Path) -> Iterator[Callable[[Piece], None]]:
    """A function that writes a piece under `directory`.

    It returns before the piece has reached the disk, but not before the one before has.

    Raises:
      OSError: the file system has no room, or fails.
    """
    # A piece changes no more: to copy it first would take its size again.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, in_chunks := _InChunks(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # Orbax warns where there is none
    )
    # Weights hardly compress, and trying takes half of the time.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer, ThreadPoolExecutor(1) as pool:
        directory.mkdir(exist_ok=True)
        recording: list[Future[None]] = []

        def write(piece: Piece) -> None:
            tree = traverse_util.unflatten_dict(piece.leaves, sep=".")
            path = directory.absolute() / piece.name
            _check_room(path, sum(leaf.nbytes for leaf in piece.leaves.values()))
            # What it writes reaches the disk while the next piece is written: see `_record`.
            in_chunks.context = tensorstore.Context(
                {"file_io_sync": False, "cache_pool#ocdbt": {"total_bytes_limit": 10**8}}
            )
            args = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=FILE_BYTES)
            with _as_os_error(path):
                checkpointer.save(path, args)
            while recording:
                recording.pop().result()
            recording.append(pool.submit(_record, path))

        yield write
        while recording:
            recording.pop().result()


def _record(path: Path) -> None:
    """Says of a piece that it is complete, once all of it is on the disk."""
    sizes = sizes_of(path)
    for file in sizes:
        with (path / file).open("rb") as stream:
            os.fsync(stream.fileno())
        uncache(path / file)
    write_whole(path / RECORD, sizes)


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


def remove_unfinished(directory: Path) -> None:
    """Removes what was being written when a conversion was killed."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if not is_written(directory, path.name):
            shutil.rmtree(path)
