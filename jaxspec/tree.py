"""The draft tree: from scored candidates to nodes, parents and ancestors.

Candidates form one pool per sequence, level by level: k at the first, then k * k at each further
one (every beam's k best continuations). `build` keeps the best of the whole pool, EAGLE-2's global
re-rank (arXiv:2406.16858, section 4.2). A chain is the tree of one branch.

    pool (k = 2, 2 levels):  0 1 | 2 3 4 5      2, 3 continue beam 0; 4, 5 continue beam 1
    kept, ascending:         0 1 2 4
    nodes:                   0 (root) 1 2 3 4   parents: -1 0 0 1 2
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.dims import typed

__all__ = ["Tree", "build", "build_from_levels", "only_root"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "parent", "depth", "ancestors"],
    meta_fields=["levels"],
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """Nodes to verify: the root (the last token sampled), then candidates, parents first.

    Attributes:
      tokens: [B,J] target ids.
      parent: [B,J] node index of each node's parent, below its own; -1 for the root.
      depth: [B,J] 0 for the root.
      ancestors: [B,J,J], whether node k is node j or above it: which nodes j attends to.
      levels: the greatest depth possible.
    """

    tokens: Any
    parent: Any
    depth: Any
    ancestors: Any
    levels: int


@typed
def build(
    root_B: Int[Array, "B"],
    score_BI: Float[Array, "B I"],
    token_BI: Int[Array, "B I"],
    parent_BI: Int[Array, "B I"],
    level_I: Int[Array, "I"],
    *,
    nodes: int,
    levels: int,
) -> Tree:
    """The tree of the root and the `nodes - 1` best candidates of a pool.

    Args:
      score_BI: summed log-probability of each candidate's path, f32. NaN counts as -inf.
      parent_BI: pool index of each candidate's parent, which is below its own; -1 for the root.
      level_I: depth of the pool's candidates below the root, less one.

    A child never outscores its parent, and of equal scores the lower index wins; so with every
    node its parent is kept too, and kept indices in ascending order put parents first.
    """
    score_BI = jnp.where(jnp.isnan(score_BI), -jnp.inf, score_BI)
    kept_BI = jnp.sort(jax.lax.top_k(score_BI, nodes - 1)[1], axis=-1)

    def of_kept(values_BI: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values_BI, kept_BI, axis=1)

    def with_root(root: jax.Array | int, values: jax.Array) -> jax.Array:
        first = jnp.broadcast_to(jnp.asarray(root, values.dtype), values.shape[:1])
        return jnp.concatenate([first[:, None], values], axis=1)

    parent_in_pool = of_kept(parent_BI)
    is_parent = kept_BI[:, None, :] == parent_in_pool[:, :, None]
    parent_node = jnp.where(parent_in_pool < 0, 0, 1 + jnp.argmax(is_parent, axis=-1))
    parent_BJ = with_root(-1, parent_node.astype(jnp.int32))
    depth_BJ = with_root(0, 1 + level_I[kept_BI])
    return Tree(
        with_root(root_B, of_kept(token_BI)),
        parent_BJ,
        depth_BJ.astype(jnp.int32),
        _ancestors(parent_BJ, levels),
        levels,
    )


def build_from_levels(
    root_B: jax.Array,
    first: tuple[jax.Array, jax.Array],
    deeper: tuple[jax.Array, jax.Array, jax.Array] | None,
    *,
    nodes: int,
) -> Tree:
    """The tree of a pool that was grown level by level; see `build`.

    Args:
      first: scores and tokens of the first level's candidates, [B,k].
      deeper: scores, tokens and parents of the further levels', as `lax.scan` stacks them,
        [levels - 1, B, k * k]; None where there is one level.
    """
    score, token = first
    batch, k = score.shape
    root_parent = jnp.full((batch, k), -1, jnp.int32)
    pool: list[tuple[jax.Array, ...]] = [(score, token, root_parent)]
    sizes = [k]
    if deeper is not None:
        pool.append(tuple(jnp.moveaxis(x, 0, 1).reshape(batch, -1) for x in deeper))
        sizes += [k * k] * deeper[0].shape[0]
    score_BI, token_BI, parent_BI = (
        jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True)
    )
    level_I = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))
    return build(root_B, score_BI, token_BI, parent_BI, level_I, nodes=nodes, levels=len(sizes))


@typed
def _ancestors(parent_BJ: Int[Array, "B J"], levels: int) -> Bool[Array, "B J J"]:
    """Each node's own bit and its ancestors', gathered from the parents once per level."""
    nodes = parent_BJ.shape[1]
    own_BJJ = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (*parent_BJ.shape, nodes))
    above_BJ = jnp.maximum(parent_BJ, 0)[:, :, None]
    seen_BJJ = own_BJJ
    for _ in range(levels):
        seen_BJJ = own_BJJ | jnp.take_along_axis(seen_BJJ, above_BJ, axis=1)
    return seen_BJJ


@typed
def only_root(root_B: Int[Array, "B"]) -> Tree:
    """The tree of the root alone: plain decoding, one token a step."""
    batch = root_B.shape[0]
    return Tree(
        root_B[:, None],
        jnp.full((batch, 1), -1, jnp.int32),
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones((batch, 1, 1), bool),
        0,
    )
