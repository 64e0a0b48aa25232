"""The step at full Kimi width, compiled for H200s that are not there: what do its loops write?"""

import functools
import importlib.util
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.aot import h200s
from jaxspec.config import MeshConfig, Numerics, TreeConfig
from jaxspec.hlo import Write, collectives, loop_writes
from jaxspec.kernels.expert_matmul.xla import BLOCK
from jaxspec.plan_compile import NO_AUTOTUNING, absent_devices, compile_step
from jaxspec.step import compiler_options
from tests.full_size import abstract_draft, abstract_target

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for an H200 needs the `cuda` extra",
    ),
]

SLOTS = 129 * 256  # 129 divides no other dimension: it gives away what holds a cache's slots


class Case(NamedTuple):
    batch: int
    implementation: Literal["mosaic", "xla"]
    devices: int = 1
    tree: str = "3x4x16"


@functools.cache
def compiled_decode(case: Case):
    """The program, and its arguments as each device holds them."""
    mesh = MeshConfig(1, case.devices)
    numerics = Numerics(implementation=case.implementation, mesh=mesh)
    target, draft = abstract_target(6, numerics), abstract_draft(32000, (1, 3, 5), numerics)
    devices, tree = absent_devices(mesh), TreeConfig.parse(case.tree)
    compiled, state = compile_step(devices, target, draft, tree, case.batch, SLOTS)
    return compiled, devices.shapes((nnx.state((target, draft)), state))


CASES = pytest.mark.parametrize(
    "case",
    [
        Case(1, "mosaic"),
        Case(8, "mosaic"),
        Case(1, "xla"),
        Case(8, "xla"),
        Case(1, "mosaic", devices=8),
        Case(8, "mosaic", devices=8),
        Case(1, "mosaic", tree="3x1x4"),  # one query for each of the draft's heads
    ],
    ids=lambda case: "-".join(map(str, case)),
)


@CASES
def test_no_loop_writes_a_share_of_the_cache_or_of_the_experts(case):
    compiled, _ = compiled_decode(case)
    config = abstract_target(6).config
    cache_layer = case.batch * SLOTS * (config.kv_lora_rank + config.qk_rope_head_dim) * 2
    experts_layer = config.n_routed_experts // case.devices * 3 * 2048 * 7168 // 2
    writes = loop_writes(compiled.as_text())
    of_a_block = BLOCK * 2 * 2048 * 7168 // 8  # sums by 8 weights, of gate and up
    is_seen = any(w.opcode == "add" and math.prod(w.shape) == of_a_block for w in writes)
    assert is_seen or case.implementation == "mosaic", "no expert is read"
    for write in writes:
        holds_slots = any(size % 129 == 0 for size in write.shape)
        assert not (holds_slots and write.num_bytes >= cache_layer / 8), write
        assert write.num_bytes < experts_layer / 8, write


def copies_of_weights(compiled, stacks) -> list[Write]:
    """The loop writes that are as large as one layer's weight, or as two side by side."""
    weights = {
        math.prod(x.sharding.shard_shape(x.shape)[1:])
        for x in jax.tree.leaves(stacks)
        if x.dtype == jnp.bfloat16
    }
    weights = {size for size in weights if size >= 2**19}
    pairs = {a + b for a in weights for b in weights}
    copying = {"async-done", "concatenate", "convert", "copy", "dynamic-slice", "fusion-done"}
    return [
        write
        for write in loop_writes(compiled.as_text())
        if write.opcode in copying and math.prod(write.shape) in weights | pairs
    ]


@CASES
def test_layers_weights_are_read_where_they_lie(case):
    compiled, (params, _) = compiled_decode(case)
    stacks = [x for path, x in jax.tree.leaves_with_path(params) if "'sparse'" in str(path)]
    # Activations begin with these axes: 8 times 16 tokens are as many as a head is wide.
    tokens = (case.batch, TreeConfig.parse(case.tree).nodes)
    copies = [w for w in copies_of_weights(compiled, stacks) if w.shape[:2] != tokens]
    assert stacks and not copies


def test_a_copied_weight_is_seen():
    """As XLA compiles a layer left to itself; if it no longer copies, `compiler_options` can go."""
    there = jax.sharding.NamedSharding(h200s(), jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((16, 7168), jnp.bfloat16, sharding=there)
    stack = jax.ShapeDtypeStruct((6, 7168, 7168), jnp.bfloat16, sharding=there)

    def layers(x, stack):
        return jax.lax.scan(lambda x, weight: (x @ weight, None), x, stack)[0]

    lowered = jax.jit(layers).lower(x, stack)
    copying, reading = (
        lowered.compile(NO_AUTOTUNING | options) for options in ({}, compiler_options("gpu"))
    )
    assert copies_of_weights(copying, [stack])
    assert not copies_of_weights(reading, [stack])


@CASES
def test_the_state_is_updated_in_place(case):
    compiled, (_, state) = compiled_decode(case)
    memory = compiled.memory_analysis()
    state_bytes = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes < 2**30


@CASES
def test_kernels_are_inside(case):
    """Attention, experts and verification, the three kinds, by Mosaic's calls in the program."""
    text = compiled_decode(case)[0].as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    named = {
        name
        for name in ("mla_attention", "expert_gate_up", "expert_down", "tree_top", "tree_walk")
        if any(f"/{name}/" in line for line in calls)
    }
    assert len(named) == (5 if case.implementation == "mosaic" else 0), len(calls)


@CASES
def test_a_layer_talks_twice(case):
    """Once after attention, once after the experts; a device alone says nothing."""
    found = collectives(compiled_decode(case)[0].as_text()).values()
    fewest = min((len(exchanges) for exchanges in found), default=0)
    assert fewest == (0 if case.devices == 1 else 2), found
