"""The command line: flags, and nothing else; what the commands do is in `commands.py`.

JAX takes a second to import, so it is imported inside the commands: help and usage errors are
instant.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jaxspec.aliases import CacheLayout
from jaxspec.cli_compare import compare
from jaxspec.cli_doctor import doctor
from jaxspec.cli_export import export
from jaxspec.cli_plan import plan
from jaxspec.cli_score import score
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
    rotary_of,
)
from jaxspec.version import version

if TYPE_CHECKING:
    from jaxspec.config import MeshConfig, TreeConfig

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
    implementation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of the kernels: mosaic or xla. Default: each takes mosaic where that can run.",
        ),
    ] = None,
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
    _start_jax(compile_cache)
    _join(context)
    from jaxspec.commands import GenerateFlags, PromptFlags, run_generate
    from jaxspec.console import Display
    from jaxspec.generator import GenerateConfig
    from jaxspec.processes import is_first
    from jaxspec.text import SamplingConfig

    if ceiling and draft == "none":
        raise InputError("--ceiling is of a tree, and --draft none has none")
    drafted = (draft, capture, capture_convention, draft_rotary)
    models = models_of(target, drafted, dtype, implementation, _mesh(mesh, cache))
    sglang = (speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens)
    flags = GenerateFlags(
        models=models,
        prompts=PromptFlags(prompt, prompt_file, tokens, chat, thinking),
        config=GenerateConfig(
            tree=_tree(tree, sglang, has_draft=draft != "none"),
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


@app.command()
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
    _start_jax(compile_cache)
    _join(context)
    from jaxspec.commands import PromptFlags, run_record, run_record_features
    from jaxspec.console import Display
    from jaxspec.processes import is_first

    prompts = PromptFlags(prompt, prompt_file, tokens, chat, thinking)
    if features:
        if boundaries is not None or top is not None:
            raise InputError("--boundaries and --top are of a record; --features keeps its own")
        ids = ids_of("--capture", capture)
        drafted = (draft, None, capture_convention, draft_rotary)
        models = models_of(target, drafted, dtype, None, _mesh(mesh, cache))
        with Display() as display:
            made = run_record_features(models, prompts, ids, length or 512, out, display)
        if as_json and is_first():
            print(json.dumps(made.to_dict()))
        return
    if length is not None:
        raise InputError("--length is of --features: a record takes prompts as they are")
    drafted = (draft, capture, capture_convention, draft_rotary)
    models = models_of(target, drafted, dtype, None, _mesh(mesh, cache))
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


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Hugging Face directory, or a repository's id.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Must not exist yet.")],
    *,
    kind: Annotated[
        Literal["auto", "target", "draft"],
        typer.Option(help="auto takes what has an fc for a draft."),
    ] = "auto",
    capture_convention: ConventionFlag = None,
    draft_rotary: DraftRotaryFlag = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Ties a draft to this target. Default: it stays open."),
    ] = None,
    experts: Annotated[
        Literal["stored", "int4"], typer.Option(help="int4 quantises plain or fp8 experts.")
    ] = "stored",
    latent_norm_eps: Annotated[
        Literal["rms_norm_eps", "transformers"],
        typer.Option(help="Of the latent norms: the config's (vLLM, SGLang), or 1e-6."),
    ] = "rms_norm_eps",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all that headers show; write nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """A Hugging Face checkpoint into an Orbax one with a manifest; interrupted, it goes on."""
    from jaxspec.checkpoint import locate
    from jaxspec.console import Display
    from jaxspec.convert.write import ConvertConfig
    from jaxspec.convert.write import convert as run

    config = ConvertConfig(
        kind,
        capture_convention,
        None if target is None else locate(target),
        experts,
        latent_norm_eps,
        rotary_of(draft_rotary),
    )
    with Display() as display:
        report = run(
            locate(source),
            destination,
            config,
            is_dry_run=dry_run,
            progress=display.progress_bytes,
        )
        if not as_json:
            display.say(report.summary())
    if as_json:
        print(json.dumps(report.to_dict()))


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="DIR|FEATURES", help="Checkpoint, or features file.")
    ],
    *,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Target that a draft is tied to (default: none), or that features are of "
            "(default: the one that ships).",
        ),
    ] = None,
    capture_convention: ConventionFlag = None,
    draft_rotary: DraftRotaryFlag = None,
    as_json: JsonFlag = False,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """The contract of a checkpoint: every claim, and where it was read.

    Of a safetensors file with tokens and features, or the first shard of what record --features
    wrote: which boundary of --target each chunk really is; exit status 1 if that is not what the
    file claims.
    """
    from jaxspec.features import first_shard

    path = str(first_shard(Path(path)) or path)
    if path.endswith(".safetensors"):
        _inspect_features(Path(path), target, as_json, compile_cache)
        return
    from jaxspec.checkpoint import locate
    from jaxspec.convert.inspect import inspect as run
    from jaxspec.convert.write import ConvertConfig
    from jaxspec.describe import describe

    config = ConvertConfig(
        capture_convention=capture_convention,
        target=None if target is None else locate(target),
        draft_rotary=rotary_of(draft_rotary),
    )
    found = run(locate(path), config)
    print(json.dumps(found.to_dict()) if as_json else describe(found))


def _inspect_features(
    path: Path, target: str | None, as_json: bool, compile_cache: str | None
) -> None:
    _start_jax(compile_cache)
    from jaxspec.commands import run_identify
    from jaxspec.console import Display

    with Display() as display:
        report = run_identify(
            path, models_of(target, ("none", None, None, None), "float32", None), display
        )
    print(json.dumps(report.to_dict()) if as_json else report.summary())
    if not report.holds:
        raise typer.Exit(1)


def _start_jax(compile_cache: str | None) -> None:
    from jaxspec.environment import start_jax

    start_jax(compile_cache)


OWN = ("coordinator", "process_index", "join_timeout", "as_json", "compile_cache")
"""What each of several processes may be given in its own way."""


def _join(context: typer.Context) -> None:
    """Joins the other processes, where the flags say that there are some.

    Raises:
      InputError: the others do not come, or were given other flags.
    """
    flags = context.params
    given = (flags["coordinator"], flags["num_processes"], flags["process_index"])
    timeout_s = flags["join_timeout"]
    if given == (None, None, None):
        if timeout_s is not None:
            raise InputError(
                "--join-timeout without --coordinator: there are no others to wait for"
            )
        return
    if None in given:
        raise InputError(
            "--coordinator, --num-processes and --process-index are given together or not at all"
        )
    if flags["mesh"] is None:
        raise InputError("--coordinator without --mesh: several processes share a mesh")
    from jaxspec.processes import JOIN_TIMEOUT_S, Processes, check_agreement, join

    join(Processes(*given, JOIN_TIMEOUT_S if timeout_s is None else timeout_s))
    known = [param for param in context.command.params if param.name in flags]
    shared = {flag.opts[0]: str(flags[flag.name]) for flag in known if flag.name not in OWN}
    check_agreement(shared | {"version of jaxspec": version()})


def _mesh(text: str | None, cache: CacheLayout | None) -> "MeshConfig | None":
    """The mesh, if one was asked for."""
    from jaxspec.config import MeshConfig

    if text is None:
        if cache is not None:
            raise InputError(f"--cache {cache} is of a mesh: give one with --mesh, as in 1x8")
        return None
    return MeshConfig.parse(text, cache or "replicated")


def _tree(
    text: str | None, sglang: tuple[int | None, int | None, int | None], has_draft: bool
) -> "TreeConfig | None":
    """The tree, from whichever of its two spellings was used."""
    from jaxspec.config import TreeConfig

    steps, topk, nodes = sglang
    is_sglang = any(value is not None for value in sglang)
    if not has_draft:
        if text is not None or is_sglang:
            raise InputError("--draft none decodes plainly: there is no tree to give a shape to")
        return None
    if text is not None and is_sglang:
        raise InputError("--tree and --speculative-... say the same thing: give one of the two")
    if not is_sglang:
        return TreeConfig.parse(text or DEFAULT_TREE)
    if steps is None or topk is None or nodes is None:
        raise InputError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
            "are given together or not at all"
        )
    tree = TreeConfig(steps, topk, nodes)
    tree.check()
    return tree


for command in (plan, export, compare, score, doctor, train_draft):
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
