"""The walk over a tree as one Mosaic GPU kernel: a program for each sequence.

Shares are merged for the nodes on the path alone, when the walk gets there.
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

    def body(tree_g: Any, logits_g: Any, scores_g: Any, *walked_g: Any) -> None:
        path_g, chosen_g, count_g, is_nan_g = walked_g
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
            node, count, is_nan = carry
            token = lax.cond(
                is_sampled,
                lambda: best(scores_g, node, scores.count),
                lambda: best(logits_g, node, logits.count),
            )
            is_nan = jnp.maximum(is_nan, greatest_of(logits_g.at[b, node, 2][...], logits.count))
            path_g[b, at] = node
            chosen_g[b, at] = token
            is_next = jnp.logical_and(parents == node, tokens == token)
            child = jnp.min(jnp.where(is_next, place, NO_ID))
            has_child = jnp.logical_and(child != NO_ID, at < levels)
            count = count + jnp.where(has_child, 1, 0)
            return jnp.where(has_child, child, node), count, is_nan

        zero = jnp.int32(0)
        _, count, is_nan = lax.fori_loop(0, levels + 1, step, (zero, zero, zero))
        count_g[b] = count
        is_nan_g[b] = is_nan

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    path_BP, chosen_BP, count_B, is_nan_B = plgpu.kernel(
        body,
        out_type=(ints(batch, levels + 1), ints(batch, levels + 1), ints(batch), ints(batch)),
        grid=(batch,),
        grid_names=("batch",),
        interpret=interpret,
        kernel_name="tree_walk",
    )(tree_B3J, logits.found, scores.found)
    return Verified(Accepted(path_BP, count_B, chosen_BP), is_nan_B > 0)


def greatest_of(values: jax.Array, count: int) -> jax.Array:
    """The greatest of the first `count` values of a vector."""
    slot = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    return jnp.max(jnp.where(slot < count, values, LOWEST))
