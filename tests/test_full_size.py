"""Everything at Kimi-K2.5's real sizes, as shapes: 61 layers, 7168 wide, 384 experts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.config import TreeConfig
from jaxspec.draft import Draft
from jaxspec.sampling import Sampling
from jaxspec.step import NUM_STOP_IDS, Admission, Settings, decode, prefill
from tests.full_size import abstract_draft, abstract_inputs, abstract_target

BATCH, SLOTS, WIDTH, VOCAB = 4, 32768, 7168, 163840


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(tree)))


def test_target_is_as_large_as_published():
    """594.2 GB of text tensors, and the routers, which are kept in f32."""
    target = abstract_target()
    routers = 60 * 384 * WIDTH * 2
    assert abs(num_bytes(target) - routers - 594.2e9) < 0.05e9
    assert target.experts.gate_up_words.shape == (60, 384, 2, 2048, WIDTH // 8)
    assert target.experts.down_words.shape == (60, 384, WIDTH, 2048 // 8)
    assert target.experts.gate_up_words.dtype == jnp.int32


def test_cache_is_576_wide_and_per_head_nothing():
    cache = jax.eval_shape(lambda: abstract_target().empty_cache(1, 1000))
    per_token = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) / 1000
    assert per_token == 61 * (512 + 64) * 2


def test_draft_is_as_large_as_published():
    """3.178e9 parameters: lightseekorg/kimi-k2.5-eagle3, with embedding and head of its own."""
    base = abstract_draft(VOCAB)
    config = dataclasses.replace(
        base.config, intermediate_size=12288, has_embedding=True, has_head=True
    )
    draft = nnx.eval_shape(lambda: Draft(config, base.numerics, nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(draft, nnx.Param)))
    assert abs(count - 3.178e9) < 0.001e9
    assert draft.fc.shape == (21504, WIDTH)


@pytest.mark.parametrize("draft_vocab_size", [32000, VOCAB])
def test_prefill_and_decode_trace(draft_vocab_size):
    target, draft = abstract_target(), abstract_draft(draft_vocab_size)
    graph, params, state = abstract_inputs(target, draft, BATCH, SLOTS)
    capture = target.boundaries((2, 30, 58), "this test")
    settings = Settings(TreeConfig(5, 8, 32), capture, 128)
    ints = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    new = Admission(
        jax.ShapeDtypeStruct((BATCH,), jnp.bool_),
        jax.ShapeDtypeStruct((BATCH, SLOTS), jnp.int32),
        ints,
        ints,
        jax.ShapeDtypeStruct((BATCH, NUM_STOP_IDS), jnp.int32),
        jax.eval_shape(lambda: Sampling.of(BATCH)),
    )

    def admit(params, state, new):
        return prefill(*nnx.merge(graph, params), state, new, settings)

    def run(params, state, max_steps):
        return decode(*nnx.merge(graph, params), state, max_steps, settings)

    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    after_prompt = jax.eval_shape(admit, params, state, new)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after_prompt) == shapes
    after_steps = jax.eval_shape(run, params, state, jax.ShapeDtypeStruct((), jnp.int32))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after_steps) == shapes


@pytest.mark.parametrize("tree", ["1x1x2", "3x4x16", "8x10x60"])
def test_the_state_fits_every_tree(tree):
    """The state that a compiled step takes says nothing of the tree."""
    shape = TreeConfig.parse(tree)
    target, draft = abstract_target(3), abstract_draft(32000, (0, 1, 2))
    graph, params, state = abstract_inputs(target, draft, 1, 256)
    settings = Settings(shape, target.boundaries((0, 1, 2), "this test"), 128)

    def run(params, state, max_steps):
        return decode(*nnx.merge(graph, params), state, max_steps, settings)

    after = jax.eval_shape(run, params, state, jax.ShapeDtypeStruct((), jnp.int32))
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
