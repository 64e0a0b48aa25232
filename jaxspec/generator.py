"""Generation: requests in, completions out, over the two compiled programs of `step.py`.

Not a server: a fixed number of places, filled from a list of requests as they come free.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

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
from jaxspec.sampling import Sampling
from jaxspec.sharding import devices_of, specs_of
from jaxspec.step import (
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
    "Completion",
    "GenerateConfig",
    "Generator",
    "Request",
    "Run",
    "implementations",
]

DEFAULT_CONTEXT = 2048
Finish = Literal["eos", "stop", "length", "capacity"]


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


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how its tokens are chosen; see `sampling.Sampling`."""

    prompt_ids: tuple[int, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int | None = None

    def check_sampling(self) -> None:
        """Raises InputError for settings by which no token can be chosen."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; 0 is greedy, else it is positive")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it lies above 0, and 1 is off")
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"top_k is {self.top_k}; 0 is off, else it is positive, below 2^31")


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


_NOT_FINITE = {
    Status.TARGET_NOT_FINITE: "the target's logits are NaN",
    Status.DRAFT_NOT_FINITE: "the draft's hidden state is not finite",
}


@dataclasses.dataclass
class _Place:
    """A request in the batch."""

    index: int
    request: Request
    limit: int
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
        stop_ids = () if config.ignore_eos else target.config.eos_token_ids
        self.config, self.capture = config, capture
        self.num_traces = {"prefill": 0, "decode": 0}
        self.slots = config.slots(target.config)
        self._vocab_size = target.config.vocab_size
        self._settings = Settings(config.tree, capture, stop_ids, config.prefill_chunk)
        graph, self._params = nnx.split((target, draft))
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

    def run(
        self,
        requests: Sequence[Request],
        should_stop: Callable[[int, Sequence[int]], int | None] | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> Run:
        """The completions of the requests, as many at a time as there are places.

        Args:
          should_stop: called with a request's index and its tokens so far, whenever there are
            more; a number of tokens to keep ends the request there, with finish "stop".
          on_finish: called with a request's index and its completion, as soon as it is there.

        Raises:
          InputError: a request that cannot be served; nothing is generated.
          FloatingPointError: target or draft computed something that is not finite. Requests
            that ended before, or in the same call, were handed to `on_finish`.
        """
        for index, request in enumerate(requests):
            self._check(index, request)
        self._set_idle(np.ones(self.config.batch_size, bool))  # an earlier run may have failed
        waiting = list(enumerate(requests))[::-1]
        places: list[_Place | None] = [None] * self.config.batch_size
        completions: list[Completion | None] = [None] * len(requests)
        prefill_ms = decode_ms = 0.0
        while waiting or any(places):
            admitted: dict[int, _Place] = {}
            for b in [b for b, place in enumerate(places) if place is None][: len(waiting)]:
                index, request = waiting.pop()
                places[b] = admitted[b] = _Place(index, request, self._limit(request))
            if admitted:
                took_ms = self._timed(self._prefill, self._admission(admitted))
                prefill_ms += took_ms
                for place in admitted.values():
                    place.prefill_ms = took_ms
                self._collect(places, completions, should_stop, on_finish)
                if not any(places):
                    continue
            took_ms = self._timed(self._decode, np.int32(self.config.steps_per_call))
            decode_ms += took_ms
            for place in filter(None, places):
                place.decode_ms += took_ms
            self._collect(places, completions, should_stop, on_finish)
        done = tuple(completion for completion in completions if completion is not None)
        return Run(done, prefill_ms, decode_ms)

    def _check(self, index: int, request: Request) -> None:
        who, ids = f"request {index}", request.prompt_ids
        if not ids:
            raise InputError(f"{who}: the prompt is empty")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise InputError(f"{who}: token id {bad} is not in a vocabulary of {self._vocab_size}")
        if len(ids) >= self.slots:
            raise InputError(
                f"{who}: a prompt of {len(ids)} tokens leaves no room for a new one in a context "
                f"of {self.slots}; raise context_length (--context-length)"
            )
        try:
            request.check_sampling()
        except InputError as error:
            raise InputError(f"{who}: {error}") from None
        if request.max_new_tokens is not None and request.max_new_tokens < 1:
            raise InputError(f"{who}: max_new_tokens is {request.max_new_tokens}; it starts at 1")

    def _limit(self, request: Request) -> int:
        wanted = request.max_new_tokens or self.config.max_new_tokens
        return min(wanted, self.slots - len(request.prompt_ids))

    def _admission(self, admitted: Mapping[int, _Place] = MappingProxyType({})) -> Admission:
        """The programs' input for requests and the places of the batch they get."""
        batch = self.config.batch_size
        prompt = np.zeros((batch, self.slots), np.int32)
        is_admitted, prompt_len = np.zeros(batch, bool), np.ones(batch, np.int32)
        limit, top_k = np.ones(batch, np.int32), np.zeros(batch, np.int32)
        seed, temperature = np.zeros(batch, np.uint32), np.zeros(batch, np.float32)
        top_p = np.ones(batch, np.float32)
        for b, place in admitted.items():
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
        new = self._put(argument)
        self._state = jax.block_until_ready(program(self._params, self._state, new))
        return 1e3 * (time.perf_counter() - started)

    def _collect(self, places, completions, should_stop, on_finish) -> None:
        """Shows new tokens to `should_stop`, and turns places that ended into completions."""
        state = self._state
        status, tokens, num_tokens, accepted, num_steps = self._fetch(
            (state.status, state.tokens, state.num_tokens, state.accepted, state.num_steps)
        )
        is_stopped, failures = np.zeros(len(places), bool), []
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
            keep = should_stop(place.index, mine) if should_stop and is_new else None
            shown = mine if keep is None else mine[:keep]
            place.num_reported = len(shown)
            if keep is None and status[b] == Status.RUNNING:
                continue
            if keep is not None:
                finish: Finish = "stop"
                is_stopped[b] = True
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
        if is_stopped.any():
            self._set_idle(is_stopped)
        if failures:
            raise FloatingPointError("\n".join(failures))

    def _set_idle(self, is_stopped: np.ndarray) -> None:
        """Ends what runs in these places of the batch."""
        status = np.where(is_stopped, np.int32(Status.IDLE), self._fetch(self._state.status))
        new = self._put({"status": jnp.asarray(status)})
        self._state = dataclasses.replace(self._state, **new)


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
