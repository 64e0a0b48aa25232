"""The phases of a step: the named scopes of `step.py`, and within two of them, of the models."""

from collections.abc import Iterable, Sequence

__all__ = ["LOOP", "PARTS", "PHASES", "part_of", "phase_of"]

PHASES = ("propose", "verify", "accept", "commit", "extend")
"""In the order in which a step goes through them."""
LOOP = "loop"
"""What stands in none of them: the loop over steps itself."""
_INNER = {"verify": ("attention", "experts", "dense", "head"), "propose": ("levels", "tree")}
_REST = "rest"
PARTS = (
    *(f"verify/{name}" for name in (*_INNER["verify"], _REST)),
    *(f"propose/{name}" for name in (*_INNER["propose"], _REST)),
    *("accept", "commit", "extend", LOOP),
)
"""All that `part_of` may say, verification first."""


def phase_of(scopes: Iterable[str]) -> str:
    """The phase that an operation is part of, or `LOOP`.

    Args:
      scopes: what it was traced under; see `hlo.Run`. The outermost name decides.
    """
    return next((word for word in _words(scopes) if word in PHASES), LOOP)


def part_of(scopes: Sequence[str]) -> str:
    """The part of a phase, as in "verify/attention"; of a phase without parts, the phase."""
    phase = phase_of(scopes)
    if phase not in _INNER:
        return phase
    words = _words(scopes)
    inside = words[words.index(phase) :]
    return f"{phase}/{next((word for word in inside if word in _INNER[phase]), _REST)}"


def _words(scopes: Iterable[str]) -> list[str]:
    """The names in scopes. Of equal operations that XLA merged into one, those of the first."""
    return [word for scope in scopes for word in scope.split(";")[0].split("/")]
