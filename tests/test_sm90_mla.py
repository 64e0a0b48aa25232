"""The Mosaic kernel of `mla_attention`, compiled for an H200 that is not there; ptxas is read."""

import importlib.util
import re

import jax
import pytest

from jaxspec.aot import h200s
from jaxspec.kernels.mla_attention.cases import CASES, shapes
from jaxspec.kernels.mla_attention.mosaic import Tuning, mla_attention_mosaic

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for an H200 needs the `cuda` extra",
    ),
]

HARMLESS = {"C7519"}
"""C7519: a `warpgroup.arrive` is put before the `wgmma` of a rolled loop, which orders its
registers and costs one instruction. Others (C7504, C7508, C7510, C7512) say that a register budget
was ignored or that one `wgmma` waits for another."""

SCALE = 0.1
SHARED_BYTES = 227 * 1024
"""What a CTA may have on an H200."""

FEW = [
    "8h-1t-32k",
    "8h-4t-32k",
    "8h-16t-32k",
    "64h-8t-4k",
    "64h-64t-128k",
    "ragged-8",
    "tree-128",
    "chunk-64h",
]


def compile_case(name: str, tuning: Tuning, dump) -> tuple[str, str, str]:
    """(PTX, what ptxas said, shared memory and barriers) of a case's kernel."""
    on_gpu = jax.sharding.NamedSharding(h200s(1), jax.sharding.PartitionSpec())
    args = jax.tree.map(lambda x: x.update(sharding=on_gpu), shapes(CASES[name]))
    program = jax.jit(lambda args: mla_attention_mosaic(**args, scale=SCALE, tuning=tuning))
    program.lower(args).compile(compiler_options={"xla_gpu_autotune_level": 0})
    (ptx,), (report,), (resources,) = map(dump.glob, ("*.ptx", "*.ptxas", "*.resources.txt"))
    return ptx.read_text(), report.read_text(), resources.read_text()


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
@pytest.mark.parametrize("tuning", [Tuning()], ids=["default"])
def test_compiles_without_spills(name, tuning, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    ptx, report, resources = compile_case(name, tuning, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert set(re.findall(r"C\d{4}", report)) <= HARMLESS, report
    (registers,) = map(int, re.findall(r"Used (\d+) registers", report))
    # Three warpgroups share 64k registers; the budget of each is the kernel's.
    assert registers <= 168
    (shared,) = map(int, re.findall(r"smem_scratch_bytes=(\d+)", resources))
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    assert shared + 8 * sum(int(n) * int(count) for n, count in barriers) <= SHARED_BYTES
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
