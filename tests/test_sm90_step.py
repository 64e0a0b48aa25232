"""The step at full Kimi width, compiled for an H200 that is not there: what do its loops write?"""

import functools
import importlib.util
import math
from typing import Literal

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.aot import h200s
from jaxspec.config import Numerics, TreeConfig
from jaxspec.hlo import loop_writes
from jaxspec.step import Settings, decode
from tests.full_size import abstract_draft, abstract_inputs, abstract_target

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for an H200 needs the `cuda` extra",
    ),
]

SLOTS = 129 * 256  # 129 divides no other dimension: it gives away what holds a cache's slots
NODES = 16


@functools.cache
def compiled_decode(batch: int, implementation: Literal["mosaic", "xla"]):
    target = abstract_target(6, Numerics(implementation=implementation))
    draft = abstract_draft(32000, (1, 3, 5))
    graph, params, state = abstract_inputs(target, draft, batch, SLOTS)
    capture = target.boundaries((1, 3, 5), "this test")
    settings = Settings(TreeConfig(3, 4, NODES), capture, (163585,), 128)
    on_gpu = jax.sharding.NamedSharding(h200s(1), jax.sharding.PartitionSpec())

    def program(params, state, max_steps):
        return decode(*nnx.merge(graph, params), state, max_steps, settings)

    max_steps = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(program, donate_argnums=1, in_shardings=on_gpu, out_shardings=on_gpu)
    lowered = program.lower(params, state, max_steps)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}), state


CASES = pytest.mark.parametrize(
    ("batch", "implementation"), [(1, "mosaic"), (8, "mosaic"), (1, "xla"), (8, "xla")]
)


@CASES
def test_no_loop_writes_a_share_of_the_cache_or_of_the_experts(batch, implementation):
    compiled, _ = compiled_decode(batch, implementation)
    config = abstract_target(6).config
    cache_layer = batch * SLOTS * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    experts_layer = config.n_routed_experts * 3 * 2048 * 7168 // 2
    writes = loop_writes(compiled.as_text())
    of_one_expert = 2 * 2048 * 7168 // 8  # sums by 8 weights, of gate and up
    is_read_by_xla = any(math.prod(write.shape) == of_one_expert for write in writes)
    assert is_read_by_xla == (implementation == "xla")
    for write in writes:
        holds_slots = any(size % 129 == 0 for size in write.shape)
        assert not (holds_slots and write.num_bytes >= cache_layer / 8), write
        assert write.num_bytes < experts_layer / 8, write


@CASES
def test_the_state_is_updated_in_place(batch, implementation):
    compiled, state = compiled_decode(batch, implementation)
    memory = compiled.memory_analysis()
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes < 2**30


@CASES
def test_kernels_are_inside(batch, implementation):
    """Attention, experts and verification, the three kinds, by Mosaic's calls in the program."""
    text = compiled_decode(batch, implementation)[0].as_text()
    calls = [line for line in text.splitlines() if "mosaic_gpu" in line and "custom-call" in line]
    named = {
        name
        for name in ("mla_attention", "expert_gate_up", "expert_down", "tree_top", "tree_walk")
        if any(name in line for line in calls)
    }
    assert len(named) == (5 if implementation == "mosaic" else 0), calls
