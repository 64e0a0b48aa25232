"""A draft over whole texts, teacher-forced, against what the target says of them.

As training-time test does it (arXiv:2503.01840): row t pairs the features of t with token t + 1;
the d-th drafted token of row t is guessed from the draft's own hidden state, with the text's own
tokens in between, and sees the committed rows up to t and its own chain. That is also what engines
compute in a step of a chain whose drafted tokens were accepted so far.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxspec.aliases import Progress
from jaxspec.cache import joined
from jaxspec.config import TreeConfig
from jaxspec.contracts import Features, TargetIds
from jaxspec.dims import typed
from jaxspec.doctor_readings import Case
from jaxspec.doctor_texts import Text, loop_start
from jaxspec.draft import Borrowed
from jaxspec.errors import InputError
from jaxspec.layers import full_f32
from jaxspec.mla import Pass
from jaxspec.recording import RecordConfig, record
from jaxspec.target import Ends, Target

__all__ = ["DoctorConfig", "Scores", "States", "read_states", "score_all"]

SPREAD = 0.01
"""Share of a draft's mass that is spread over the vocabulary before it is scored: a token that it
cannot say then costs something finite."""
SLOTS = 128
"""Of the draft's cache, which is empty and read by none."""


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """What is measured.

    Attributes:
      levels: drafted tokens per step of the chain.
      top: how many guesses count for top-k agreement.
      batch_size: texts at a time.
      tree: whose accept_length and ceiling are wanted beside the chain's; None for none.
    """

    levels: int = 3
    top: int = 4
    batch_size: int = 8
    tree: TreeConfig | None = None

    def check(self) -> None:
        """Raises InputError where nothing can be measured so."""
        if self.levels < 1 or self.top < 1 or self.batch_size < 1:
            raise InputError("levels, top and batch_size start at 1")
        if self.tree is not None:
            self.tree.check()


@dataclasses.dataclass(frozen=True)
class States:
    """What one target pass leaves of some texts.

    Attributes:
      tokens: [B,T], zero past each text's length.
      boundaries: by number, [B,T,D]; the last one is always there, since logits come of it.
      looping: ids of the texts that repeat themselves, which are not among `texts`: any draft
        foresees a loop.
    """

    texts: tuple[Text, ...]
    tokens: np.ndarray
    boundaries: dict[int, np.ndarray]
    looping: tuple[str, ...]


def read_states(
    target: Target,
    texts: Sequence[Text],
    boundaries: Sequence[int],
    batch_size: int = 8,
    progress: Progress | None = None,
) -> States:
    """The target's states of the texts that do not loop, in one pass.

    Raises:
      InputError: no text is left, or one is of a single token.
    """
    short = [text.id for text in texts if len(text.ids) < 2]
    if short:
        raise InputError(f"prompt {short[0]!r} is a single token: a draft guesses after two")
    loops = [loop_start(text.ids) is not None for text in texts]
    looping = tuple(text.id for text, is_loop in zip(texts, loops, strict=True) if is_loop)
    kept = tuple(text for text, is_loop in zip(texts, loops, strict=True) if not is_loop)
    if not kept:
        raise InputError(f"all of {len(texts)} texts repeat themselves, which any draft foresees")
    last = target.config.num_hidden_layers
    config = RecordConfig(boundaries=tuple(sorted({*boundaries, last})), top=1)
    longest = max(len(text.ids) for text in kept)
    parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for some in itertools.batched(kept, batch_size):
        arrays = record(target, None, [text.ids for text in some], config).arrays
        for name in ("tokens", *(f"boundary.{b:03d}" for b in config.boundaries or ())):
            width = [(0, 0)] * arrays[name].ndim
            width[1] = (0, longest - arrays[name].shape[1])
            parts[name].append(np.pad(arrays[name], width))
        if progress is not None:
            progress("the target reads", len(parts["tokens"]), -(-len(kept) // batch_size))
    whole = {name: np.concatenate(some) for name, some in parts.items()}
    tokens = whole.pop("tokens")
    return States(kept, tokens, {int(name[-3:]): x for name, x in whole.items()}, looping)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "log_prob", "best"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class _Truth:
    """What the target says, padded by the drafted tokens: A is T + levels.

    Attributes:
      tokens: [B,A+1].
      log_prob: [B,A,V] of the token after each position.
      best: [B,A] the likeliest one.
    """

    tokens: Any
    log_prob: Any
    best: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["score", "agrees", "is_in_top", "is_next"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a draft's guesses, at every row and depth, [B,T,P].

    Attributes:
      score: expected log-probability, in nats, that the draft gives to the target's own token.
      agrees, is_in_top: whether the target's likeliest token is its first guess, or in its top-k.
      is_next: whether its first guess is the text's own token, as an accepted one is.
    """

    score: Any
    agrees: Any
    is_in_top: Any
    is_next: Any


def score_all(
    target: Ends,
    states: States,
    cases: Sequence[Case],
    config: DoctorConfig,
    progress: Progress | None,
) -> list[Scores]:
    """The scores of every case, and those of a draft that knew the target at the end."""
    graph, params = nnx.split(target)
    lent, last = Borrowed.of(target), target.config.num_hidden_layers
    done: list[list[Any]] = []
    batches = list(itertools.batched(range(len(states.texts)), config.batch_size))
    for batch in batches:
        rows = [*batch, *[batch[-1]] * (config.batch_size - len(batch))]
        tokens = np.pad(states.tokens[rows], ((0, 0), (0, config.levels + 1)))
        truth = _truth(graph, config.levels, params, tokens, states.boundaries[last][rows])
        some = []
        for index, case in enumerate(cases):
            some.append(_run(target, states, rows, case, truth, lent, config))
            if progress is not None:
                number = len(done) * len(cases) + index + 1
                progress("the draft reads", number, len(batches) * len(cases))
        some.append(_perfect(config.levels, truth))
        done.append(jax.device_get(some))
    count = len(states.texts)  # what filled up the last batch stands after them
    return [
        jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *one)
        for one in zip(*done, strict=True)
    ]


def _run(
    target: Ends,
    states: States,
    rows: Sequence[int],
    case: Case,
    truth: _Truth,
    lent: Borrowed,
    config: DoctorConfig,
) -> Scores:
    """The scores of one case on some texts."""
    dtype = case.draft.numerics.jnp_dtype
    chunks = [jnp.asarray(states.boundaries[b][rows]) for b in case.boundaries]
    if case.final_norm:
        chunks = [target.norm(chunk) for chunk in chunks]
    # What would come from before a text, or from behind it, is in no row that counts.
    features_BTG = jnp.roll(jnp.concatenate(chunks, axis=-1), case.lag, axis=1).astype(dtype)
    graph, params = nnx.split(case.draft)
    borrowed = lent.embed.astype(dtype), lent.head.astype(dtype)
    return _score(
        graph, config.levels, config.top, params, features_BTG, truth, borrowed,
        np.int32(case.drafted_pos),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("graph", "levels"))
def _truth(graph, levels, params, tokens, hidden_BTD):
    """What the target says, from its last boundary."""
    target = nnx.merge(graph, params)
    logits_BTV = target.logits(hidden_BTD)
    log_prob = jax.nn.log_softmax(jnp.pad(logits_BTV, ((0, 0), (0, levels), (0, 0))), axis=-1)
    best = jnp.argmax(log_prob, axis=-1).astype(jnp.int32)
    return _Truth(tokens, log_prob, best)


@functools.partial(jax.jit, static_argnames="levels")
def _perfect(levels, truth):
    """The scores of a draft that guesses the target's likeliest token."""
    num_rows = truth.best.shape[1] - levels
    scores = []
    for depth in range(levels):
        best_BT = truth.best[:, depth + 1 : depth + 1 + num_rows]
        log_prob = truth.log_prob[:, depth + 1 : depth + 1 + num_rows]
        score = jnp.sum(jnp.exp(log_prob) * log_prob, axis=-1)
        yes = jnp.ones(best_BT.shape, bool)
        is_next = best_BT == truth.tokens[:, depth + 2 : depth + 2 + num_rows]
        scores.append(Scores(score, yes, yes, is_next))
    return jax.tree.map(lambda *of_depths: jnp.stack(of_depths, axis=-1), *scores)


@functools.partial(jax.jit, static_argnames=("graph", "levels", "top"))
def _score(graph, levels, top, params, features_BTG, truth, borrowed, drafted_pos):
    """The draft over whole texts: all rows at once, and depth after depth."""
    draft, lent = nnx.merge(graph, params), Borrowed(*borrowed)
    batch, length = features_BTG.shape[:2]
    row_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    nothing_B, cache = jnp.zeros((batch,), jnp.int32), draft.empty_cache(batch, SLOTS)
    committed_TT, own_TT = jnp.tri(length, dtype=bool), jnp.eye(length, dtype=bool)
    out, earlier, scores = None, cache, []
    for depth in range(levels):
        ids = truth.tokens[:, depth + 1 : depth + 1 + length]
        tokens = TargetIds(ids, draft.config.vocab_size)
        if out is None:
            features = Features(features_BTG, draft.config.boundaries)
            out = draft.fuse(features, tokens, Pass(row_BT, nothing_B), cache, lent)
            earlier = out.rows
        else:
            sees_TS = jnp.concatenate([committed_TT, *[own_TT] * depth], axis=-1)
            sees_BTS = jnp.broadcast_to(sees_TS[None], (batch, *sees_TS.shape))
            at = Pass(row_BT + depth + drafted_pos, nothing_B, sees_BTS)
            out = draft.recur(out.recurrent, tokens, at, cache, earlier, lent)
            earlier = joined(earlier, out.rows)
        logits_BTU = draft.logits(out.recurrent, lent)
        scores.append(_judged(logits_BTU, draft.target_of_draft[...], truth, depth + 1, top))
    return jax.tree.map(lambda *of_depths: jnp.stack(of_depths, axis=-1), *scores)


@full_f32
@typed
def _judged(
    logits_BTU: Float[Array, "B T U"],
    tokens_U: Int[Array, "U"],
    truth: _Truth,
    after: int,
    top: int,
) -> Scores:
    """The scores of guesses about what follows `after` positions later."""
    rows = slice(after, after + logits_BTU.shape[1])
    log_prob_BTV, best_BT = truth.log_prob[:, rows], truth.best[:, rows]
    floor = jnp.log(SPREAD / log_prob_BTV.shape[-1])
    spread_BTU = jnp.logaddexp(jnp.log1p(-SPREAD) + jax.nn.log_softmax(logits_BTU, axis=-1), floor)
    share_BTU = jnp.exp(log_prob_BTV[..., tokens_U])
    score_BT = floor + jnp.sum(share_BTU * (spread_BTU - floor), axis=-1)
    score_BT = jnp.where(jnp.isnan(score_BT), floor, score_BT)  # numbers that overflow say nothing
    _, first_BTM = jax.lax.top_k(logits_BTU, min(top, logits_BTU.shape[-1]))
    guess_BTM = tokens_U[first_BTM]
    guess_BT = guess_BTM[..., 0]
    return Scores(
        score_BT,
        guess_BT == best_BT,
        (guess_BTM == best_BT[..., None]).any(axis=-1),
        guess_BT == truth.tokens[:, after + 1 : after + 1 + logits_BTU.shape[1]],
    )
