"""Pictures as files."""

from pathlib import Path
from typing import Any

from jaxspec.errors import InputError
from jaxspec.outputs import check_file

__all__ = ["check_picture", "save_picture"]

FORMATS = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Raises InputError where no picture can be written."""
    if path.suffix not in FORMATS:
        raise InputError(f"--plot {path}: expected a file that ends in {', '.join(FORMATS)}")
    check_file(path, f"--plot {path}")


def save_picture(figure: Any, path: Path) -> None:
    """Writes a matplotlib figure.

    Raises:
      InputError: it cannot be written there.
    """
    from matplotlib import rc_context

    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path}: cannot be written ({error})") from error
