"""Which boundaries a file of features really holds: by comparison with the target's own."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from jaxspec.aliases import Progress
from jaxspec.errors import InputError
from jaxspec.record_file import claimed_boundaries
from jaxspec.recording import RecordConfig, record
from jaxspec.target import Target

__all__ = ["Chunk", "FeaturesReport", "identify"]

NEAR = 0.1
"""Relative distance below which a chunk may be that boundary."""
CLEARLY = 0.5
"""It is, if no other boundary comes nearer than the distance divided by this."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of the features, as wide as the target.

    Attributes:
      nearest, distance: the boundary it is closest to, and the median over positions of
        |chunk - boundary| / |boundary|. A norm over all positions would be that of the few whose
        activations are massive, in which all boundaries are alike.
      next_nearest, next_distance: the runner-up.
    """

    nearest: int
    distance: float
    next_nearest: int
    next_distance: float

    @property
    def is_ambiguous(self) -> bool:
        """Whether it is near a boundary, and another one is about as near."""
        return self.distance < NEAR and self.distance > CLEARLY * self.next_distance

    @property
    def boundary(self) -> int | None:
        """The boundary it is; None where it is none of this target's, or could be two."""
        return self.nearest if self.distance < NEAR and not self.is_ambiguous else None


@dataclasses.dataclass(frozen=True)
class FeaturesReport:
    """What a features file holds, and what it says it holds.

    Attributes:
      claimed: the boundaries in its metadata; None where it states none.
    """

    path: Path
    target: str
    chunks: tuple[Chunk, ...]
    claimed: tuple[int, ...] | None

    @property
    def found(self) -> tuple[int | None, ...]:
        return tuple(chunk.boundary for chunk in self.chunks)

    @property
    def holds(self) -> bool:
        """Whether every chunk is a boundary, and the one that is claimed."""
        return None not in self.found and self.claimed in (None, self.found)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "features": str(self.path),
            "target": self.target,
            "claimed": self.claimed and list(self.claimed),
            "found": list(self.found),
            "holds": self.holds,
            "chunks": [
                {
                    "boundary": chunk.boundary,
                    "ambiguous": chunk.is_ambiguous,
                    **dataclasses.asdict(chunk),
                }
                for chunk in self.chunks
            ],
        }

    def summary(self) -> str:
        """A line a chunk, and the verdict."""
        lines = [f"{self.path}: features against {self.target}"]
        for index, chunk in enumerate(self.chunks):
            is_it = f"is boundary {chunk.nearest}" if chunk.boundary is not None else "is none"
            if chunk.is_ambiguous:
                is_it = "is ambiguous"
            lines.append(
                f"  chunk {index} {is_it}: {chunk.distance:.2g} from boundary {chunk.nearest}, "
                f"{chunk.next_distance:.2g} from {chunk.next_nearest}"
            )
        claimed = "the file claims no boundaries"
        if self.claimed is not None:
            claimed = f"the file claims {self.claimed}"
        lines.append(f"  {claimed}: {'this holds' if self.holds else 'this does not hold'}")
        return "\n".join(lines)


def identify(path: Path, target: Target, progress: Progress | None = None) -> FeaturesReport:
    """The report of a safetensors file with `tokens` and `features`, and maybe `lengths`.

    The tokens go through the target, and each chunk of the features is compared with every
    boundary, position by position.

    Raises:
      InputError: the file has no such arrays, or they are not of this target.
    """
    tokens, lengths, features, claimed = _read(path)
    width = target.config.hidden_size
    if features.ndim != 3 or features.shape[:2] != tokens.shape or features.shape[2] % width:
        raise InputError(
            f"{path}: features are {list(features.shape)} and tokens {list(tokens.shape)}; "
            f"expected [B, T, a multiple of {width}, the target's hidden_size] and [B, T]"
        )
    sequences = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    vocab_size = target.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InputError(f"{path}: token ids outside the target's vocabulary of {vocab_size}")
    own = record(target, None, sequences, RecordConfig(top=1), progress).arrays
    is_real = np.arange(tokens.shape[1]) < lengths[:, None]
    boundaries = [
        own[f"boundary.{b:03d}"].astype(np.float32)[is_real[:, : own["tokens"].shape[1]]]
        for b in range(target.config.num_hidden_layers + 1)
    ]
    chunks = []
    for chunk in np.split(features[is_real].astype(np.float32), features.shape[2] // width, axis=1):
        distances = [_distance(chunk, boundary) for boundary in boundaries]
        first, second = np.argsort(distances)[:2].tolist()
        chunks.append(Chunk(first, distances[first], second, distances[second]))
    return FeaturesReport(path, target.identity, tuple(chunks), claimed)


def _distance(chunk: np.ndarray, boundary: np.ndarray) -> float:
    """The median over positions of how far the one is from the other, relative to the other."""
    away, size = (np.linalg.norm(rows, axis=1) for rows in (chunk - boundary, boundary))
    return float(np.median(away / np.maximum(size, np.finfo(np.float32).tiny)))


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...] | None]:
    """Tokens, lengths, features and the boundaries that the file claims."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            missing = {"tokens", "features"} - names
            if missing:
                shown = sorted(names)[:3] + ["..."] * (len(names) > 3)
                raise InputError(
                    f"{path}: no array {' and no '.join(sorted(missing))}; it has "
                    f"{', '.join(shown)}. Features come with their tokens; a checkpoint is "
                    "named by its directory"
                )
            tokens, features = file.get_tensor("tokens"), file.get_tensor("features")
            lengths = file.get_tensor("lengths") if "lengths" in names else None
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path}: not a safetensors file ({error})") from error
    if lengths is None:
        lengths = np.full(tokens.shape[0], tokens.shape[1], np.int32)
    return tokens, lengths, features, claimed_boundaries(path, metadata)
