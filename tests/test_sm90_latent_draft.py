"""The tree of a full-size draft with latent attention, compiled for an H200 that is not there."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxspec.aot import h200s
from jaxspec.config import Numerics, TreeConfig
from jaxspec.draft import Borrowed
from jaxspec.propose import DraftSeed, propose
from jaxspec.step import compiler_options
from tests.full_size import abstract_latent_draft

pytestmark = [
    pytest.mark.sm90,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="compiling for an H200 needs the `cuda` extra",
    ),
]

BATCH, SLOTS, TREE = 4, 128 * 256, TreeConfig(3, 4, 16)


def test_levels_read_the_cache_where_it_lies():
    """By the target's own kernel; rows of the levels above are a part that is merged."""
    draft = abstract_latent_draft(Numerics(implementation="mosaic"))
    graph, params = nnx.split(draft)
    cache = jax.eval_shape(lambda: draft.empty_cache(BATCH, SLOTS))
    width, vocab = draft.config.hidden_size, draft.config.vocab_size

    def program(params, recurrent, log_probs, tokens, root, length, cache, embed, head):
        seed = DraftSeed(recurrent, log_probs, tokens)
        draft, borrowed = nnx.merge(graph, params), Borrowed(embed, head)
        tree = propose(draft, seed, root, length, cache, borrowed, TREE)
        return tree.tokens, tree.parent

    kept = draft.config.num_kept_candidates
    shapes = (
        params,
        *(
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (
                ((BATCH, width), jnp.bfloat16),
                ((BATCH, kept), jnp.float32),
                ((BATCH, kept), jnp.int32),
                ((BATCH,), jnp.int32),
                ((BATCH,), jnp.int32),
            )
        ),
    )
    shapes = (*shapes, cache, *(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((vocab, width), (width, vocab))
    ))  # fmt: skip
    where = jax.sharding.NamedSharding(h200s(), jax.sharding.PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes
    )
    options = {"xla_gpu_autotune_level": 0} | compiler_options("gpu")
    compiled = jax.jit(program).lower(*shapes).compile(options)
    assert "mla_attention" in compiled.as_text()
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert cache_bytes > 100 * 2**20
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 2
