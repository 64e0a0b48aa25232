"""The Mosaic kernel of `mla_attention`, compiled for an H200 that is not there; ptxas is read."""

import pytest

from jaxspec import ptxas
from jaxspec.kernels.mla_attention import mla_attention
from jaxspec.kernels.mla_attention.cases import CASES, shapes

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        not ptxas.IS_INSTALLED, reason="compiling for an H200 needs the `cuda` extra"
    ),
]

HARMLESS = {"C7519"}
"""A `warpgroup.arrive` is put before the `wgmma` of a rolled loop, which orders its registers and
costs one instruction. Others (C7504, C7508, C7510, C7512) say that a register budget was ignored
or that one `wgmma` waits for another."""
REGISTERS = 168
"""Of a thread, where three warpgroups share the 64k of an SM."""

FEW = {
    "8h-1t-32k",
    "8h-4t-32k",
    "8h-16t-32k",
    "64h-64t-128k",
    "ragged-8",
    "tree-23",
    "tree-128",
    "chunk-64h",
}


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_compiles_without_spills(name):
    def program(args):
        return mla_attention(**args, scale=0.1, implementation="mosaic")

    kernels = ptxas.kernels(program, shapes(CASES[name]))
    assert [k for k in kernels if k.name.startswith("mla_attention")]
    for kernel in kernels:
        assert kernel.local_bytes == 0, kernel.name
        assert kernel.remarks <= HARMLESS, kernel.name
        assert kernel.registers <= REGISTERS, kernel.name
        assert kernel.shared_bytes <= ptxas.SHARED_BYTES, kernel.name
        assert "cp.async.bulk.tensor" in kernel.ptx
        assert ("wgmma.mma_async" in kernel.ptx) == kernel.name.startswith("mla_attention")
