"""A training run as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.picture import save_picture
from jaxspec.training_run import TrainReport

__all__ = ["plot_training"]


def plot_training(report: TrainReport, path: Path) -> None:
    """Writes held-out loss and accuracy per step, and acceptance beside its ceiling.

    Raises:
      InputError: it cannot be written there.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    of_loss, of_accuracy, of_acceptance = figure.subplots(1, 3)
    batches = [one.batch for one in report.evaluations]
    for axes, name, title in (
        (of_loss, "loss", "held-out loss, nats"),
        (of_accuracy, "accuracy", "held-out accuracy"),
    ):
        _draw(axes, batches, [getattr(one, name) for one in report.evaluations])
        axes.set(title=title, xlabel="batches")
    of_acceptance.set(title="accept_length, bonus included", xlabel="batches")
    measured = [one for one in report.evaluations if one.accept_length is not None]
    if measured:
        at = [one.batch for one in measured]
        of_acceptance.plot(at, [one.accept_length for one in measured], "o-", label="measured")
        ceilings = [one.accept_ceiling for one in measured]
        of_acceptance.plot(at, ceilings, "k--", label="its ceiling")
        of_acceptance.legend()
    of_accuracy.legend(title="step")
    figure.suptitle(f"{report.draft.parent.name}: measured on {report.device}, {report.dtype}")
    save_picture(figure, path)


def _draw(axes: Any, batches: Sequence[int], of_steps: Sequence[Sequence[float | None]]) -> None:
    """A line for each step of the training-time test."""
    for step, values in enumerate(zip(*of_steps, strict=True)):
        shown = [float("nan") if value is None else value for value in values]
        axes.plot(batches, shown, "o-", markersize=3, label=str(step + 1))
