"""A sweep for a reader: tables, and the frontier as a picture that grey paper can carry."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.picture import save_picture
from jaxspec.sweep_report import BatchReport, Prediction, SettingReport, SweepReport, TreeReport

__all__ = ["draw_sweep", "show_sweep"]

COLUMNS = 3
"""Panels beside each other."""


def show_sweep(report: SweepReport, console: Console) -> None:
    """Prints all of a sweep."""
    r = report
    kind = "greedy" if r.temperature == 0 else f"sampled at {r.temperature:g}"
    looping = f"; {len(r.looping)} more repeat themselves and are left out" if r.looping else ""
    console.print(
        f"measured on {r.machine}: {r.draft} for {r.target}, {r.dtype}; {r.num_texts} texts of "
        f"{r.num_tokens} tokens, {kind}{looping}\nthe prompts surprise the target by "
        f"{r.surprise:.2f} nats a token, of the {r.uniform:.2f} of random ones; trees whose "
        f"acceptance was measured, all along these texts: {len(r.accept_length)}",
        soft_wrap=True,
        highlight=False,
    )
    for setting in r.settings:
        for batch in setting.batches:
            console.print(_table(setting, batch))
    if r.predicted:
        console.print(_predictions(r.predicted))
    console.print(r.finding(), soft_wrap=True, highlight=False)
    for one in r.predicted:
        console.print(
            f"predicted for {one.model} on mesh {one.mesh} of H200s, batch {one.batch_size}, with "
            f"the accept lengths measured here: {one.best}, {one.trees[one.best][1]:.2f} times "
            "plain decoding",
            soft_wrap=True,
            highlight=False,
        )


def _table(setting: SettingReport, batch: BatchReport) -> Table:
    named = f"{setting.name}, " if setting.env else ""
    table = Table(
        title=f"{named}batch {batch.batch_size}, measured in {batch.num_rounds} rounds; intervals "
        "are of 95 %",
        title_justify="left",
    )
    table.add_column("tree")
    for head in (
        "accept_length",
        "step, ms",
        "tokens/s",
        "times plain",
        "same steps: real",
        "walked",
    ):
        table.add_column(head, justify="right")
    table.add_column("")
    plain = f"{batch.plain_ms:.2f}", f"{batch.plain_tokens_per_s:.1f}"
    table.add_row("plain", "1", *plain, "1", "", "", "", end_section=True)
    for index, one in enumerate(batch.trees):
        check = ("", "")
        if one.check is not None:
            check = f"{one.check.real:.3f}", f"{one.check.walked:.3f}"
        remark = "fastest tree" if index == 0 else "or this" if one.is_rival else ""
        cells = f"{one.step_ms:.2f}", f"{one.tokens_per_s:.1f}", str(one.speed)
        table.add_row(one.tree, str(one.accept_length), *cells, *check, remark)
    return table


def _predictions(predicted: tuple[Prediction, ...]) -> Table:
    table = Table(title="predicted, on H200s", title_justify="left")
    for head in ("batch", "tree", "tokens/s, predicted", "times plain, predicted"):
        table.add_column(head, justify="right")
    for one in predicted:
        for tree, (per_s, speed) in one.trees.items():
            table.add_row(str(one.batch_size), tree, f"{per_s:,.1f}", f"{speed:.2f}")
    return table


def draw_sweep(report: SweepReport, path: Path) -> None:
    """Each timed tree's accept_length over the cost of its step; above the diagonal it pays.

    Raises:
      InputError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    panels = [(setting, batch) for setting in report.settings for batch in setting.batches]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 4.6 * columns, 0.6 + 4.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (setting, batch) in zip(grid.flat, panels, strict=False):
        _panel(axes, batch)
        title = f"batch {batch.batch_size}, fastest: {batch.best.tree}"
        axes.set_title(f"{setting.name}\n{title}" if setting.env else title, fontsize=9)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    said = f"{report.draft} for {report.target}, {report.dtype}"
    figure.suptitle(f"measured on {report.machine}:\n{said}", fontsize=9)
    save_picture(figure, path)


def _panel(axes: Any, batch: BatchReport) -> None:
    cost = np.array([_cost(one) for one in batch.trees])
    length = np.array([one.accept_length.value for one in batch.trees])
    ends = [one.accept_length.interval or (one.accept_length.value,) * 2 for one in batch.trees]
    away = np.maximum(
        np.stack([length - [low for low, _ in ends], [h for _, h in ends] - length]), 0
    )
    most = 1.1 * max(cost.max(), length.max())
    axes.plot([0, most], [0, most], color="0.5", linestyle="--", label="as fast as plain decoding")
    axes.errorbar(
        cost, length, yerr=away, fmt="o", color="0.4", markersize=4, capsize=2, linewidth=0.8,
        label="a tree",
    )  # fmt: skip
    edge = _frontier(batch.trees)
    axes.plot(
        [_cost(one) for one in edge],
        [one.accept_length.value for one in edge],
        color="black", linewidth=1.2, label="frontier",
    )  # fmt: skip
    star = {"color": "black", "markersize": 13, "zorder": 3}
    axes.plot(cost[0], length[0], "*", label="the fastest tree", **star)
    for one in edge:
        axes.annotate(
            one.tree,
            (_cost(one), one.accept_length.value),
            xytext=(3, -11),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_xlim(0, 1.15 * cost.max())
    axes.set_ylim(0, 1.15 * max(high for _, high in ends))
    axes.set_xlabel("time of a step, over that of plain decoding")
    axes.set_ylabel("accept_length, bonus included")
    axes.legend(fontsize=7, loc="lower right")


def _cost(tree: TreeReport) -> float:
    """Time of a step over a plain one's, taken round by round."""
    return tree.accept_length.value / tree.speed.value


def _frontier(trees: tuple[TreeReport, ...]) -> list[TreeReport]:
    """Those that none both accepts more than and is as quick as, the quickest first."""
    found: list[TreeReport] = []
    for one in sorted(trees, key=_cost):
        if not found or one.accept_length.value > found[-1].accept_length.value:
            found.append(one)
    return found
