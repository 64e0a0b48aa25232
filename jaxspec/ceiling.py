"""How far a draft could get: what one that knew the target's own probabilities would reach.

A draft's acceptance says little by itself, since half of it is the text's: after `import` anybody
guesses, inside a name nobody does. So the same tree is grown again from the target's own
distributions, at the request's temperature and with its cuts, and walked along the text that was
emitted. Greedy text has one possible continuation, and every level of the tree is accepted.

The rows of the whole text are computed once and fill the cache. A step at the root in position r
then reads the first r + 1 of them, and only the tree's own rows are new.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxspec.aliases import Progress
from jaxspec.cache import Latents
from jaxspec.config import TreeConfig
from jaxspec.contracts import DraftIds, TargetIds
from jaxspec.dims import typed
from jaxspec.draft import Borrowed, Draft
from jaxspec.errors import InputError
from jaxspec.figures import accept_per_depth, ratio
from jaxspec.known_texts import Chunk, Texts, read_texts, texts_in, whole_chunks
from jaxspec.mla import Pass
from jaxspec.requests import Request
from jaxspec.sampling import Sampling, keep_top
from jaxspec.sharding import devices_of, specs_of
from jaxspec.target import Target
from jaxspec.tree import Tree, build_from_levels
from jaxspec.verify import accept

__all__ = ["Ceiling", "TextCeiling", "accept_ceiling"]


@dataclasses.dataclass(frozen=True)
class TextCeiling:
    """What a draft that knows the target would have reached on one text.

    Attributes:
      accepted: its drafted tokens accepted in each step; a step emits one more.
      num_emitted: tokens that those steps emitted: all but the text's first, which is prefill's.
      best: for every token the steps emitted, the probability of the one that was likeliest there:
        how often the best single guess is right.
      draft: the probability of the token that the given draft would have guessed there; None
        without a draft.
      agrees: whether the draft's guess was the likeliest token; None without a draft.
    """

    accepted: tuple[int, ...]
    num_emitted: int
    best: np.ndarray
    draft: np.ndarray | None
    agrees: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """The ceilings of several texts under one tree; figures of no tokens are None."""

    texts: tuple[TextCeiling, ...]
    levels: int

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by steps per step, bonus included."""
        return ratio(
            sum(text.num_emitted for text in self.texts),
            sum(len(text.accepted) for text in self.texts),
        )

    @property
    def accept_per_depth(self) -> tuple[float | None, ...]:
        """Share of all steps in which the token at depth d + 1 was accepted."""
        accepted = [count for text in self.texts for count in text.accepted]
        return accept_per_depth(accepted, self.levels)

    @property
    def first_token(self) -> float | None:
        """Mean probability of the likeliest token: no single guess is accepted more often."""
        return self._mean("best")

    @property
    def draft_first_token(self) -> float | None:
        """Mean probability that the draft's first guess is accepted."""
        return self._mean("draft")

    @property
    def top1_agreement(self) -> float | None:
        """How often the draft's first guess is the target's likeliest token."""
        return self._mean("agrees")

    def _mean(self, name: str) -> float | None:
        of_texts = [getattr(text, name) for text in self.texts]
        if any(values is None for values in of_texts):
            return None
        return ratio(sum(float(v.sum()) for v in of_texts), sum(len(v) for v in of_texts))


def accept_ceiling(
    target: Target,
    requests: Sequence[Request],
    emitted: Sequence[Sequence[int]],
    tree: TreeConfig,
    draft: Draft | None = None,
    *,
    batch_size: int = 8,
    progress: Progress | None = None,
) -> Ceiling:
    """The ceiling of `tree` on texts that were emitted, or on any other text.

    Args:
      requests: the prompts, and how their tokens were chosen.
      emitted: the tokens after each prompt. The first one is the first root, as if from prefill.
      draft: also measure its first guesses, teacher-forced, with this draft.
      batch_size: texts at a time; more where a mesh has more groups.
      progress: called with "ceiling", and how many of how many texts are done.

    Raises:
      ContractError: draft and target do not belong together.
      InputError: there is no such tree, a text has no prompt, settings by which no token can be
        chosen, or a mesh does not fit.
    """
    tree.check()
    for request in requests:
        request.check_settings()
    if tree.branches > target.config.vocab_size:
        raise InputError(f"tree {tree}: more branches than the target has tokens")
    if any(not request.prompt_ids for request in requests):
        raise InputError("a text without a prompt: nothing stands before its first token")
    capture = None
    if draft is not None:
        capture = target.asked_for(draft.config.boundaries)
    pairs = list(zip(requests, emitted, strict=True))
    longest = max((len(r.prompt_ids) + len(tokens) for r, tokens in pairs), default=0)
    slots = whole_chunks(longest)
    if target.numerics.mesh is not None:
        batch_size += -batch_size % target.numerics.mesh.data
    measure = _measurer(target, draft, tree, capture, batch_size, slots)
    done: list[TextCeiling] = []
    for some in itertools.batched(pairs, batch_size):
        seen, accepted_BS, num_steps_B = measure(texts_in(some, batch_size, slots))
        for b, (request, tokens) in enumerate(some):
            # The roots: every emitted token that another one follows.
            roots = slice(
                len(request.prompt_ids), len(request.prompt_ids) + max(len(tokens) - 1, 0)
            )
            has_draft = draft is not None
            done.append(
                TextCeiling(
                    tuple(accepted_BS[b, : num_steps_B[b]].tolist()),
                    max(len(tokens) - 1, 0),
                    np.exp(seen.log_prob[b, roots, 0]),
                    np.exp(seen.guess_log_prob[b, roots]) if has_draft else None,
                    seen.guess_agrees[b, roots] if has_draft else None,
                )
            )
        if progress is not None:
            progress("ceiling", len(done), len(pairs))
    return Ceiling(tuple(done), tree.levels)


def _measurer(
    target: Target, draft: Draft | None, tree: TreeConfig, capture: Any, batch: int, slots: int
) -> Callable[[Texts], Any]:
    """What gives, on the host, what may follow each position of some texts, and `_walk` of them."""
    graph, params = nnx.split((target, draft))

    def empty_caches() -> tuple[Latents, Any]:
        drafts = None if draft is None else draft.empty_cache(batch, slots)
        return target.empty_cache(batch, slots), drafts

    def read(params: Any, caches: Any, texts: Texts) -> tuple[Latents, _Seen]:
        return _read(*nnx.merge(graph, params), caches, texts, tree, capture)

    def walk(params: Any, cache: Latents, seen: _Seen, texts: Texts) -> Any:
        target, _ = nnx.merge(graph, params)
        return seen, *_walk(target, cache, seen, texts, tree)

    # Two programs: in one, the draft's sums over devices and the walk's would not wait for each
    # other, and XLA's CPU devices (jax 0.12.0) then take one for the other and crash.
    devices = devices_of(target, draft, batch)
    if devices is None:
        first, then = jax.jit(read), jax.jit(walk)

        def on_one(texts: Texts) -> Any:
            return jax.device_get(then(params, *first(params, empty_caches(), texts), texts))

        return on_one
    params, shapes = devices.put(params), jax.eval_shape(empty_caches)
    new_caches = jax.jit(empty_caches, out_shardings=devices.shardings(shapes))
    of_params, of_caches = specs_of((params, shapes), devices.config)
    rows, read_out = P("data"), (of_caches[0], P("data"))
    first = jax.jit(devices.spread(read, (of_params, of_caches, rows), read_out))
    then = jax.jit(devices.spread(walk, (of_params, *read_out, rows), rows))

    def on_devices(texts: Texts) -> Any:
        given = jax.tree.map(lambda array: devices.put_as(array, rows), texts)
        return devices.fetch(then(params, *first(params, new_caches(), given), given))

    return on_devices


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["log_prob", "token", "guess_log_prob", "guess_agrees"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Seen:
    """What may follow each position of the texts.

    Attributes:
      log_prob, token: [B,S,W] the likeliest tokens, best first, and their log-probabilities.
      guess_log_prob: [B,S] log-probability of the draft's guess; None without a draft.
      guess_agrees: [B,S] whether that is the likeliest token; None without a draft.
    """

    log_prob: Any
    token: Any
    guess_log_prob: Any
    guess_agrees: Any


def _read(
    target: Target,
    draft: Draft | None,
    caches: tuple[Latents, Any],
    texts: Texts,
    tree: TreeConfig,
    capture: Any,
) -> tuple[Latents, _Seen]:
    """The cache of the whole texts, and what may follow each of their positions.

    Args:
      caches: the target's and the draft's, empty.
    """

    def say(guess_B: jax.Array, chunk: Chunk) -> tuple[jax.Array, _Seen]:
        log_prob_BTV = _log_probs(chunk.logits, texts.sampling)
        log_prob_BTW, token_BTW = lax.top_k(log_prob_BTV, tree.branches)
        if draft is None or chunk.drafted is None:
            return guess_B, _Seen(log_prob_BTW, token_BTW, None, None)
        logits_BTU = draft.logits(chunk.drafted.recurrent, Borrowed.of(target))
        best = jnp.argmax(logits_BTU, axis=-1).astype(jnp.int32)
        ids = draft.vocab_map.to_target(DraftIds(best, draft.config.draft_vocab_size))
        own_BT = ids.require(target.config.vocab_size, "ceiling")
        # Row t of the draft has read token t + 1, and guesses what follows it.
        guess_BT = jnp.concatenate([guess_B[:, None], own_BT[:, :-1]], axis=1)
        guess_log_prob_BT = jnp.take_along_axis(log_prob_BTV, guess_BT[:, :, None], axis=-1)[..., 0]
        found = _Seen(log_prob_BTW, token_BTW, guess_log_prob_BT, guess_BT == token_BTW[..., 0])
        return own_BT[:, -1], found

    none_B = jnp.zeros((texts.tokens.shape[0],), jnp.int32)
    (target_cache, _), seen = read_texts(target, draft, caches, texts, capture, say, none_B)
    return target_cache, seen


def _walk(
    target: Target, cache: Latents, seen: _Seen, texts: Texts, shape: TreeConfig
) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
    """The accepted tokens of each step, and the number of steps, of every text."""
    batch, slots = texts.tokens.shape
    place_B = jnp.arange(batch)

    def goes_on(carry):
        root_B, _, _ = carry
        return (root_B + 1 < texts.text_len).any()

    def body(carry):
        root_B, accepted_BS, num_steps_B = carry
        is_running_B = root_B + 1 < texts.text_len
        tree = _grow(target, cache, seen, texts, root_B, is_running_B, shape)
        # What followed each node's depth in the text; past its end, nothing is ever right.
        after_BJ = root_B[:, None] + tree.depth + 1
        chosen_BJ = texts.tokens.at[place_B[:, None], after_BJ].get(mode="fill", fill_value=-1)
        chosen_BJ = jnp.where(after_BJ < texts.text_len[:, None], chosen_BJ, -1)
        count_B = accept(tree, chosen_BJ).count
        slot_B = jnp.where(is_running_B, num_steps_B, slots)
        return (
            jnp.where(is_running_B, root_B + count_B + 1, root_B),
            accepted_BS.at[place_B, slot_B].set(count_B, mode="drop"),
            num_steps_B + is_running_B.astype(jnp.int32),
        )

    start = texts.prompt_len, jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32)
    _, accepted_BS, num_steps_B = lax.while_loop(goes_on, body, start)
    return accepted_BS, num_steps_B


def _grow(
    target: Target,
    cache: Latents,
    seen: _Seen,
    texts: Texts,
    pos_B: Int[Array, "B"],
    is_running_B: Bool[Array, "B"],
    shape: TreeConfig,
) -> Tree:
    """The tree below the token at `pos_B`, by the rule of `propose`, from the target itself.

    The first level was seen when the text was read. Each further one is a target pass over all
    beams so far, of which only the new ones' continuations are wanted.
    """
    k, levels = shape.branches, shape.levels
    batch, num_rows = pos_B.shape[0], (levels - 1) * k
    depth_T = jnp.asarray(np.repeat(np.arange(1, levels, dtype=np.int32), k))

    def at_root(values: jax.Array) -> jax.Array:
        return values.at[jnp.arange(batch), pos_B].get(mode="clip")

    first = at_root(seen.log_prob), at_root(seen.token)
    beams = (
        *first,
        jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k)),  # their pool indices
        jnp.zeros((batch, k, num_rows), bool),  # the rows of their chains
    )
    rows = jnp.zeros((batch, num_rows), jnp.int32), jnp.zeros((batch, num_rows, num_rows), bool)

    def level(carry, depth):
        (token_BT, sees_BTT), (score_BW, token_BW, pool_BW, chain_BWT) = carry
        row = (depth - 1) * k
        own_WT = row + jnp.arange(k)[:, None] == jnp.arange(num_rows)[None]
        chain_BWT = chain_BWT | own_WT[None]
        token_BT = lax.dynamic_update_slice_in_dim(token_BT, token_BW, row, axis=1)
        sees_BTT = lax.dynamic_update_slice_in_dim(sees_BTT, chain_BWT, row, axis=1)
        at = Pass(
            pos_B[:, None] + depth_T[None],
            pos_B + 1,
            sees_BTT,
            is_running_B[:, None] & (depth_T <= depth)[None],
        )
        out = target(TargetIds(token_BT, target.config.vocab_size), at, cache, None)
        hidden_BWD = lax.dynamic_slice_in_dim(out.hidden, row, k, axis=1)
        log_prob_BWV = _log_probs(target.logits(hidden_BWD), texts.sampling)
        log_prob_BWM, next_token_BWM = lax.top_k(log_prob_BWV, k)
        candidate_BI = (score_BW[:, :, None] + log_prob_BWM).reshape(batch, k * k)
        token_BI = next_token_BWM.reshape(batch, k * k)
        parent_BI = jnp.repeat(pool_BW, k, axis=1)
        next_score_BW, best_BW = lax.top_k(candidate_BI, k)
        beams = (
            next_score_BW,
            jnp.take_along_axis(token_BI, best_BW, axis=1),
            k + (depth - 1) * k * k + best_BW,
            jnp.take_along_axis(chain_BWT, (best_BW // k)[:, :, None], axis=1),
        )
        return ((token_BT, sees_BTT), beams), (candidate_BI, token_BI, parent_BI)

    deeper = None
    if levels > 1:
        _, deeper = lax.scan(level, (rows, beams), jnp.arange(1, levels, dtype=jnp.int32))
    return build_from_levels(at_root(texts.tokens), first, deeper, nodes=shape.nodes)


@typed
def _log_probs(logits_BTV: Float[Array, "B T V"], sampling: Sampling) -> Float[Array, "B T V"]:
    """Log-probabilities of what `sampling.choose` chooses: after temperature and all that cuts.

    Greedy choice is certain: 0 for the likeliest token, -inf for all others.
    """
    logits_BTV = jnp.where(jnp.isnan(logits_BTV), -jnp.inf, logits_BTV)
    is_sampled_B11 = (sampling.temperature > 0)[:, None, None]
    score_BTV = logits_BTV / jnp.where(is_sampled_B11, sampling.temperature[:, None, None], 1.0)
    is_kept_BTV = keep_top(score_BTV, sampling)
    sampled_BTV = jax.nn.log_softmax(jnp.where(is_kept_BTV, score_BTV, -jnp.inf), axis=-1)
    best_BT1 = jnp.argmax(logits_BTV, axis=-1)[..., None]
    is_best_BTV = jnp.arange(logits_BTV.shape[-1])[None, None] == best_BT1
    return jnp.where(is_sampled_B11, sampled_BTV, jnp.where(is_best_BTV, 0.0, -jnp.inf))
