"""What a sweep has measured so far: entries in memory, and in a file that it goes on with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.runfile import LinesFile

__all__ = ["FORMAT", "SweepLog"]

FORMAT = "jaxspec-sweep-1"


class SweepLog:
    """The entries of one sweep, in their order.

    Attributes:
      header: whose they are: target, draft, version, machine and flags.
      entries: each with `what` it is: "texts", "walk", "trees", "round" or "whole".
    """

    def __init__(self, header: Mapping[str, Any], path: Path | None = None) -> None:
        """
        Args:
          path: of the file; what this very sweep already wrote there is taken over.

        Raises:
          InputError: the file is of another sweep, damaged, or has no place to be.
        """
        self.header, self.entries = dict(header), list[dict[str, Any]]()
        self._file = None if path is None else _File(path, self.header, self.entries)

    @classmethod
    def read(cls, path: Path) -> "SweepLog":
        """What a file holds, whoever's it is.

        Raises:
          InputError: there is no such file, or it is damaged.
        """
        try:
            first = path.read_text("utf-8").partition("\n")[0]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        header = json.loads(first)
        del header["format"]
        return cls(header, path)

    def find(self, what: str, **values: Any) -> dict[str, Any] | None:
        """The entry with these values, or None."""
        for entry in self.entries:
            if entry["what"] == what and all(entry[name] == values[name] for name in values):
                return entry
        return None

    def append(self, what: str, **values: Any) -> dict[str, Any]:
        """The new entry, written at once.

        Raises:
          InputError: the file cannot be written.
        """
        entry = {"what": what, **values}
        if self._file is None:
            self.entries.append(entry)
        else:
            self._file.append(entry)
        return entry


class _File(LinesFile):
    def __init__(self, path: Path, header: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        self._entries = entries
        super().__init__(path, FORMAT, header)

    def _keep(self, entry: dict[str, Any]) -> None:
        entry["what"]  # or it is no entry
        self._entries.append(entry)
