"""`tree_verify` in plain XLA: tokens by argmax, then the walk, without a pointer being chased.

A node is confirmed when it is the token the target chose after its parent, and accepted when it and
all its ancestors are confirmed. Siblings are distinct tokens, so at most one path is accepted, and
it ends in the deepest accepted node.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.kernels.tree_verify.sampling import Sampling, gumbel_noise, keep_top

__all__ = ["Accepted", "Verified", "accept", "choose", "tree_verify_xla"]


class Accepted(NamedTuple):
    """The accepted path of each sequence.

    Attributes:
      path: [B,P] node indices, root first; past `count` they repeat the last node.
      count: [B] accepted drafted tokens, the root not among them.
      tokens: [B,P] the tokens that follow: entry i is what the target chose after path[i], so
        entries 0 .. count are emitted, the last of them the bonus token.
    """

    path: jax.Array
    count: jax.Array
    tokens: jax.Array


class Verified(NamedTuple):
    """What the target makes of a tree.

    Attributes:
      accepted: the path.
      is_nan: [B], whether some logit of a node on the path is NaN.
    """

    accepted: Accepted
    is_nan: jax.Array


def tree_verify_xla(
    logits_BJV: jax.Array,
    tokens_BJ: jax.Array,
    parent_BJ: jax.Array,
    depth_BJ: jax.Array,
    ancestors_BJJ: jax.Array,
    length_B: jax.Array,
    sampling: Sampling,
    *,
    levels: int,
) -> Verified:
    """See `tree_verify`."""
    chosen_BJ = choose(logits_BJV, depth_BJ, length_B, sampling, levels=levels)
    accepted = accept(tokens_BJ, parent_BJ, depth_BJ, ancestors_BJJ, chosen_BJ, levels=levels)
    is_nan_BJ = jnp.isnan(logits_BJV).any(-1)
    return Verified(accepted, jnp.take_along_axis(is_nan_BJ, accepted.path, axis=1).any(1))


def choose(
    logits_BJV: jax.Array,
    depth_BJ: jax.Array,
    length_B: jax.Array,
    sampling: Sampling,
    *,
    levels: int,
) -> jax.Array:
    """The token that follows each node, [B,J] int32.

    Args:
      depth_BJ: of each node; a root stands at position `length_B`, so the token after a node is
        the one at position length + depth + 1.
      levels: the greatest depth.

    NaN logits count as -inf. Of equal scores the lowest id wins.
    """
    logits_BJV = logits_BJV.astype(jnp.float32)
    logits_BJV = jnp.where(jnp.isnan(logits_BJV), -jnp.inf, logits_BJV)
    is_sampled_B = sampling.is_sampled

    def greedy() -> jax.Array:
        return jnp.argmax(logits_BJV, axis=-1)

    def sampled() -> jax.Array:
        temperature_B = jnp.where(is_sampled_B, sampling.temperature, 1.0)
        # Below their maximum, so that no temperature makes a second one infinite.
        below_BJV = logits_BJV - logits_BJV.max(-1, keepdims=True)
        score_BJV = below_BJV / temperature_B[:, None, None]
        score_BJV = lax.cond(
            sampling.is_cut.any(),
            lambda: jnp.where(keep_top(score_BJV, sampling), score_BJV, -jnp.inf),
            lambda: score_BJV,
        )
        # One draw per depth, not per node: siblings' children share theirs.
        pos_BP = length_B[:, None] + 1 + jnp.arange(levels + 1)[None]
        noise_BPV = gumbel_noise(sampling.seed, pos_BP, logits_BJV.shape[-1])
        noise_BJV = jnp.take_along_axis(noise_BPV, depth_BJ[:, :, None], axis=1)
        token_BJ = jnp.argmax(score_BJV + noise_BJV, axis=-1)
        return jnp.where(is_sampled_B[:, None], token_BJ, greedy())

    return lax.cond(is_sampled_B.any(), sampled, greedy).astype(jnp.int32)


def accept(
    tokens_BJ: jax.Array,
    parent_BJ: jax.Array,
    depth_BJ: jax.Array,
    ancestors_BJJ: jax.Array,
    chosen_BJ: jax.Array,
    *,
    levels: int,
) -> Accepted:
    """The path along which the tree's tokens are the ones the target chose.

    Args:
      chosen_BJ: the target's token after each node.

    Of equal siblings, which no well-formed tree has, any one may count.
    """
    wanted_BJ = jnp.take_along_axis(chosen_BJ, jnp.maximum(parent_BJ, 0), axis=1)
    is_confirmed_BJ = (tokens_BJ == wanted_BJ) | (parent_BJ < 0)
    is_accepted_BJ = ~(ancestors_BJJ & ~is_confirmed_BJ[:, None, :]).any(-1)
    depth_if_accepted = jnp.where(is_accepted_BJ, depth_BJ, -1)
    last_B = jnp.argmax(depth_if_accepted, axis=1)
    count_B = depth_if_accepted.max(axis=1)
    # The path holds exactly one ancestor of the last node at each depth down to its own.
    on_path_BJ = jnp.take_along_axis(ancestors_BJJ, last_B[:, None, None], axis=1)[:, 0]
    step = jnp.arange(levels + 1)
    is_at_BPJ = on_path_BJ[:, None] & (depth_BJ[:, None] == step[None, :, None])
    path_BP = jnp.where(
        step[None] <= count_B[:, None], jnp.argmax(is_at_BPJ, axis=-1), last_B[:, None]
    )
    return Accepted(path_BP, count_B, jnp.take_along_axis(chosen_BJ, path_BP, axis=1))
