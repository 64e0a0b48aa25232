"""`jaxspec doctor`: its flags."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli_start import mesh_of
from jaxspec.errors import InputError
from jaxspec.flags import (
    CaptureFlag,
    ChatFlag,
    CompileCacheFlag,
    ConventionFlag,
    DraftFlag,
    DraftRotaryFlag,
    DtypeFlag,
    JsonFlag,
    MeshFlag,
    PlotFlag,
    PromptArgument,
    PromptFileFlag,
    TargetFlag,
    ThinkingFlag,
    TokensFlag,
    given,
    models_of,
)

__all__ = ["doctor"]


def doctor(
    context: typer.Context,
    prompt: PromptArgument = None,
    *,
    target: TargetFlag = None,
    draft: DraftFlag = None,
    capture: CaptureFlag = None,
    capture_convention: ConventionFlag = None,
    draft_rotary: DraftRotaryFlag = None,
    prompt_file: PromptFileFlag = None,
    tokens: TokensFlag = None,
    chat: ChatFlag = False,
    thinking: ThinkingFlag = None,
    observed: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.jsonl",
            help="Another engine's run with a chain: what its steps gave against what these "
            "weights give on its own tokens. Default: none.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="That the target writes after each prompt; 0 reads those alone.")
    ] = 64,
    context_length: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a text; longer prompts are cut.")
    ] = 512,
    temperature: Annotated[
        float,
        typer.Option(help="Of what it writes after prompts that do not say. 0 is greedy."),
    ] = 0.8,
    levels: Annotated[
        int, typer.Option(help="Drafted tokens per step; of --observed, what its flags say.")
    ] = 3,
    top: Annotated[int, typer.Option(help="Guesses that count for top-k agreement.")] = 4,
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="LEVELSxBRANCHESxNODES",
            help="Also say what this tree accepts, and at best. Default: the chain alone.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.")] = 8,
    dtype: DtypeFlag = None,
    mesh: MeshFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """Why is acceptance low? The draft as declared, and under every other reading of it.

    Without prompts: those that ship. Exit status 1 if another reading explains the target better,
    or --observed finds the engine at fault.
    """
    from jaxspec.commands import PromptFlags
    from jaxspec.config import TreeConfig
    from jaxspec.console import Display, wide_console
    from jaxspec.doctor_run import DoctorFlags, run_doctor
    from jaxspec.doctor_scores import DoctorConfig
    from jaxspec.doctor_view import plot_report, table_of
    from jaxspec.environment import start_jax
    from jaxspec.picture import check_picture

    astray = given(context, "max_new_tokens", "context_length", "temperature", "levels", "tree")
    if observed is not None and astray:
        raise InputError(f"{', '.join(astray)}: --observed brings its own texts, and its levels")
    start_jax(compile_cache)
    if plot is not None:
        check_picture(plot)
    drafted = (draft, capture, capture_convention, draft_rotary)
    flags = DoctorFlags(
        models_of(target, drafted, dtype, None, mesh_of(mesh, None)),
        PromptFlags(prompt, prompt_file, tokens, chat, thinking),
        DoctorConfig(levels, top, batch_size, None if tree is None else TreeConfig.parse(tree)),
        observed,
        max_new_tokens,
        temperature,
        context_length,
    )
    with Display() as display:
        report = run_doctor(flags, display)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        wide_console().print(table_of(report))
        print(report.finding())
    if plot is not None:
        plot_report(report, plot)
    if not report.holds:
        raise typer.Exit(1)
