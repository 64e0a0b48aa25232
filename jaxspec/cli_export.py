"""`jaxspec export`: its flags."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxspec.aliases import Convention
from jaxspec.flags import DEFAULT_TREE, JsonFlag

__all__ = ["export"]


def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint, of either form.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Must not exist yet.")],
    *,
    layout: Annotated[
        Literal["hf", "specforge", "speculators"],
        typer.Option(help="hf is a target's; the others are drafts'."),
    ],
    pair: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The draft of a target, or the target of a draft, in the commands that serve "
            "them. If it is here, they have to belong together. Default: its name is left open.",
        ),
    ] = None,
    tree: Annotated[
        str, typer.Option(metavar="LEVELSxBRANCHESxNODES", help="That they serve with.")
    ] = DEFAULT_TREE,
    capture_convention: Annotated[
        Convention | None,
        typer.Option(
            help="How specforge writes a draft's ids; SGLang and vLLM read before. Default: before."
        ),
    ] = None,
    flat: Annotated[
        bool,
        typer.Option("--flat", help="Of Kimi-K2.5, the text model alone, in DeepSeek-V3's form."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """The way back: a target or a draft for other engines, and the commands that serve the pair."""
    from jaxspec.checkpoint import CheckpointError, locate
    from jaxspec.config import TreeConfig
    from jaxspec.console import Display
    from jaxspec.convert.export import ExportConfig
    from jaxspec.convert.export import export as run

    try:
        pair_directory = None if pair is None else locate(pair)
    except CheckpointError:
        pair_directory = None  # it may lie elsewhere; the report says that nobody looked at it
    config = ExportConfig(
        layout, capture_convention, flat, pair, pair_directory, TreeConfig.parse(tree)
    )
    with Display() as display:
        report = run(locate(source), destination, config, display.progress)
    print(json.dumps(report.to_dict()) if as_json else report.summary())
