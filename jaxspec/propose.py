"""Growing the draft tree: the draft's levels, from the candidates of its last committed row."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.cache import DraftCache
from jaxspec.config import TreeConfig
from jaxspec.contracts import DraftIds, TargetIds
from jaxspec.dims import typed
from jaxspec.draft import Borrowed, Draft
from jaxspec.mla import Pass
from jaxspec.tree import Tree, build_from_levels

__all__ = ["DraftSeed", "Levels", "grow", "propose", "seed_from"]

Levels = tuple[tuple[Any, Any], tuple[Any, Any, Any] | None]
"""Candidates of the first level, and of the further ones: see `tree.build_from_levels`."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["recurrent", "log_probs", "tokens"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DraftSeed:
    """What the draft's last committed row leaves for the next tree, whatever its shape.

    Attributes:
      recurrent: [B,D] its hidden state.
      log_probs: [B,M] its best candidates' log-probabilities, f32, best first.
      tokens: [B,M] their target ids.
    """

    recurrent: Any
    log_probs: Any
    tokens: Any


@typed
def seed_from(draft: Draft, recurrent_BD: Float[Array, "B D"], target: Borrowed) -> DraftSeed:
    """The seed for a tree below the row that ended in `recurrent`."""
    log_prob_BTM, token_BTM = _continuations(
        draft, recurrent_BD[:, None], target, draft.config.num_kept_candidates
    )
    return DraftSeed(recurrent_BD, log_prob_BTM[:, 0], token_BTM[:, 0])


def _continuations(
    draft: Draft, recurrent_BTD: jax.Array, target: Borrowed, count: int
) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest next tokens of each row: log-probabilities (f32) and target ids."""
    log_prob_BTU = jax.nn.log_softmax(draft.logits(recurrent_BTD, target), axis=-1)
    log_prob_BTU = jnp.where(jnp.isnan(log_prob_BTU), -jnp.inf, log_prob_BTU)
    best, draft_id = lax.top_k(log_prob_BTU, count)
    ids = draft.vocab_map.to_target(DraftIds(draft_id, draft.config.draft_vocab_size))
    return best, ids.require(draft.config.vocab_size, "propose")


@typed
def propose(
    draft: Draft,
    seed: DraftSeed,
    root_B: Int[Array, "B"],
    length_B: Int[Array, "B"],
    cache: DraftCache,
    target: Borrowed,
    shape: TreeConfig,
) -> Tree:
    """The draft's tree below the root token.

    Args:
      root_B: the last token sampled, at position `length_B`.
      length_B: committed rows of the draft's cache; the last of them holds the root token.
    """
    levels = grow(draft, seed, length_B, cache, target, shape.levels, shape.branches)
    return build_from_levels(root_B, *levels, nodes=shape.nodes)


@typed
def grow(
    draft: Draft,
    seed: DraftSeed,
    length_B: Int[Array, "B"],
    cache: DraftCache,
    target: Borrowed,
    levels: int,
    branches: int,
) -> Levels:
    """The candidates of every level, of which `build_from_levels` makes a tree.

    Each level feeds its k beams through `recur`, and every beam's k best continuations become
    candidates; the k best of those are the next level's beams. A beam sees the committed rows, its
    own chain and itself. Path scores are sums of log-probabilities in f32.
    """
    k, batch = branches, length_B.shape[0]
    num_scratch = (levels - 1) * k
    first = seed.log_probs[:, :k], seed.tokens[:, :k]
    scratch = jax.tree.map(
        lambda slots: jnp.zeros((*slots.shape[:-2], num_scratch, slots.shape[-1]), slots.dtype),
        cache,
    )
    beams = (
        *first,
        jnp.broadcast_to(seed.recurrent[:, None], (batch, k, seed.recurrent.shape[-1])),
        jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k)),  # their pool indices
        jnp.zeros((batch, k, num_scratch), bool),  # the scratch rows of their chains
    )

    def level(carry, depth):
        scratch, (score_BW, token_BW, recurrent_BWD, pool_BW, chain_BWA) = carry
        row = (depth - 1) * k
        itself_BWW = jnp.broadcast_to(jnp.eye(k, dtype=bool), (batch, k, k))
        out = draft.recur(
            recurrent_BWD,
            TargetIds(token_BW, draft.config.vocab_size),
            Pass(
                jnp.broadcast_to((length_B + depth - 1)[:, None], (batch, k)),
                length_B,
                jnp.concatenate([chain_BWA, itself_BWW], axis=-1),
            ),
            cache,
            scratch,
            target,
        )
        scratch = jax.tree.map(
            lambda all_rows, rows: lax.dynamic_update_slice_in_dim(all_rows, rows, row, axis=-2),
            scratch,
            out.rows,
        )
        log_prob_BWM, next_token_BWM = _continuations(draft, out.recurrent, target, k)
        candidate_BI = (score_BW[:, :, None] + log_prob_BWM).reshape(batch, k * k)
        token_BI = next_token_BWM.reshape(batch, k * k)
        parent_BI = jnp.repeat(pool_BW, k, axis=1)
        next_score_BW, best_BW = lax.top_k(candidate_BI, k)
        beam_BW = best_BW // k

        def of_beam(values: jax.Array) -> jax.Array:
            return jnp.take_along_axis(values, beam_BW[:, :, None], axis=1)

        # This level's rows start at `row`; a beam's own row joins its children's chain.
        own_BWA = jnp.arange(num_scratch)[None, None] == (row + beam_BW)[:, :, None]
        beams = (
            next_score_BW,
            jnp.take_along_axis(token_BI, best_BW, axis=1),
            of_beam(out.recurrent),
            k + (depth - 1) * k * k + best_BW,
            of_beam(chain_BWA) | own_BWA,
        )
        return (scratch, beams), (candidate_BI, token_BI, parent_BI)

    deeper = None
    if levels > 1:
        _, deeper = lax.scan(level, (scratch, beams), jnp.arange(1, levels, dtype=jnp.int32))
    return first, deeper
