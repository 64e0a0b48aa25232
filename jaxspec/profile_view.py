"""A profile for a reader: tables, and a picture."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxspec.phases import PHASES
from jaxspec.picture import save_picture
from jaxspec.plan_report import in_units
from jaxspec.profile_report import (
    CALL,
    COLLECTIVES,
    METHOD,
    ORDER,
    UNKNOWN,
    ProfileReport,
    StepProfile,
)

__all__ = ["draw", "show", "verdict"]

FILLS = {
    "verify": ("0.25", ("", "///", "...", "xxx", "---")),
    "propose": ("0.65", ("", "///", "...")),
    "accept": ("0.9", ("///",)),
    "commit": ("0.9", ("xxx",)),
    "extend": ("0.8", ("",)),
    COLLECTIVES: ("0.5", ("+++",)),
    UNKNOWN: ("white", ("ooo",)),
    CALL: ("white", ("...",)),
}
"""A grey for each phase, and hatches for its parts; white for the rest."""


def show(report: ProfileReport, console: Console) -> None:
    """Prints all of a profile, the verification's share first."""
    r = report
    draft = "no draft" if r.draft is None else f"draft {r.draft}"
    where = r.device if r.mesh is None else f"mesh {r.mesh} of {r.device}, cache {r.mesh.cache}"
    lens = "+".join(map(str, r.prompt_lens))
    kernels = ", ".join(f"{name} {which}" for name, which in r.implementations.items())
    for line in (
        *(f"{_name(step)}: {_shares(step)}" for step in r.steps),
        f"measured: {r.target}, {draft}; {r.dtype} on {where}; batch {len(r.prompt_lens)}, prompts "
        f"of {lens} tokens, context {r.context_length}, {r.num_steps} steps a call; {kernels}",
        f"machine: {r.machine}, jax {r.jax_version}; command: {r.command}",
    ):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(_phases(r))
    if any(step.exchanges for step in r.steps):
        console.print(_exchanges(r))
    for line in (*METHOD, verdict(r)):
        console.print(line, soft_wrap=True, highlight=False)


def verdict(report: ProfileReport) -> str:
    """Whether the phases' sum is the whole step, and how far that can be relied on."""
    lines = []
    for step in report.steps:
        holds = "agrees with" if step.agrees else "DOES NOT AGREE with"
        lines.append(
            f"{_name(step)}: the sum {holds} the whole step to 10 %: {step.disagreement:+.1%}"
            + ("" if step.has_settled else "; times did not settle, the machine is busy")
        )
    return "\n".join(lines)


def _name(step: StepProfile) -> str:
    return "plain decoding" if step.tree is None else f"tree {step.tree}"


def _shares(step: StepProfile) -> str:
    """The phases' shares of their sum, the verification's first."""
    phases = sorted(PHASES, key=lambda phase: phase != "verify")
    shares = [f"{name} {step.of_phase(name) / step.sum_ms:.0%}" for name in phases]
    return f"{', '.join(shares)} of {step.sum_ms:.3f} ms; the whole step: {step.step_ms:.3f} ms"


def _phases(report: ProfileReport) -> Table:
    table = Table(
        title="A step: ms, share, idle ms, operations; measured",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("phase")
    for step in report.steps:
        table.add_column(_name(step), justify="right")

    def row(name: str, cells: Iterator[str]) -> None:
        table.add_row(name, *cells)

    for name, parts in _grouped(report):
        if len(parts) > 1:
            cells = (
                f"{s.of_phase(name):.3f}  {s.of_phase(name) / s.sum_ms:6.1%}{'':19}"
                for s in report.steps
            )
            row(name, cells)
        for part in parts:
            shown = f"  {part.split('/')[1]}" if len(parts) > 1 else part
            row(shown, (_cell(step, part) for step in report.steps))
    table.add_section()
    row("sum", (f"{s.sum_ms:.3f}  {'':25}" for s in report.steps))
    row("whole step, no profiler", (f"{s.step_ms:.3f}  {'':25}" for s in report.steps))
    row("with the profiler", (f"{min(s.traced_ms):.3f}  {'':25}" for s in report.steps))
    cost = (f"{s.profiler_us:.2f} us{'':24}" for s in report.steps)
    row("taken off an operation", cost)
    calls = (f"{len(s.whole_ms)}  {'':25}" for s in report.steps)
    row("calls with, and without", calls)
    return table


def _cell(step: StepProfile, part: str) -> str:
    one = step.phases.get(part)
    if one is None:
        return ""
    share = f"{one.ms / step.sum_ms:6.1%}"
    return f"{one.ms:.3f}  {share}  {one.idle_ms:8.3f}  {one.operations:7,.0f}"


def _grouped(report: ProfileReport) -> Iterator[tuple[str, list[str]]]:
    """The phases that any of the steps has, each with its parts."""
    there = [name for name in ORDER if any(name in step.phases for step in report.steps)]
    for phase in dict.fromkeys(name.split("/")[0] for name in there):
        yield phase, [name for name in there if name.split("/")[0] == phase]


def _exchanges(report: ProfileReport) -> Table:
    table = Table(title="Collectives, measured", title_justify="left", title_style="bold")
    for name in ("step", "phase", "kind"):
        table.add_column(name)
    for name in ("bytes each", "in a step", "ms"):
        table.add_column(name, justify="right")
    for step in report.steps:
        for one in step.exchanges:
            figures = in_units(one.num_bytes), f"{one.times:,.1f}", f"{one.ms:.3f}"
            table.add_row(_name(step), one.phase, one.opcode, *figures)
        table.add_section()
    return table


def draw(report: ProfileReport, path: Path) -> None:
    """Writes the picture: a bar for each step, in its phases, and the whole step beside it.

    Raises:
      InputError: it cannot be written there.
    """
    from matplotlib.figure import Figure  # no window, and no state that other code shares

    steps = report.steps
    figure = Figure(figsize=(11, 2.6 + 0.75 * len(steps)), layout="constrained")
    axes = figure.subplots()
    start = [0.0] * len(steps)
    for phase, parts in _grouped(report):
        grey, hatches = FILLS.get(phase, ("white", ("",)))
        for index, part in enumerate(parts):
            wide = [step.phases[part].ms if part in step.phases else 0.0 for step in steps]
            axes.barh(
                range(len(steps)),
                wide,
                left=start,
                height=0.6,
                label=part,
                color=grey,
                hatch=hatches[index % len(hatches)],
                edgecolor="white" if grey == "0.25" else "black",
                linewidth=0.6,
            )
            start = [a + b for a, b in zip(start, wide, strict=True)]
    for row, (step, end) in enumerate(zip(steps, start, strict=True)):
        axes.plot([step.step_ms] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2.5)
        share = step.of_phase("verify") / step.sum_ms
        axes.annotate(
            f"{step.step_ms:.2f} ms; verify {share:.0%} of the phases",
            (max(end, step.step_ms), row),
            (6, -4),
            textcoords="offset points",
        )
    axes.plot([], [], color="black", linewidth=2.5, label="whole step, no profiler")
    axes.set_yticks(range(len(steps)), [_name(step) for step in steps])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(*start, *(step.step_ms for step in steps)))
    axes.set_xlabel("ms in a step, measured")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.22), ncols=5, frameon=False)
    figure.suptitle(
        f"where a step's time goes: {report.target.split('@')[0]} in {report.dtype} on "
        f"{report.machine}, batch {len(report.prompt_lens)}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    save_picture(figure, path)
