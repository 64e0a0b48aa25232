"""Conversion: a Hugging Face directory in, a directory of Orbax checkpoints and a manifest out.

A piece (a layer, the embedding, ...) at a time is in memory. Everything is written into
`DST.partial`; its manifest comes last, and one rename makes it `DST`. So what is called `DST` is
complete, and a conversion that was killed goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.aliases import Convention, PathLike, Progress
from jaxspec.config import DraftConfig, Numerics, TargetConfig
from jaxspec.convert.configs import LatentNormEps
from jaxspec.convert.drafts import is_draft
from jaxspec.convert.manifest import MANIFEST, PARTIAL, Manifest, is_converted, read_manifest
from jaxspec.convert.plan import leaf_dtypes
from jaxspec.convert.prepare import (
    Experts,
    Prepared,
    TargetCard,
    abstract_draft,
    abstract_target,
    parameters_of,
    prepare_draft,
    prepare_target,
)
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.source import Source
from jaxspec.convert.store import is_written, remove_unfinished, writing_to
from jaxspec.version import version

__all__ = ["ConversionReport", "ConvertConfig", "convert", "manifest_of", "prepare", "read_card"]

COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that go along as they are: a converted target needs its tokenizer."""


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Choices of a conversion.

    Attributes:
      kind: "auto" takes a checkpoint with an `fc` for a draft.
      capture_convention: what a draft's boundary ids mean; None reads it from the checkpoint.
      target: directory of the target that a draft is tied to, converted or not.
      experts: "int4" quantises plain or fp8 routed experts.
      latent_norm_eps: see `configs.LatentNormEps`.
    """

    kind: Literal["auto", "target", "draft"] = "auto"
    capture_convention: Convention | None = None
    target: Path | None = None
    experts: Experts = "stored"
    latent_norm_eps: LatentNormEps = "rms_norm_eps"


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What was converted, or with `--dry-run` what would be.

    Attributes:
      num_pieces_kept: pieces that an earlier, interrupted conversion had finished.
    """

    source: Path
    destination: Path
    is_dry_run: bool
    num_pieces_kept: int
    manifest: Manifest

    def summary(self) -> str:
        """What it is; of a draft, which boundaries it was trained on and where that was read."""
        manifest, verb = self.manifest, "would be" if self.is_dry_run else "is"
        lines = [
            f"{self.destination} {verb} the {manifest.kind} {manifest.identity}; "
            "`jaxspec inspect` shows every claim"
        ]
        if isinstance(manifest.config, DraftConfig):
            want = manifest.config.boundaries
            ids = f"boundaries {want.ids}" if want.ids else "no boundaries of its own"
            lines.append(f"  trained on {ids}   [{want.origin}]")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "dry_run": self.is_dry_run,
            "pieces_kept": self.num_pieces_kept,
            **self.manifest.to_dict(),
        }


def convert(
    source: PathLike,
    destination: PathLike,
    config: ConvertConfig | None = None,
    *,
    is_dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """The report of converting `source` into `destination`, which must not exist yet.

    Args:
      is_dry_run: checks everything that headers can show, and writes nothing.
      progress: called as progress(what, done, total).

    Raises:
      CheckpointError: everything that is wrong with the source, or a destination that exists.
        Nothing is left behind.
    """
    source, destination, config = Path(source), Path(destination), config or ConvertConfig()
    if destination.exists():
        raise CheckpointError(
            str(destination), ["exists already; a conversion never writes over anything"]
        )
    prepared = prepare(source, config)
    manifest, num_kept = manifest_of(prepared), 0
    if not is_dry_run:
        partial = destination.with_name(f"{destination.name}.{PARTIAL}")
        num_kept = _write(prepared, manifest, partial, progress)
        sources = _hash(prepared.source, progress)
        manifest = dataclasses.replace(manifest, sources=sources)
        for file in COPIED:
            if (source / file).is_file():
                shutil.copyfile(source / file, partial / file)
        (partial / f"{PARTIAL}.json").unlink()
        (partial / MANIFEST).write_text(json.dumps(manifest.to_dict(), indent=1) + "\n")
        partial.rename(destination)
    return ConversionReport(source, destination, is_dry_run, num_kept, manifest)


def prepare(directory: Path, config: ConvertConfig) -> Prepared:
    """The checkpoint in a Hugging Face directory, checked as far as its headers go.

    Raises:
      CheckpointError: everything that is wrong with it.
    """
    if is_converted(directory):
        raise CheckpointError(str(directory), ["converted already"])
    source = Source(directory)
    kind = config.kind
    if kind == "auto":
        kind = "draft" if is_draft(source) else "target"
    if kind == "draft":
        card = None if config.target is None else read_card(config.target)
        return prepare_draft(source, config.capture_convention, card)
    if config.target is not None or config.capture_convention is not None:
        raise CheckpointError(
            str(directory), ["this is a target; --target and --capture-convention are for drafts"]
        )
    return prepare_target(source, config.experts, config.latent_norm_eps)


def read_card(directory: Path) -> TargetCard:
    """What a draft has to know of the target in a directory, converted or not."""
    if is_converted(directory):
        found = read_manifest(directory)
    else:
        found = prepare_target(Source(directory))
    if not isinstance(found.config, TargetConfig):
        raise CheckpointError(str(directory), [f"--target names a {found.kind}"])
    return TargetCard(found.identity, found.config)


def manifest_of(prepared: Prepared) -> Manifest:
    """The manifest of what a checkpoint becomes; its files are not hashed yet."""
    config = prepared.config
    if isinstance(config, TargetConfig):
        model = abstract_target(config, Numerics(), prepared.identity)
    else:
        model = abstract_draft(config, Numerics(), prepared.identity)
    shapes = {path: leaf.get_value().shape for path, leaf in parameters_of(model).items()}
    leaves: dict[str, dict[str, Any]] = {}
    for rule in prepared.rules:
        dtypes = leaf_dtypes(rule, prepared.source)
        for path, dtype in zip(rule.leaves, dtypes, strict=True):
            shape = shapes[path]
            leaf = leaves.setdefault(
                path, {"path": path, "shape": list(shape), "dtypes": [], "bytes": 0}
            )
            leaf["dtypes"] = sorted({*leaf["dtypes"], dtype})
            in_rule = math.prod(shape if rule.layer is None else shape[1:])
            leaf["bytes"] += in_rule * np.dtype(dtype).itemsize
    assert leaves.keys() == shapes.keys(), "every parameter is built, and nothing else"
    pieces = {rule.piece: {"name": rule.piece, "layer": rule.layer} for rule in prepared.rules}
    files = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": None}
        for path in _files(prepared.source)
    ]
    return Manifest(
        prepared.kind,
        prepared.identity,
        prepared.config,
        prepared.claims,
        list(leaves.values()),
        list(pieces.values()),
        files,
        prepared.unused,
        version(),
    )


def _write(prepared: Prepared, manifest: Manifest, partial: Path, progress: Progress | None) -> int:
    """Writes every piece into `partial`; returns how many were there already.

    Values that are no numbers are looked for to the end, so that all are reported together, but
    nothing is written after the first, and `partial` is removed.
    """
    kept = _resume(manifest, partial)
    problems, params = Problems(str(prepared.source.directory)), partial / "params"

    with writing_to(params) as write:
        for done, piece in enumerate(prepared.pieces(problems, kept), start=len(kept) + 1):
            if not problems.found:
                write(piece)
            del piece  # before the next one is built
            if progress is not None:
                progress("converting", done, len(manifest.pieces))
    if problems.found:
        shutil.rmtree(partial)
        problems.raise_any()
    return len(kept)


def _resume(manifest: Manifest, partial: Path) -> set[str]:
    """Names of the pieces that `partial` holds already, of the same conversion.

    Raises:
      CheckpointError: it holds another one.
    """
    plan, record = json.loads(json.dumps(manifest.to_dict())), partial / f"{PARTIAL}.json"
    if not partial.exists():
        partial.mkdir(parents=True)
        record.write_text(json.dumps(plan))
        return set()
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        found = None
    if found != plan:
        raise CheckpointError(
            str(partial),
            ["is left from another conversion that did not finish; remove it and convert again"],
        )
    remove_unfinished(partial / "params")
    names = (piece["name"] for piece in manifest.pieces)
    return {name for name in names if is_written(partial / "params", name)}


def _files(source: Source) -> list[Path]:
    """Every file that a conversion reads."""
    others = ("config.json", "model.safetensors.index.json", *COPIED)
    names = [name for name in others if (source.directory / name).is_file()]
    return [source.directory / name for name in (*names, *source.files)]


def _hash(source: Source, progress: Progress | None) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of every file that was read."""
    files, hashed = _files(source), []
    for done, path in enumerate(files, start=1):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        hashed.append({"file": path.name, "bytes": path.stat().st_size, "sha256": digest})
        if progress is not None:
            progress("hashing", done, len(files))
    return hashed
