"""`jaxspec compare`: its flags."""

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from jaxspec.errors import InputError
from jaxspec.flags import JsonFlag

__all__ = ["compare"]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A record, or a run file.")],
    b: Annotated[
        Path | None,
        typer.Argument(
            metavar="B", help="Another one, of the same kind; with --isolate it may be left out."
        ),
    ] = None,
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
    is_isolated: Annotated[
        bool,
        typer.Option(
            "--isolate",
            help="Of records: run each layer of --target on the record's own state before it, and "
            "compare what comes out, so that nothing compounds; known mistakes are tried.",
        ),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Of run files: the target, in float32, that says how near a tie is where tokens "
            "part. With --isolate: the weights. Default: none.",
        ),
    ] = None,
    tie: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --target: the logit margin up to which it is a tie. Default: 1e-4."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="F.png", help="A picture; of two isolated records, that of A. Default: none."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Two records boundary by boundary, or two run files request by request.

    Exit status 1 if they differ, or nothing could be compared.
    """
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
    if is_isolated:
        if target is None:
            raise InputError("--isolate runs the layers of a target: give --target DIR")
        if reference is not None or kinds or align or tie is not None:
            raise InputError("--isolate goes without --reference, --require, --align and --tie")
        isolated = _isolated([a] if b is None else [a, b], target)
        _show(
            isolated,
            view.tables_of_isolation,
            lambda path: view.plot_isolation(isolated, path),
            plot,
            as_json,
        )
        return
    if b is None:
        raise InputError("compare takes two files; --isolate takes one record and --target DIR")
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

        if target is None:
            runs = compare_runs(a, b)
        else:
            runs = compare_runs(a, b, _margins(target, (a, b)), NEAR_TIE if tie is None else tie)
        _show([runs], view.tables_of_runs, lambda path: view.plot_runs(runs, path), plot, as_json)
    else:
        if target is not None:
            raise InputError("--target is of run files, or of --isolate; these are records")
        from jaxspec.record_comparison import compare_records

        records = compare_records(a, b, reference, kinds, aligns=align)
        _show(
            [records],
            view.tables_of_records,
            lambda path: view.plot_records(records, path),
            plot,
            as_json,
        )


def _show(found: list[Any], tables, draw, plot: Path | None, as_json: bool) -> None:
    """Prints the findings, draws them, and exits with 1 unless all hold.

    The picture comes last: where it cannot be written, what was found is on the screen.
    """
    from jaxspec.console import wide_console

    if as_json:
        found_here = [one.to_dict() for one in found]
        whole = {"kind": found_here[0]["kind"], "holds": all(one["holds"] for one in found_here)}
        print(json.dumps(found_here[0] if len(found) == 1 else whole | {"records": found_here}))
    else:
        console = wide_console()
        for one in found:
            for table in tables(one):
                console.print(table)
            print(one.finding())
    if plot is not None:
        draw(plot)
    if not all(one.holds for one in found):
        raise typer.Exit(1)


def _is_run(path: Path) -> bool:
    """Whether a file begins as JSON does; safetensors begins with a size."""
    try:
        with path.open("rb") as file:
            return file.read(1) == b"{"
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def _margins(directory: str, runs: tuple[Path, Path]):
    """What tells how near the logits of two tokens are, in float32.

    Raises:
      InputError: both runs say that they are of another target.
    """
    from jaxspec.checkpoint import load_target
    from jaxspec.config import Numerics
    from jaxspec.convert.pairing import fingerprint_of
    from jaxspec.recording import logit_margins
    from jaxspec.run_comparison import read_run

    target = load_target(directory, Numerics(dtype="float32"))
    stated = [str(read_run(run)[0].get("target_hash") or target.identity) for run in runs]
    if all(fingerprint_of(one) != fingerprint_of(target.identity) for one in stated):
        raise InputError(
            f"--target {directory} is {target.identity}, and the runs are of {' and '.join(stated)}"
            ": its margins say nothing of them"
        )
    return lambda questions: logit_margins(target, questions)


def _isolated(paths: list[Path], directory: str) -> list[Any]:
    """Each record against the target's weights in float32, and in lower precision if it is."""
    from jaxspec.aliases import Dtype
    from jaxspec.checkpoint import load_target
    from jaxspec.config import Numerics
    from jaxspec.console import Display
    from jaxspec.isolation import isolate_record
    from jaxspec.record_file import RecordFile
    from jaxspec.target import Target

    is_exact = all(RecordFile.open(path).dtype == "float32" for path in paths)
    with Display() as display:

        def load(dtype: Dtype) -> Target:
            return load_target(directory, Numerics(dtype=dtype), progress=display.progress)

        exact, coarse = load("float32"), None if is_exact else load("bfloat16")
        return [isolate_record(path, exact, coarse, display.progress) for path in paths]
