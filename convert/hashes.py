"""SHA-256 of the files that a conversion reads, taken while it goes on.

Each file is hashed just before the first piece that needs it is built. So the hash of every file
that a written piece came from is known, however the conversion ends, and one that goes on later can
tell whether the source is still the same. What was hashed lies in the page cache then: on most
machines the source is read from the disk once.
"""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxspec.convert.manifest import write_whole
from jaxspec.convert.problems import CheckpointError

__all__ = ["Hashes"]


class Hashes:
    """Hashes of files, in an order, one file ahead of who waits for them.

    Args:
      files: all of them, in the order in which they will be needed.
      record: where hashes and times of change are kept until the conversion is complete.
    """

    def __init__(self, files: Iterable[Path], record: Path) -> None:
        self._files, self._record = {path.name: path for path in files}, record
        self._stamps = {name: _stamp(path) for name, path in self._files.items()}
        self._known: dict[str, dict[str, Any]] = {}
        if record.is_file():
            self._known = json.loads(record.read_text())
        self._futures: dict[str, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def recheck(self) -> None:
        """Hashes again what a former run has read and was changed or touched since.

        Raises:
          CheckpointError: a file is not what that run read.
        """
        for name in self._known.keys() & self._files.keys():
            self._hash(name)

    def wait_for(self, names: Iterable[str]) -> None:
        """Returns when these files have been hashed; starts on the one after them.

        Raises:
          CheckpointError: a file is not what a former run read.
        """
        order, names = list(self._files), list(names)
        last = max(map(order.index, names), default=-1)
        for name in order[: last + 2]:
            if name not in self._futures:
                self._futures[name] = self._pool.submit(self._hash, name)
        for name in names:
            self._futures[name].result()

    def result(self) -> dict[str, str]:
        """SHA-256 of every file.

        Raises:
          CheckpointError: a file has changed since this run began.
        """
        self.wait_for(self._files)
        for name, path in self._files.items():
            if _stamp(path) != self._stamps[name]:
                raise CheckpointError(
                    str(path.parent),
                    [f"{name} has changed while it was being converted; {AGAIN}"],
                )
        return {name: self._known[name]["sha256"] for name in self._files}

    def _hash(self, name: str) -> None:
        known, stamp, path = self._known.get(name), self._stamps[name], self._files[name]
        if known is not None and {key: known[key] for key in stamp} == stamp:
            return
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if known is not None and known["sha256"] != digest:
            raise CheckpointError(
                str(path.parent),
                [
                    f"{name} has changed since a part of it was converted: SHA-256 was "
                    f"{known['sha256'][:12]}..., is {digest[:12]}...; {AGAIN}"
                ],
            )
        self._known[name] = stamp | {"sha256": digest}
        write_whole(self._record, self._known)


AGAIN = "put it back, or remove what is written so far and convert again"


def _stamp(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
