"""What a file of `torch.save` holds, without torch and without running anything in it.

The format, since torch 1.6: a zip archive, its members stored and not compressed.

    NAME/data.pkl     a pickle of a dict: name -> _rebuild_tensor_v2(storage, offset, size, stride),
                      or a list of those
    NAME/data/KEY     the bytes of a storage, to which the pickle points by (type, KEY, size)
    NAME/byteorder    "little", where it is there

A pickle is a program. This one may name ordered dicts, storage types and the function that makes a
tensor of a storage, all of which are stood in for here; a name of anything else is an error before
it means anything. What comes out are places in the file, as of a safetensors header.
"""

import collections
import io
import math
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.convert.problems import Problems

__all__ = ["Stored", "read_torch_file"]

STORAGES = {
    "BFloat16Storage": "BF16",
    "BoolStorage": "BOOL",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "IntStorage": "I32",
    "LongStorage": "I64",
}
"""torch's storage types, by safetensors' names of their elements."""
ITEM_BYTES = {"BF16": 2, "BOOL": 1, "I8": 1, "U8": 1, "F64": 8, "F32": 4, "F16": 2, "I32": 4}
ITEM_BYTES |= {"I64": 8}
MAX_PICKLE_BYTES = 100_000_000
"""As long as a safetensors header may be; names and shapes never fill it."""
LOCAL_HEADER_BYTES = 30


class Stored(NamedTuple):
    """A tensor in a file: safetensors' name of its elements, shape, offset of its first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class _Storage(NamedTuple):
    dtype: str
    key: str
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: Any, first: Any, shape: Any, stride: Any, *of_training: Any) -> _Tensor:
    numbers = (first, *shape, *stride)
    if type(storage) is not _Storage or any(type(n) is not int or n < 0 for n in numbers):
        raise pickle.UnpicklingError("a tensor that is made of no storage, or has no shape")
    return _Tensor(storage, first, tuple(shape), tuple(stride))


def _parameter(data: Any, *of_training: Any) -> Any:
    return data


KNOWN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


class _Unpickler(pickle.Unpickler):
    """Rebuilds dicts of places; anything that would have to be imported is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", str(dtype), str(key), _, int(size)) if dtype in ITEM_BYTES:
                return _Storage(dtype, key, size)
        raise pickle.UnpicklingError("it points to something that is no storage of a known type")


def read_torch_file(path: Path, problems: Problems) -> dict[str, Stored]:
    """The tensors of a file, by name; what is not one, or not all there, becomes a problem."""
    file = path.name
    if not zipfile.is_zipfile(path):
        problems.add(
            f"{file}: not a zip archive: truncated, or of a torch older than 1.6; load it there "
            "and save it again, best as model.safetensors"
        )
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in members or members["data.pkl"].file_size > MAX_PICKLE_BYTES:
                problems.add(f"{file}: a zip archive, and not one of torch.save: no data.pkl")
                return {}
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
            if order != b"little":
                problems.add(f"{file}: byte order {order!r}; supported: little")
                return {}
            content = _Unpickler(io.BytesIO(archive.read(members["data.pkl"]))).load()
    except Exception as error:  # a pickle that is damaged may raise any
        problems.add(f"{file}: only tensors are read from a pickle, and nothing is run: {error}")
        return {}
    if not isinstance(content, dict):
        problems.add(f"{file}: holds a {type(content).__name__}; expected tensors by name")
        return {}
    found = {}
    for name, tensor in _flat(content):
        problem = _why_not(name, tensor, members)
        if problem is not None:
            problems.add(f"{file}: {name!r} {problem}")
            continue
        member = members[f"data/{tensor.storage.key}"]
        start = _start_of(path, member) + tensor.first * ITEM_BYTES[tensor.storage.dtype]
        found[name] = Stored(tensor.storage.dtype, tensor.shape, start)
    return found


def _flat(content: dict) -> Iterator[tuple[Any, Any]]:
    """The entries of a dict, and those of the lists in it, by name and place: `states.0`."""
    for name, value in dict.items(content):  # a pickle may set attributes, as of this name
        if type(value) is list:
            yield from ((f"{name}.{index}", one) for index, one in enumerate(value))
        else:
            yield name, value


def _why_not(name: Any, tensor: Any, members: dict[str, zipfile.ZipInfo]) -> str | None:
    """Why an entry cannot be read; None if it can."""
    if type(name) is not str or type(tensor) is not _Tensor:
        return f"is a {type(tensor).__name__}; expected a tensor"
    storage = tensor.storage
    member = members.get(f"data/{storage.key}")
    if member is None or member.file_size != storage.size * ITEM_BYTES[storage.dtype]:
        return f"lies in data/{storage.key}, which is missing or of another size"
    if member.compress_type != zipfile.ZIP_STORED:
        return f"lies in data/{storage.key}, which is compressed; torch.save compresses nothing"
    if tensor.first + math.prod(tensor.shape) > storage.size:
        return f"reaches past the end of data/{storage.key}"
    step, is_contiguous = 1, len(tensor.stride) == len(tensor.shape)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=False):
        is_contiguous &= stride == step or size <= 1
        step *= size
    if not is_contiguous:
        return f"has strides {tensor.stride} for shape {list(tensor.shape)}; save it contiguous"
    return None


def _start_of(path: Path, member: zipfile.ZipInfo) -> int:
    """Where the bytes of a stored member begin: past its own header, which repeats its name."""
    with path.open("rb") as stream:
        stream.seek(member.header_offset)
        header = stream.read(LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return member.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
