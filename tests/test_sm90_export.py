"""Programs with Mosaic kernels exported, written, read and compiled: the kernels stay the same."""

import functools

import jax
import pytest
from jax import export

from jaxspec import ptxas
from jaxspec.aot import h200s
from jaxspec.kernels.expert_matmul import cases as expert_cases
from jaxspec.kernels.expert_matmul import expert_matmul
from jaxspec.kernels.mla_attention import cases as mla_cases
from jaxspec.kernels.mla_attention import mla_attention

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        not ptxas.IS_INSTALLED, reason="compiling for an H200 needs the `cuda` extra"
    ),
]

ATTEND = functools.partial(mla_attention, scale=0.1, implementation="mosaic")
MULTIPLY = functools.partial(expert_matmul, implementation="mosaic")
PROGRAMS = {
    "mla_attention": (ATTEND, mla_cases.shapes(mla_cases.CASES["8h-4t-32k"])),
    "expert_matmul": (MULTIPLY, expert_cases.shapes(expert_cases.CASES["eighth-512t"])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_round_trip(name):
    function, shapes = PROGRAMS[name]
    # Arrays side by side: jax does not know how to write a PackedInt4 down.
    leaves, tree = jax.tree.flatten(shapes)
    # Of custom calls jax promises nothing for the future; within a version they must come back.
    checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    program = jax.jit(lambda *leaves: function(**jax.tree.unflatten(tree, leaves)))
    exported = export.export(program, platforms=["cuda"], disabled_checks=checks)(*leaves)
    read = export.deserialize(exported.serialize())
    assert read.mlir_module() == exported.mlir_module()
    assert (read.in_avals, read.out_avals) == (exported.in_avals, exported.out_avals)
    assert read.in_tree == exported.in_tree
    kernels = ptxas.kernel_hashes(exported.mlir_module())
    assert len(kernels) == 2

    on_gpu = jax.sharding.NamedSharding(h200s(1), jax.sharding.PartitionSpec())
    there = [leaf.update(sharding=on_gpu) for leaf in leaves]
    lowered = jax.jit(read.call).lower(*there)
    assert ptxas.kernel_hashes(lowered.as_text()) == kernels
    compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 2
