"""Reading a checkpoint piece by piece, whether it was converted or is converted on the way."""

from collections.abc import Iterator
from pathlib import Path

from jaxspec.convert.manifest import Manifest, part_of
from jaxspec.convert.plan import Piece
from jaxspec.convert.prepare import Prepared
from jaxspec.convert.problems import Problems

__all__ = ["pieces_of"]


def pieces_of(
    found: Prepared | Manifest, directory: Path, problems: Problems
) -> tuple[int, Iterator[Piece]]:
    """How many pieces there are, and each of them; wrong values go to `problems`."""
    if isinstance(found, Prepared):
        return len({rule.piece for rule in found.rules}), found.pieces(problems)
    # Orbax takes half a second to import, and only a converted checkpoint needs it.
    from jaxspec.convert.store import read_piece

    params, pieces = directory / "params", found.pieces
    return len(pieces), (
        read_piece(params, piece["name"], piece["layer"], part_of(piece)) for piece in pieces
    )
