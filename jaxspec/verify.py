"""Which part of a tree the target confirms: the walk, without a pointer being chased.

A node is confirmed when it is the token the target chose after its parent, and accepted when it and
all its ancestors are confirmed. Siblings are distinct tokens, so at most one path is accepted, and
it ends in the deepest accepted node.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.dims import typed
from jaxspec.tree import Tree

__all__ = ["Accepted", "accept"]


class Accepted(NamedTuple):
    """The accepted path of each sequence.

    Attributes:
      path: [B,P] node indices, root first; past `count` they repeat the last node.
      count: [B] accepted drafted tokens, the root not among them.
      tokens: [B,P] the tokens that follow: entry i is what the target chose after path[i], so
        entries 0 .. count are emitted, the last of them the bonus token.
    """

    path: Int[Array, "B P"]
    count: Int[Array, "B"]
    tokens: Int[Array, "B P"]


@typed
def accept(tree: Tree, chosen_BJ: Int[Array, "B J"]) -> Accepted:
    """The path along which the tree's tokens are the ones the target chose.

    Args:
      chosen_BJ: the target's token after each node.

    Of equal siblings, which no well-formed tree has, the first one counts.
    """
    wanted_BJ = jnp.take_along_axis(chosen_BJ, jnp.maximum(tree.parent, 0), axis=1)
    is_confirmed_BJ = (tree.tokens == wanted_BJ) | (tree.parent < 0)
    is_accepted_BJ = ~(tree.ancestors & ~is_confirmed_BJ[:, None, :]).any(-1)
    depth_if_accepted = jnp.where(is_accepted_BJ, tree.depth, -1)
    last_B = jnp.argmax(depth_if_accepted, axis=1)
    count_B = depth_if_accepted.max(axis=1)
    # The path holds exactly one ancestor of the last node at each depth down to its own.
    on_path_BJ = jnp.take_along_axis(tree.ancestors, last_B[:, None, None], axis=1)[:, 0]
    step = jnp.arange(tree.levels + 1)
    is_at_BPJ = on_path_BJ[:, None] & (tree.depth[:, None] == step[None, :, None])
    path_BP = jnp.where(
        step[None] <= count_B[:, None], jnp.argmax(is_at_BPJ, axis=-1), last_B[:, None]
    )
    return Accepted(path_BP, count_B, jnp.take_along_axis(chosen_BJ, path_BP, axis=1))
