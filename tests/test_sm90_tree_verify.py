"""The Mosaic kernels of `tree_verify`, compiled for an H200 that is not there; ptxas is read."""

import pytest

from jaxspec import ptxas
from jaxspec.kernels.tree_verify import tree_verify
from jaxspec.kernels.tree_verify.cases import CASES, shapes

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        not ptxas.IS_INSTALLED, reason="compiling for an H200 needs the `cuda` extra"
    ),
]

PROGRAMS = 5
"""That a multiprocessor is to hold at once, so that one loads while another computes."""
FEW = ["1n-1b-greedy", "16n-1b-cut", "16n-1b-bf16", "128n-8b-sampled"]


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_compiles_without_spills(name):
    case = CASES[name]

    def program(args):
        return tree_verify(**args, levels=case.levels, implementation="mosaic")

    kernels = ptxas.kernels(program, shapes(case))
    assert [kernel.name for kernel in kernels] == ["tree_top", "tree_sample", "tree_walk"]
    for kernel in kernels:
        assert kernel.local_bytes == 0, kernel.name
        assert not kernel.remarks, kernel.name
        assert kernel.ctas_per_sm >= PROGRAMS, kernel.name
    for kernel in kernels[:2]:
        is_wide = "ld.global.v2.b32" in kernel.ptx
        is_wide |= case.dtype == "bfloat16" and "ld.global.b16" not in kernel.ptx
        assert is_wide, f"{kernel.name} loads number by number"
