"""The Mosaic kernels of `expert_matmul`, compiled for an H200 that is not there; ptxas is read."""

import re

import pytest

from jaxspec.kernels.expert_matmul.cases import CASES, shapes
from jaxspec.kernels.expert_matmul.mosaic import expert_matmul_mosaic, tuning_for
from jaxspec.ptxas import IS_INSTALLED, SHARED_BYTES, kernels

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(not IS_INSTALLED, reason="compiling for an H200 needs the `cuda` extra"),
]

REGISTERS = 65536
"""Of a multiprocessor; a program's 128 threads take theirs in units of eight."""
MULTIPROCESSORS = 132

# One of each tuning in use.
FEW = ["eighth-1t", "eighth-8t", "eighth-17t", "eighth-256t", "eighth-512t"]


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_compiles_without_spills(name):
    case = CASES[name]
    tuning = tuning_for(case.tokens, case.experts)
    resident = -(-tuning.programs // MULTIPROCESSORS)
    compiled = kernels(expert_matmul_mosaic, **shapes(case))
    assert len(compiled) == 2
    for kernel in compiled:
        assert kernel.local_bytes == 0
        assert not kernel.remarks
        assert resident * 128 * (-(-kernel.registers // 8) * 8) <= REGISTERS
        # The driver keeps a KB of each program's; one program may have all but that of 228 KB.
        assert resident * (kernel.shared_bytes + 1024) <= SHARED_BYTES + 1024
        assert kernel.shared_bytes <= tuning.smem_bytes
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in kernel.ptx
        assert "cp.async.bulk.tensor" in kernel.ptx
        assert not re.search(r"cvt\.rn\.(f32|bf16)\.[su]\d", kernel.ptx), "a weight is converted"
