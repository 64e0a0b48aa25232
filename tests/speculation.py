"""Drives jaxspec's step and the slow oracle over the same requests, and compares what they did."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec import step as steps
from jaxspec.config import TreeConfig
from jaxspec.draft import Borrowed, Draft
from jaxspec.propose import propose
from jaxspec.sampling import Sampling, gumbel_noise
from jaxspec.step import NUM_STOP_IDS, Admission, Settings, State
from jaxspec.target import Target
from tests.reference.eagle import Choice, Oracle, Step, greedy, sampler

NEAR_TIE = 1e-4
"""Decisions taken by less may fall otherwise in float32."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how its tokens are chosen."""

    prompt: tuple[int, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def choose(self, vocab_size: int) -> Callable[[np.ndarray, int], Choice]:
        """The oracle's way to choose the request's tokens."""
        if not self.temperature:
            return greedy

        return sampler(
            functools.partial(_noise, self.seed, vocab_size),
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
        )


@functools.cache
def _noise(seed: int, vocab_size: int, position: int) -> np.ndarray:
    """jaxspec's noise for a position, [V]: the one thing the oracle takes from it."""
    seeds, positions = jnp.full((1,), seed, jnp.uint32), jnp.full((1, 1), position)
    return np.asarray(gumbel_noise(seeds, positions, vocab_size)[0, 0], np.float64)


class Stepper:
    """jaxspec's `prefill` and `step`, a step at a time, for batches of one size.

    Args:
      optimise: as usual; without it, programs that run for moments compile in half the time.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        batch: int,
        slots: int,
        chunk: int,
        *,
        optimise: bool = True,
    ) -> None:
        capture = target.boundaries(draft.config.boundaries.ids, "test")
        graph, self.params = nnx.split((target, draft))
        self.batch, self.slots = batch, slots
        empty = steps.empty_state(target, draft, batch, slots)
        # A slot that was read before it was filled would show.
        nan = functools.partial(jax.tree.map, lambda slots: jnp.full_like(slots, jnp.nan))
        self.empty = dataclasses.replace(
            empty, target_cache=nan(empty.target_cache), draft_cache=nan(empty.draft_cache)
        )

        def admit(params, state: State, new: Admission) -> State:
            settings = Settings(None, capture, chunk)
            return steps.prefill(*nnx.merge(graph, params), state, new, settings)

        def advance(params, state: State, tree: TreeConfig):
            target, draft = nnx.merge(graph, params)
            borrowed = Borrowed.of(target)
            drafted = propose(
                draft, state.seed, state.root, state.length, state.draft_cache, borrowed, tree
            )
            settings = Settings(tree, capture, chunk)
            after = steps.step(target, draft, state, settings)
            return drafted.tokens, drafted.parent, after

        options = {} if optimise else {"xla_backend_optimization_level": 0}
        self.admit = jax.jit(admit, compiler_options=options)
        self.advance = jax.jit(advance, static_argnames="tree", compiler_options=options)

    def run(
        self, requests: Sequence[Request], tree: TreeConfig, num_tokens: int
    ) -> list[tuple[int, list[Step]]]:
        """The first token and the steps of every request, until all have `num_tokens`."""
        prompts = np.zeros((self.batch, self.slots), np.int32)
        for b, request in enumerate(requests):
            prompts[b, : len(request.prompt)] = request.prompt

        def column(name: str, dtype) -> jax.Array:
            return jnp.array([getattr(request, name) for request in requests], dtype)

        new = Admission(
            jnp.ones(self.batch, bool),
            jnp.asarray(prompts),
            jnp.array([len(request.prompt) for request in requests]),
            jnp.full(self.batch, num_tokens),
            jnp.full((self.batch, NUM_STOP_IDS), -1),
            Sampling(
                column("seed", jnp.uint32),
                column("temperature", jnp.float32),
                column("top_k", jnp.int32),
                column("top_p", jnp.float32),
                column("min_p", jnp.float32),
            ),
        )
        state = self.admit(self.params, self.empty, new)
        firsts, runs = state.tokens[:, 0].tolist(), [[] for _ in requests]
        while (state.status == steps.Status.RUNNING).any():
            before = state
            tokens, parents, state = self.advance(self.params, before, tree)
            for b, run in enumerate(runs):
                old, new_count = int(before.num_tokens[b]), int(state.num_tokens[b])
                if new_count > old:
                    emitted = state.tokens[b, old:new_count].tolist()
                    accepted = int(state.accepted[b, before.num_steps[b]])
                    run.append(Step(tokens[b].tolist(), parents[b].tolist(), accepted, emitted))
        return list(zip(firsts, runs, strict=True))


class Difference(NamedTuple):
    """Where two runs part, and the least margins by which the oracle decided up to there."""

    what: str
    margin: float
    router_margin: float

    @property
    def is_near_tie(self) -> bool:
        return min(self.margin, self.router_margin) < NEAR_TIE


def differences(
    oracle: Oracle,
    request: Request,
    tree: TreeConfig,
    num_tokens: int,
    ours: tuple[int, list[Step]],
) -> Iterator[Difference]:
    """The steps in which a run departs from the oracle's.

    After each, the oracle goes on from what the run emitted, so that one near-tie in a tree hides
    nothing behind it. Of the last step, which the limit may cut short, only what was emitted is
    compared.
    """
    first, run = ours
    wanted_first = oracle.first(list(request.prompt))
    if first != wanted_first.token:
        router_margin = oracle.target.run(request.prompt).margins.min()
        what = f"first token {first}, not {wanted_first.token}"
        yield Difference(what, wanted_first.margin, router_margin)
    shape = tree.levels, tree.branches, tree.nodes
    tokens, left = [*request.prompt, first], num_tokens - 1
    wanted = oracle.steps(tokens, *shape)
    for index, mine in enumerate(run):
        theirs = next(wanted)
        cut = dataclasses.replace(
            theirs, accepted=min(theirs.accepted, left), emitted=theirs.emitted[:left]
        )
        tokens, left = tokens + mine.emitted, left - len(mine.emitted)
        for name in ("tokens", "parents", "accepted", "emitted"):
            if getattr(mine, name) != getattr(cut, name):
                what = f"step {index}: {name} {getattr(mine, name)}, not {getattr(cut, name)}"
                yield Difference(what, theirs.margin, theirs.router_margin)
                wanted = oracle.steps(tokens, *shape)
                break
    assert left == 0
