"""Conversion: a Hugging Face directory in, a directory of Orbax checkpoints and a manifest out."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.aliases import Convention, PathLike, Progress
from jaxspec.config import DraftConfig, Numerics, TargetConfig
from jaxspec.convert.configs import LatentNormEps
from jaxspec.convert.conversion import files_of, write_checkpoint
from jaxspec.convert.draft_configs import AS_STATED
from jaxspec.convert.drafts import is_draft
from jaxspec.convert.manifest import Manifest, is_converted, read_manifest
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
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.rotary import RotaryChoice
from jaxspec.convert.source import Source
from jaxspec.version import version

__all__ = ["ConversionReport", "ConvertConfig", "convert", "manifest_of", "prepare", "read_card"]


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Choices of a conversion.

    Attributes:
      kind: "auto" takes a checkpoint with an `fc` for a draft.
      capture_convention: what a draft's boundary ids mean; None reads it from the checkpoint.
      target: directory of the target that a draft is tied to, converted or not.
      experts: "int4" quantises plain or fp8 routed experts.
      latent_norm_eps: see `configs.LatentNormEps`.
      draft_rotary: a draft's rotary embedding, in place of what its config says.
    """

    kind: Literal["auto", "target", "draft"] = "auto"
    capture_convention: Convention | None = None
    target: Path | None = None
    experts: Experts = "stored"
    latent_norm_eps: LatentNormEps = "rms_norm_eps"
    draft_rotary: RotaryChoice = AS_STATED


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
            of_rotary, of_kind = manifest.claims["rotary"], manifest.claims["rotary_kind"]
            lines.append(f"  rotary {json.dumps(of_rotary.value)}   [{of_rotary.origin}]")
            lines.append(f"  turning {of_kind.value}   [{of_kind.origin}]")
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
      progress: called as progress("converting", done, total) with bytes of the source; first with
        those that an earlier run has converted.

    Raises:
      CheckpointError: everything that is wrong with the source, a destination that exists or has
        no room, or an earlier run that was another conversion. Nothing that was there is lost; a
        source that is wrong leaves nothing behind.
    """
    source, destination, config = Path(source), Path(destination), config or ConvertConfig()
    if destination.exists():
        raise CheckpointError(
            str(destination), ["exists already; a conversion never writes over anything"]
        )
    prepared = prepare(source, config)
    manifest, num_kept = manifest_of(prepared), 0
    if not is_dry_run:
        manifest, num_kept = write_checkpoint(prepared, manifest, destination, progress)
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
        return prepare_draft(
            source,
            config.capture_convention,
            card,
            config.draft_rotary,
            config.latent_norm_eps,
        )
    if config.target is not None or config.capture_convention is not None or config.draft_rotary:
        raise CheckpointError(
            str(directory),
            ["this is a target; --target, --capture-convention and --draft-rotary are for drafts"],
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
            shape = shape if rule.layer is None else shape[1:]
            if rule.part is not None:
                shape = [*shape[: (a := rule.part.axis)], rule.part.count, *shape[a + 1 :]]
            leaf["bytes"] += math.prod(shape) * np.dtype(dtype).itemsize
    assert leaves.keys() == shapes.keys(), "every parameter is built, and nothing else"
    pieces: dict[str, dict[str, Any]] = {}
    for rule in prepared.rules:
        part = {} if rule.part is None else {"part": dataclasses.asdict(rule.part)}
        pieces[rule.piece] = {"name": rule.piece, "layer": rule.layer} | part
    files = [
        {"file": path.name, "bytes": path.stat().st_size, "sha256": None}
        for path in files_of(prepared.source)
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
