"""Drives jaxspec's step and the slow oracle over the same requests, and compares what they did."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec import step as steps
from jaxspec.config import TreeConfig
from jaxspec.draft import Borrowed, Draft
from jaxspec.propose import propose
from jaxspec.sampling import Sampling, gumbel_noise
from jaxspec.step import Admission, Settings, State
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
    seed: int = 0

    def choose(self, vocab_size: int) -> Callable[[np.ndarray, int], Choice]:
        """The oracle's way to choose the request's tokens."""
        if not self.temperature:
            return greedy

        def noise(position: int) -> np.ndarray:
            seed, pos = jnp.full((1,), self.seed, jnp.uint32), jnp.full((1, 1), position)
            return np.asarray(gumbel_noise(seed, pos, vocab_size)[0, 0], np.float64)

        return sampler(noise, self.temperature, self.top_k, self.top_p)


class Stepper:
    """jaxspec's `prefill` and `step`, compiled once for a batch size and a tree, one at a time."""

    def __init__(
        self, target: Target, draft: Draft, tree: TreeConfig, batch: int, slots: int, chunk: int
    ) -> None:
        capture = target.boundaries(draft.config.boundaries.ids, "test")
        settings = Settings(tree, capture, (), chunk)
        graph, self.params = nnx.split((target, draft))
        self.batch, self.slots = batch, slots
        self.empty = functools.partial(steps.empty_state, target, draft, batch, slots)

        def admit(params, state: State, new: Admission) -> State:
            return steps.prefill(*nnx.merge(graph, params), state, new, settings)

        def advance(params, state: State):
            target, draft = nnx.merge(graph, params)
            borrowed = Borrowed(target.embed[...], target.head[...])
            drafted = propose(
                draft, state.seed, state.root, state.length, state.draft_cache, borrowed, tree
            )
            return drafted.tokens, drafted.parent, steps.step(target, draft, state, settings)

        self.admit, self.advance = jax.jit(admit), jax.jit(advance)

    def run(self, requests: Sequence[Request], num_tokens: int) -> list[tuple[int, list[Step]]]:
        """The first token and the steps of every request, until all have `num_tokens`."""
        prompts = np.zeros((self.batch, self.slots), np.int32)
        for b, request in enumerate(requests):
            prompts[b, : len(request.prompt)] = request.prompt
        column = lambda name, dtype: jnp.array([getattr(r, name) for r in requests], dtype)  # noqa: E731
        new = Admission(
            jnp.ones(self.batch, bool),
            jnp.asarray(prompts),
            jnp.array([len(request.prompt) for request in requests]),
            jnp.full(self.batch, num_tokens),
            Sampling(
                column("seed", jnp.uint32),
                column("temperature", jnp.float32),
                column("top_k", jnp.int32),
                column("top_p", jnp.float32),
            ),
        )
        state = self.admit(self.params, self.empty(), new)
        firsts, runs = state.tokens[:, 0].tolist(), [[] for _ in requests]
        while (state.status == steps.Status.RUNNING).any():
            before = state
            tokens, parents, state = self.advance(self.params, before)
            for b, run in enumerate(runs):
                old, new_count = int(before.num_tokens[b]), int(state.num_tokens[b])
                if new_count > old:
                    emitted = state.tokens[b, old:new_count].tolist()
                    accepted = int(state.accepted[b, before.num_steps[b]])
                    run.append(
                        Step(tokens[b].tolist(), parents[b].tolist(), accepted, emitted, 0.0)
                    )
        return list(zip(firsts, runs, strict=True))


def first_difference(
    oracle: Oracle,
    request: Request,
    tree: TreeConfig,
    num_tokens: int,
    ours: tuple[int, list[Step]],
) -> tuple[str, float] | None:
    """Where a run departs from the oracle's, and by what margin the oracle decided there.

    None where they agree to the end. Of the last step, which the limit may cut short, only what was
    emitted is compared.
    """
    first, run = oracle.run(
        list(request.prompt), tree.levels, tree.branches, tree.nodes, num_tokens
    )
    if ours[0] != first.token:
        return f"first token {ours[0]}, not {first.token}", first.margin
    left = num_tokens - 1
    for index, (mine, theirs) in enumerate(zip(ours[1], run, strict=False)):
        for name in ("tokens", "parents", "accepted", "emitted"):
            got, wanted = getattr(mine, name), getattr(theirs, name)
            if name == "emitted":
                wanted = wanted[:left]
            if name == "accepted":
                wanted = min(wanted, left)
            if got != wanted:
                return f"step {index}: {name} {got}, not {wanted}", theirs.margin
        left -= len(theirs.emitted)
    if len(ours[1]) != len(run):
        return f"{len(ours[1])} steps, not {len(run)}", 0.0
    return None
