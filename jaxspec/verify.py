"""Which part of a tree the target confirms."""

from typing import Literal

from jaxtyping import Array, Float, Int

from jaxspec.dims import typed
from jaxspec.kernels.tree_verify import Accepted, Sampling, Verified, tree_verify, xla
from jaxspec.tree import Tree

__all__ = ["Accepted", "Verified", "accept", "verify"]


@typed
def verify(
    logits_BJV: Float[Array, "B J V"],
    tree: Tree,
    length_B: Int[Array, "B"],
    sampling: Sampling,
    implementation: Literal["mosaic", "xla"] | None = None,
) -> Verified:
    """The path that the target's own choices confirm, from its logits after each node.

    Args:
      length_B: position of the root.
      implementation: see `tree_verify`.
    """
    return tree_verify(
        logits_BJV,
        tree.tokens,
        tree.parent,
        tree.depth,
        tree.ancestors,
        length_B,
        sampling,
        levels=tree.levels,
        implementation=implementation,
    )


@typed
def accept(tree: Tree, chosen_BJ: Int[Array, "B J"]) -> Accepted:
    """The path along which the tree's tokens are the ones the target chose.

    Args:
      chosen_BJ: the target's token after each node.
    """
    return xla.accept(
        tree.tokens, tree.parent, tree.depth, tree.ancestors, chosen_BJ, levels=tree.levels
    )
