"""Files of `torch.save`, read without torch: a real one, real drafts, and ones that do harm.

The golden file was written by torch, from `ARRAYS`, with `benchmarks/reference_env/save_torch.py`.
"""

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoint import load_draft
from jaxspec.convert.drafts import is_draft
from jaxspec.convert.problems import CheckpointError
from jaxspec.convert.source import Source
from jaxspec.convert.write import convert
from tests import draft_kinds, make_checkpoint, tiny, torch_reference
from tests.test_checkpoint import assert_same

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.weight": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "c.rows": np.arange(20, dtype=np.float32).reshape(4, 5),
    "d2t": np.arange(5, dtype=np.int64) * 3,
    "t2d": np.arange(7) % 3 == 0,
    "e": np.arange(4, dtype=np.int32),
    "f": np.linspace(0, 1, 3, dtype=np.float16),
}
GOLDEN = torch_reference.GOLDEN / "torch-file.bin"


def directory_of(path: Path, folder: Path) -> Path:
    """A checkpoint directory with that file."""
    (folder / "config.json").write_text("{}")
    shutil.copyfile(path, folder / "pytorch_model.bin")
    return folder


def test_file_of_torch(tmp_path):
    source = Source(directory_of(GOLDEN, tmp_path))
    assert source.tensors.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        array = array[1:3] if name.endswith(".rows") else array
        found = source.read(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(source.read("a.weight", range(1, 3)), ARRAYS["a.weight"][1:3])


@pytest.mark.torch_reference
def test_drafts_saved_by_torch(tmp_path, target):
    """The same draft as from safetensors."""
    config, tensors = draft_kinds.safeailab()
    plain = make_checkpoint.write(tmp_path / "plain", config, tensors)
    saved = make_checkpoint.write(tmp_path / "bin", config, {})
    (saved / "model.safetensors").unlink()
    weights = plain / "model.safetensors"
    torch_reference.save_torch(weights, saved / "pytorch_model.bin")
    wanted = load_draft(plain, tiny.NUMERICS, target=target)
    convert(saved, tmp_path / "converted")
    for directory in (saved, tmp_path / "converted"):
        found = load_draft(directory, tiny.NUMERICS, target=target)
        assert_same(found, wanted)
        assert (found.config, found.identity) == (wanted.config, wanted.identity)


class Evil:
    """Pickles as a call of `os.system`."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def archive(folder: Path, content: bytes, name: str = "data.pkl", **members: bytes) -> Path:
    """A checkpoint directory whose file is a zip archive of this pickle."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
        file.writestr(f"x/{name}", content)
        for member, data in members.items():
            file.writestr(f"x/{member}", data)
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"w": Evil()}), r"nothing is run: it names posix\.system"),
        (pickle.dumps({"w": eval}), r"it names builtins\.eval"),
        (pickle.dumps({"w": np.ones(2)}), r"it names numpy.*, which is no tensor"),
        (pickle.dumps({"w": 1.0}), r"'w' is a float; expected a tensor"),
        (pickle.dumps([1]), "holds a list; expected tensors by name"),
        (pickle.dumps({"w": 1})[:-3], "only tensors are read"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(S'x'\nI0\n(t(tNN\x85R.", "only tensors are read"),
    ],
)
def test_pickles_that_are_no_tensors(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Source(archive(tmp_path / "bad", content))
    assert not (tmp_path / "ran").exists(), "nothing was run"


def edited(folder: Path, edit) -> Path:
    """The golden file with its archive's members changed, as a directory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    with (
        zipfile.ZipFile(GOLDEN) as old,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new,
    ):
        members = {info.filename.partition("/")[2]: old.read(info) for info in old.infolist()}
        compression = edit(members) or zipfile.ZIP_STORED
        for name, data in members.items():
            new.writestr(f"x/{name}", data, compression)
    return folder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("data.pkl") and None, "not one of torch.save: no data.pkl"),
        (lambda m: m.pop("data/0") and None, "lies in data/0, which is missing"),
        (lambda m: m.update({"data/0": m["data/0"][:-4]}), "data/0, which is missing or of anoth"),
        (lambda m: m.update({"byteorder": b"big"}), "byte order b'big'; supported: little"),
        (lambda m: zipfile.ZIP_DEFLATED, "which is compressed"),
    ],
)
def test_archives_that_are_damaged(tmp_path, edit, message):
    with pytest.raises(CheckpointError, match=message):
        Source(edited(tmp_path / "bad", edit))


def test_file_of_an_older_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    stream = io.BytesIO()
    pickle.dump(0x1950A86A20F9469CFC6C, stream, protocol=2)
    (tmp_path / "pytorch_model.bin").write_bytes(stream.getvalue())
    with pytest.raises(CheckpointError, match=r"of a torch older than 1\.6"):
        Source(tmp_path)


def test_safetensors_come_first(tmp_path):
    """A directory with both: what torch wrote is not looked at."""
    directory = make_checkpoint.write(tmp_path, *draft_kinds.safeailab())
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert is_draft(Source(directory))


def test_half_precision(tmp_path, target):
    """What SafeAILab's drafts are stored in: every value is kept, in f32."""
    config, tensors = draft_kinds.safeailab()
    halved = {
        name: tensor.astype(np.float16) if tensor.dtype == np.float32 else tensor
        for name, tensor in tensors.items()
    }
    widened = {
        name: tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor
        for name, tensor in halved.items()
    }
    found, wanted = (
        load_draft(
            make_checkpoint.write(tmp_path / name, config, some), tiny.NUMERICS, target=target
        )
        for name, some in (("half", halved), ("wide", widened))
    )
    assert_same(found, wanted)
    assert found.identity == wanted.identity
    convert(tmp_path / "half", tmp_path / "converted")
    assert_same(load_draft(tmp_path / "converted", tiny.NUMERICS, target=target), wanted)
