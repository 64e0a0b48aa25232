"""`jaxspec plan`: its flags."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli_start import trees_of
from jaxspec.flags import CacheFlag, JsonFlag, TreesFlag

__all__ = ["plan"]


def plan(
    *,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|config.json",
            help="Config of a target, with or without its weights. Default: Kimi-K2.5's, which "
            "ships.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|config.json|none",
            help="Likewise, of a draft. Default: that of a published Llama-type draft for "
            "Kimi-K2.5, which ships.",
        ),
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(
            metavar="DATAxMODEL",
            help="H200s: DATA groups of them share the sequences, the MODEL devices of a group "
            "every layer.",
        ),
    ] = "1x8",
    cache: CacheFlag = None,
    tree: TreesFlag = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time, all groups together.")] = 1,
    context_length: Annotated[
        int, typer.Option(metavar="N", help="Tokens of each sequence, all of them cached.")
    ] = 32768,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="In place of an assumption that is printed; may be repeated. Default: none.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="F.png", help="Picture of speed and time. Default: none."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Will it fit, and what will it cost: the full-size step, compiled for H200s without one.

    Needs the CUDA wheels and no GPU. Exit status 1 if it does not fit.
    """
    # What does not fit is said below; XLA's own remarks about it would stand before that.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from jaxspec.config import MeshConfig
    from jaxspec.console import Display
    from jaxspec.hardware import Assumptions
    from jaxspec.picture import check_picture
    from jaxspec.plan import plan as run
    from jaxspec.plan_models import PlanConfig
    from jaxspec.plan_view import draw, show

    trees = trees_of(tree, has_draft=draft != "none")
    if plot is not None:
        check_picture(plot)
    grid = MeshConfig.parse(mesh, cache or "replicated")
    assumed = Assumptions().replaced(assume or ())
    config = PlanConfig(target, draft, grid, trees, batch_size, context_length, assumed)
    with Display() as display:
        report = run(config, display.waiting)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        from rich.console import Console

        show(report, Console())
    if plot is not None:
        draw(report, plot)
    if not (report.fits and report.agrees):
        raise typer.Exit(1)
