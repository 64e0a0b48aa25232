"""Reading a checkpoint piece by piece, whether it was converted or is converted on the way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.convert.manifest import Manifest, part_of
from jaxspec.convert.plan import Piece, Rule
from jaxspec.convert.prepare import Prepared
from jaxspec.convert.problems import Problems

if TYPE_CHECKING:
    from jaxspec.convert.stored import StoredPiece

__all__ = ["pieces_of"]


def pieces_of(
    found: Prepared | Manifest,
    directory: Path,
    problems: Problems,
    is_needed: Callable[[Rule], bool] = lambda _: True,
) -> tuple[int, Iterator["Piece | StoredPiece"]]:
    """How many pieces there are, and each of them; wrong values go to `problems`.

    Args:
      is_needed: of what is converted on the way, which rules' pieces are built.
    """
    if isinstance(found, Prepared):
        pieces = found.pieces(problems, is_needed)
        return len({rule.piece for rule in found.rules if is_needed(rule)}), pieces
    # TensorStore takes its time to import, and only a converted checkpoint needs it.
    from jaxspec.convert.stored import open_piece

    params = directory / "params"
    return len(found.pieces), (
        open_piece(params, piece["name"], piece["layer"], part_of(piece)) for piece in found.pieces
    )
