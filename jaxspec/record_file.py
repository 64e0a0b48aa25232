"""Records as files: opened without reading them, checked, and read an array at a time."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import safetensors

from jaxspec.errors import InputError

__all__ = ["FORMAT", "RANKS", "RecordFile", "claimed_boundaries"]

FORMAT = "jaxspec-record-1"
RANKS = {
    r"boundary\.\d+": 3,
    r"features": 3,
    r"logits(\.top|\.top_ids)?": 3,
    r"draft\.logits": 3,
    r"router\.\d+": 3,
    r"router_margin\.\d+": 2,
}
"""Forms of the names that mean something, and how many axes such an array has."""


@dataclasses.dataclass(frozen=True)
class RecordFile:
    """A record of any framework; `recording.Record` says what its arrays are.

    Attributes:
      shapes: of every array, by name.
      lengths: [B] tokens of each sequence.
      metadata: as in the file; what a writer left out is missing.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    tokens: np.ndarray
    lengths: np.ndarray
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> "RecordFile":
        """The record in a safetensors file.

        Raises:
          InputError: it is none, is cut short, or its arrays do not belong together.
        """
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                names = list(file.keys())
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
                if metadata.get("format") != FORMAT:
                    raise InputError(
                        f"{path}: its metadata says format {metadata.get('format')!r}; a record "
                        f"says {FORMAT!r}"
                    )
                if "tokens" not in shapes:
                    raise InputError(f"{path}: a record without `tokens`")
                tokens = file.get_tensor("tokens")
                lengths = file.get_tensor("lengths") if "lengths" in shapes else None
        except (OSError, safetensors.SafetensorError) as error:
            raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
        if tokens.ndim != 2 or not tokens.size:
            raise InputError(f"{path}: tokens are {list(tokens.shape)}; expected [B, T]")
        if lengths is None:
            lengths = np.full(tokens.shape[0], tokens.shape[1], np.int32)
        if lengths.shape != tokens.shape[:1] or lengths.min() < 1 or lengths.max() > len(tokens[0]):
            raise InputError(
                f"{path}: lengths are {lengths.tolist()}; expected one for each of "
                f"{len(tokens)} sequences, from 1 to {len(tokens[0])}"
            )
        for name, shape in shapes.items():
            rank = next((n for form, n in RANKS.items() if re.fullmatch(form, name)), None)
            if rank is not None and (shape[:2] != tokens.shape or len(shape) != rank):
                raise InputError(
                    f"{path}: {name} is {list(shape)}; of tokens {list(tokens.shape)} it has "
                    f"{rank} axes, and the first two are theirs"
                )
        return cls(path, shapes, tokens, lengths, metadata)

    @property
    def dtype(self) -> str:
        """That of the run, "float32" where the writer did not say."""
        return self.metadata.get("dtype", "float32")

    def rows(self, name: str, is_kept_BT: np.ndarray) -> np.ndarray:
        """The rows [M, ...] of an array at the kept positions, f32 unless it holds integers.

        Raises:
          InputError: one of them is not finite; it is named by sequence and position.
        """
        with safetensors.safe_open(self.path, framework="numpy") as file:
            array = file.get_tensor(name)
        batch, slots = is_kept_BT.shape
        rows = array[:batch, :slots][is_kept_BT]
        if np.issubdtype(rows.dtype, np.integer):
            return rows
        rows = rows.astype(np.float32)
        flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        # A router that rejects nobody has an infinite margin.
        is_bad = np.isnan(flat) if name.startswith("router_margin") else ~np.isfinite(flat)
        if is_bad.any():
            bad = int(is_bad.any(axis=1).argmax())
            b, t = (int(index[bad]) for index in np.nonzero(is_kept_BT))
            raise InputError(
                f"{self.path}: {name} holds {flat[bad][is_bad[bad]][0]} in sequence {b} at "
                f"position {t} ({int(is_bad.sum())} such values in all): nothing can be compared "
                "with that"
            )
        return rows


def claimed_boundaries(path: Path, metadata: dict[str, str]) -> tuple[int, ...] | None:
    """Which boundaries a file's metadata says that its `features` are; None where it does not.

    Raises:
      InputError: what it says are no ids.
    """
    said = metadata.get("boundaries", "")
    parts = [part.strip() for part in said.split(",")] if said else []
    if not all(part.isdigit() for part in parts):
        raise InputError(
            f"{path}: its metadata says boundaries {said!r}; expected ids, as in 1,3,5"
        )
    return tuple(map(int, parts)) or None
