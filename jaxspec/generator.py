"""Generation: requests in, completions out, over the two compiled programs of `step.py`.

Not a server: a fixed number of places, filled from a list of requests as they come free.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import TreeConfig
from jaxspec.contracts import Boundaries
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.sampling import Sampling
from jaxspec.step import Admission, Settings, State, Status, decode, empty_state, prefill
from jaxspec.target import Target

__all__ = ["Completion", "GenerateConfig", "Generator", "Request", "Run"]

Finish = Literal["eos", "stop", "length", "capacity"]


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How a batch is generated.

    Attributes:
      tree: shape of the draft tree; None decodes plainly, and no draft is used.
      max_new_tokens: of a request that does not say.
      context_length: prompt and completion together, per place; sizes the caches.
      batch_size: places.
      prefill_chunk: prompt tokens per target pass.
      ignore_eos: go on past end-of-sequence.
      steps_per_call: steps between two looks at the tokens (streaming, stop strings, refilling).
    """

    tree: TreeConfig | None
    max_new_tokens: int = 128
    context_length: int = 2048
    batch_size: int = 1
    prefill_chunk: int = 128
    ignore_eos: bool = False
    steps_per_call: int = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how its tokens are chosen; see `sampling.Sampling`."""

    prompt_ids: tuple[int, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a request gave.

    Attributes:
      tokens: the emitted ids; an end-of-sequence token is the last of them.
      finish: why it ended: "capacity" is a context that was full before `max_new_tokens`.
      accepted: drafted tokens accepted in each verify step; the first token comes from prefill.
      prefill_ms, decode_ms: wall time of the calls it took part in.
    """

    tokens: tuple[int, ...]
    finish: Finish
    accepted: tuple[int, ...]
    prefill_ms: float
    decode_ms: float


@dataclasses.dataclass(frozen=True)
class Run:
    """The completions of all requests, in their order, and the wall time of all calls together."""

    completions: tuple[Completion, ...]
    prefill_ms: float
    decode_ms: float


@dataclasses.dataclass
class _Place:
    """A request in the batch."""

    index: int
    request: Request
    limit: int
    prefill_ms: float
    decode_ms: float = 0.0
    num_reported: int = 0


class Generator:
    """A target, a draft and a config, compiled once for requests of every length.

    Attributes:
      compile_s: seconds that tracing and compiling took.
      num_traces: how often each program was traced; it stays at one.
      capture: the claim the features are stamped with; None without a draft.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        config: GenerateConfig,
        capture: Boundaries | None = None,
    ) -> None:
        """Compiles; contract errors are raised here, while tracing.

        Args:
          capture: the boundaries the target reports; None takes those the draft claims.

        Raises:
          ContractError: draft and target do not belong together.
          InputError: a config that cannot run.
        """
        if (draft is None) != (config.tree is None):
            raise InputError("a draft wants a tree and a tree a draft: one of the two is missing")
        if config.tree is not None:
            config.tree.check()
            if config.tree.branches > draft.config.draft_vocab_size:
                raise InputError(
                    f"tree {config.tree}: {config.tree.branches} branches over a draft vocabulary "
                    f"of {draft.config.draft_vocab_size}"
                )
        for name in ("max_new_tokens", "batch_size", "prefill_chunk", "steps_per_call"):
            if getattr(config, name) < 1:
                raise InputError(f"{name} is {getattr(config, name)}; it starts at 1")
        if config.context_length < 2:
            raise InputError(f"context_length is {config.context_length}; it starts at 2")
        if capture is None and draft is not None:
            capture = target.boundaries(
                draft.config.boundaries.ids, "target capture, as the draft's claim asks"
            )
        stop_ids = () if config.ignore_eos else target.config.eos_token_ids
        self.config, self.capture = config, capture
        self.num_traces = {"prefill": 0, "decode": 0}
        self._vocab_size = target.config.vocab_size
        self._settings = Settings(config.tree, capture, stop_ids, config.prefill_chunk)
        graph, self._params = nnx.split((target, draft))
        new_state = functools.partial(
            empty_state, target, draft, config.batch_size, config.context_length
        )
        started = time.perf_counter()
        state, new = jax.eval_shape(new_state), jax.eval_shape(self._admission)
        self._prefill = self._compile("prefill", prefill, graph, state, new)
        max_steps = jax.ShapeDtypeStruct((), jnp.int32)
        self._decode = self._compile("decode", decode, graph, state, max_steps)
        self.compile_s = time.perf_counter() - started
        self._state: State = jax.jit(new_state)()

    def _compile(self, name: str, program: Callable, graph, state, argument) -> Callable:
        def traced(params, state, argument):
            self.num_traces[name] += 1
            return program(*nnx.merge(graph, params), state, argument, self._settings)

        return jax.jit(traced, donate_argnums=1).lower(self._params, state, argument).compile()

    def run(
        self,
        requests: Sequence[Request],
        should_stop: Callable[[int, Sequence[int]], int | None] | None = None,
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> Run:
        """The completions of the requests, as many at a time as there are places.

        Args:
          should_stop: called with a request's index and its tokens so far; a number of tokens
            to keep ends the request there, with finish "stop".
          on_tokens: called with a request's index and all its tokens so far, whenever there are
            more; tokens that `should_stop` cuts off are never shown.
          on_finish: called with a request's index and its completion, as soon as it is there.

        Raises:
          InputError: a request that cannot be served; nothing is generated.
          FloatingPointError: the target's logits were NaN.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        waiting = list(enumerate(requests))[::-1]
        places: list[_Place | None] = [None] * self.config.batch_size
        completions: list[Completion | None] = [None] * len(requests)
        prefill_ms = decode_ms = 0.0
        while waiting or any(places):
            admitted = [b for b, place in enumerate(places) if place is None][: len(waiting)]
            if admitted:
                for b in admitted:
                    index, request = waiting.pop()
                    places[b] = _Place(index, request, self._limit(request), 0.0)
                took_ms = self._timed(self._prefill, self._admission(places, admitted))
                prefill_ms += took_ms
                for b in admitted:
                    places[b].prefill_ms = took_ms
                self._collect(places, completions, should_stop, on_tokens, on_finish)
                if not any(places):
                    continue
            took_ms = self._timed(self._decode, np.int32(self.config.steps_per_call))
            decode_ms += took_ms
            for place in filter(None, places):
                place.decode_ms += took_ms
            self._collect(places, completions, should_stop, on_tokens, on_finish)
        return Run(tuple(completions), prefill_ms, decode_ms)

    def _check(self, index: int, request: Request) -> None:
        who, ids = f"request {index}", request.prompt_ids
        if not ids:
            raise InputError(f"{who}: the prompt is empty")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise InputError(f"{who}: token id {bad} is not in a vocabulary of {self._vocab_size}")
        if len(ids) >= self.config.context_length:
            raise InputError(
                f"{who}: a prompt of {len(ids)} tokens leaves no room for a new one in a context "
                f"of {self.config.context_length}; raise context_length (--context-length)"
            )
        if not 0 <= request.temperature < float("inf"):
            raise InputError(f"{who}: temperature is {request.temperature}; it must be 0 or more")
        if not 0 < request.top_p <= 1:
            raise InputError(f"{who}: top_p is {request.top_p}; it lies above 0 and up to 1")
        if request.top_k < 0:
            raise InputError(f"{who}: top_k is {request.top_k}; 0 is off, else it is positive")
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise InputError(f"{who}: max_new_tokens is {request.max_new_tokens}; it starts at 1")

    def _limit(self, request: Request) -> int:
        wanted = request.max_new_tokens or self.config.max_new_tokens
        return min(wanted, self.config.context_length - len(request.prompt_ids))

    def _admission(
        self, places: Sequence[_Place | None] = (), admitted: Iterable[int] = ()
    ) -> Admission:
        """The programs' input for the requests in the places `admitted`."""
        batch = self.config.batch_size
        prompt = np.zeros((batch, self.config.context_length), np.int32)
        is_admitted, prompt_len = np.zeros(batch, bool), np.ones(batch, np.int32)
        limit, top_k = np.ones(batch, np.int32), np.zeros(batch, np.int32)
        seed, temperature = np.zeros(batch, np.uint32), np.zeros(batch, np.float32)
        top_p = np.ones(batch, np.float32)
        for b in admitted:
            place = places[b]
            ids, request = place.request.prompt_ids, place.request
            is_admitted[b], prompt_len[b], limit[b] = True, len(ids), place.limit
            prompt[b, : len(ids)] = ids
            seed[b] = request.seed % 2**32
            temperature[b], top_k[b], top_p[b] = request.temperature, request.top_k, request.top_p
        return Admission(
            is_admitted, prompt, prompt_len, limit, Sampling(seed, temperature, top_k, top_p)
        )

    def _timed(self, program: Callable, argument) -> float:
        """Milliseconds that a program took to update the state."""
        started = time.perf_counter()
        self._state = jax.block_until_ready(program(self._params, self._state, argument))
        return 1e3 * (time.perf_counter() - started)

    def _collect(self, places, completions, should_stop, on_tokens, on_finish) -> None:
        """Reports new tokens, and turns places that ended into completions."""
        state = self._state
        status, tokens, num_tokens, accepted, num_steps = jax.device_get(
            (state.status, state.tokens, state.num_tokens, state.accepted, state.num_steps)
        )
        stopped = []
        for b, place in enumerate(places):
            if place is None:
                continue
            if status[b] == Status.NOT_A_NUMBER:
                raise FloatingPointError(
                    f"request {place.index}: the target's logits are NaN after "
                    f"{num_tokens[b]} new tokens; a weight or an activation overflowed"
                )
            mine = tokens[b, : num_tokens[b]].tolist()
            is_new = len(mine) > place.num_reported
            keep = should_stop(place.index, mine) if should_stop and is_new else None
            shown = mine if keep is None else mine[:keep]
            if on_tokens and len(shown) > place.num_reported:
                on_tokens(place.index, shown)
            place.num_reported = len(shown)
            if keep is None and status[b] == Status.RUNNING:
                continue
            if keep is not None:
                finish: Finish = "stop"
                stopped.append(b)
            elif status[b] == Status.EOS:
                finish = "eos"
            else:
                wanted = place.request.max_new_tokens or self.config.max_new_tokens
                finish = "length" if place.limit == wanted else "capacity"
            steps = _steps_until(accepted[b, : num_steps[b]].tolist(), len(shown))
            completion = Completion(tuple(shown), finish, steps, place.prefill_ms, place.decode_ms)
            completions[place.index] = completion
            places[b] = None
            if on_finish:
                on_finish(place.index, completion)
        if stopped:
            idle = state.status.at[np.asarray(stopped)].set(Status.IDLE)
            self._state = dataclasses.replace(state, status=idle)


def _steps_until(accepted: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The steps that emitted the first `num_tokens` tokens, the last one's count cut to them.

    The first token comes from prefill; a step of `a` accepted drafted tokens emits those and a
    bonus token.
    """
    steps, left = [], num_tokens - 1
    for count in accepted:
        if left <= 0:
            break
        steps.append(min(count, left))
        left -= count + 1
    return tuple(steps)
