"""A comparison for a reader: tables, and a plot of the error along the depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from jaxspec.errors import InputError
from jaxspec.isolation_findings import Isolation
from jaxspec.picture import save_picture
from jaxspec.record_findings import F32_TOLERANCE, ArrayComparison, RecordComparison
from jaxspec.run_comparison import Estimate, RunComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_isolation",
    "plot_records",
    "plot_runs",
    "tables_of_isolation",
    "tables_of_records",
    "tables_of_runs",
]

FLOOR = 1e-9
"""Where equal bits are drawn: they have no logarithm."""


def tables_of_records(found: RecordComparison) -> list[Table]:
    """The arrays' errors, the routers' choices, and what the logits say."""
    arrays = Table(title=f"a {found.a}\nb {found.b}", title_justify="left")
    arrays.add_column("array")
    heads = ["|a - b| / |b|", "middle row", "worst row", "at", "1 - cosine", "largest"]
    if found.reference is not None:
        heads += ["a from reference", "b from reference"]
    for head in [*heads, "tolerance", ""]:
        arrays.add_column(head, justify="right")
    for one in found.arrays:
        figures = [one.error, one.middle, one.worst]
        cells = [*map(_figure, figures), "{}:{}".format(*one.worst_at)]
        cells += [_figure(one.cosine_difference), _figure(one.largest)]
        cells += map(_figure, one.reference_errors or ())
        judged = "" if found.reference is not None else f"{_figure(one.tolerance)} ({one.judges})"
        arrays.add_row(one.name, *cells, judged, _verdict(one))
    tables = [arrays]
    if found.routers:
        routers = Table("router", "rows", "other experts", "of them ties", "largest margin", "")
        for router in found.routers:
            margin = "" if router.margin is None else _figure(router.margin)
            counts = [router.num_rows, router.num_other, router.num_ties]
            holds = "" if router.holds else "DIFFERS"
            routers.add_row(router.name, *map(str, counts), margin, holds)
        tables.append(routers)
    if found.logits:
        logits = Table(
            "logits", "same best token", "KL(b | a), nats", "worst rank of b's best in a"
        )
        for one in found.logits:
            kl = "" if one.kl is None else _figure(one.kl)
            rank = "" if one.rank is None else str(one.rank)
            logits.add_row(one.name, f"{one.top1:.2%}", kl, rank)
        tables.append(logits)
    return tables


def tables_of_runs(found: RunComparison) -> list[Table]:
    """The figures by category, and the requests whose tokens part."""
    figures = Table(title=f"a {found.a}\nb {found.b}", title_justify="left")
    for head in ("requests", "figure", "a", "b", "a - b, 95 %", ""):
        figures.add_column(head)
    for group in found.groups:
        rows: list[tuple[str, Estimate | None]] = [("accept_length", group.accept_length)]
        rows += [
            (f"accepted at depth {depth}", one)
            for depth, one in enumerate(group.accept_per_depth, start=1)
        ]
        rows += [
            ("ms per verify step", group.ms_per_step),
            ("tokens/s of a request", group.tokens_per_s),
        ]
        for name, one in rows:
            if one is not None:
                interval = ""
                if one.interval is not None:
                    interval = "{:+.3g} to {:+.3g}".format(*one.interval)
                differs = "differs" if one.differs else ""
                who = f"{group.name} ({group.num_requests})"
                figures.add_row(who, name, f"{one.a:.3g}", f"{one.b:.3g}", interval, differs)
    tables = [figures]
    if found.differences:
        parts = Table("request", "first other token", "a", "b", "logit margin")
        for one in found.differences:
            a, b = ("ended" if x is None else str(x) for x in (one.a, one.b))
            margin = "" if one.margin is None else _figure(one.margin)
            parts.add_row(one.id, str(one.index), a, b, margin)
        tables.append(parts)
    return tables


def tables_of_isolation(found: Isolation) -> list[Table]:
    """Every part's distance from these weights, and what rounding explains."""
    parts = Table(title=f"{found.record}\nagainst {found.target}", title_justify="left")
    parts.add_column("part")
    for head in ("rows", "rms", "worst row", "rms of its dtype", "other experts", "left out", ""):
        parts.add_column(head, justify="right")
    for one in found.parts:
        name = one.name if one.layer is None else f"{one.name} ({one.kind})"
        own = "" if one.own is None else _figure(one.own[0])
        others = [str(one.num_other), str(one.num_ties)] if one.kind == "sparse" else ["", ""]
        cells = [str(one.num_rows), _figure(one.rms), _figure(one.worst), own, *others]
        parts.add_row(name, *cells, "" if one.holds else "DEPARTS")
    return [parts]


def plot_isolation(found: Sequence[Isolation], path: Path) -> None:
    """Each layer's own error along the depth, beside what rounding explains; a panel per record.

    Raises:
      InputError: no layer of a record was compared, or the picture cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.5 + 3 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, one in zip(panels, found, strict=True):
        _plot_layers(one, axes, path)
    panels[-1].set_xlabel("layer")
    save_picture(figure, path)


def _plot_layers(found: Isolation, axes: "Axes", path: Path) -> None:
    layers = [part for part in found.parts if part.layer is not None]
    if not layers:
        raise InputError(
            f"--plot {path}: no layer of {found.record} was compared, so there is no depth to plot"
        )
    depth = [part.layer for part in layers]
    is_exact = layers[0].own is None
    errors = [max(part.worst if is_exact else part.rms, FLOOR) for part in layers]
    name = "worst row" if is_exact else "rms over rows"
    axes.semilogy(depth, errors, "o-", color="black", markersize=4, label=f"the record, {name}")
    if is_exact:
        axes.axhline(F32_TOLERANCE, color="grey", linestyle=":", label="tolerance")
    else:
        own = [max(part.own[0] if part.own else 0.0, FLOOR) for part in layers]
        label = f"these weights in {found.dtype}"
        axes.semilogy(depth, own, "s--", color="grey", markersize=3, label=label)
    far = [
        (part.layer, error) for part, error in zip(layers, errors, strict=True) if not part.holds
    ]
    if far:
        axes.scatter(*zip(*far, strict=True), s=90, facecolors="none", edgecolors="black", zorder=3)
        axes.scatter([], [], s=60, facecolors="none", edgecolors="black", label="departs")
    axes.set_ylabel("error of the layer alone")
    axes.set_title(found.record.name, fontsize=9)
    axes.legend(fontsize=8)


def plot_records(found: RecordComparison, path: Path) -> None:
    """Two panels over the layers: the rows' errors, and the rows that chose other experts.

    Raises:
      InputError: no boundary was compared, or the picture cannot be written.
    """
    if not found.boundaries:
        raise InputError(f"--plot {path}: no boundary was compared, so there is no depth to plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    errors, choices = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    depth = [one.depth for one in found.boundaries]
    lines = {"worst row": "o-", "middle row": "s--"}
    for (name, style), of in zip(lines.items(), ("worst", "middle"), strict=True):
        values = [max(getattr(one, of), FLOOR) for one in found.boundaries]
        errors.semilogy(depth, values, style, label=name, color="black", markersize=4)
    if found.reference is None:
        limits = [one.tolerance for one in found.boundaries]
        label = f"tolerance of the {found.boundaries[0].judges} row"
        errors.semilogy(depth, limits, ":", color="grey", label=label)
    else:
        for side, style in ((0, "^-."), (1, "v-.")):
            values = [
                max((one.reference_errors or (0, 0))[side], FLOOR) for one in found.boundaries
            ]
            name = f"{'ab'[side]} from the reference, rms over rows"
            errors.semilogy(depth, values, style, color="grey", markersize=4, label=name)
    first = next((one for one in found.boundaries if not one.holds), None)
    if first is not None:
        errors.axvline(first.depth, color="black", linewidth=0.8)
        errors.annotate(f" {first.name}", (first.depth, errors.get_ylim()[1]), va="top", fontsize=8)
    errors.set_ylabel("|a - b| / |b|")
    errors.legend(fontsize=8)
    errors.set_title(f"a: {found.a.name}   b: {found.b.name}", fontsize=9)
    shares = [router.num_other / max(router.num_rows, 1) for router in found.routers]
    choices.bar([router.layer + 0.5 for router in found.routers], shares, color="grey", width=0.8)
    choices.set_ylabel("other experts")
    choices.set_ylim(0, max([*shares, 0.01]) * 1.1)
    choices.set_xlabel("boundary (bars: the layer between two)")
    save_picture(figure, path)


def plot_runs(found: RunComparison, path: Path) -> None:
    """Acceptance at each depth, run by run, and the accept lengths by category.

    Raises:
      InputError: no request was compared, or the picture cannot be written.
    """
    if not found.groups or found.groups[0].accept_length is None:
        raise InputError(f"--plot {path}: no verify steps were compared")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    depths, lengths = figure.subplots(1, 2)
    whole = found.groups[0]
    x = range(1, len(whole.accept_per_depth) + 1)
    depths.plot(
        x,
        [one.a for one in whole.accept_per_depth],
        "o-",
        color="black",
        label=f"a: {found.a.name}",
    )
    depths.plot(
        x,
        [one.b for one in whole.accept_per_depth],
        "s--",
        color="grey",
        label=f"b: {found.b.name}",
    )
    depths.set(xlabel="depth", ylabel="share of steps accepted", ylim=(0, 1.05), xticks=list(x))
    depths.legend()
    groups = [group for group in found.groups if group.accept_length is not None]
    y = range(len(groups))
    estimates = [group.accept_length for group in groups if group.accept_length is not None]
    middle = [one.difference for one in estimates]
    intervals = [one.interval or (np.nan, np.nan) for one in estimates]
    away = np.abs(np.array(intervals).T - middle)
    lengths.errorbar(middle, list(y), xerr=away, fmt="o", color="black", capsize=3)
    lengths.axvline(0, color="grey", linewidth=0.8)
    lengths.set_yticks(list(y), [group.name for group in groups])
    lengths.set_xlabel("accept_length, a - b, 95 %")
    save_picture(figure, path)


def _figure(value: float) -> str:
    return f"{value:.1e}"


def _verdict(one: ArrayComparison) -> str:
    if one.flagged is None:
        return ""
    return "DIFFERS" if one.flagged == "both" else f"{one.flagged} IS FAR"
