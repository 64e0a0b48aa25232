"""`hlo` sees a copy in a loop, lets an update in place pass, and counts what is started."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxspec.hlo import collectives, loop_writes, module_name, operations, runs


def compiled_text(body, *shapes):
    def program(*state):
        return lax.fori_loop(0, 10, lambda i, state: body(i, *state), state)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(program, donate_argnums=range(len(args))).lower(*args).compile().as_text()


def test_a_copy_is_seen():
    text = compiled_text(lambda i, cache: (cache[::-1] + cache.mean(),), (64, 256))
    assert any(write.shape == (64, 256) for write in loop_writes(text))


def test_an_update_in_place_is_not():
    def body(i, cache):
        row = cache[i % 64] * 2.0 + 1.0
        return (cache.at[(i + 1) % 64].set(row),)

    text = compiled_text(body, (64, 256))
    writes = loop_writes(text)
    assert not any(write.shape == (64, 256) for write in writes), writes


def test_what_is_outside_a_loop_does_not_count():
    args = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    text = jax.jit(lambda x: x[::-1] + x.mean()).lower(args).compile().as_text()
    assert loop_writes(text) == []


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        loop_writes("nothing of the kind")


def test_turns_of_loops_multiply():
    """A scan of 5 with one of 3 inside, as XLA:CPU compiles it: what is in both runs 15 times."""

    def inner(x, _):
        return jnp.tanh(x @ x), None

    def outer(x, _):
        return lax.scan(inner, x, None, length=3)[0], None

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = jax.jit(lambda x: lax.scan(outer, x, None, length=5)[0])
    found = runs(program.lower(shape).compile().as_text(), lambda scope: pytest.fail(scope))
    products = [run for run in found if run.opcode in ("dot", "custom-call")]
    assert [run.times for run in products] == [15], found
    assert products[0].num_bytes == 64 * 64 * 4


GPU_PROGRAM = """HloModule jit_program, is_scheduled=true

%fused_slice (p0: bf16[60,128], p1: s32[]) -> bf16[1,128] {
  %p0 = bf16[60,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = bf16[1,128]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,128}
}

%layer (p: (s32[], bf16[16,128])) -> (s32[], bf16[16,128]) {
  %p = (s32[], bf16[16,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[16,128]{1,0} get-tuple-element(%p), index=1
  %start = ((bf16[60,128]{1,0}, s32[]), bf16[1,128]{1,0}, u32[]) fusion-start(%x, %i), kind=kLoop, calls=%fused_slice, metadata={op_name="jit(program)/while/body/verify/while/body/slice"}
  %weight = bf16[1,128]{1,0} fusion-done(%start)
  %sum-start = ((bf16[16,128]{1,0}), bf16[16,128]{1,0}) all-reduce-start(%x), to_apply=%add, metadata={op_name="jit(program)/while/body/verify/while/body/psum"}
  %sum = bf16[16,128]{1,0} all-reduce-done(%sum-start)
  ROOT %out = (s32[], bf16[16,128]{1,0}) tuple(%i, %sum)
}

%layer_condition (p: (s32[], bf16[16,128])) -> pred[] {
  %p = (s32[], bf16[16,128]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

%block (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %y = f32[4]{0} get-tuple-element(%p), index=1
  %attend = f32[4]{0} custom-call(%y), custom_call_target="mosaic_gpu_v2"
  ROOT %out = (s32[], f32[4]{0}) tuple(%p, %attend)
}

%block_condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

%greedy (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %negated = f32[4]{0} negate(%p)
}

%sampled (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} negate(%p)
  ROOT %b = f32[4]{0} exponential(%a)
}

ENTRY %main (a: bf16[16,128], b: f32[4]) -> f32[4] {
  %a = bf16[16,128]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %t = (s32[], bf16[16,128]{1,0}) tuple(%a, %a)
  %layers = (s32[], bf16[16,128]{1,0}) while(%t), condition=%layer_condition, body=%layer, metadata={op_name="jit(program)/while/body/verify/while"}, backend_config={"known_trip_count":{"n":"60"},"dynamic_variables":[]}
  %blocks = (s32[], f32[4]{0}) while(%t), condition=%block_condition, body=%block, metadata={op_name="jit(program)/while/body/extend/while"}
  %c = f32[4]{0} get-tuple-element(%blocks), index=1
  ROOT %chosen = f32[4]{0} conditional(%b, %c, %c), branch_computations={%sampled, %greedy}, metadata={op_name="jit(program)/while/body/accept/cond"}
}
"""  # noqa: E501
"""What matters of a GPU's: asynchronous starts, a counted loop and one that is not, branches."""


def test_what_a_gpu_is_started_with():
    asked = []

    def turns_of(scope):
        asked.append(scope)
        return 7

    found = runs(GPU_PROGRAM, turns_of)
    assert asked == ["jit(program)/while/body/extend/while"]
    assert [(run.opcode, run.times, run.num_bytes) for run in found] == [
        ("dynamic-slice", 60, 128 * 2),  # a fusion's is its root's; -done starts nothing
        ("all-reduce", 60, 16 * 128 * 2),
        ("while", 8, 0),  # the host looks once more than the loop turns
        ("compare", 8, 1),
        ("custom-call", 7, 16),
        ("negate", 1, 16),  # the branch that starts less
    ]
    assert [run.is_collective for run in found] == [False, True, False, False, False, False]
    assert found[1].scopes[0] == "jit(program)/while/body/verify/while"
    assert found[4].scopes[0] == "jit(program)/while/body/extend/while"


def test_collectives_of_the_same_program():
    (exchange,) = collectives(GPU_PROGRAM)["layer"]
    assert (exchange.opcode, exchange.num_bytes) == ("all-reduce", 16 * 128 * 2)


def test_its_operations_by_name():
    found = operations(GPU_PROGRAM)
    assert module_name(GPU_PROGRAM) == "jit_program"
    assert found["sum-start"].is_collective and found["sum-start"].num_bytes == 16 * 128 * 2
    assert found["sum"].opcode == "all-reduce"  # its end is of it, too
    assert found["layers"].runs_others and found["chosen"].runs_others
    assert not found["attend"].runs_others and "slice.1" not in found  # it is inside a fusion
    assert found["attend"].scopes == {("jit(program)/while/body/extend/while", "")}
    assert {"negated", "b"} <= set(found)  # either branch may run
    with pytest.raises(ValueError, match="not the text"):
        module_name("ENTRY %main")


def test_a_small_loop_on_a_cpu_is_one_operation():
    # jax 0.11.2 and 0.12.0.1 both compile it so, in a call that is a kernel: nothing runs in it.
    def program(x):
        return lax.fori_loop(0, 10, lambda i, x: x * 0.5 + i, x)

    found = operations(jax.jit(program).lower(jnp.zeros(4)).compile().as_text())
    assert "fusion" in {one.opcode for one in found.values()}
    assert not any(one.runs_others for one in found.values()), found
