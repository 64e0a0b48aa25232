"""Which boundaries a file of features really holds: by comparison with the target's own."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import safetensors

from jaxspec.aliases import Progress
from jaxspec.errors import InputError
from jaxspec.feature_files import FeatureFiles, FeatureSample
from jaxspec.record_file import claimed_boundaries
from jaxspec.recording import RecordConfig, record
from jaxspec.target import Target

__all__ = ["Chunk", "FeaturesReport", "identify"]

NEAR = 0.1
"""Relative distance below which a chunk may be that boundary."""
CLEARLY = 0.5
"""It is, if no other boundary comes nearer than the distance divided by this."""
SOME_FILES, SOME_TOKENS = 4, 128
"""Of another project's files, so many samples are looked at, and the first tokens of each: no state
depends on later ones."""


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
      last: where the last states that another project keeps beside the features lie: before the
        final norm or after it; None of other files.
    """

    path: Path
    target: str
    chunks: tuple[Chunk, ...]
    claimed: tuple[int, ...] | None
    last: Literal["before", "after", "neither"] | None = None

    @property
    def found(self) -> tuple[int | None, ...]:
        return tuple(chunk.boundary for chunk in self.chunks)

    @property
    def holds(self) -> bool:
        """Whether every chunk is a boundary, and the one that is claimed."""
        is_told = None not in self.found and self.last != "neither"
        return is_told and self.claimed in (None, self.found)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "features": str(self.path),
            "target": self.target,
            "claimed": self.claimed and list(self.claimed),
            "found": list(self.found),
            "holds": self.holds,
            "last": self.last,
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
        if self.last is not None:
            where = {"before": "before the final norm", "after": "after the final norm"}
            lines.append(f"  the last states are {where.get(self.last, 'none of this target')}")
        claimed = "the file claims no boundaries"
        if self.claimed is not None:
            claimed = f"the file claims {self.claimed}"
        lines.append(f"  {claimed}: {'this holds' if self.holds else 'this does not hold'}")
        return "\n".join(lines)


def identify(path: Path, target: Target, progress: Progress | None = None) -> FeaturesReport:
    """The report of a safetensors file with `tokens` and `features`, and maybe `lengths`, or of
    another project's feature files.

    The tokens go through the target, and each chunk of the features is compared with every
    boundary, position by position.

    Raises:
      InputError: the file has no such arrays, or they are not of this target.
    """
    files = FeatureFiles.find(path)
    given = _read(path) if files is None else _read_files(files)
    tokens, features, width = given.tokens, given.features, target.config.hidden_size
    if features.ndim != 3 or features.shape[:2] != tokens.shape or features.shape[2] % width:
        raise InputError(
            f"{path}: features are {list(features.shape)} and tokens {list(tokens.shape)}; "
            f"expected [B, T, a multiple of {width}, the target's hidden_size] and [B, T]"
        )
    lengths = given.lengths
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
    last = None
    if given.last is not None:
        last = _where(given.last[is_real].astype(np.float32), boundaries[-1], target)
    return FeaturesReport(path, target.identity, tuple(chunks), given.claimed, last)


def _where(
    last_MD: np.ndarray, boundary_MD: np.ndarray, target: Target
) -> Literal["before", "after", "neither"]:
    """Whether last states are the target's before its final norm, or after it."""
    given_MD = jnp.asarray(boundary_MD, target.numerics.jnp_dtype)[None]
    normed_MD = np.asarray(target.norm(given_MD)[0], np.float32)
    before, after = _distance(last_MD, boundary_MD), _distance(last_MD, normed_MD)
    if min(before, after) >= NEAR:
        return "neither"
    return "before" if before < after else "after"


def _distance(chunk: np.ndarray, boundary: np.ndarray) -> float:
    """The median over positions of how far the one is from the other, relative to the other."""
    away, size = (np.linalg.norm(rows, axis=1) for rows in (chunk - boundary, boundary))
    return float(np.median(away / np.maximum(size, np.finfo(np.float32).tiny)))


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a file holds: tokens [B,T], lengths [B], features [B,T,K*D], last states [B,T,D]."""

    tokens: np.ndarray
    lengths: np.ndarray
    features: np.ndarray
    claimed: tuple[int, ...] | None
    last: np.ndarray | None = None


def _read_files(files: FeatureFiles) -> _Given:
    """Some of another project's samples, spread over all."""
    count = min(len(files.files), SOME_FILES)
    rows = np.linspace(0, len(files.files) - 1, count).astype(int).tolist()
    samples = [files.read(row) for row in rows]
    tokens = [sample.tokens[:SOME_TOKENS] for sample in samples]
    longest = max(map(len, tokens))

    def padded(arrays: list[np.ndarray]) -> np.ndarray:
        cut = [array[:SOME_TOKENS] for array in arrays]
        widths = {array.shape[1:] for array in cut}
        if len(widths) > 1:
            raise InputError(f"{files.path}: states of different widths, {sorted(widths)}")
        return np.stack([np.pad(a, [(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in cut])

    return _Given(
        padded(tokens),
        np.array([len(ids) for ids in tokens], np.int32),
        padded([_states(sample, "features") for sample in samples]),
        files.claim,
        padded([_states(sample, "last") for sample in samples]),
    )


def _states(sample: FeatureSample, name: Literal["features", "last"]) -> np.ndarray:
    states = getattr(sample, name)
    assert states is not None, "read with its states"
    return states


def _read(path: Path) -> _Given:
    """The arrays of a file, and the boundaries that it claims."""
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
    return _Given(tokens, lengths, features, claimed_boundaries(path, metadata))
