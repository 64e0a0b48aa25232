"""`jaxspec record`: its flags."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli_start import join, mesh_of
from jaxspec.errors import InputError
from jaxspec.flags import (
    CacheFlag,
    CaptureFlag,
    ChatFlag,
    CompileCacheFlag,
    ConventionFlag,
    CoordinatorFlag,
    DraftFlag,
    DraftRotaryFlag,
    DtypeFlag,
    JoinTimeoutFlag,
    JsonFlag,
    MeshFlag,
    NumProcessesFlag,
    ProcessIndexFlag,
    PromptArgument,
    PromptFileFlag,
    TargetFlag,
    ThinkingFlag,
    TokensFlag,
    ids_of,
    models_of,
)

__all__ = ["record"]


def record(
    context: typer.Context,
    prompt: PromptArgument = None,
    *,
    out: Annotated[
        Path,
        typer.Option(metavar="R.safetensors|DIR", help="The record, or with --features a DIR."),
    ],
    features: Annotated[
        bool,
        typer.Option(
            "--features",
            help="For train-draft: --prompt-file is what it calls --data, and features and last "
            "state of all of it go to shards. Interrupted, it goes on.",
        ),
    ] = False,
    length: Annotated[
        int | None,
        typer.Option(
            min=3, help="With --features: tokens of a window; samples are cut. Default: 512."
        ),
    ] = None,
    target: TargetFlag = None,
    draft: DraftFlag = None,
    capture: CaptureFlag = None,
    capture_convention: ConventionFlag = None,
    draft_rotary: DraftRotaryFlag = None,
    dtype: DtypeFlag = None,
    mesh: MeshFlag = None,
    cache: CacheFlag = None,
    coordinator: CoordinatorFlag = None,
    num_processes: NumProcessesFlag = None,
    process_index: ProcessIndexFlag = None,
    join_timeout: JoinTimeoutFlag = None,
    prompt_file: PromptFileFlag = None,
    tokens: TokensFlag = None,
    chat: ChatFlag = False,
    thinking: ThinkingFlag = None,
    boundaries: Annotated[
        str | None,
        typer.Option(metavar="IDS|none", help="Those to keep. Default: all."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the K best logits only. Default: all."),
    ] = None,
    as_json: JsonFlag = False,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """What target and draft say of given tokens, position by position, in a file."""
    from jaxspec.environment import start_jax

    start_jax(compile_cache)
    join(context)
    from jaxspec.commands import PromptFlags, run_record, run_record_features
    from jaxspec.console import Display
    from jaxspec.processes import is_first

    prompts = PromptFlags(prompt, prompt_file, tokens, chat, thinking)
    if features:
        if boundaries is not None or top is not None:
            raise InputError("--boundaries and --top are of a record; --features keeps its own")
        ids = ids_of("--capture", capture)
        drafted = (draft, None, capture_convention, draft_rotary)
        models = models_of(target, drafted, dtype, None, mesh_of(mesh, cache))
        with Display() as display:
            made = run_record_features(models, prompts, ids, length or 512, out, display)
        if as_json and is_first():
            print(json.dumps(made.to_dict()))
        return
    if length is not None:
        raise InputError("--length is of --features: a record takes prompts as they are")
    drafted = (draft, capture, capture_convention, draft_rotary)
    models = models_of(target, drafted, dtype, None, mesh_of(mesh, cache))
    kept = () if boundaries == "none" else ids_of("--boundaries", boundaries)
    with Display() as display:
        done = run_record(
            models,
            prompts,
            kept,
            top,
            out,
            display,
        )
        if not as_json:
            display.say(f"{out}: {', '.join(done.arrays)}")
    if as_json and is_first():
        print(json.dumps(done.to_dict()))
