"""The page cache, in which a conversion leaves nothing of what it reads and writes once."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["uncache"]


def uncache(path: Path, runs: Iterable[Sequence[int]] = ((0, 0),)) -> None:
    """Gives back the memory that the system keeps of a file, as far as it is on the disk.

    It would push out what others keep there. And it is used again at once for what is read next:
    on a virtual machine, the first touch of fresh memory takes longer than a copy of as many bytes.

    Args:
      runs: first byte and end of each run of bytes; 0 and 0 are the whole file.
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with path.open("rb") as stream:
            for start, end in runs:
                os.posix_fadvise(stream.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)
