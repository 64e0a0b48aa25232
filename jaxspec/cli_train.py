"""`jaxspec train-draft`: its flags, and the models and data that they name."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxspec.cli_start import mesh_of
from jaxspec.errors import InputError
from jaxspec.flags import (
    DEFAULT_TREE,
    CaptureFlag,
    CompileCacheFlag,
    DtypeFlag,
    JsonFlag,
    MeshFlag,
    PlotFlag,
    TargetFlag,
    dtype_of,
    given,
    ids_of,
)

if TYPE_CHECKING:
    from jaxspec.draft import Draft
    from jaxspec.fresh_draft import DraftShape
    from jaxspec.target import Target
    from jaxspec.training_data import Windows

__all__ = ["train_draft"]

HELD_OUT_SHARE = 20
"""Without --heldout, the last of so many windows are never learned from."""


def train_draft(
    context: typer.Context,
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Gets draft/, which generate takes, metrics.jsonl and checkpoints/. A run that "
            "was interrupted goes on when it is given the same again.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="Text, or JSON lines with messages, conversations (ShareGPT), text, prompt or "
            "question. Default: --tokens.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="F", help="JSON list of lists of ids, in place of --data."),
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What `jaxspec record --features` wrote, in place of --data, or features of "
            "SpecForge's or speculators' making, which are compared with the target first.",
        ),
    ] = None,
    heldout: Annotated[
        Path | None,
        typer.Option(
            metavar="F",
            help="Likewise, for evaluation. Default: the last twentieth of the windows.",
        ),
    ] = None,
    heldout_windows: Annotated[
        int, typer.Option(min=1, help="Of those, so many at most, spread evenly over them.")
    ] = 64,
    target: TargetFlag = None,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A draft to start from, with all that it is. Default: a fresh one.",
        ),
    ] = None,
    attention: Annotated[
        Literal["llama", "latent"], typer.Option(help="Of a fresh draft; latent is the target's.")
    ] = "llama",
    capture: CaptureFlag = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of a fresh draft: the N ids that are most frequent in the data. Default: 32000, "
            "or all where there are no more.",
        ),
    ] = None,
    draft_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sizes of a fresh draft under Hugging Face's names, such as intermediate_size, "
            "num_attention_heads, head_dim, rope_theta. Default: the target's.",
        ),
    ] = None,
    length: Annotated[int, typer.Option(min=3, help="Tokens of a window; samples are cut.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows of a batch.")] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Of the whole run.")] = 1000,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches that make an update.")] = 1,
    optimizer: Annotated[
        Literal["adamw", "muon"],
        typer.Option(help="Muon moves the layer's matrices, and Adam then the rest."),
    ] = "adamw",
    learning_rate: Annotated[float, typer.Option(help="Its highest.")] = 1e-4,
    final_rate: Annotated[
        float, typer.Option(help="Where it ends, along a cosine, as a share of the highest.")
    ] = 0.1,
    warm_up: Annotated[int, typer.Option(min=0, help="Batches until it is reached.")] = 50,
    clip: Annotated[float, typer.Option(help="Of the gradient's norm.")] = 0.5,
    weight_decay: Annotated[float, typer.Option(help="AdamW's, or of Muon's matrices.")] = 0.0,
    num_steps: Annotated[int, typer.Option(min=1, help="Of the training-time test.")] = 7,
    one_step_batches: Annotated[
        int,
        typer.Option(min=0, help="So many at first take one step only, which costs less."),
    ] = 0,
    step_weight: Annotated[
        float, typer.Option(help="What a step counts, over the one before it.")
    ] = 0.8,
    labels: Annotated[
        Literal["covered", "within"],
        typer.Option(
            help="The target's probabilities of the draft's vocabulary, as they are, or made to "
            "sum to 1."
        ),
    ] = "covered",
    seed: Annotated[int, typer.Option(help="Of a fresh draft, and of the order.")] = 0,
    evaluate_every: Annotated[
        int, typer.Option(min=1, help="Batches between evaluations, each with a checkpoint.")
    ] = 200,
    accept_prompts: Annotated[
        int,
        typer.Option(min=0, help="Held-out prompts on which acceptance is measured; 0: it is not."),
    ] = 16,
    accept_temperature: Annotated[float, typer.Option(help="Of what is generated there.")] = 0.8,
    tree: Annotated[
        str, typer.Option(metavar="LEVELSxBRANCHESxNODES", help="That is drafted there.")
    ] = DEFAULT_TREE,
    dtype: DtypeFlag = None,
    mesh: MeshFlag = None,
    plot: PlotFlag = None,
    as_json: JsonFlag = False,
    compile_cache: CompileCacheFlag = None,
) -> None:
    """An EAGLE-3 draft of a target, by the training-time test on the target's own features.

    Exit status 1: the loss was no number, and training stopped.
    """
    source = data or tokens or features
    if source is None or sum(one is not None for one in (data, tokens, features)) > 1:
        raise InputError("give one of --data, --tokens and --features")
    from jaxspec.feature_files import FeatureFiles

    files = None if features is None else FeatureFiles.find(features)
    own = ("heldout", "length") if files is not None else ("capture", "heldout", "length")
    if features is not None and (astray := given(context, *own)):
        raise InputError(
            f"{', '.join(astray)}: --features bring their own boundaries and windows, of which the "
            "last are held out"
        )
    from jaxspec.environment import start_jax
    from jaxspec.picture import check_picture

    if plot is not None:
        check_picture(plot)
    start_jax(compile_cache)
    import numpy as np

    from jaxspec.checkpoint import load_target, locate
    from jaxspec.config import Numerics, TreeConfig
    from jaxspec.console import Display
    from jaxspec.environment import SHIPPED_TARGET
    from jaxspec.features import FeaturesDirectory
    from jaxspec.fresh_draft import DraftShape
    from jaxspec.optimizer import OptimizerConfig
    from jaxspec.other_features import claim_features
    from jaxspec.tokenizer import load_tokenizer
    from jaxspec.training import LossConfig
    from jaxspec.training_acceptance import AcceptanceConfig
    from jaxspec.training_data import Windows, read_samples
    from jaxspec.training_run import TrainConfig, train

    config = TrainConfig(
        LossConfig(num_steps, step_weight, labels, one_step_batches),
        OptimizerConfig(
            learning_rate, batches, warm_up, clip, weight_decay, accumulate, optimizer, final_rate
        ),
        batch_size,
        seed,
        evaluate_every,
        AcceptanceConfig(
            accept_prompts, temperature=accept_temperature, tree=TreeConfig.parse(tree)
        ),
    )
    config.check()
    shape = DraftShape(
        attention,
        ids_of("--capture", capture),
        vocab_size=draft_vocab_size,
        sizes=_sizes(draft_config),
    )
    of_fresh = given(context, "attention", "draft_vocab_size", "draft_config")
    of_fresh += given(context, "capture") if files is None else []
    if draft is not None and of_fresh:
        raise InputError(f"{', '.join(of_fresh)}: a fresh draft's, and --draft is not one")
    directory = locate(target or SHIPPED_TARGET)
    stored = None
    if features is not None and files is None:
        stored = FeaturesDirectory.open(features)
    dtype = dtype_of(dtype)
    if stored is not None and stored.dtype != dtype:
        raise InputError(f"{features}: recorded in {stored.dtype}; give --dtype {stored.dtype}")
    numerics = Numerics(dtype=dtype, mesh=mesh_of(mesh, None))
    with Display() as display:
        model = load_target(directory, numerics, progress=display.progress)
        most = model.config.max_position_embeddings
        if length > most:
            raise InputError(f"--length {length}: the target was made for {most} tokens")
        tokenizer, vocab_size = load_tokenizer(directory), model.config.vocab_size

        def windows(path: Path) -> Windows:
            samples = read_samples(path, tokenizer, model.config, tokens is not None)
            return Windows.of(samples, length, vocab_size)

        if files is not None:
            stated = ids_of("--capture", capture)
            stored, found = claim_features(files, model, stated, dtype, display.progress)
            display.say(found.summary())
            if not files.has_masks:
                display.say("  nothing says which tokens are the assistant's: all are learned")
            learned = stored.windows(vocab_size)
            if stored.length > most:
                raise InputError(f"{features}: {stored.length} tokens in a sample, of {most}")
        elif stored is not None:
            learned = stored.windows()
        if stored is not None:
            of_stored = {"capture": stored.boundaries.ids, "capture_from": "--features"}
            shape = dataclasses.replace(shape, **of_stored)
        else:
            learned = windows(source)
        if heldout is None:
            learned, held_out = _split(learned)
        else:
            held_out = windows(heldout)
        if len(held_out) > heldout_windows:
            held_out = held_out.take(np.linspace(0, len(held_out) - 1, heldout_windows).astype(int))
        start = _start(model, draft, shape, learned, seed)
        if stored is not None:
            stored.require(start.config.boundaries)
        display.say(
            f"{len(learned)} windows to learn from, {len(held_out)} held out; the draft reads "
            f"{start.config.boundaries}"
        )
        report = train(model, start, learned, held_out, config, out, display.progress, display.say)
        if plot is not None:
            from jaxspec.training_view import plot_training

            plot_training(report, plot)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        print(f"{report.draft} is the draft; {report.metrics} how it came about")


def _split(windows: "Windows") -> "tuple[Windows, Windows]":
    """Those to learn from, and the last ones, to evaluate on."""
    count = max(1, len(windows) // HELD_OUT_SHARE)
    if len(windows) < 2:
        raise InputError(
            "one window of text: nothing would be left to evaluate on; give more, or --heldout"
        )
    return windows.take(slice(None, -count)), windows.take(slice(-count, None))


def _start(
    target: "Target", draft: str | None, shape: "DraftShape", learned: "Windows", seed: int
) -> "Draft":
    from jaxspec.checkpoint import load_draft
    from jaxspec.config import Numerics
    from jaxspec.fresh_draft import fresh_draft

    if draft is not None:
        numerics = Numerics(dtype="float32", mesh=target.numerics.mesh)
        return load_draft(draft, numerics, target=target)
    vocab_size = target.config.vocab_size
    ids = learned.frequent_ids(vocab_size, shape.num_ids(vocab_size))
    return fresh_draft(target, shape, ids, seed)


def _sizes(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"--draft-config {text!r}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"--draft-config {text!r}: expected an object")
    return found
