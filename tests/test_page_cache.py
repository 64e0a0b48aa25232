"""A conversion gives back the memory of what it has read and written, and uses its own again."""

import os
import shutil
import weakref
from itertools import pairwise
from typing import cast

import numpy as np

from jaxspec.convert import plan
from jaxspec.convert.plan import ALIGNMENT, Piece, Reader
from jaxspec.convert.problems import Problems
from jaxspec.convert.source import Source
from jaxspec.convert.write import convert
from tests import make_checkpoint


def test_all_that_was_read_and_written_is_given_back(tmp_path, monkeypatch):
    """Each byte of the source once, after the last piece that needs it; each file of the store."""
    config = make_checkpoint.target_config()
    tensors = make_checkpoint.target_tensors(config, "language_model.model.")
    directory = make_checkpoint.write(tmp_path / "source", config, tensors, 2)
    given: dict[int, list[tuple[int, int]]] = {}
    monkeypatch.setattr(plan, "PIECE_BYTES", 1024)
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda file, start, length, _: given.setdefault(os.fstat(file).st_ino, []).append(
            (start, start + length)
        ),
        raising=False,
    )
    manifest = convert(directory, tmp_path / "out").manifest
    assert sum(piece["name"].startswith("embed") for piece in manifest.pieces) > 1
    source = Source(directory)
    for file in source.files:
        runs = sorted(given.pop((directory / file).stat().st_ino))
        assert all(end <= start for (_, end), (start, _) in pairwise(runs))
        held = [one.num_bytes for one in source.tensors.values() if one.file == file]
        assert sum(end - start for start, end in runs) == sum(held)
        assert len(runs) < len(held), "what lies side by side goes at once"
    stored = [path for path in (tmp_path / "out" / "params").rglob("*") if path.is_file()]
    assert given == {p.stat().st_ino: [(0, 0)] for p in stored if p.name != "files.json"}
    # The same place again: the store knows nothing any more of what lay there.
    shutil.rmtree(tmp_path / "out")
    assert convert(directory, tmp_path / "out").manifest == manifest


def test_arrays_are_lent_again_and_not_kept():
    reader = Reader(cast(Source, None), Problems("nowhere"), (1, 1))  # nothing is read
    shape, dtype = (3, 5), np.dtype(np.int32)
    first, second = reader.empty(shape, dtype), reader.empty(shape, dtype)
    assert not np.shares_memory(first, second)
    assert first.ctypes.data % ALIGNMENT == second.ctypes.data % ALIGNMENT == 0
    own = np.zeros(shape, dtype)
    reader.give_back(Piece("a piece", None, None, {"lent": first, "its own": own}))
    assert reader.empty(shape, np.dtype(np.float32)) is not first
    assert reader.empty(shape, dtype) is first
    assert reader.empty(shape, dtype) is not own
    held = weakref.ref(second)
    del second
    assert held() is None, "of what is never given back, as in loading, nothing stays"
