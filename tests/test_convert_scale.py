"""Conversion at Kimi's real sizes: complete indices from headers alone, and memory that is bounded."""

import json
import os
import subprocess
import sys
import time

import pytest

from jaxspec.convert.write import convert
from tests import real_layouts

GIB = 1024**3


@pytest.fixture
def directory(tmp_path):
    """A place whose files are removed at once: pytest keeps those of its last runs."""
    import shutil

    yield tmp_path / "source"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_tensors", "num_files", "gib"),
    [("kimi_k25", 208_550, 64, 554.3), ("kimi_k2_instruct", 139_644, 61, 958.5)],
)
def test_dry_run_of_a_complete_index(directory, model, num_tensors, num_files, gib):
    """Names, shapes, dtypes and sizes of every tensor are checked, in two minutes at most."""
    config = getattr(real_layouts, f"{model}_config")()
    files = getattr(real_layouts, f"{model}_files")(config)
    real_layouts.write(directory, config, files)
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert sum(map(len, files.values())) == num_tensors
    assert (len(files), round(size / GIB, 1)) == (num_files, gib)
    used = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    assert used < 0.2 * GIB, "holes cost nothing"
    started = time.perf_counter()
    report = convert(directory, directory.parent / "out", is_dry_run=True)
    seconds = time.perf_counter() - started
    print(f"{model}: dry run in {seconds:.1f} s")
    assert seconds < 120
    assert list(directory.parent.iterdir()) == [directory]
    shapes = {leaf["path"]: leaf["shape"] for leaf in report.manifest.leaves}
    assert shapes["sparse.attention.out"] == [60, 64, 128, 7168]
    if model == "kimi_k25":
        assert shapes["experts.gate_up_words"] == [60, 384, 2, 2048, 896]
        num_vision = 6 + 3 + 27 * 12 + 2
        assert len(report.manifest.unused) == num_vision
    else:
        assert shapes["experts.gate_up"] == [60, 384, 2, 2048, 7168]
        assert len(report.manifest.unused) == 61
