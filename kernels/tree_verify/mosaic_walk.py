"""The walk over a tree as one Mosaic GPU kernel: a program for each sequence.

Plain XLA takes about ten launches for the merge of the shares and the walk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.kernels.tree_verify.sampling import LOWEST
from jaxspec.kernels.tree_verify.xla import Accepted, Verified

__all__ = ["MAX_NODES", "Shares", "greatest_of", "walk"]

MAX_NODES = 128
"""Of a tree, and of a path: they fill one vector."""
NO_ID = 2**31 - 1
NO_NODE = -2
"""The parent of a node that fills up the vector."""


class Shares(NamedTuple):
    """What each share of the vocabulary has to offer after each node.

    Attributes:
      found: [B,J,A,S] int32: the greatest value as `sortable` has it, its lowest id and, among
        logits, whether one is NaN. Slots fill whole vectors.
      count: slots that are shares; the others may hold anything.
    """

    found: jax.Array
    count: int


def walk(
    tokens_BJ: jax.Array,
    parent_BJ: jax.Array,
    logits: Shares,
    scores: Shares,
    is_sampled_B: jax.Array,
    *,
    levels: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Verified:
    """The accepted path; of equal siblings the first one counts.

    Where no child is the token chosen, the walk stays at its node, and so the path repeats it.

    Args:
      logits, scores: what to choose by in greedy and in sampled sequences.
    """
    batch, nodes = tokens_BJ.shape
    # All in one array, because each takes a kernel to fill up.
    columns = tokens_BJ, parent_BJ, jnp.broadcast_to(is_sampled_B[:, None], tokens_BJ.shape)
    tree_B3J = jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)
    missing = [(0, 0), (0, 0), (0, MAX_NODES - nodes)]
    tree_B3J = jnp.pad(tree_B3J, missing, constant_values=NO_NODE)

    def body(tree_g: Any, logits_g: Any, scores_g: Any, walked_g: Any) -> None:
        b = lax.axis_index("batch")
        tokens, parents = tree_g.at[b, 0][...], tree_g.at[b, 1][...]
        is_sampled = tree_g[b, 2, 0] != 0
        place = lax.broadcasted_iota(jnp.int32, (MAX_NODES,), 0)

        def best(found_g: Any, node: jax.Array, count: int) -> jax.Array:
            order, token = (found_g.at[b, node, i][...] for i in range(2))
            slot = lax.broadcasted_iota(jnp.int32, order.shape, 0)
            is_best = jnp.logical_and(slot < count, order == greatest_of(order, count))
            return jnp.min(jnp.where(is_best, token, NO_ID))

        def step(at: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            node, count, is_nan, path, chosen = carry
            token = lax.cond(
                is_sampled,
                lambda: best(scores_g, node, scores.count),
                lambda: best(logits_g, node, logits.count),
            )
            is_nan = jnp.maximum(is_nan, greatest_of(logits_g.at[b, node, 2][...], logits.count))
            path = jnp.where(place == at, node, path)
            chosen = jnp.where(place == at, token, chosen)
            is_next = jnp.logical_and(parents == node, tokens == token)
            child = jnp.min(jnp.where(is_next, place, NO_ID))
            has_child = jnp.logical_and(child != NO_ID, at < levels)
            count = count + jnp.where(has_child, 1, 0)
            return jnp.where(has_child, child, node), count, is_nan, path, chosen

        zero, zeros = jnp.int32(0), jnp.zeros((MAX_NODES,), jnp.int32)
        start = (zero, zero, zero, zeros, zeros)
        _, count, is_nan, path, chosen = lax.fori_loop(0, levels + 1, step, start)
        for i, row in enumerate((path, chosen, jnp.where(place == 0, count, is_nan))):
            walked_g.at[b, i][...] = row

    walked = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, 3, MAX_NODES), jnp.int32),
        grid=(batch,),
        grid_names=("batch",),
        interpret=interpret,
        kernel_name="tree_walk",
    )(tree_B3J, logits.found, scores.found)
    path_BP, chosen_BP = (walked[:, i, : levels + 1] for i in range(2))
    return Verified(Accepted(path_BP, walked[:, 2, 0], chosen_BP), walked[:, 2, 1] > 0)


def greatest_of(values: jax.Array, count: int) -> jax.Array:
    """The greatest of the first `count` values of a vector."""
    slot = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    return jnp.max(jnp.where(slot < count, values, LOWEST))
