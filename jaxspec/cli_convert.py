"""`jaxspec convert` and `jaxspec inspect`: their flags."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxspec.flags import (
    CompileCacheFlag,
    ConventionFlag,
    DraftRotaryFlag,
    JsonFlag,
    models_of,
    rotary_of,
)

__all__ = ["convert", "inspect"]


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

    Of a safetensors file with tokens and features, the first shard of what record --features wrote,
    or SpecForge's or speculators' feature files: which boundary of --target each chunk really is;
    exit status 1 if that is not what the file claims.
    """
    from jaxspec.feature_files import FeatureFiles
    from jaxspec.features import first_shard

    path = str(first_shard(Path(path)) or path)
    if path.endswith(".safetensors") or FeatureFiles.find(Path(path)) is not None:
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
    from jaxspec.environment import start_jax

    start_jax(compile_cache)
    from jaxspec.commands import run_identify
    from jaxspec.console import Display

    with Display() as display:
        report = run_identify(
            path, models_of(target, ("none", None, None, None), "float32", None), display
        )
    print(json.dumps(report.to_dict()) if as_json else report.summary())
    if not report.holds:
        raise typer.Exit(1)
