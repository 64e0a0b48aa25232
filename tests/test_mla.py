"""Absorbed attention against attention whose keys and values are materialised, head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.cache import commit
from jaxspec.layers import rotary_angles
from jaxspec.mla import Pass
from tests import tiny, trees
from tests.reference import formulas

LAYER = 0
TOKENS = 6


@pytest.fixture(scope="module")
def attend(target):
    """One layer's attention, jitted: (x, pos, kv_len, cache, sees) -> output, latent, rotary."""
    graph, params = nnx.split(target.dense)
    first = jax.tree.map(lambda stack: stack[LAYER], params)

    @jax.jit
    def run(x_BTD, pos_BT, kv_len_B, cache, sees_BTT):
        layer = nnx.merge(graph, first)
        angles = rotary_angles(target.config.rotary, pos_BT)
        at = Pass(pos_BT, kv_len_B, sees_BTT)
        return layer.attention(x_BTD, at, angles, cache, jnp.int32(LAYER))

    return run


def states(batch: int, tokens: int) -> np.ndarray:
    shape = (batch, tokens, tiny.TARGET_CONFIG["hidden_size"])
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def assert_close(got, want) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "parents", [trees.chain(TOKENS), trees.star(TOKENS), trees.random_tree(TOKENS, 3)], ids=str
)
def test_absorbed_is_unabsorbed(target, reference_target, attend, parents):
    x, pos, sees = states(2, TOKENS), trees.depths(parents), trees.ancestors(parents)
    got, _ = attend(
        x,
        jnp.broadcast_to(pos, (2, TOKENS)),
        jnp.zeros(2, jnp.int32),
        target.empty_cache(2, 16),
        jnp.broadcast_to(sees, (2, TOKENS, TOKENS)),
    )
    weights = reference_target.layers[LAYER]
    for b in range(2):
        assert_close(got[b], reference_target.attention(weights, x[b].astype(float), pos, sees))


def test_rows_of_an_earlier_call_serve_a_later_one(target, reference_target, attend):
    """A prefix of two lengths from the cache, then more tokens: the same as all of them at once."""
    x, prefix = states(2, 2 * TOKENS), np.array([3, 6])
    causal = jnp.broadcast_to(formulas.causal(TOKENS), (2, TOKENS, TOKENS))
    empty = jax.tree.map(lambda slots: jnp.full_like(slots, jnp.nan), target.empty_cache(2, 16))
    pos = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS))
    _, new = attend(x[:, :TOKENS], pos, jnp.zeros(2, jnp.int32), empty, causal)
    rows = jax.tree.map(
        lambda slots, row: jnp.broadcast_to(row, (len(slots), *row.shape)),
        empty,
        new,
    )
    cache = commit(empty, rows, pos, jnp.zeros(2, jnp.int32), jnp.asarray(prefix))
    later = np.stack([x[b, prefix[b] : prefix[b] + TOKENS] for b in range(2)])
    got, _ = attend(later, pos + prefix[:, None], jnp.asarray(prefix), cache, causal)
    weights = reference_target.layers[LAYER]
    for b in range(2):
        end = prefix[b] + TOKENS
        whole = reference_target.attention(
            weights, x[b, :end].astype(float), np.arange(end), formulas.causal(end)
        )
        assert_close(got[b], whole[prefix[b] :])
