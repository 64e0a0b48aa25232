"""The speculative step: two programs over one donated state that no tree shapes.

`prefill` admits prompts into some places of the batch; `decode` runs whole steps in one
`lax.while_loop`:

    propose   the draft's tree below the last sampled token        (propose.py, tree.py)
    verify    one target pass over its nodes, against the cache    (target.py)
    accept    the path that the target's own choices confirm       (verify.py)
    commit    the accepted rows into both caches, one scatter each (cache.py)
    extend    the draft over the accepted path, with the TARGET's features

Where a sequence stands: `length` tokens have rows in both caches; the root token, at position
`length`, was sampled and has none. Row i of the draft's cache pairs the features of position i with
the token at i + 1, so its last row already holds the root.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxspec.cache import DraftCache, Latents, commit
from jaxspec.config import TreeConfig
from jaxspec.contracts import Boundaries, TargetIds
from jaxspec.dims import typed
from jaxspec.draft import Borrowed, Draft, DraftPass
from jaxspec.mla import Pass
from jaxspec.propose import DraftSeed, propose, seed_from
from jaxspec.sampling import Sampling
from jaxspec.target import Target
from jaxspec.tree import only_root
from jaxspec.verify import verify

__all__ = [
    "NUM_STOP_IDS",
    "Admission",
    "Settings",
    "State",
    "Status",
    "compiler_options",
    "decode",
    "empty_state",
    "prefill",
]

NUM_STOP_IDS = 16
"""Stop ids that a sequence can have: they are data of the compiled step, and no part of it."""


class Status:
    """What a place of the batch is doing, or why its sequence ended."""

    IDLE, RUNNING, STOPPED, LENGTH, TARGET_NOT_FINITE, DRAFT_NOT_FINITE = range(6)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a compiled step is specialised to.

    Attributes:
      tree: shape of the draft tree; None decodes plainly.
      capture: the boundaries that the target reports to the draft.
      chunk: prompt tokens per target pass.
    """

    tree: TreeConfig | None
    capture: Boundaries | None
    chunk: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["target_cache", "draft_cache", "seed", "root", "length", "status", "sampling",
                 "stop_ids", "limit", "tokens", "num_tokens", "accepted", "num_steps"],
    meta_fields=[],
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class State:
    """All that lives between steps. Donated: a step updates it in place.

    Attributes:
      target_cache, draft_cache: rows of committed tokens; the draft's is None without a draft.
      seed: what the draft's last row offers to the next tree; None without a draft.
      root: [B] the last sampled token.
      length: [B] committed tokens.
      status: [B] see `Status`.
      sampling: of each sequence.
      stop_ids: [B,A] tokens that end a sequence, themselves emitted; -1 where there are fewer.
      limit: [B] tokens that a sequence may emit.
      tokens: [B,S] emitted tokens, `num_tokens` [B] of them.
      accepted: [B,S] int8, drafted tokens accepted in each verify step, `num_steps` [B] of them.
    """

    target_cache: Latents
    draft_cache: DraftCache | None
    seed: DraftSeed | None
    root: Any
    length: Any
    status: Any
    sampling: Sampling
    stop_ids: Any
    limit: Any
    tokens: Any
    num_tokens: Any
    accepted: Any
    num_steps: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["is_admitted", "prompt", "prompt_len", "limit", "stop_ids", "sampling"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Admission:
    """New sequences for some places of the batch; the others go on untouched.

    Attributes:
      is_admitted: [B] the places to fill.
      prompt: [B,S] prompt ids, `prompt_len` [B] of them, at least one and at most S - 1.
      limit: [B] tokens to emit at most, at least one. With the prompt it must fit S.
      stop_ids: [B,A] see `State`.
      sampling: of the new sequences.
    """

    is_admitted: Any
    prompt: Any
    prompt_len: Any
    limit: Any
    stop_ids: Any
    sampling: Sampling


def compiler_options(platform: str) -> dict[str, bool | int]:
    """What to ask of XLA when it compiles these programs for a platform ("gpu", "cpu").

    On GPU: layers' weights lie in stacks, and only a product by cuBLAS reads its layer where it
    lies. Before a product by Triton, or one merged with its neighbour, XLA (jax 0.11.2, 0.12.0.1)
    copies the weights out: every weight but the experts' would cross the memory bus three times.

    On CPU: vectors of up to 512 bits, where the processor has them. XLA stops at 256, and the
    experts' product is bound by instructions.
    """
    if platform == "cpu":
        return {"xla_cpu_prefer_vector_width": 512}
    if platform != "gpu":
        return {}
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}


def empty_state(target: Target, draft: Draft | None, batch: int, slots: int) -> State:
    """The state of a batch whose places are all idle, for sequences of at most `slots` tokens."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((batch, *shape), dtype)

    seed = None
    if draft is not None:
        width, kept = draft.config.hidden_size, draft.config.num_kept_candidates
        seed = DraftSeed(
            zeros(width, dtype=draft.numerics.jnp_dtype),
            zeros(kept, dtype=jnp.float32),
            zeros(kept),
        )
    return State(
        target_cache=target.empty_cache(batch, slots),
        draft_cache=None if draft is None else draft.empty_cache(batch, slots),
        seed=seed,
        root=zeros(),
        length=zeros(),
        status=zeros(),
        sampling=Sampling.of(batch),
        stop_ids=zeros(NUM_STOP_IDS) - 1,
        limit=zeros(),
        tokens=zeros(slots),
        num_tokens=zeros(),
        accepted=zeros(slots, dtype=jnp.int8),
        num_steps=zeros(),
    )


def prefill(
    target: Target, draft: Draft | None, state: State, new: Admission, settings: Settings
) -> State:
    """The state with new sequences admitted, each with its first token sampled.

    A loop over chunks of fixed size, so that one compilation serves every prompt length; it ends
    with the longest prompt. At a chunk's end the draft's shifted token is the next *prompt* token;
    only after the last one is it the sampled one.
    """
    prompt_BS, chunk = new.prompt, settings.chunk
    batch = prompt_BS.shape[0]
    # A chunk may reach past the buffer, and the draft reads one token further.
    prompt_BS = jnp.pad(prompt_BS, ((0, 0), (0, chunk + 1)))
    last_B = new.prompt_len - 1
    borrowed = Borrowed.of(target)

    def body(carry):
        start, state = carry
        pos_BT = jnp.broadcast_to(start + jnp.arange(chunk), (batch, chunk))
        is_real_BT = new.is_admitted[:, None] & (pos_BT <= last_B[:, None])
        at = Pass(pos_BT, jnp.where(new.is_admitted, start, 0), None, is_real_BT)
        count_B = is_real_BT.sum(1)
        first_B = jnp.full((batch,), start)
        rows_BT = jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))
        is_last_BT = is_real_BT & (pos_BT == last_B[:, None])
        has_last_B = is_last_BT.any(1)
        last_row_B = jnp.argmax(is_last_BT, axis=1)[:, None, None]

        ids_BT = lax.dynamic_slice_in_dim(prompt_BS, start, chunk, axis=1)
        seen = target(
            TargetIds(ids_BT, target.config.vocab_size), at, state.target_cache, settings.capture
        )
        logits_BTV = target.logits(jnp.take_along_axis(seen.hidden, last_row_B, axis=1))
        # The last prompt token is the root of a tree of its own.
        first, is_nan_B = verify(
            logits_BTV,
            only_root(ids_BT[:, 0]),
            last_B,
            new.sampling,
            target.numerics.implementation,
        )
        root_B = jnp.where(has_last_B, first.tokens[:, 0], state.root)
        is_bad_B = has_last_B & is_nan_B
        state = dataclasses.replace(
            state,
            target_cache=commit(
                state.target_cache, seen.rows, rows_BT, first_B, count_B, target.stripe
            ),
            root=root_B,
            status=jnp.where(is_bad_B, Status.TARGET_NOT_FINITE, state.status),
        )
        if draft is not None:
            next_BT = lax.dynamic_slice_in_dim(prompt_BS, start + 1, chunk, axis=1)
            shifted = TargetIds(
                jnp.where(is_last_BT, root_B[:, None], next_BT), target.config.vocab_size
            )
            assert seen.features is not None and state.draft_cache is not None, "it has a draft"
            drafted = draft.fuse(seen.features, shifted, at, state.draft_cache, borrowed)
            state = _with_draft_rows(draft, state, drafted, first_B, count_B, is_last_BT, borrowed)
        return start + chunk, state

    longest = jnp.where(new.is_admitted, new.prompt_len, 0).max()
    state = dataclasses.replace(
        state, status=jnp.where(new.is_admitted, Status.RUNNING, state.status)
    )
    _, state = lax.while_loop(
        lambda carry: carry[0] < longest, body, (jnp.zeros((), jnp.int32), state)
    )
    state = dataclasses.replace(
        state,
        length=jnp.where(new.is_admitted, new.prompt_len, state.length),
        limit=jnp.where(new.is_admitted, new.limit, state.limit),
        stop_ids=_where(new.is_admitted, new.stop_ids, state.stop_ids),
        sampling=_where(new.is_admitted, new.sampling, state.sampling),
        num_tokens=jnp.where(new.is_admitted, 0, state.num_tokens),
        num_steps=jnp.where(new.is_admitted, 0, state.num_steps),
    )
    is_new_B = new.is_admitted & (state.status == Status.RUNNING)
    return _emit(state, state.root[:, None], is_new_B.astype(jnp.int32))[0]


def decode(
    target: Target,
    draft: Draft | None,
    state: State,
    max_steps: Int[Array, ""],
    settings: Settings,
) -> State:
    """The state after at most `max_steps` steps, fewer when no sequence is running any more."""

    def goes_on(carry):
        done, state = carry
        return (done < max_steps) & (state.status == Status.RUNNING).any()

    def body(carry):
        done, state = carry
        return done + 1, step(target, draft, state, settings)

    return lax.while_loop(goes_on, body, (jnp.zeros((), jnp.int32), state))[1]


def step(target: Target, draft: Draft | None, state: State, settings: Settings) -> State:
    """The state after one speculative step of every running sequence."""
    vocab_size, borrowed = target.config.vocab_size, Borrowed.of(target)
    is_running_B = state.status == Status.RUNNING
    with jax.named_scope("propose"):
        if draft is None or settings.tree is None:
            tree = only_root(state.root)
        else:
            assert state.seed is not None and state.draft_cache is not None, "it has a draft"
            tree = propose(
                draft,
                state.seed,
                state.root,
                state.length,
                state.draft_cache,
                borrowed,
                settings.tree,
            )
    with jax.named_scope("verify"):
        at = Pass(
            state.length[:, None] + tree.depth,
            state.length,
            tree.ancestors,
            jnp.broadcast_to(is_running_B[:, None], tree.tokens.shape),
        )
        seen = target(TargetIds(tree.tokens, vocab_size), at, state.target_cache, settings.capture)
        logits_BJV = target.logits(seen.hidden)
    with jax.named_scope("accept"):
        accepted, is_nan_B = verify(
            logits_BJV, tree, state.length, state.sampling, target.numerics.implementation
        )
        # A choice made among NaNs is none: the sequence ends before it, and the caller is told.
        # Off the path they do not matter: a drafted token may well overflow.
        is_bad_B = is_running_B & is_nan_B
        state = dataclasses.replace(
            state, status=jnp.where(is_bad_B, Status.TARGET_NOT_FINITE, state.status)
        )
        offered_B = jnp.where(is_running_B & ~is_bad_B, accepted.count + 1, 0)
        length_B = state.length
        state, count_B = _emit(state, accepted.tokens, offered_B)
        state = _count_step(state, count_B, accepted.count)
    with jax.named_scope("commit"):
        # The root and the accepted nodes get their rows; the bonus token is the next root.
        bonus_B1 = jnp.maximum(count_B - 1, 0)[:, None]
        state = dataclasses.replace(
            state,
            target_cache=commit(
                state.target_cache, seen.rows, accepted.path, length_B, count_B, target.stripe
            ),
            root=jnp.where(
                count_B > 0,
                jnp.take_along_axis(accepted.tokens, bonus_B1, axis=1)[:, 0],
                state.root,
            ),
            length=length_B + count_B,
        )
    if draft is None:
        return state
    with jax.named_scope("extend"):
        assert seen.features is not None and state.draft_cache is not None, "it has a draft"
        path = jnp.arange(tree.levels + 1)[None]
        at = Pass(length_B[:, None] + path, length_B)
        drafted = draft.fuse(
            seen.features.take_rows(accepted.path),
            TargetIds(accepted.tokens, vocab_size),
            at,
            state.draft_cache,
            borrowed,
        )
        is_last_BP = path == count_B[:, None] - 1
        return _with_draft_rows(draft, state, drafted, length_B, count_B, is_last_BP, borrowed)


def _with_draft_rows(
    draft: Draft,
    state: State,
    drafted: DraftPass,
    start_B: jax.Array,
    count_B: jax.Array,
    is_last_BP: jax.Array,
    borrowed: Borrowed,
) -> State:
    """The state with the draft's rows committed, and the next tree's seed from the last ones.

    A draft that is not finite would be lossless all the same, and never accepted: its sequence
    ends here, and the caller is told.
    """
    assert state.draft_cache is not None, "it has a draft"
    rows_BP = jnp.broadcast_to(jnp.arange(is_last_BP.shape[1]), is_last_BP.shape)
    has_last_B, last_B11 = is_last_BP.any(1), jnp.argmax(is_last_BP, axis=1)[:, None, None]
    recurrent_BD = jnp.take_along_axis(drafted.recurrent, last_B11, axis=1)[:, 0]
    is_bad_B = has_last_B & ~jnp.isfinite(recurrent_BD).all(1) & (state.status == Status.RUNNING)
    # A count that waits for the whole pass: the cache is written when all have read it, in place.
    count_B = jnp.where(is_bad_B, 0, count_B)
    return dataclasses.replace(
        state,
        draft_cache=commit(
            state.draft_cache, drafted.rows, rows_BP, start_B, count_B, draft.stripe
        ),
        seed=_where(has_last_B, seed_from(draft, recurrent_BD, borrowed), state.seed),
        status=jnp.where(is_bad_B, Status.DRAFT_NOT_FINITE, state.status),
    )


@typed
def _emit(
    state: State, token_BP: Int[Array, "B P"], offered_B: Int[Array, "B"]
) -> tuple[State, Int[Array, "B"]]:
    """The state with tokens emitted, and how many were: up to a stop token or the limit."""
    place = jnp.arange(token_BP.shape[1])[None]
    is_offered_BP = place < offered_B[:, None]
    is_stop_BP = (token_BP[:, :, None] == state.stop_ids[:, None, :]).any(-1) & is_offered_BP
    until_stop_B = jnp.where(is_stop_BP.any(1), jnp.argmax(is_stop_BP, axis=1) + 1, offered_B)
    count_B = jnp.minimum(until_stop_B, state.limit - state.num_tokens)
    count_B = jnp.where(offered_B > 0, count_B, 0)
    num_tokens_B = state.num_tokens + count_B
    has_stopped_B = is_stop_BP.any(1) & (count_B == until_stop_B)
    is_full_B = (offered_B > 0) & (num_tokens_B == state.limit)
    status_B = jnp.where(is_full_B, Status.LENGTH, state.status)
    status_B = jnp.where(has_stopped_B, Status.STOPPED, status_B)
    num_slots = state.tokens.shape[1]
    slot_BP = jnp.where(
        place < count_B[:, None], state.num_tokens[:, None] + place, num_slots + place
    )
    batch = jnp.arange(token_BP.shape[0])[:, None]
    tokens_BS = state.tokens.at[batch, slot_BP].set(token_BP, mode="drop", unique_indices=True)
    state = dataclasses.replace(state, tokens=tokens_BS, num_tokens=num_tokens_B, status=status_B)
    return state, count_B


def _count_step(state: State, count_B: jax.Array, accepted_B: jax.Array) -> State:
    """The state with this step's accepted drafted tokens noted, those cut off not counted."""
    counted_B = jnp.minimum(count_B, accepted_B).astype(jnp.int8)
    batch, slot_B = (
        jnp.arange(count_B.shape[0]),
        jnp.where(count_B > 0, state.num_steps, state.accepted.shape[1]),
    )
    return dataclasses.replace(
        state,
        accepted=state.accepted.at[batch, slot_B].set(counted_B, mode="drop"),
        num_steps=state.num_steps + (count_B > 0).astype(jnp.int32),
    )


def _where(is_new_B: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """Per sequence, the leaves of `new` or of `old`."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(is_new_B.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
