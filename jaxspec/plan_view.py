"""A plan for a reader: tables, and a picture."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxspec.hardware import NODE
from jaxspec.picture import save_picture
from jaxspec.plan_report import PlanReport, ProgramPlan, accept_lengths, in_units

__all__ = ["draw", "show", "verdict"]

GREY = "0.45"


def show(report: PlanReport, console: Console) -> None:
    """Prints all of a plan."""
    r = report
    draft = "no draft" if r.draft is None else f"draft {r.draft}"
    console.print(
        f"predicted: {r.target}, {draft}; mesh {r.mesh} of {r.device}, cache {r.cache}, batch "
        f"{r.batch_size}, {r.context_length} tokens of context each, all filled",
        soft_wrap=True,
        highlight=False,
    )
    for table in (_memory(r), _times(r), _counts(r), _exchanges(r), _speeds(r), _assumptions(r)):
        console.print()
        console.print(table)
    console.print()
    console.print(verdict(r), soft_wrap=True, highlight=False)


def verdict(report: PlanReport) -> str:
    """Whether it fits, and from when on a tree pays."""
    lines = []
    for program in report.programs:
        free = report.memory_bytes - program.memory.total
        room = in_units(abs(free))
        said = f"fits, {room} of head-room" if free >= 0 else f"DOES NOT FIT: {room} too much"
        lines.append(f"{_name(program)}: {said} on each device (predicted)")
    for step in report.steps:
        least, most = report.break_even(step), step.levels + 1
        when = f"pays above an accept_length of {least:.2f} of {most}"
        lines.append(
            f"{_name(step)}: {when if least < most else f'never pays: {least:.2f} of {most}'}"
            " (predicted)"
        )
    if any(one.devices > NODE for program in report.programs for one in program.exchanges):
        lines.append(f"collectives cost more than assumed: a group has more than a node's {NODE}")
    if not report.agrees:
        lines.append("the table of sharding rules and XLA disagree about what a device holds")
    return "\n".join(lines)


def _name(program: ProgramPlan) -> str:
    return "plain decoding" if program.tree is None else f"tree {program.tree}"


def _table(report: PlanReport, title: str, *first: str) -> Table:
    """A table with a column for each program, after the first ones."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in first:
        table.add_column(name)
    for program in report.programs:
        table.add_column(_name(program), justify="right")
    return table


def _memory(report: PlanReport) -> Table:
    table = _table(report, "Bytes on each device, predicted", "what")
    rows: dict[str, Callable[[ProgramPlan], float]] = {
        "weights of the target": lambda p: p.memory.target,
        "weights of the draft": lambda p: p.memory.draft,
        "cache of the target": lambda p: p.memory.target_cache,
        "cache of the draft": lambda p: p.memory.draft_cache,
        "other state": lambda p: p.memory.other,
        "outputs that are no inputs": lambda p: p.memory.outputs,
        "temporaries of a step": lambda p: p.memory.temporaries,
        "temporaries of a prefill, in their place": lambda p: p.memory.prefill_temporaries,
    }
    for name, of in rows.items():
        table.add_row(name, *(in_units(of(p)) for p in report.programs))
    table.add_section()
    table.add_row("all, with the larger temporaries", *_each(report, lambda p: p.memory.total))
    free = [report.memory_bytes - p.memory.total for p in report.programs]
    table.add_row(
        f"left of {in_units(report.memory_bytes)}",
        *(in_units(f) if f >= 0 else f"-{in_units(-f)}: does not fit" for f in free),
    )
    return table


def _each(report: PlanReport, of: Callable[[ProgramPlan], float]) -> Iterable[str]:
    return (in_units(of(program)) for program in report.programs)


def _times(report: PlanReport) -> Table:
    title = "A step: bytes to and from a device's memory, and time, predicted"
    table = _table(report, title, "part")
    times = [program.times_ms(report.assumed) for program in report.programs]
    for part in _parts(times):
        cells = []
        for program, of_one in zip(report.programs, times, strict=True):
            num_bytes = _bytes_of(program, part)
            shown = f"{in_units(num_bytes)}  " if num_bytes else ""
            cells.append(f"{shown}{of_one[part]:7.3f} ms" if part in of_one else "")
        table.add_row(part, *cells)
    table.add_section()
    table.add_row("step", *(f"{p.step_ms(report.assumed):.3f} ms" for p in report.programs))
    return table


def _parts(times: Sequence[dict[str, float]]) -> list[str]:
    """The parts of all programs; the last one, if any has a draft, has them all."""
    return list(dict.fromkeys(part for of_one in reversed(times) for part in of_one))


def _bytes_of(program: ProgramPlan, part: str) -> float:
    if part == "slices copied":
        return 2 * sum(program.copied.values())
    return program.work[part].num_bytes if part in program.work else 0


def _counts(report: PlanReport) -> Table:
    table = _table(report, "What a step starts, by phase, predicted", "what", "phase")
    programs = report.programs
    for name, of in (
        ("kernels and copies", lambda p: p.launches),
        ("looks at a loop's condition", lambda p: p.waits),
    ):
        for phase in dict.fromkeys(phase for p in programs for phase in of(p)):
            table.add_row(name, phase, *(f"{of(p).get(phase, 0):,.0f}" for p in programs))
        table.add_section()
    for name, which in (("of all devices together", 0), ("of the device with most", 1)):
        table.add_row(
            "distinct experts in a layer", name, *(f"{p.experts[which]:.1f}" for p in programs)
        )
    return table


def _exchanges(report: PlanReport) -> Table:
    table = Table(title="Collectives, predicted", title_justify="left", title_style="bold")
    for name in ("step", "phase", "kind"):
        table.add_column(name)
    for name in ("bytes each", "in a step", "time"):
        table.add_column(name, justify="right")
    for program in report.programs:
        for one in program.exchanges:
            count, took = f"{one.times:,.0f}", f"{one.ms(report.assumed):.3f} ms"
            size = in_units(one.num_bytes)
            table.add_row(_name(program), one.phase, one.opcode, size, count, took)
        table.add_section()
    return table


def _speeds(report: PlanReport) -> Table:
    title = "Tokens per second, all sequences together, predicted"
    table = _table(report, title, "accept_length")
    most = max((accept_lengths(step) for step in report.steps), key=len, default=[1.0])
    for length in most:
        cells = [f"{report.tokens_per_s(report.plain):,.1f}"]
        cells += [
            f"{report.tokens_per_s(step, length):,.1f}" if length <= step.levels + 1 else ""
            for step in report.steps
        ]
        table.add_row(f"{length:.1f}", *cells)
    table.add_section()
    even = [f"{report.break_even(step):.2f}" for step in report.steps]
    table.add_row("as fast as plain decoding at", "", *even)
    return table


def _assumptions(report: PlanReport) -> Table:
    title = "Assumed, for all of the above (--assume NAME=NUMBER)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("name")
    table.add_column("value", justify="right")
    table.add_column("because")
    for name, one in report.assumed.to_dict().items():
        table.add_row(name, f"{one['value']:g} {one['unit']}", one["source"])
    return table


def draw(report: PlanReport, path: Path) -> None:
    """Writes the picture: tokens per second by accept_length, and where a step's time goes."""
    from matplotlib.figure import Figure  # no window, and no state that other code shares

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    speeds, times = figure.subplots(1, 2, width_ratios=[1, 1.25])
    plain = report.tokens_per_s(report.plain)
    speeds.axhline(plain, color=GREY, linestyle="--")
    speeds.annotate(
        f"plain decoding, {plain:,.0f}", (1, plain), (2, 4), textcoords="offset points", color=GREY
    )
    for step in report.steps:
        lengths = accept_lengths(step)
        per_s = [report.tokens_per_s(step, length) for length in lengths]
        (line,) = speeds.plot(lengths, per_s, label=_name(step))
        even = report.break_even(step)
        if 1 <= even <= step.levels + 1:
            speeds.plot(even, plain, "o", color=line.get_color())
            speeds.annotate(
                f"{even:.2f}", (even, plain), (4, -14), textcoords="offset points",
                color=line.get_color(),
            )  # fmt: skip
    speeds.set_xlabel("accept_length: tokens that a step emits, bonus included")
    speeds.set_ylabel("tokens per second, all sequences")
    speeds.set_ylim(bottom=0)
    speeds.set_title("predicted speed", loc="left")
    if report.steps:
        speeds.legend(loc="lower right", frameon=False)

    names = [_name(program) for program in report.programs]
    of_each = [program.times_ms(report.assumed) for program in report.programs]
    start = [0.0] * len(names)
    for index, part in enumerate(_parts(of_each)):
        wide = [of_one.get(part, 0.0) for of_one in of_each]
        times.barh(names, wide, left=start, color=f"C{index}", label=part, height=0.6)
        start = [a + b for a, b in zip(start, wide, strict=True)]
    for row, total in enumerate(start):
        times.annotate(f"{total:.1f} ms", (total, row), (4, -4), textcoords="offset points")
    times.set_xlim(right=1.12 * max(start))
    times.invert_yaxis()
    times.set_xlabel("ms")
    times.set_title("where a step's time is predicted to go", loc="left")
    times.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, frameon=False, columnspacing=1.2
    )
    for axes in (speeds, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{report.target.split('@')[0]} on mesh {report.mesh} of {report.device}, cache "
        f"{report.cache}, batch {report.batch_size}, {report.context_length} tokens of context",
        x=0.01,
        ha="left",
    )
    save_picture(figure, path)
