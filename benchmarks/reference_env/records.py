"""Records ("jaxspec-record-1", a safetensors file) and token files, as the reference programs
read and write them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

FORMAT = "jaxspec-record-1"


def read_tokens(path: Path) -> list[list[int]]:
    """The sequences of a JSON list of lists of token ids.

    Raises:
      SystemExit: it holds something else, or an empty sequence.
    """
    sequences = json.loads(path.read_text())
    if not isinstance(sequences, list) or not sequences or not all(map(_is_ids, sequences)):
        raise SystemExit(f"{path}: expected a JSON list of non-empty lists of token ids")
    return sequences


def stack_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows [T_b, ...] of every sequence as one [B, T, ...], zero after each one's length."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def read_record(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The arrays and the metadata of a record.

    Raises:
      SystemExit: the file is no record.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise SystemExit(
                f"{path}: metadata says format {metadata.get('format')!r}, expected {FORMAT!r}"
            )
        names = file.keys()
        return {name: file.get_tensor(name) for name in names}, metadata


def write_record(path: Path, arrays: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a record; every array contiguous, in the dtype it has."""
    arrays = {name: array.contiguous() for name, array in arrays.items()}
    save_file(arrays, path, {"format": FORMAT, **metadata})


def _is_ids(row: object) -> bool:
    return isinstance(row, list) and bool(row) and all(isinstance(i, int) for i in row)
