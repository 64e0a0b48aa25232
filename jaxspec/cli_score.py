"""`jaxspec score`: its flags."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from jaxspec.errors import InputError
from jaxspec.flags import JsonFlag

__all__ = ["score"]


def score(
    task: Annotated[Literal["gsm8k"], typer.Argument(help="What the prompts are.")],
    run: Annotated[Path, typer.Argument(metavar="RUN.jsonl", help="A run file of them.")],
    *,
    answers: Annotated[
        Path,
        typer.Option(
            metavar="F.jsonl",
            help="GSM8K's lines, question and answer, with the ids of the prompts that were run; "
            "the prompt file itself, if it holds the answers.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="For a run file without text: the target whose tokenizer decodes its ids. "
            "Default: none.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Exact-match accuracy of a run, from a file with the answers."""
    from rich.table import Table

    from jaxspec.console import wide_console
    from jaxspec.scoring import score_gsm8k

    found = score_gsm8k(run, answers, None if target is None else _decoder(target))
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    table = Table(title=str(run), title_justify="left")
    heads = ("requests", "right", "accuracy", "95 %", "without a number", "out of tokens")
    for head in ("", *heads):
        table.add_column(head, justify="right" if head else "left")
    for one in found.groups:
        counts = [one.num_without_number, one.num_unfinished]
        low, high = one.interval
        shares = [f"{one.accuracy:.1%}", f"{low:.1%} to {high:.1%}"]
        cells = [one.num_requests, one.num_correct, *shares, *counts]
        table.add_row(one.name, *map(str, cells))
    wide_console().print(table)
    print(found.finding())


def _decoder(directory: str):
    """What makes text of ids, as the target's tokenizer does; special tokens are left out."""
    from jaxspec.checkpoint import locate
    from jaxspec.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(locate(directory))
    if tokenizer is None:
        raise InputError(f"--target {directory}: no tiktoken.model in it, which would decode ids")
    return tokenizer.decode
