"""The doctor's findings for a reader: a table, and a plot that grey paper can carry."""

from pathlib import Path
from typing import get_args

import numpy as np
from rich.table import Table

from jaxspec.doctor_report import LEAST, DoctorReport, Figures, Verdict
from jaxspec.picture import save_picture

__all__ = ["plot_report", "table_of"]


def table_of(report: DoctorReport) -> Table:
    """The readings below the declared one: what beats it, cannot be told from it, is worse;
    of each, the best first."""
    looping = f", {len(report.looping)} left out that loop" if report.looping else ""
    table = Table(
        title=f"{report.draft} for {report.target}, {report.dtype}\n{report.claim}\n"
        f"{report.num_rows} tokens of {report.num_texts} texts{looping}; a chain of "
        f"{report.levels}",
        title_justify="left",
    )
    for head in ("reading", "nats per token over declared", ""):
        table.add_column(head)
    for head in ("top-1 by depth", f"top-{report.top}", "accept_length"):
        table.add_column(head, justify="right")
    table.add_row("the target's own guesses", "", "ceiling", *_cells(report.ceiling))
    table.add_row("as declared", "", "", *_cells(report.declared), end_section=True)
    for verdict in get_args(Verdict):
        for one in report.readings:
            if one.verdict == verdict:
                low, high = one.interval
                gain = f"{one.gain:+.4f} ({low:+.4f} to {high:+.4f})"
                table.add_row(one.name, gain, verdict, *_cells(one.figures))
        table.add_section()
    return table


def _cells(figures: Figures) -> tuple[str, str, str]:
    top1 = " ".join(f"{share:.1%}" for share in figures.top1)
    return top1, f"{figures.topk[0]:.1%}", f"{figures.accept_length:.2f}"


def plot_report(report: DoctorReport, path: Path) -> None:
    """Each reading's gain with its interval, and its accept length, beside the declared one's.

    Raises:
      InputError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    shown = report.readings
    figure = Figure(figsize=(9, 1.6 + 0.2 * len(shown)), layout="constrained")
    gains, lengths = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    y = np.arange(len(shown))[::-1]
    styles = {
        "better": ("o", "black", "black"),
        "indistinguishable": ("s", "white", "black"),
        "worse": ("x", "grey", "grey"),
    }
    for verdict, (marker, fill, colour) in styles.items():
        rows = [i for i, one in enumerate(shown) if one.verdict == verdict]
        if not rows:
            continue
        middle = np.array([shown[i].gain for i in rows])
        ends = np.array([shown[i].interval for i in rows]).T
        away = np.maximum(np.stack([middle - ends[0], ends[1] - middle]), 0)
        style = {"marker": marker, "markerfacecolor": fill, "color": colour, "linestyle": "none"}
        gains.errorbar(middle, y[rows], xerr=away, capsize=2, label=verdict, **style)
        lengths.plot([shown[i].figures.accept_length for i in rows], y[rows], **style)
    gains.axvline(0, color="black", linewidth=0.8)
    gains.set_xscale("symlog", linthresh=0.01)
    gains.set_yticks(y, [one.name for one in shown], fontsize=7)
    gains.set_xlabel(
        f"nats per token over the declared reading, 95 % together; less than {LEAST:g} is none"
    )
    gains.legend(fontsize=7)
    lengths.axvline(report.declared.accept_length, color="black", linewidth=0.8, label="declared")
    lengths.axvline(report.ceiling.accept_length, color="black", linestyle=":", label="ceiling")
    lengths.set_xlabel("accept_length, bonus included")
    lengths.legend(fontsize=7)
    figure.suptitle(f"{report.draft} for {report.target}", fontsize=9)
    save_picture(figure, path)
