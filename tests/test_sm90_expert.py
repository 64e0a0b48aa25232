"""The Mosaic kernels of `expert_matmul`, compiled for an H200 that is not there; ptxas is read."""

import importlib.util
import re

import jax
import pytest

from jaxspec.aot import h200s
from jaxspec.kernels.expert_matmul.cases import CASES, shapes
from jaxspec.kernels.expert_matmul.mosaic import SMEM_BYTES, expert_matmul_mosaic, tuning_for

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for an H200 needs the `cuda` extra",
    ),
]

REGISTERS = 65536
"""Of a multiprocessor; a program's 128 threads take theirs in units of eight."""
MULTIPROCESSORS = 132

# One of each tuning in use.
FEW = ["eighth-8t", "eighth-256t", "eighth-512t"]


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_compiles_without_spills(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    on_gpu = jax.sharding.NamedSharding(h200s(1), jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda x: x.update(sharding=on_gpu), shapes(CASES[name]))
    program = jax.jit(lambda args: expert_matmul_mosaic(**args))
    compiled = program.lower(args).compile(compiler_options={"xla_gpu_autotune_level": 0})

    resident = -(-tuning_for(CASES[name].tokens).programs // MULTIPROCESSORS)
    reports = sorted(tmp_path.glob("*.ptxas"))
    assert len(reports) == 2
    for report in reports:
        said, ptx = report.read_text(), report.with_suffix(".ptx").read_text()
        resources = report.with_suffix(".resources.txt").read_text()
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        assert not re.findall(r"C\d{4}", said), said
        (registers,) = map(int, re.findall(r"Used (\d+) registers", said))
        assert resident * 128 * (-(-registers // 8) * 8) <= REGISTERS
        (shared,) = map(int, re.findall(r"smem_scratch_bytes=(\d+)", resources))
        # The driver keeps 1 KB of each program's, and barriers are less than another.
        assert resident * (shared + 2048) <= SMEM_BYTES + 1024
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
        assert "cp.async.bulk.tensor" in ptx
        assert not re.search(r"cvt\.rn\.(f32|bf16)\.[su](8|16|32)", ptx), "a weight is converted"

    # The stacks go in as they lie: a copy or a gather of an expert would be a temporary.
    expert_bytes = 3 * 7168 * 2048 // 2
    assert not re.search(r"s32\[\d+(,\d+)*,896\]\S* (copy|fusion|gather)\(", compiled.as_text())
    rows = compiled.memory_analysis().temp_size_in_bytes
    assert rows < expert_bytes or CASES[name].tokens > 8
