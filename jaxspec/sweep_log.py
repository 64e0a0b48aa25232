"""What a sweep has measured so far: entries in memory, and in a file that it goes on with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.runfile import LinesFile

__all__ = ["FORMAT", "SweepLog"]

FORMAT = "jaxspec-sweep-1"
_VALUES = {
    "texts": ("texts", "surprise", "uniform"),
    "walk": ("steps",),
    "trees": ("batch_size", "trees"),
    "round": ("env", "batch_size", "round", "texts", "cells"),
    "whole": ("env", "batch_size", "round", "tree", "texts", "cells"),
}
"""What an entry is, and what it has."""


class SweepLog:
    """The entries of one sweep, in their order.

    Attributes:
      header: whose they are: target, draft, version, machine and flags.
      entries: each with `what` it is, one of `_VALUES`, and the values of such a one.
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
            header = json.loads(path.read_text("utf-8").partition("\n")[0])
            del header["format"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: no {FORMAT} file can be read there ({error!r})") from error
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
        for name in _VALUES[entry["what"]]:
            entry[name]  # or it is damaged
        self._entries.append(entry)
