"""Where a command may write: that it can, before there is something to write, and that what lies
there already is of this very run."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError

__all__ = ["check_file", "check_folder", "check_same_run"]


def check_file(path: Path, what: str) -> None:
    """Raises InputError where a file cannot be written, or made; it is left as it is.

    Args:
      what: the file as a message names it, with its flag if it has one.
    """
    if not path.exists():
        check_folder(path.parent, what)
        return
    try:
        path.open("r+b").close()
    except OSError as error:
        raise InputError(f"{what}: cannot be written ({error.strerror})") from error


def check_folder(folder: Path, what: str) -> None:
    """Raises InputError where no file can be made in a folder.

    Args:
      what: is to be made there; see `check_file`.
    """
    if not folder.is_dir():
        raise InputError(f"{what}: there is no directory {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(f"{what}: cannot be written ({error.strerror})") from error


def check_same_run(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises InputError where what a file says of its run is not what this one is.

    Args:
      found, wanted: as JSON has them. What one of them leaves out is None.
    """
    there, here = dict(_flat(found)), dict(_flat(wanted))
    for name in [*here, *there]:
        if there.get(name) != here.get(name):
            raise InputError(
                f"{path}: of another run, which cannot be gone on with: {name} is "
                f"{there.get(name)!r} there and {here.get(name)!r} here; name another place with "
                "--out, or give the same flags and files"
            )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of all that is no object, as in ("config.loss.num_steps", 7)."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{name}.{key}" if name else key)
