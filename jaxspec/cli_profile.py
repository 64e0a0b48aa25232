"""`jaxspec profile`: its flags."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli_start import mesh_of, trees_of
from jaxspec.flags import (
    CacheFlag,
    CaptureFlag,
    ChatFlag,
    CompileCacheFlag,
    ConventionFlag,
    DraftFlag,
    DraftRotaryFlag,
    DtypeFlag,
    ImplementationFlag,
    JsonFlag,
    MeshFlag,
    PlotFlag,
    PromptArgument,
    PromptFileFlag,
    TargetFlag,
    ThinkingFlag,
    TokensFlag,
    TreesFlag,
    models_of,
)

__all__ = ["profile"]


def profile(
    prompt: PromptArgument = None,
    *,
    target: TargetFlag = None,
    draft: DraftFlag = None,
    tree: TreesFlag = None,
    capture: CaptureFlag = None,
    capture_convention: ConventionFlag = None,
    draft_rotary: DraftRotaryFlag = None,
    prompt_file: PromptFileFlag = None,
    tokens: TokensFlag = None,
    chat: ChatFlag = False,
    thinking: ThinkingFlag = None,
    batch_size: Annotated[
        int, typer.Option(help="Prompts at a time; the first ones are taken, one a place.")
    ] = 1,
    context_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens that each place has room for. Default: 2048, or what the target was made "
            "for if that is less.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    steps: Annotated[int, typer.Option(help="In a call of the program.")] = 8,
    repeats: Annotated[
        int,
        typer.Option(
            help="Calls with the profiler, and as many without; fewer, once three of each are "
            "within 5 % of the fastest."
        ),
    ] = 30,
    dtype: DtypeFlag = None,
    mesh: MeshFlag = None,
    cache: CacheFlag = None,
    implementation: ImplementationFlag = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Leave each tree's profile there, with a track of the phases: xprof --logdir DIR, "
            "or a trace.json.gz of it in ui.perfetto.dev. Default: none.",
        ),
    ] = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """Where the time of a step goes: verification, its parts, and the rest, measured here.

    Without prompts: those that ship. Exit status 1 if the sum is not the whole step to 10 %.
    """
    import jax

    from jaxspec.commands import PromptFlags
    from jaxspec.console import Display, wide_console
    from jaxspec.environment import start_jax
    from jaxspec.picture import check_picture
    from jaxspec.profile_run import ProfileFlags, run_profile
    from jaxspec.profile_view import draw, show
    from jaxspec.profiling import ProfileConfig
    from jaxspec.text import SamplingConfig

    trees = trees_of(tree, has_draft=draft != "none")
    if plot is not None:
        check_picture(plot)
    start_jax(compile_cache)
    # A program kept from an earlier version may be the same but for the names of its phases.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    drafted = (draft, capture, capture_convention, draft_rotary)
    flags = ProfileFlags(
        models_of(target, drafted, dtype, implementation, mesh_of(mesh, cache)),
        PromptFlags(prompt, prompt_file, tokens, chat, thinking),
        ProfileConfig(trees, context_length, steps, repeats, trace),
        batch_size,
        SamplingConfig(temperature),
    )
    with Display() as display:
        report = run_profile(flags, display)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        show(report, wide_console())
    if plot is not None:
        draw(report, plot)
    if not report.agrees:
        raise typer.Exit(1)
