"""`jaxspec compare`: its flags."""

import json
from pathlib import Path
from typing import Annotated, cast

import typer

from jaxspec.errors import InputError
from jaxspec.flags import JsonFlag

__all__ = ["compare"]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A record, or a run file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same kind.")],
    *,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="R",
            help="A record in float32: each of two records is judged by its distance from it. "
            "Default: none.",
        ),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Fail unless these were compared: of boundary, features, router, logits, draft. "
            "Default: whatever both hold.",
        ),
    ] = None,
    align: Annotated[
        bool, typer.Option("--align", help="Of records of other tokens, compare the common start.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Of run files: the target, in float32, that says how near a tie is where tokens "
            "part. Default: none.",
        ),
    ] = None,
    tie: Annotated[
        float | None,
        typer.Option(
            help="With --target: the logit margin up to which it is a tie. Default: 1e-4."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="F.png", help="A picture. Default: none.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Two records boundary by boundary, or two run files request by request.

    Exit status 1 if they differ, or nothing could be compared.
    """
    from rich.console import Console

    from jaxspec import comparison_view as view
    from jaxspec.picture import check_picture
    from jaxspec.record_findings import KINDS, Kind

    if plot is not None:
        check_picture(plot)
    named = [name.strip() for name in require.split(",")] if require else []
    for name in named:
        if name not in KINDS:
            raise InputError(f"--require {name}: there are {', '.join(KINDS)}")
    kinds = cast("list[Kind]", named)
    if tie is not None and target is None:
        raise InputError("--tie is of the margins that --target gives: give both")
    are_runs = [_is_run(path) for path in (a, b)]
    if are_runs[0] != are_runs[1]:
        run, record = (a, b) if are_runs[0] else (b, a)
        raise InputError(f"{run} is a run file and {record} a record: nothing to compare")
    if are_runs[0]:
        if reference is not None or kinds or align:
            raise InputError("--reference, --require and --align are of records; these are runs")
        from jaxspec.record_comparison import NEAR_TIE
        from jaxspec.run_comparison import compare_runs

        margins = None if target is None else _margins(target)
        found = compare_runs(a, b, margins, None if target is None else tie or NEAR_TIE)
        tables = view.tables_of_runs(found)
        if plot is not None:
            view.plot_runs(found, plot)
    else:
        if target is not None:
            raise InputError("--target is of run files; these are records")
        from jaxspec.record_comparison import compare_records

        found = compare_records(a, b, reference, kinds, aligns=align)
        tables = view.tables_of_records(found)
        if plot is not None:
            view.plot_records(found, plot)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        console = Console(width=None if Console().is_terminal else 160)
        for table in tables:
            console.print(table)
        print(found.finding())
    if not found.holds:
        raise typer.Exit(1)


def _is_run(path: Path) -> bool:
    """Whether a file begins as JSON does; safetensors begins with a size."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _margins(directory: str):
    """What tells how near the logits of two tokens are, in float32."""
    from jaxspec.checkpoint import load_target
    from jaxspec.config import Numerics
    from jaxspec.recording import logit_margins

    target = load_target(directory, Numerics(dtype="float32"))
    return lambda questions: logit_margins(target, questions)
