"""Features on disk: what a target said of texts, in shards, under the claim of what it is.

Each shard is a record (`record_file.py`) of some windows, so that `inspect` can say which boundary
each of its chunks really is. `manifest.json` says what all of them are.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from jaxspec.aliases import Progress
from jaxspec.contracts import Boundaries, Features
from jaxspec.convert.manifest import MANIFEST, write_whole
from jaxspec.errors import InputError
from jaxspec.recording import Record, RecordConfig, record
from jaxspec.target import Target
from jaxspec.training_data import Windows

__all__ = ["FeaturesDirectory", "estimated_bytes", "first_shard", "record_features"]

FORMAT = "jaxspec-features-1"
PER_SHARD = 32
"""Windows of a shard: what an interrupted run does again, at most."""


@dataclasses.dataclass(frozen=True)
class FeaturesDirectory:
    """A directory of shards that is complete.

    Attributes:
      boundaries: the claim of what its features are.
      last: the boundary before the final norm, which is kept beside them.
    """

    path: Path
    boundaries: Boundaries
    last: int
    dtype: str
    num_windows: int
    length: int
    per_shard: int

    @classmethod
    def open(cls, path: Path) -> "FeaturesDirectory":
        """The directory, as its manifest has it.

        Raises:
          InputError: it is none, is damaged, or its recording was interrupted.
        """
        about = _read_manifest(path)
        try:
            claim = about["boundaries"]
            boundaries = Boundaries(**claim | {"ids": tuple(claim["ids"])})
            rest = ("last", "dtype", "num_windows", "length", "per_shard")
            sizes = [about[name] for name in rest]
        except (KeyError, TypeError) as error:
            raise InputError(f"{path / MANIFEST}: incomplete ({error!r})") from error
        found = cls(path, boundaries, *sizes)
        missing = [shard for shard in found.shards if not shard.is_file()]
        if missing:
            raise InputError(
                f"{path}: {len(missing)} of {len(found.shards)} shards are missing, the first is "
                f"{missing[0].name}; `jaxspec record --features` goes on when it is given the same"
            )
        return found

    @property
    def is_normed(self) -> bool:
        """Whether the last states are those after the final norm."""
        return False

    @property
    def shards(self) -> list[Path]:
        return [_shard(self.path, i) for i in range(-(-self.num_windows // self.per_shard))]

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return dataclasses.asdict(self) | {"path": str(self.path), "shards": len(self.shards)}

    def require(self, want: Boundaries) -> None:
        """Raises ContractError where these are not the features that a draft is trained on."""
        self.boundaries.require(want, "train-draft")

    def windows(self) -> Windows:
        """Their tokens, and what was recorded of each, which is read when it is needed."""
        shape = (self.num_windows, self.length)
        tokens, is_learned = np.zeros(shape, np.int32), np.zeros(shape, bool)
        lengths = np.zeros(self.num_windows, np.int32)
        for index, shard in enumerate(self.shards):
            rows = slice(index * self.per_shard, (index + 1) * self.per_shard)
            found = _read(shard, ("tokens", "lengths", "loss_mask"))
            width = found["tokens"].shape[1]
            tokens[rows, :width], lengths[rows] = found["tokens"], found["lengths"]
            is_learned[rows, :width] = found["loss_mask"] != 0
        where = [
            f"{_shard(self.path, i // self.per_shard)}, row {i % self.per_shard}"
            for i in range(shape[0])
        ]
        return Windows(tokens, is_learned, lengths, where, self, np.arange(shape[0]))

    def read(self, rows: np.ndarray) -> tuple[Features, np.ndarray]:
        """The features of some windows and the last boundary [B,length,D], zero past the ends."""
        names = ("features", f"boundary.{self.last:03d}")
        of_rows: list[list[np.ndarray]] = [[], []]
        for row in rows.tolist():
            shard, at = _shard(self.path, row // self.per_shard), row % self.per_shard
            found = _read(shard, names, slice(at, at + 1))
            for kept, name in zip(of_rows, names, strict=True):
                array = found[name]
                kept.append(np.pad(array, [(0, 0), (0, self.length - array.shape[1]), (0, 0)]))
        features, hidden = map(np.concatenate, of_rows)
        return Features(features, self.boundaries), hidden


def first_shard(path: Path) -> Path | None:
    """The first shard of a directory of features, whose chunks are those of all; None of others."""
    manifest = path / MANIFEST
    if not manifest.is_file() or FORMAT not in manifest.read_text("utf-8"):
        return None
    return FeaturesDirectory.open(path).shards[0]


def estimated_bytes(target: Target, capture: Boundaries, windows: Windows) -> int:
    """What the shards will take, to within the shortness of their longest windows."""
    width = capture.total_width + target.config.hidden_size
    return windows.tokens.size * (width * target.numerics.jnp_dtype.itemsize + 5)


def record_features(
    target: Target,
    capture: Boundaries,
    windows: Windows,
    out: Path,
    progress: Progress | None = None,
) -> FeaturesDirectory:
    """The directory with what the target says of the windows; an interrupted one goes on.

    Args:
      progress: called with "recording", and how many of how many shards are done.

    Raises:
      InputError: `out` is something else or of another recording, or has no room.
    """
    last = target.config.num_hidden_layers
    about = {
        "format": FORMAT,
        "target": target.identity,
        "boundaries": dataclasses.asdict(capture) | {"ids": list(capture.ids)},
        "last": last,
        "dtype": target.numerics.dtype,
        "num_windows": len(windows),
        "length": windows.tokens.shape[1],
        "windows": windows.digest,
        "per_shard": PER_SHARD,
    }
    _begin(out, about)
    shards = [_shard(out, i) for i in range(-(-len(windows) // PER_SHARD))]
    num_missing = sum(not shard.is_file() for shard in shards)
    wanted = estimated_bytes(target, capture, windows) * num_missing // len(shards)
    free = shutil.disk_usage(out).free
    if free < wanted:
        raise InputError(
            f"--out {out}: about {wanted / 1e9:.3f} GB are to come, and {free / 1e9:.3f} GB are "
            "free"
        )
    config = RecordConfig(boundaries=(last,), capture=capture, top=1)
    kept = ("tokens", "lengths", "features", f"boundary.{last:03d}")
    for index, shard in enumerate(shards):
        if not shard.is_file():
            part = windows.take(slice(index * PER_SHARD, (index + 1) * PER_SHARD))
            rows = zip(part.tokens, part.lengths, strict=True)
            done = record(target, None, [row[:n].tolist() for row, n in rows], config)
            arrays = {name: done.arrays[name] for name in kept}
            width = arrays["tokens"].shape[1]
            arrays["loss_mask"] = part.is_learned[:, :width].astype(np.int8)
            Record(arrays, done.metadata).save(shard)
        if progress is not None:
            progress("recording", index + 1, len(shards))
    return FeaturesDirectory.open(out)


def _begin(out: Path, about: dict[str, Any]) -> None:
    """Makes the directory, or finds that an earlier run of the same kind did."""
    try:
        if not (out / MANIFEST).is_file():
            if out.exists() and any(out.iterdir()):
                raise InputError(f"--out {out}: not empty, and no features in it")
            out.mkdir(parents=True, exist_ok=True)
            write_whole(out / MANIFEST, about)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from error
    found = _read_manifest(out)
    differing = [name for name in about if found.get(name) != about[name]]
    if differing:
        name = differing[0]
        raise InputError(
            f"{out / MANIFEST}: of another recording, whose {name} is {found.get(name)} where this "
            f"one's is {about[name]}; give another --out"
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        about = json.loads((path / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no features in it ({error})") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InputError(f"{path / MANIFEST}: its format is not {FORMAT!r}: no features")
    return about


def _shard(path: Path, index: int) -> Path:
    return path / f"features-{index:05d}.safetensors"


def _read(shard: Path, names: tuple[str, ...], rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """Some rows of a shard's arrays."""
    try:
        with safetensors.safe_open(shard, framework="numpy") as file:
            return {name: np.asarray(file.get_slice(name)[rows]) for name in names}
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(
            f"{shard}: cannot be read ({error}); remove it, and `jaxspec record --features` makes "
            "it again"
        ) from error
