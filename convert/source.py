"""A Hugging Face directory, read lazily: headers first, then one tensor at a time."""

import dataclasses
import errno
import itertools
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.convert.page_cache import uncache
from jaxspec.convert.problems import Problems
from jaxspec.convert.torch_file import read_torch_file

__all__ = ["DTYPES", "Source", "TensorInfo", "read_json"]

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "BOOL": np.dtype(np.bool_),
}
"""Safetensors' names of element types."""

SINGLE, SINGLE_TORCH = "model.safetensors", "pytorch_model.bin"
"""Of a checkpoint that is one file."""
MAX_HEADER_BYTES = 100_000_000
"""Safetensors' own limit: a longer header is not one."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: file name, element type, shape and the offset of its first byte."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Source:
    """A checkpoint directory as Hugging Face writes it: safetensors or, without them, `.bin`.

    Attributes:
      directory: where it lies.
      config: its `config.json`; `generation_config` and `tokenizer_config` are {} where the
        directory has none.
      tensors: what the headers of its files say, by name.
      files: the files with tensors, in order.

    Raises:
      CheckpointError: no config, no weights, a file missing or truncated, an index that does not
        agree with its files, or a tensor in two files: all that were found.
    """

    def __init__(self, directory: str | os.PathLike[str], *, needs_weights: bool = True) -> None:
        """Args:
        needs_weights: whether to read what safetensors files say; without, there is no tensor.
        """
        self.directory = Path(directory)
        problems = Problems(str(directory))
        if not self.directory.is_dir():
            problems.add("no such directory")
            problems.raise_any()
        if not (self.directory / "config.json").is_file():
            problems.add(
                "no config.json: expected a Hugging Face checkpoint directory, or a converted "
                "one with its manifest.json"
            )
        self.config = read_json(self.directory / "config.json", problems)
        self.generation_config = read_json(self.directory / "generation_config.json", problems)
        self.tokenizer_config = read_json(self.directory / "tokenizer_config.json", problems)
        has_safetensors = any(self.directory.glob("*.safetensors"))
        self._single = SINGLE if has_safetensors else SINGLE_TORCH
        index = self._read_index(problems) if needs_weights else None
        self.files = self._list_files(index, problems) if needs_weights else []
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            read = _read_header if has_safetensors else _read_torch_header
            for name, info in read(self.directory / file, problems).items():
                if name in self.tensors:
                    problems.add(
                        f"tensor {name} is in two files, {self.tensors[name].file} and {file}"
                    )
                self.tensors[name] = info
        if index is not None:
            self._compare_with(index, problems)
        problems.raise_any()

    def read(
        self, name: str, rows: range | None = None, into: np.ndarray | None = None
    ) -> np.ndarray:
        """The tensor, or some of its rows, in the file's own element type.

        Args:
          into: what it is read into, contiguous; None is a new array.

        Raises:
          OSError: the file cannot be read, or has become shorter.
        """
        info = self.tensors[name]
        dtype, path = DTYPES[info.dtype], self.directory / info.file
        shape, offset = info.shape, info.offset
        if rows is not None:
            shape = (len(rows), *info.shape[1:])
            offset += rows.start * math.prod(info.shape[1:]) * dtype.itemsize
        array = np.empty(shape, dtype) if into is None else into
        assert (array.shape, array.dtype) == (shape, dtype), f"{name} is {dtype} {shape}"
        with path.open("rb") as stream:
            stream.seek(offset)
            if stream.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:
                raise OSError(errno.EIO, "ends before its last tensor", str(path))
        return array

    def uncache(self, names: Iterable[str]) -> None:
        """Gives back the memory in which the system keeps these tensors' bytes."""
        tensors = [self.tensors[name] for name in names]
        tensors.sort(key=lambda one: (one.file, one.offset))
        for file, group in itertools.groupby(tensors, key=lambda one: one.file):
            # What lies side by side goes at once: a page that two tensors share can only go whole.
            runs: list[list[int]] = []
            for one in group:
                if not runs or runs[-1][1] != one.offset:
                    runs.append([one.offset, one.offset])
                runs[-1][1] += one.num_bytes
            uncache(self.directory / file, runs)

    @property
    def index_file(self) -> str:
        """The file that says which file a tensor is in, where there are several."""
        return f"{self._single}.index.json"

    def _read_index(self, problems: Problems) -> dict[str, str] | None:
        """File name of every tensor, or None for a checkpoint without an index."""
        path = self.directory / self.index_file
        if not path.is_file():
            return None
        index = read_json(path, problems).get("weight_map")
        if not isinstance(index, dict):
            problems.add(f"{path.name}: no weight_map")
            return {}
        return index

    def _list_files(self, index: dict[str, str] | None, problems: Problems) -> list[str]:
        single, kind = self._single, self._single.rpartition(".")[2]
        present = sorted(path.name for path in self.directory.glob(f"*.{kind}"))
        if kind == "bin":  # a trainer's directory has others: options, the optimiser's state
            present = [name for name in present if name.startswith("pytorch_model")]
        if index is None:
            if present == [single]:
                return present
            if present:
                problems.add(
                    f"{len(present)} {kind} files ({present[0]}, ...) and neither "
                    f"{self.index_file} nor a single {single}"
                )
            else:
                problems.add(
                    "no weights: expected model.safetensors, or shards and their index, or the "
                    "same as pytorch_model.bin"
                )
            return []
        named = sorted(set(index.values()))
        for file in named:
            if file not in present:
                count = sum(value == file for value in index.values())
                problems.add(
                    f"{self.index_file} names {file} for {count} tensors, and there is no such file"
                )
        for file in present:
            if file not in named:
                problems.add(f"{file} is not named in {self.index_file}")
        return [file for file in named if file in present]

    def _compare_with(self, index: dict[str, str], problems: Problems) -> None:
        for name, file in index.items():
            info = self.tensors.get(name)
            if info is None and file in self.files:
                problems.add(
                    f"tensor {name}: {self.index_file} says it is in {file}, which does not hold it"
                )
            elif info is not None and info.file != file:
                problems.add(f"tensor {name} is in {info.file}; {self.index_file} says {file}")
        for name, info in self.tensors.items():
            if name not in index:
                problems.add(f"tensor {name} in {info.file} is not in {self.index_file}")


def read_json(path: Path, problems: Problems) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file, or none that can be read."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problems.add(f"{path.name}: not JSON ({error})")
        return {}
    if not isinstance(data, dict):
        problems.add(f"{path.name}: expected a JSON object, found a {type(data).__name__}")
        return {}
    return data


def _read_header(path: Path, problems: Problems) -> dict[str, TensorInfo]:
    """What a safetensors file says it holds, checked against the file's size.

    The format: eight bytes of little-endian header length, the header as JSON, then the data.
    """
    size, file = path.stat().st_size, path.name
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            problems.add(f"{file}: truncated, or not safetensors: {size} bytes hold no header")
            return {}
        try:
            header = json.loads(stream.read(length))
            entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
            for name, entry in header.items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    entries[name] = (entry["dtype"], tuple(entry["shape"]), start, end)
        except (ValueError, KeyError, TypeError, AttributeError):
            problems.add(f"{file}: its safetensors header cannot be read")
            return {}
    data_start, tensors = 8 + length, {}
    end_of_data = data_start + max((end for *_, end in entries.values()), default=0)
    if size != end_of_data:
        what = "truncated" if size < end_of_data else "too long"
        problems.add(f"{file}: {what}: {size} bytes, its header describes {end_of_data}")
        return {}
    for name, (dtype, shape, start, end) in entries.items():
        if dtype not in DTYPES:
            problems.add(
                f"tensor {name} in {file}: element type {dtype}; known are {', '.join(DTYPES)}"
            )
        elif end - start != math.prod(shape) * DTYPES[dtype].itemsize:
            problems.add(
                f"tensor {name} in {file}: {end - start} bytes for shape {list(shape)} of {dtype}"
            )
        else:
            tensors[name] = TensorInfo(file, dtype, shape, data_start + start)
    return tensors


def _read_torch_header(path: Path, problems: Problems) -> dict[str, TensorInfo]:
    """The same of a file of `torch.save`."""
    return {
        name: TensorInfo(path.name, found.dtype, found.shape, found.offset)
        for name, found in read_torch_file(path, problems).items()
    }
