"""Figures over verify steps, each with its formula; one of no steps is None."""

from collections.abc import Sequence

__all__ = ["accept_per_depth", "ratio"]


def ratio(numerator: float, denominator: float) -> float | None:
    """The quotient; None where there is nothing to divide by."""
    return numerator / denominator if denominator else None


def accept_per_depth(accepted: Sequence[int], levels: int) -> tuple[float | None, ...]:
    """Share of all steps in which the token at depth d + 1 was accepted, for every d.

    Args:
      accepted: drafted tokens accepted in each step, at most `levels`.
    """
    return tuple(
        ratio(sum(count > depth for count in accepted), len(accepted)) for depth in range(levels)
    )
