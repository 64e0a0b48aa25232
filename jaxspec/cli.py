"""The command line: flags, and nothing else; what the commands do is in `commands.py`.

JAX takes a second to import, so it is imported inside the commands: help and usage errors are
instant.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli_compare import compare
from jaxspec.cli_convert import convert, inspect
from jaxspec.cli_doctor import doctor
from jaxspec.cli_export import export
from jaxspec.cli_plan import plan
from jaxspec.cli_profile import profile
from jaxspec.cli_record import record
from jaxspec.cli_score import score
from jaxspec.cli_start import join, mesh_of, tree_of
from jaxspec.cli_sweep import sweep
from jaxspec.cli_train import train_draft
from jaxspec.errors import InputError
from jaxspec.flags import (
    DEFAULT_TREE,
    CacheFlag,
    CaptureFlag,
    ChatFlag,
    CompileCacheFlag,
    ConventionFlag,
    CoordinatorFlag,
    DraftFlag,
    DraftRotaryFlag,
    DtypeFlag,
    ImplementationFlag,
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
    models_of,
)
from jaxspec.version import version

__all__ = ["app", "main"]

app = typer.Typer(
    name="jaxspec",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # boxes cut long flags short
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"jaxspec {version()}")
        raise typer.Exit


@app.callback()
def _options(
    is_version_asked: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """EAGLE-3 speculative decoding for Kimi-K2.5 in JAX."""


@app.command()
def generate(
    context: typer.Context,
    prompt: PromptArgument = None,
    *,
    target: TargetFlag = None,
    draft: DraftFlag = None,
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="LEVELSxBRANCHESxNODES",
            help=f"Shape of the draft tree. Default: {DEFAULT_TREE}, a chain of 3.",
        ),
    ] = None,
    speculative_num_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="SGLang's name of LEVELS. Default: --tree's.",
        ),
    ] = None,
    speculative_eagle_topk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="SGLang's name of BRANCHES. Default: --tree's.",
        ),
    ] = None,
    speculative_num_draft_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="SGLang's name of NODES, root included. Default: --tree's.",
        ),
    ] = None,
    capture: CaptureFlag = None,
    capture_convention: ConventionFlag = None,
    draft_rotary: DraftRotaryFlag = None,
    prompt_file: PromptFileFlag = None,
    tokens: TokensFlag = None,
    chat: ChatFlag = False,
    thinking: ThinkingFlag = None,
    max_new_tokens: Annotated[int, typer.Option(help="Per prompt.")] = 128,
    context_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of prompt and continuation together. Default: 2048, or what the target "
            "was made for if that is less.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts at a time.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Above 0; 1 is off.")] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Of the likeliest token's probability; cuts after top-p. 0 is off."),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of the first prompt, below 2^32; the next ones count up.")
    ] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Ends a continuation; may be repeated. Default: none."),
    ] = None,
    stop_id: Annotated[
        list[int] | None,
        typer.Option(
            metavar="ID",
            help="Token that ends a continuation, besides the target's own; may be repeated. "
            "Default: none.",
        ),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past it.")] = False,
    dtype: DtypeFlag = None,
    mesh: MeshFlag = None,
    cache: CacheFlag = None,
    coordinator: CoordinatorFlag = None,
    num_processes: NumProcessesFlag = None,
    process_index: ProcessIndexFlag = None,
    join_timeout: JoinTimeoutFlag = None,
    implementation: ImplementationFlag = None,
    ceiling: Annotated[
        bool,
        typer.Option(
            "--ceiling",
            help="Also measure accept_ceiling: what a draft that knew the target's own "
            "probabilities would have reached.",
        ),
    ] = False,
    as_json: JsonFlag = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.jsonl",
            help="Run file; an interrupted run goes on with it. Default: none.",
        ),
    ] = None,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """Text from a target and a draft."""
    from jaxspec.environment import start_jax

    start_jax(compile_cache)
    join(context)
    from jaxspec.commands import GenerateFlags, PromptFlags, run_generate
    from jaxspec.console import Display
    from jaxspec.generator import GenerateConfig
    from jaxspec.processes import is_first
    from jaxspec.text import SamplingConfig

    if ceiling and draft == "none":
        raise InputError("--ceiling is of a tree, and --draft none has none")
    drafted = (draft, capture, capture_convention, draft_rotary)
    models = models_of(target, drafted, dtype, implementation, mesh_of(mesh, cache))
    sglang = (speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens)
    flags = GenerateFlags(
        models=models,
        prompts=PromptFlags(prompt, prompt_file, tokens, chat, thinking),
        config=GenerateConfig(
            tree=tree_of(tree, sglang, has_draft=draft != "none"),
            max_new_tokens=max_new_tokens,
            context_length=context_length,
            batch_size=batch_size,
            ignore_eos=ignore_eos,
        ),
        sampling=SamplingConfig(
            temperature, top_k, top_p, min_p, seed, tuple(stop or ()), tuple(stop_id or ())
        ),
        out=out,
        streams=not as_json and is_first(),
        with_ceiling=ceiling,
    )
    with Display() as display:
        report = run_generate(flags, display)
        if not as_json:
            display.say(report.summary())
    if as_json and is_first():
        print(json.dumps(report.to_dict(), ensure_ascii=False))
    if report.num_failed:
        # Each was named on stderr; the others were served.
        raise typer.Exit(2)


@app.command()
def tokenize(
    prompt: PromptArgument = None,
    *,
    target: TargetFlag = None,
    prompt_file: PromptFileFlag = None,
    chat: ChatFlag = False,
    thinking: ThinkingFlag = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="One JSON object with id, category, ids and the text of every token. Default: "
            "a JSON list of lists of ids, as --tokens reads it.",
        ),
    ] = False,
) -> None:
    """The exact ids of prompts, for feeding other engines the same thing."""
    from jaxspec.commands import ModelFlags, PromptFlags, run_tokenize, unread_settings

    report = run_tokenize(
        ModelFlags(target), PromptFlags(prompt, prompt_file, None, chat, thinking)
    )
    if as_json:
        print(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        if said := unread_settings(report.prompts):
            print(f"{said}: ids alone are printed; --json has both", file=sys.stderr)
        print(json.dumps([list(prompt.ids) for prompt in report.prompts]))


for command in (record, convert, inspect, plan, export, compare, score, doctor, train_draft):
    app.command()(command)
for command in (profile, sweep):
    app.command()(command)


def main() -> None:
    """Runs the command line; an error is one message.

    Exit status 2 is bad input. What was computed and is no number may have other causes: 1.
    """
    try:
        app(prog_name="jaxspec")
    except (InputError, FloatingPointError) as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
    except BrokenPipeError:
        # Whoever read stdout has seen enough. Python flushes it once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
