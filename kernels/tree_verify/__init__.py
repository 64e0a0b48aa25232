"""From a tree's logits to the path that the target's own choices confirm."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxspec.kernels.hopper import why_not_hopper
from jaxspec.kernels.tree_verify.mosaic import supported, tree_verify_mosaic
from jaxspec.kernels.tree_verify.sampling import Sampling
from jaxspec.kernels.tree_verify.xla import Accepted, Verified, tree_verify_xla

__all__ = ["Accepted", "Implementation", "Sampling", "Verified", "tree_verify", "why_not_mosaic"]

Implementation = Literal["mosaic", "xla"]


def tree_verify(
    logits_BJV: jax.Array,
    tokens_BJ: jax.Array,
    parent_BJ: jax.Array,
    depth_BJ: jax.Array,
    ancestors_BJJ: jax.Array,
    length_B: jax.Array,
    sampling: Sampling,
    *,
    levels: int,
    implementation: Implementation | None = None,
) -> Verified:
    """The path whose tokens are the ones that the target chooses, and those that it goes on with.

    The token after a node is its logits' argmax; at a temperature above 0 that of
    `logits / temperature + noise` over the tokens that top-k, top-p and min-p keep, these and the
    noise as in `sampling`. The walk goes on from a node to the child that is that token. NaN logits
    count as -inf; of equal scores the lowest id wins. A tree of the root alone is plain decoding.

    Args:
      logits_BJV: f32 or bf16, after each node.
      tokens_BJ: each node's own token.
      parent_BJ: node index of each node's parent, below its own; -1 for the root, node 0.
      depth_BJ: 0 for the root, at most `levels`.
      ancestors_BJJ: whether node k is node j or above it.
      length_B: position of the root; the token after a node stands at length + depth + 1.
      levels: the greatest depth; a path has levels + 1 places.
      implementation: None takes "mosaic" where `why_not_mosaic` has no objection, else "xla".
        "mosaic" has code for Hopper GPUs only; it can be compiled for one that is not there.

    Both choose the same tokens, but for near-ties: logarithms may differ in the last place.

    Raises:
      ValueError: shapes that do not belong together, or that "mosaic" does not take.
    """
    _check(logits_BJV, tokens_BJ, parent_BJ, depth_BJ, ancestors_BJJ, length_B)
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(
            f"tree_verify: no implementation {implementation!r}; there are 'mosaic' and 'xla'"
        )
    if implementation is None:
        reason = why_not_mosaic(logits_BJV, levels)
        implementation = "mosaic" if reason is None else "xla"
    if implementation == "mosaic":
        return tree_verify_mosaic(
            logits_BJV, tokens_BJ, parent_BJ, depth_BJ, length_B, sampling, levels=levels
        )
    return tree_verify_xla(
        logits_BJV, tokens_BJ, parent_BJ, depth_BJ, ancestors_BJJ, length_B, sampling, levels=levels
    )


def why_not_mosaic(logits: Any, levels: int) -> str | None:
    """Why a call of these logits, or their shape, runs in plain XLA; None if it runs Mosaic's."""
    return why_not_hopper() or supported(logits, levels)


def _check(logits, tokens, parent, depth, ancestors, length) -> None:
    batch, nodes, _ = logits.shape
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"tree_verify: logits are {logits.dtype} where floats are needed")
    wanted = {
        "tokens": (tokens, (batch, nodes)),
        "parent": (parent, (batch, nodes)),
        "depth": (depth, (batch, nodes)),
        "ancestors": (ancestors, (batch, nodes, nodes)),
        "length": (length, (batch,)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(
                f"tree_verify: {name} is {array.shape} where logits {logits.shape} make it {shape}"
            )
        kind, kind_name = (jnp.bool_, "bool") if name == "ancestors" else (jnp.integer, "integer")
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"tree_verify: {name} is {array.dtype} where {kind_name} is needed")
