"""Texts whose tokens are all known, read by the target and a draft, chunk by chunk."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.cache import commit
from jaxspec.contracts import TargetIds
from jaxspec.draft import Borrowed, Draft, DraftPass
from jaxspec.mla import Pass
from jaxspec.requests import Request, sampling_of
from jaxspec.sampling import Sampling
from jaxspec.target import Target

__all__ = ["Chunk", "Texts", "read_texts", "texts_in", "whole_chunks"]

CHUNK = 128
"""Tokens per pass over the text: one compilation for every length."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "prompt_len", "text_len", "sampling"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts with what follows: [B,S] ids, `prompt_len` [B] and `text_len` [B] of them."""

    tokens: Any
    prompt_len: Any
    text_len: Any
    sampling: Sampling


class Chunk(NamedTuple):
    """What was read of CHUNK positions; past a text's end it is about nothing.

    Attributes:
      next_ids: the token after each position.
      logits: the target's, for that token.
      drafted: the draft's pass, which has read that token too; None without a draft.
    """

    next_ids: Int[Array, "B T"]
    logits: Float[Array, "B T V"]
    drafted: DraftPass | None


def whole_chunks(length: int) -> int:
    """The slots of texts up to so long."""
    return -(-length // CHUNK) * CHUNK


def texts_in(pairs: Sequence[tuple[Request, Sequence[int]]], batch_size: int, slots: int) -> Texts:
    """The texts of a batch; places without one are empty."""
    tokens = np.zeros((batch_size, slots), np.int32)
    prompt_len, text_len = np.zeros(batch_size, np.int32), np.zeros(batch_size, np.int32)
    for b, (request, emitted) in enumerate(pairs):
        whole = [*request.prompt_ids, *emitted]
        tokens[b, : len(whole)] = whole
        prompt_len[b], text_len[b] = len(request.prompt_ids), len(whole)
    sampling = sampling_of({b: request for b, (request, _) in enumerate(pairs)}, batch_size)
    return Texts(tokens, prompt_len, text_len, sampling)


def read_texts[Carry, Said](
    target: Target,
    draft: Draft | None,
    caches: tuple[Any, Any],
    texts: Texts,
    capture: Any,
    say: Callable[[Carry, Chunk], tuple[Carry, Said]],
    carry: Carry,
) -> tuple[tuple[Any, Any], Said]:
    """The caches of the whole texts, and what is said of each of their positions, [B,S,...].

    Args:
      caches: the target's and the draft's, empty; the latter is None without a draft.
      say: what is made of a chunk, [B,T,...], and what it is told of the chunks before.
    """
    batch, slots = texts.tokens.shape
    vocab_size, borrowed = target.config.vocab_size, Borrowed.of(target)
    # The draft reads one token further.
    tokens_BS = jnp.pad(texts.tokens, ((0, 0), (0, 1)))
    row_BT = jnp.broadcast_to(jnp.arange(CHUNK, dtype=jnp.int32), (batch, CHUNK))

    def read(state, start):
        (target_cache, draft_cache), carry = state
        pos_BT, start_B = start + row_BT, jnp.broadcast_to(start, (batch,))
        is_real_BT = pos_BT < texts.text_len[:, None]
        at = Pass(pos_BT, start_B, None, is_real_BT)
        place = row_BT, start_B, is_real_BT.sum(1, dtype=jnp.int32)
        ids_BT = lax.dynamic_slice_in_dim(tokens_BS, start, CHUNK, axis=1)
        next_BT = lax.dynamic_slice_in_dim(tokens_BS, start + 1, CHUNK, axis=1)
        seen = target(TargetIds(ids_BT, vocab_size), at, target_cache, capture)
        target_cache = commit(target_cache, seen.rows, *place, target.stripe)
        drafted = None
        if draft is not None:
            assert seen.features is not None, "there is a draft, so they were captured"
            next_ids = TargetIds(next_BT, vocab_size)
            drafted = draft.fuse(seen.features, next_ids, at, draft_cache, borrowed)
            draft_cache = commit(draft_cache, drafted.rows, *place, draft.stripe)
        carry, said = say(carry, Chunk(next_BT, target.logits(seen.hidden), drafted))
        return ((target_cache, draft_cache), carry), said

    starts = jnp.arange(0, slots, CHUNK, dtype=jnp.int32)
    (caches, _), chunks = lax.scan(read, (caches, carry), starts)
    # [chunks, B, CHUNK, ...] -> [B, S, ...]
    said = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, slots, *x.shape[3:]), chunks)
    return caches, said
