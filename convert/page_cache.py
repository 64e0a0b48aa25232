"""The page cache, in which a conversion leaves nothing of what it reads and writes once."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["uncache"]

WHOLE = ((0, 0),)


def uncache(path: Path, runs: Iterable[Sequence[int]] = WHOLE) -> None:
    """Gives back the memory that the system keeps of a file, as far as it is on the disk.

    It would push out what others keep there. And it is used again at once for what is read next:
    on a virtual machine, the first touch of fresh memory takes longer than a copy of as many bytes.

    Args:
      runs: first byte and end of each run of bytes; an end of 0 is that of the file.
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with path.open("rb") as stream:
            for start, end in runs:
                length = max(end - start, 0)
                os.posix_fadvise(stream.fileno(), start, length, os.POSIX_FADV_DONTNEED)
