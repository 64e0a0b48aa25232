"""Flags that several commands share, and what they mean.

A default that no signature can state is in the help.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_type_hints

import typer

from jaxspec.aliases import CacheLayout, Convention, Dtype
from jaxspec.errors import InputError

if TYPE_CHECKING:
    from jaxspec.commands import ModelFlags
    from jaxspec.config import MeshConfig
    from jaxspec.convert.rotary import RotaryChoice

__all__ = [
    "DEFAULT_TREE",
    "CacheFlag",
    "CaptureFlag",
    "ChatFlag",
    "CompileCacheFlag",
    "ConventionFlag",
    "CoordinatorFlag",
    "DraftFlag",
    "DraftRotaryFlag",
    "DtypeFlag",
    "ImplementationFlag",
    "JoinTimeoutFlag",
    "JsonFlag",
    "MeshFlag",
    "NumProcessesFlag",
    "PlotFlag",
    "ProcessIndexFlag",
    "PromptArgument",
    "PromptFileFlag",
    "TargetFlag",
    "ThinkingFlag",
    "TokensFlag",
    "TreesFlag",
    "dtype_of",
    "given",
    "ids_of",
    "models_of",
    "rotary_of",
]

DEFAULT_TREE = "3x1x4"

TargetFlag = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="DIR",
        help="Hugging Face or converted checkpoint, or the id of a repository in the local Hugging "
        "Face cache. Default: the small trained target that ships with jaxspec.",
    ),
]
DraftFlag = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="DIR|none",
        help="EAGLE-3 draft, likewise; none decodes plainly. Default: the one that ships, with the "
        "target that ships.",
    ),
]
CaptureFlag = Annotated[
    str | None,
    typer.Option(
        "--capture",
        metavar="IDS",
        help="Boundaries the target captures, as in 2,30,58: b is the state entering layer b. A "
        "draft that states its own refuses others. Default: what the draft states.",
    ),
]
ConventionFlag = Annotated[
    Convention | None,
    typer.Option(
        "--capture-convention",
        help="Whether the draft's own ids mean the state before or after a layer. Default: what "
        "its checkpoint says.",
    ),
]
DraftRotaryFlag = Annotated[
    str | None,
    typer.Option(
        "--draft-rotary",
        metavar="JSON",
        help="The draft's rope_theta, rope_scaling (null: none) or rope_interleave, where its "
        "config.json is known to be wrong. Default: what that says.",
    ),
]
DtypeFlag = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="Of weights, activations and caches. Default: float32 on a CPU, bfloat16 elsewhere.",
    ),
]
ImplementationFlag = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of the kernels: mosaic or xla. Default: each takes mosaic where that can run.",
    ),
]
TreesFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--tree",
        metavar="LEVELSxBRANCHESxNODES",
        help=f"Shape of the draft tree; may be repeated. Default: {DEFAULT_TREE}.",
    ),
]
MeshFlag = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="DATAxMODEL",
        help="Devices, as in 1x8: DATA groups of them share the prompts, the MODEL devices of a "
        "group every layer. Default: one device.",
    ),
]
CacheFlag = Annotated[
    CacheLayout | None,
    typer.Option(
        "--cache",
        help="On a mesh, whether each device of a group keeps all of the target's cache, or its "
        "share of the slots. Default: replicated.",
    ),
]
CoordinatorFlag = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Of a run over several processes: where process 0 listens. Default: one process.",
    ),
]
NumProcessesFlag = Annotated[
    int | None,
    typer.Option("--num-processes", metavar="N", help="How many there are. Default: one."),
]
ProcessIndexFlag = Annotated[
    int | None,
    typer.Option(
        "--process-index",
        metavar="I",
        help="Which of them this is, from 0; the first one prints and writes. Default: one.",
    ),
]
JoinTimeoutFlag = Annotated[
    int | None,
    typer.Option(
        "--join-timeout",
        metavar="SECONDS",
        help="How long a process waits for the others to come. Default: 60.",
    ),
]
PromptArgument = Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text.")]
PromptFileFlag = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file",
        metavar="F",
        help="Plain text, a prompt a line, or JSON lines with prompt, messages, conversations "
        "(ShareGPT), turns (MT-bench) or question (GSM8K). Default: PROMPT.",
    ),
]
TokensFlag = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="F",
        help="JSON list of lists of ids, in place of text; no text comes back. Default: PROMPT.",
    ),
]
ChatFlag = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Put text into the checkpoint's chat template, as a user's message. Messages always "
        "go through it.",
    ),
]
ThinkingFlag = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="On or off in the chat template. Default: as the template has it.",
    ),
]
JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="One JSON object on stdout, no text."),
]
PlotFlag = Annotated[
    Path | None, typer.Option(metavar="F.png", help="A picture of it. Default: none.")
]
CompileCacheFlag = Annotated[
    str | None,
    typer.Option(
        "--compile-cache",
        metavar="DIR|none",
        help="Where compiled programs are kept for the next run. Default: "
        "$JAX_COMPILATION_CACHE_DIR, or jaxspec/compiled in this user's caches.",
    ),
]


def given(context: typer.Context, *names: str) -> list[str]:
    """Those of these parameters, as flags, that the command line names."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def models_of(
    target: str | None,
    drafted: tuple[str | None, str | None, Convention | None, str | None],
    dtype: Dtype | None,
    implementation: str | None,
    mesh: "MeshConfig | None" = None,
) -> "ModelFlags":
    """The models that the flags name; `drafted` is the draft, and three flags about it."""
    from jaxspec.commands import ModelFlags
    from jaxspec.config import Numerics

    draft, capture, convention, rotary = drafted
    if draft == "none" and rotary is not None:
        raise InputError("--draft-rotary says how a draft turns its keys: there is no draft")
    if draft == "none" and capture is not None:
        raise InputError("--capture without a draft: nothing would be done with what is captured")
    if draft == "none" and convention is not None:
        raise InputError("--capture-convention says how a draft's ids are read: there is no draft")
    known = get_args(get_args(get_type_hints(Numerics)["implementation"])[0])
    if implementation not in (None, *known):
        raise InputError(f"--implementation is {implementation!r}; there are {' and '.join(known)}")
    numerics = Numerics(dtype_of(dtype), implementation=cast("Any", implementation), mesh=mesh)
    choice = rotary_of(rotary)
    return ModelFlags(target, draft, ids_of("--capture", capture), convention, choice, numerics)


def dtype_of(dtype: Dtype | None) -> Dtype:
    """What --dtype asks for; by default float32 on a CPU, bfloat16 elsewhere."""
    import jax

    return dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def rotary_of(text: str | None) -> "RotaryChoice":
    """What --draft-rotary asks for."""
    from jaxspec.convert.rotary import RotaryChoice

    return RotaryChoice() if text is None else RotaryChoice.parse(text)


def ids_of(flag: str, text: str | None) -> tuple[int, ...] | None:
    """The ids written as 2,30,58; None where the flag was not given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise InputError(f"{flag} is {text!r}: expected boundaries, as in 2,30,58")
    return tuple(map(int, parts))
