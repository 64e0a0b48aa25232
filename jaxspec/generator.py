"""Generation: requests in, completions out, over the two compiled programs of `step.py`.

A fixed number of places, filled from the requests as they come free. What runs in one place changes
nothing in the others.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.collectives import padded_slots
from jaxspec.config import TargetConfig, TreeConfig
from jaxspec.contracts import Boundaries
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.kernels import expert_matmul, mla_attention, tree_verify
from jaxspec.requests import Completion, Finish, Piece, Request, Run, sampling_of
from jaxspec.sharding import devices_of, specs_of
from jaxspec.step import (
    NUM_STOP_IDS,
    Admission,
    Settings,
    State,
    Status,
    compiler_options,
    decode,
    empty_state,
    prefill,
)
from jaxspec.target import Target

__all__ = [
    "GenerateConfig",
    "Generator",
    "Stream",
    "implementations",
]

DEFAULT_CONTEXT = 2048
ShouldStop = Callable[[int, Sequence[int]], int | None]


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """How a batch is generated.

    Attributes:
      tree: shape of the draft tree; None decodes plainly, and no draft is used.
      max_new_tokens: of a request that does not say.
      context_length: prompt and completion together, per place; sizes the caches. None takes
        2048, or what the target was made for if that is less.
      batch_size: places.
      prefill_chunk: prompt tokens per target pass.
      ignore_eos: go on past end-of-sequence.
      steps_per_call: steps between two looks at the tokens (streaming, stop strings, refilling).
    """

    tree: TreeConfig | None
    max_new_tokens: int = 128
    context_length: int | None = None
    batch_size: int = 1
    prefill_chunk: int = 128
    ignore_eos: bool = False
    steps_per_call: int = 16

    def check(self) -> None:
        """Raises InputError for what no target can run."""
        if self.tree is not None:
            self.tree.check()
        for name in ("max_new_tokens", "batch_size", "prefill_chunk", "steps_per_call"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it starts at 1")

    def slots(self, target: TargetConfig) -> int:
        """Tokens that a place has room for, with this target.

        Raises:
          InputError: more are asked for than the target was made for, or fewer than two.
        """
        most = target.max_position_embeddings
        slots = min(DEFAULT_CONTEXT, most) if self.context_length is None else self.context_length
        if not 2 <= slots <= most:
            raise InputError(
                f"context_length is {slots}; it starts at 2, and the target was made for {most} "
                "(config.json: max_position_embeddings)"
            )
        return slots


_NOT_FINITE = {
    Status.TARGET_NOT_FINITE: "the target's logits are NaN",
    Status.DRAFT_NOT_FINITE: "the draft's hidden state is not finite",
}


@dataclasses.dataclass
class _Place:
    """A request in the batch."""

    index: int
    request: Request
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    num_reported: int = 0


class Generator:
    """A target, a draft and a config, compiled once for requests of every length.

    Attributes:
      compile_s: seconds that tracing and compiling took.
      num_traces: how often each program was traced; it stays at one.
      capture: the claim the features are stamped with; None without a draft.
      slots: tokens, prompt and completion together, that a place has room for.
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
          InputError: a config that cannot run, on the mesh of the target's numerics.
        """
        if (draft is None) != (config.tree is None):
            raise InputError("a draft wants a tree and a tree a draft: one of the two is missing")
        config.check()
        if draft is not None and config.tree is not None:
            vocab_size = draft.config.draft_vocab_size
            if config.tree.branches > vocab_size:
                raise InputError(
                    f"tree {config.tree}: {config.tree.branches} branches over a draft vocabulary "
                    f"of {vocab_size}"
                )
        self._devices = devices_of(target, draft, config.batch_size)
        implementations(target, config)  # or what was asked for by name cannot run
        if capture is None and draft is not None:
            capture = target.asked_for(draft.config.boundaries)
        self.config, self.capture = config, capture
        self.num_traces = {"prefill": 0, "decode": 0}
        self.slots = config.slots(target.config)
        self._target = target.config
        self._settings = Settings(config.tree, capture, config.prefill_chunk)
        graph, self._params = nnx.split((target, draft))
        self._graph = graph
        if self._devices is not None:
            self._params = self._devices.put(self._params)
        new_state = functools.partial(empty_state, target, draft, config.batch_size, self.slots)
        started = time.perf_counter()
        state, new = jax.eval_shape(new_state), jax.eval_shape(self._admission)
        self._prefill = self._compile("prefill", prefill, graph, state, new)
        max_steps = jax.ShapeDtypeStruct((), jnp.int32)
        self._decode = self._compile("decode", decode, graph, state, max_steps)
        self.compile_s = time.perf_counter() - started
        where = None if self._devices is None else self._devices.shardings(state)
        self._state: State = jax.jit(new_state, out_shardings=where)()
        self._current: Stream | None = None

    def _compile(self, name: str, program: Callable, graph, state, argument) -> Callable:
        def traced(params, state, argument):
            self.num_traces[name] += 1
            return program(*nnx.merge(graph, params), state, argument, self._settings)

        devices, arguments = self._devices, (self._params, state, argument)
        if devices is not None:
            specs = specs_of(arguments, devices.config)
            traced = devices.spread(traced, specs, specs[1])
            arguments = devices.shapes(arguments)
        options = compiler_options(jax.default_backend())
        return jax.jit(traced, donate_argnums=1).lower(*arguments).compile(options)

    def _put(self, tree: Any) -> Any:
        """Inputs of a program, on the mesh's devices if there is one."""
        return tree if self._devices is None else self._devices.put(tree)

    def _fetch(self, tree: Any) -> Any:
        return jax.device_get(tree) if self._devices is None else self._devices.fetch(tree)

    def use(self, draft: Draft) -> None:
        """Goes on with other weights of the same draft; nothing is compiled again."""
        target, _ = nnx.merge(self._graph, self._params)
        self._params = self._put(nnx.split((target, draft))[1])

    def run(self, requests: Sequence[Request], should_stop: ShouldStop | None = None) -> Run:
        """The completions of the requests, as many at a time as there are places.

        Args:
          should_stop: see `stream`.

        Raises:
          InputError: a request that cannot be served whatever the capacity; nothing is generated.
            One whose prompt fills the context fails alone: see `Completion.error`.
          FloatingPointError: target or draft computed something that is not finite.
        """
        self.check(requests)
        stream = self.stream(requests, should_stop)
        done = {piece.index: piece.completion for piece in stream if piece.completion}
        completions = tuple(done[index] for index in range(len(requests)))
        return Run(completions, stream.prefill_ms, stream.decode_ms)

    def stream(
        self, requests: Iterable[Request], should_stop: ShouldStop | None = None
    ) -> "Stream":
        """The tokens of the requests while they come.

        Args:
          requests: asked for one when a place is free, so they may come from anywhere.
          should_stop: called with a request's index and its tokens so far, whenever there are
            more; a number of tokens to keep ends the request there, with finish "stop".

        The iterator raises:
          InputError: a request that cannot be served whatever the capacity.
          FloatingPointError: target or draft computed something that is not finite. What other
            requests got in the same call comes before.
          RuntimeError: another run of this generator has begun meanwhile.
        """
        return Stream(self, requests, should_stop)

    def admit(self, requests: Sequence[Request]) -> float:
        """Milliseconds that it takes to begin these requests, one for each place of the batch.

        With `decode`, for who measures: the programs that `stream` runs, one call at a time.
        """
        self._current = None  # an earlier run has lost its places
        self._set_idle(np.ones(self.config.batch_size, bool))
        return self._timed(self._prefill, self._admission(dict(enumerate(requests))))

    def decode(self) -> float:
        """Milliseconds that the next `steps_per_call` steps take, all in one call.

        Raises:
          FloatingPointError: target or draft computed something that is not finite.
          RuntimeError: a request came to its end within the steps.
        """
        took_ms = self._timed(self._decode, np.int32(self.config.steps_per_call))
        for status in self._fetch(self._state.status).tolist():
            if status in _NOT_FINITE:
                raise FloatingPointError(_NOT_FINITE[status])
            if status != Status.RUNNING:
                raise RuntimeError("a request came to its end within the steps")
        return took_ms

    @property
    def decode_hlo(self) -> str:
        """The text of the compiled program that `decode` runs."""
        return self._decode.as_text()

    def check(self, requests: Sequence[Request]) -> None:
        """Raises InputError for requests that cannot be served whatever the capacity."""
        for index, request in enumerate(requests):
            self._check(index, request)

    def _check(self, index: int, request: Request) -> None:
        try:
            request.check(self._target, self.config.ignore_eos)
        except InputError as error:
            raise InputError(f"request {index}: {error}") from None

    def _why_no_room(self, request: Request) -> str | None:
        """Why a prompt cannot have one token more; None where it can."""
        if len(request.prompt_ids) < self.slots:
            return None
        return (
            f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a new one in a "
            f"context of {self.slots}; raise context_length (--context-length)"
        )

    def _wanted(self, request: Request) -> int:
        return request.max_new_tokens or self.config.max_new_tokens

    def _limit(self, request: Request) -> int:
        return min(self._wanted(request), self.slots - len(request.prompt_ids))

    def _admission(self, admitted: Mapping[int, Request] = MappingProxyType({})) -> Admission:
        """The programs' input for requests and the places of the batch they get."""
        batch = self.config.batch_size
        prompt = np.zeros((batch, self.slots), np.int32)
        is_admitted, prompt_len = np.zeros(batch, bool), np.ones(batch, np.int32)
        limit, stop_ids = np.ones(batch, np.int32), np.full((batch, NUM_STOP_IDS), -1, np.int32)
        for b, request in admitted.items():
            ids = request.prompt_ids
            stop = request.all_stop_ids(self._target, self.config.ignore_eos)
            is_admitted[b], prompt_len[b], limit[b] = True, len(ids), self._limit(request)
            prompt[b, : len(ids)], stop_ids[b, : len(stop)] = ids, stop
        sampling = sampling_of(admitted, batch)
        return Admission(is_admitted, prompt, prompt_len, limit, stop_ids, sampling)

    def _timed(self, program: Callable, argument) -> float:
        """Milliseconds that a program took to update the state."""
        started = time.perf_counter()
        new = self._put(argument)
        self._state = jax.block_until_ready(program(self._params, self._state, new))
        return 1e3 * (time.perf_counter() - started)

    def _set_idle(self, is_stopped: np.ndarray) -> None:
        """Ends what runs in these places of the batch."""
        status = np.where(is_stopped, np.int32(Status.IDLE), self._fetch(self._state.status))
        new = self._put({"status": jnp.asarray(status)})
        self._state = dataclasses.replace(self._state, **new)


class Stream:
    """A run while it goes on: an iterator over its pieces, which come call by call.

    Attributes:
      prefill_ms, decode_ms: wall time of all calls so far.
    """

    def __init__(
        self, generator: Generator, requests: Iterable[Request], should_stop: ShouldStop | None
    ) -> None:
        self.prefill_ms = self.decode_ms = 0.0
        self._generator, self._should_stop = generator, should_stop
        self._places: list[_Place | None] = [None] * generator.config.batch_size
        self._pieces = self._play(requests)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def _play(self, requests: Iterable[Request]) -> Iterator[Piece]:
        generator, places, waiting = self._generator, self._places, iter(enumerate(requests))
        generator._current = self
        generator._set_idle(np.ones(len(places), bool))  # an earlier run may have been left
        while True:
            admitted: dict[int, _Place] = {}
            free = [b for b, place in enumerate(places) if place is None]
            while len(admitted) < len(free) and (entry := next(waiting, None)) is not None:
                index, request = entry
                generator._check(index, request)
                error = generator._why_no_room(request)
                if error is not None:
                    yield Piece(index, (), Completion((), "capacity", (), 0.0, 0.0, error))
                    continue
                b = free[len(admitted)]
                places[b] = admitted[b] = _Place(index, request)
            if admitted:
                new = generator._admission({b: place.request for b, place in admitted.items()})
                took_ms = self._timed(generator._prefill, new)
                self.prefill_ms += took_ms
                for place in admitted.values():
                    place.prefill_ms = took_ms
                yield from self._collect()
            if any(places):
                took_ms = self._timed(generator._decode, np.int32(generator.config.steps_per_call))
                self.decode_ms += took_ms
                for place in filter(None, places):
                    place.decode_ms += took_ms
                yield from self._collect()
            elif not admitted:
                return

    def _timed(self, program: Callable, argument) -> float:
        if self._generator._current is not self:
            raise RuntimeError("another run of this generator began before this one had ended")
        return self._generator._timed(program, argument)

    def _collect(self) -> Iterator[Piece]:
        """New tokens, shown to `should_stop`; places whose request ended are free afterwards."""
        state, places = self._generator._state, self._places
        status, tokens, num_tokens, accepted, num_steps = self._generator._fetch(
            (state.status, state.tokens, state.num_tokens, state.accepted, state.num_steps)
        )
        is_stopped, failures, pieces = np.zeros(len(places), bool), [], []
        for b, place in enumerate(places):
            if place is None:
                continue
            if status[b] in _NOT_FINITE:
                failures.append(
                    f"request {place.index}: {_NOT_FINITE[status[b]]} after {num_tokens[b]} new "
                    "tokens; an activation overflowed, or a weight is no number"
                )
                continue
            mine = tokens[b, : num_tokens[b]].tolist()
            is_new = len(mine) > place.num_reported
            keep = self._should_stop(place.index, mine) if self._should_stop and is_new else None
            shown, completion = tuple(mine if keep is None else mine[:keep]), None
            if keep is not None or status[b] != Status.RUNNING:
                is_stopped[b] = keep is not None
                finish = "stop" if keep is not None else self._finish(place, status[b], shown)
                steps = _steps_until(accepted[b, : num_steps[b]].tolist(), len(shown))
                completion = Completion(shown, finish, steps, place.prefill_ms, place.decode_ms)
                places[b] = None
            if is_new or completion:
                pieces.append(Piece(place.index, shown[place.num_reported :], completion))
            place.num_reported = len(shown)
        if is_stopped.any():
            self._generator._set_idle(is_stopped)
        yield from pieces
        if failures:
            raise FloatingPointError("\n".join(failures))

    def _finish(self, place: "_Place", status: int, tokens: Sequence[int]) -> Finish:
        """Why a request ended by itself."""
        generator = self._generator
        if status == Status.STOPPED:
            return "eos" if tokens[-1] in generator._target.eos_token_ids else "stop"
        wanted = generator._wanted(place.request)
        return "length" if generator._limit(place.request) == wanted else "capacity"


def implementations(target: Target, config: GenerateConfig) -> dict[str, str]:
    """The implementation that each kernel with several takes for the step, here, by kernel.

    Raises:
      InputError: one was asked for by name, and cannot run here.
    """
    c, dtype, mesh = target.config, target.numerics.jnp_dtype, target.numerics.mesh
    batch, heads, slots = config.batch_size, c.num_attention_heads, config.slots(c)
    if mesh is not None:
        batch //= mesh.data
        # A device attends with its heads to all slots, or with all heads to its slots.
        if mesh.cache == "slots":
            slots = padded_slots(slots, mesh) // mesh.model
        else:
            heads //= mesh.model
    gate_up, down = target.experts.stacks()

    def why_not(tokens: int, has_tree: bool) -> dict[str, str | None]:
        """Why kernels cannot be Mosaic's, in a pass over so many tokens of each sequence.

        Logits are wanted of a tree's every node, of a prompt chunk's last token.
        """
        nodes, levels = (tokens, levels_of_step) if has_tree else (1, 0)

        def shape(*sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        q_latent = shape(batch, tokens, heads, c.kv_lora_rank)
        q_rotary = shape(batch, tokens, heads, c.qk_rope_head_dim)
        latent = shape(c.num_hidden_layers, batch, slots, c.kv_lora_rank)
        x = shape(batch * tokens, c.hidden_size)
        logits = jax.ShapeDtypeStruct((batch, nodes, c.vocab_size), jnp.float32)
        return {
            "mla_attention": mla_attention.why_not_mosaic(q_latent, q_rotary, latent, has_tree),
            "expert_matmul": expert_matmul.why_not_mosaic(x, gate_up, down),
            "tree_verify": tree_verify.why_not_mosaic(logits, levels),
        }

    asked_for, tree = target.numerics.implementation, config.tree
    nodes_of_step, levels_of_step = (1, 0) if tree is None else (tree.nodes, tree.levels)
    of_step = why_not(nodes_of_step, has_tree=True)
    if asked_for == "mosaic":
        for reasons in (of_step, why_not(config.prefill_chunk, has_tree=False)):
            for name, reason in reasons.items():
                if reason is not None:
                    raise InputError(f"implementation mosaic of {name}: {reason}")
    if asked_for is not None:
        return dict.fromkeys(of_step, asked_for)
    return {name: "xla" if reason else "mosaic" for name, reason in of_step.items()}


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
