"""`jaxspec sweep`: its flags."""

import functools
import json
import re
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli_start import mesh_of
from jaxspec.errors import InputError
from jaxspec.flags import (
    CacheFlag,
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

__all__ = ["sweep"]


def sweep(
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
    levels: Annotated[str, typer.Option(metavar="LIST", help="Of the grid.")] = "1-10",
    branches: Annotated[str, typer.Option(metavar="LIST", help="Of the grid.")] = "1,2,4,8",
    nodes: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Of the grid; a chain has as many as its levels, and the root."
        ),
    ] = "3,4,6,8,12,16,24,32",
    tree: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEVELSxBRANCHESxNODES",
            help="In place of the grid; may be repeated, and all are timed. Default: the grid.",
        ),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="LIST", help="For each, the fastest tree is found.")
    ] = "1,4",
    max_new_tokens: Annotated[int, typer.Option(help="That the target writes, per prompt.")] = 96,
    context_length: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a text; longer prompts are cut.")
    ] = 512,
    temperature: Annotated[float, typer.Option(help="Of the texts. 0 is greedy.")] = 0.0,
    rounds: Annotated[
        int, typer.Option(help="In each, every timed tree has its turn; 3 give intervals.")
    ] = 6,
    timed: Annotated[
        int,
        typer.Option(
            help="Trees that are timed at each batch size, besides five corners of the grid."
        ),
    ] = 4,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,VALUE",
            help="Time again in fresh processes, under every combination of these environment "
            "variables, an empty VALUE being none; may be repeated. Default: none.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="DATAxMODEL",
            help="Also predict on H200s, by jaxspec plan with the accept lengths measured here: "
            "CUDA wheels, no GPU, minutes. Of the shipped pair: for Kimi-K2.5. Default: none.",
        ),
    ] = None,
    dtype: DtypeFlag = None,
    mesh: MeshFlag = None,
    cache: CacheFlag = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="F.jsonl",
            help="What was measured, line by line; an interrupted sweep goes on with it. "
            "Default: none.",
        ),
    ] = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """Which tree is fastest on this machine, and is it faster than plain decoding?

    Without prompts: those that ship. Exit status 1 if accept lengths along the texts, from which
    trees are compared, are not those of the steps that were timed.
    """
    from jaxspec.commands import PromptFlags
    from jaxspec.config import MeshConfig, TreeConfig
    from jaxspec.console import Display, wide_console
    from jaxspec.environment import start_jax
    from jaxspec.picture import check_picture
    from jaxspec.sweep import SweepConfig, grid
    from jaxspec.sweep_run import SweepFlags, environments, run_sweep
    from jaxspec.sweep_view import draw_sweep, show_sweep

    astray = given(context, "levels", "branches", "nodes")
    if tree and astray:
        raise InputError(f"{', '.join(astray)}: --tree names the trees in place of a grid")
    if tree:
        trees = tuple(map(TreeConfig.parse, dict.fromkeys(tree)))
    else:
        sizes = {"--levels": levels, "--branches": branches, "--nodes": nodes}
        trees = grid(*(numbers_of(flag, text) for flag, text in sizes.items()))
    if plot is not None:
        check_picture(plot)
    if draft == "none":
        raise InputError("--draft none: there is no tree to find")
    flags = SweepFlags(
        functools.partial(
            models_of,
            target,
            (draft, capture, capture_convention, draft_rotary),
            dtype,
            None,
            mesh_of(mesh, cache),
        ),
        PromptFlags(prompt, prompt_file, tokens, chat, thinking),
        SweepConfig(
            trees,
            numbers_of("--batch-size", batch_size),
            max_new_tokens,
            temperature,
            rounds,
            len(trees) if tree else timed,
        ),
        context_length,
        out,
        environments(env or ()),
        None if plan is None else MeshConfig.parse(plan),
        compile_cache,
    )
    start_jax(compile_cache)
    with Display() as display:
        report = run_sweep(flags, display)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        show_sweep(report, wide_console())
    if plot is not None:
        draw_sweep(report, plot)
    if not report.holds:
        raise typer.Exit(1)


def numbers_of(flag: str, text: str) -> tuple[int, ...]:
    """The numbers written as 1,2,4 or 1-10, each once, ascending."""
    numbers: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last:
            raise InputError(f"{flag} is {text!r}: expected numbers from 1, as in 1,2,4 or 1-10")
        numbers |= set(range(first, last + 1))
    return tuple(sorted(numbers))
