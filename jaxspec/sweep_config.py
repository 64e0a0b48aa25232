"""What a sweep measures: a grid of trees, batch sizes, how many texts' tokens and rounds."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxspec.config import TreeConfig
from jaxspec.errors import InputError
from jaxspec.requests import Request

__all__ = ["DEFAULT_GRID", "SweepConfig", "grid"]

MOST_STEPS = 32
"""In one timed call of a step."""


def grid(
    levels: Sequence[int], branches: Sequence[int], nodes: Sequence[int]
) -> tuple[TreeConfig, ...]:
    """All trees of these sizes that there are; of a chain, the one that all its levels fit in.

    Raises:
      InputError: there is none.
    """
    found = []
    for depth, width, size in itertools.product(levels, branches, nodes):
        tree = TreeConfig(depth, width, depth + 1 if width == 1 else size)
        # A tree that has no node for each of its levels is one of fewer levels, and slower.
        if tree.nodes > tree.levels and tree.nodes - 1 <= tree.num_candidates:
            tree.check()
            found.append(tree)
    if not found:
        raise InputError("there is no tree of these levels, branches and nodes")
    return tuple(dict.fromkeys(found))


DEFAULT_GRID = grid(range(1, 11), (1, 2, 4, 8), (3, 4, 6, 8, 12, 16, 24, 32))


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """What is measured.

    Attributes:
      trees: whose acceptance is measured.
      batch_sizes: for each of them the fastest is found.
      max_new_tokens: of a text.
      temperature: of its tokens; 0 is greedy.
      rounds: of timing.
      num_timed: trees that are timed at a batch size, besides the corners of the grid; a grid of
        no more than both is timed whole.
    """

    trees: tuple[TreeConfig, ...] = DEFAULT_GRID
    batch_sizes: tuple[int, ...] = (1, 4)
    max_new_tokens: int = 96
    temperature: float = 0.0
    rounds: int = 6
    num_timed: int = 4

    def check(self) -> None:
        """Raises InputError for what cannot be measured."""
        if not self.trees or not self.batch_sizes:
            raise InputError("there is nothing to sweep: no tree, or no batch size")
        for tree in self.trees:
            tree.check()
        for name, least in (("max_new_tokens", 16), ("rounds", 1), ("num_timed", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it starts at {least}")
        if min(self.batch_sizes) < 1:
            raise InputError(f"batch_sizes are {self.batch_sizes}; they start at 1")
        Request((0,), self.temperature).check_settings()

    def num_steps(self, tree: TreeConfig | None) -> int:
        """Of a timed call: so many that no text can end before."""
        levels = 0 if tree is None else tree.levels
        return min(MOST_STEPS, (self.max_new_tokens - 1) // (levels + 1) or 1)
