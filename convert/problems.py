"""Everything wrong with a checkpoint, collected and reported together."""

from jaxspec.errors import InputError

__all__ = ["CheckpointError", "Problems"]

NUM_SHOWN = 20


class CheckpointError(InputError):
    """A checkpoint that cannot be used, and every reason why.

    Attributes:
      problems: one line each: file, tensor or field; what was found; what was expected.
    """

    def __init__(self, where: str, problems: list[str]) -> None:
        self.problems = list(problems)
        shown = self.problems[:NUM_SHOWN]
        if (hidden := len(self.problems) - len(shown)) > 0:
            shown.append(f"... and {hidden} more of {len(self.problems)}")
        if len(shown) == 1:
            message = f"{where}: {shown[0]}"
        else:
            message = f"{where}: {len(self.problems)} problems\n  " + "\n  ".join(shown)
        super().__init__(message)


class Problems:
    """The list being collected, for one checkpoint."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[str] = []

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def raise_any(self) -> None:
        """Raises CheckpointError if there is anything to report."""
        if self.found:
            raise CheckpointError(self.where, self.found)
