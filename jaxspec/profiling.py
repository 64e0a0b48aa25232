"""Where the time of a step goes: the real compiled program, timed, and traced.

What is counted how is said in `profile_report.METHOD`, which every output repeats. Whether the
phases' sum is the step's time is measured, not arranged: the step is timed without the profiler,
and what the profiler adds to an operation is measured on another program.
"""

import collections
import dataclasses
import itertools
import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.aliases import Progress
from jaxspec.config import TreeConfig
from jaxspec.contracts import Boundaries
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig, Generator, implementations
from jaxspec.hlo import Operation, module_name, operations
from jaxspec.outputs import check_folder
from jaxspec.phases import part_of, phase_of
from jaxspec.profile_report import (
    CALL,
    COLLECTIVES,
    ORDER,
    UNKNOWN,
    Exchanged,
    PhaseTime,
    ProfileReport,
    StepProfile,
)
from jaxspec.report import command, machine
from jaxspec.requests import Request
from jaxspec.target import Target
from jaxspec.trace import Event, add_track, count_events, profile_files, read_events, spans

__all__ = ["Attribution", "ProfileConfig", "profile_step"]

ENOUGH, NEAR = 3, 1.05
"""So many calls as fast as the fastest, up to this factor, and it was no accident."""


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """What is profiled, and how often.

    Attributes:
      trees: shapes of the draft tree; none at all decodes plainly, without a draft.
      context_length: see `GenerateConfig`.
      num_steps: in a call.
      repeats: calls with the profiler, and as many without: at most, since three of each that are
        as fast as the fastest, to 5 %, are enough.
      trace: where the profile of each tree is left for XProf and Perfetto; None leaves none.
    """

    trees: tuple[TreeConfig, ...]
    context_length: int | None = None
    num_steps: int = 8
    repeats: int = 30
    trace: Path | None = None

    def check(self) -> None:
        """Raises InputError for what cannot be profiled, or not be left there."""
        for name, count in (("num_steps (--steps)", self.num_steps), ("repeats", self.repeats)):
            if count < 1:
                raise InputError(f"{name} is {count}; it starts at 1")
        if len(set(self.trees)) < len(self.trees):
            raise InputError(f"the same tree twice: {', '.join(map(str, self.trees))}")
        for tree in self.trees:
            tree.check()
        for tree in self.trees or (None,):
            if self.trace is not None and (folder := _run_folder(self.trace, tree)).exists():
                raise InputError(f"--trace {self.trace}: there is a profile already, {folder}")
        if self.trace is not None:
            try:
                self.trace.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror
                raise InputError(f"--trace {self.trace}: cannot be written ({reason})") from error
            check_folder(self.trace, f"--trace {self.trace}")


def profile_step(
    target: Target,
    draft: Draft | None,
    requests: Sequence[Request],
    config: ProfileConfig,
    capture: Boundaries | None = None,
    progress: Progress | None = None,
) -> ProfileReport:
    """Where the time of a step goes, after these prompts, with each tree.

    Args:
      requests: one for each place of the batch; what would end them is left aside.
      capture: see `Generator`.
      progress: called with what is done, how many calls of it are, and of how many.

    Raises:
      ContractError: draft and target do not belong together.
      InputError: a config or a request that cannot run, no room for the steps, or a device whose
        profiles are not read.
      FloatingPointError: target or draft computed something that is not finite.
    """
    config.check()
    if (draft is None) == bool(config.trees):
        raise InputError("a draft wants a tree and a tree a draft: one of the two is missing")
    if jax.default_backend() not in ("cpu", "gpu"):
        raise InputError(f"profiles of a {jax.default_backend()} are not read: CPU and GPU are")
    if jax.process_count() > 1:
        raise InputError("several processes: a profile is of one")
    requests = [dataclasses.replace(one, stop_ids=(), max_new_tokens=None) for one in requests]
    steps = []
    for tree in config.trees or (None,):
        asked = _generate_config(target, requests, config, tree)
        generator = Generator(target, draft, asked, capture)
        steps.append(_profiled(generator, requests, config, progress or _no_progress))
    return ProfileReport(
        target=target.identity,
        draft=None if draft is None else draft.identity,
        device=jax.devices()[0].device_kind,
        dtype=target.numerics.dtype,
        mesh=target.numerics.mesh,
        implementations=implementations(target, generator.config),
        context_length=generator.slots,
        prompt_lens=tuple(len(request.prompt_ids) for request in requests),
        num_steps=config.num_steps,
        steps=tuple(steps),
        jax_version=jax.__version__,
        machine=machine(),
        command=command(),
    )


def _no_progress(what: str, done: int, total: int) -> None:
    pass


def _generate_config(
    target: Target, requests: Sequence[Request], config: ProfileConfig, tree: TreeConfig | None
) -> GenerateConfig:
    """How the steps are generated: to the last of them, whatever the tokens are.

    Raises:
      InputError: a request that cannot be served, or that the context has no room for.
    """
    asked = GenerateConfig(
        tree,
        context_length=config.context_length,
        batch_size=len(requests),
        ignore_eos=True,
        steps_per_call=config.num_steps,
    )
    asked.check()
    slots = asked.slots(target.config)
    # A token from prefill, and from each step at most a drafted one a level and the bonus.
    most = 2 + config.num_steps * (1 if tree is None else tree.levels + 1)
    for index, request in enumerate(requests):
        if (length := len(request.prompt_ids)) + most > slots:
            raise InputError(
                f"prompt {index}: {length} tokens and {config.num_steps} steps of up to "
                f"{most - 2} tokens together have no room in a context of {slots}; fewer steps "
                "(--steps), or a longer context (--context-length)"
            )
    return dataclasses.replace(asked, max_new_tokens=most)


def _profiled(
    generator: Generator, requests: Sequence[Request], config: ProfileConfig, progress: Progress
) -> StepProfile:
    """The profile of one compiled step."""
    generator.check(requests)
    tree, hlo = generator.config.tree, generator.decode_hlo
    adds = _ProfilerCost() if jax.default_backend() == "cpu" else None
    with tempfile.TemporaryDirectory(prefix="jaxspec-profile-") as scratch:
        folder = Path(scratch) / "fastest"
        whole_ms, traced_ms = _measure(generator, requests, config, progress, adds, folder)
        xplane = profile_files(folder)[0]
        found = Attribution(read_events(xplane, module_name(hlo)), operations(hlo))
        cost_us = 0.0 if adds is None else adds.us(xplane, module_name(hlo))
        if config.trace is not None:
            add_track(folder, found.tracks())
            shutil.copytree(xplane.parent, _run_folder(config.trace, tree))
    return StepProfile(
        tree=None if tree is None else str(tree),
        whole_ms=tuple(ms / config.num_steps for ms in whole_ms),
        traced_ms=tuple(ms / config.num_steps for ms in traced_ms),
        has_settled=_settled(whole_ms) and _settled(traced_ms),
        phases=found.phases(min(traced_ms), config.num_steps, cost_us),
        exchanges=found.exchanges(config.num_steps, cost_us),
        profiler_us=cost_us,
        compile_s=generator.compile_s,
    )


def _measure(
    generator: Generator,
    requests: Sequence[Request],
    config: ProfileConfig,
    progress: Progress,
    adds: "_ProfilerCost | None",
    folder: Path,
) -> tuple[list[float], list[float]]:
    """Milliseconds of calls without and with the profiler; the fastest one's profile is left."""
    what = "plain decoding" if (tree := generator.config.tree) is None else f"tree {tree}"
    latest, whole_ms, traced_ms = folder.with_name("latest"), [], []
    generator.admit(requests)
    generator.decode()  # once for nothing: pages and threads are there afterwards
    while len(whole_ms) < config.repeats and not (_settled(whole_ms) and _settled(traced_ms)):
        progress(what, len(whole_ms), config.repeats)
        generator.admit(requests)
        whole_ms.append(generator.decode())
        if adds is not None:
            adds.run(is_traced=False)
        generator.admit(requests)
        with _profiler(latest):
            traced_ms.append(generator.decode())
            if adds is not None:
                adds.run(is_traced=True)
        if traced_ms[-1] == min(traced_ms):
            shutil.rmtree(folder, ignore_errors=True)
            latest.rename(folder)
        else:
            shutil.rmtree(latest)
    progress(what, config.repeats, config.repeats)
    return whole_ms, traced_ms


def _settled(times_ms: Sequence[float]) -> bool:
    """Whether the fastest time was no accident: two more are within 5 %."""
    return len(times_ms) >= ENOUGH and sorted(times_ms)[ENOUGH - 1] <= NEAR * min(times_ms)


def _run_folder(trace: Path, tree: TreeConfig | None) -> Path:
    """Where XProf looks for the profile of a tree."""
    return trace / "plugins" / "profile" / ("plain" if tree is None else f"tree-{tree}")


def _profiler(folder: Path) -> AbstractContextManager[Any]:
    """JAX's profiler, which leaves what it saw in a folder."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 1  # operations, and not what their threads say to each other
    options.python_tracer_level = 0
    return jax.profiler.trace(folder, profiler_options=options)


class _ProfilerCost:
    """What the profiler adds to an event that it notes, from a program of small operations.

    Each reads 16 KB of its own, as a small operation of a model does: from what lies in the cache
    already, the profiler takes less. They stand in no loop: XLA:CPU compiles a small loop into one
    kernel, and a profile shows one operation. And they are timed together, as a call's steps are:
    what else the machine does slows both alike.
    """

    OPERATIONS, WIDTH, TIMES = 200, 4096, 40

    def __init__(self) -> None:
        def small_operations(x: jax.Array, rows: jax.Array) -> jax.Array:
            for row in rows:
                x = jax.lax.optimization_barrier(x + row)  # or they were one
            return x

        self._x, self._rows = jnp.zeros(self.WIDTH), jnp.ones((self.OPERATIONS, self.WIDTH))
        self._program = jax.jit(small_operations).lower(self._x, self._rows).compile()
        self._fastest_ms = {False: math.inf, True: math.inf}

    def run(self, is_traced: bool) -> None:
        """Runs it some times, under the profiler or without."""
        x, started = self._x, time.perf_counter()
        for _ in range(self.TIMES):
            x = self._program(x, self._rows)
        jax.block_until_ready(x)
        took_ms = 1e3 * (time.perf_counter() - started)
        self._fastest_ms[is_traced] = min(took_ms, self._fastest_ms[is_traced])

    def us(self, xplane: Path, module: str) -> float:
        """Microseconds for each operation of a program, of the fastest runs; never less than none.

        One that several threads share has more events than a small one.

        Raises:
          InputError: the compiler has made fewer operations of the small ones.
        """
        small = module_name(str(self._program.as_text()))
        operations, events = count_events(xplane)
        count, wanted = operations[small], self.OPERATIONS * self.TIMES
        if count < wanted:
            raise InputError(
                f"jax {jax.__version__} runs the {wanted} operations on which the profiler's own "
                f"time is measured as {count}: it cannot be taken off; try another version of jax"
            )
        adds_us = 1e3 * (self._fastest_ms[True] - self._fastest_ms[False])
        return max(0.0, adds_us / events[small] * events[module] / operations[module])


class Attribution:
    """The events of a call, by device, and what each is part of."""

    def __init__(
        self, events: Mapping[str, Sequence[Event]], known: Mapping[str, Operation]
    ) -> None:
        """Raises InputError where nothing of the program was traced."""
        if not events:
            raise InputError(
                "JAX's profiler saw no operation of the program; on a GPU it needs CUPTI, and the "
                "right to use it"
            )
        self._events, self._known = events, known
        self._spans = {
            device: list(spans(found, self._runs_others)) for device, found in events.items()
        }

    def phases(self, call_ms: float, num_steps: int, cost_us: float) -> dict[str, PhaseTime]:
        """The phases of a step, those that take part, on one device; of several, the mean.

        Args:
          call_ms: of all the steps, by the host's clock.
          cost_us: of tracing an operation, which is taken off; nothing becomes less than zero.
        """
        busy_ns: dict[str, float] = collections.defaultdict(float)
        idle_ns: dict[str, float] = collections.defaultdict(float)
        counts = collections.Counter()
        for device, found in self._events.items():
            counts.update(self._phase(event.operation) for event in found)
            for span in self._spans[device]:
                ns = (span.end_ns - span.start_ns) / len(span.operations)
                for operation in span.operations:
                    (idle_ns if span.is_idle else busy_ns)[self._phase(operation)] += ns
            first, last = self._spans[device][0], self._spans[device][-1]
            idle_ns[CALL] += 1e6 * call_ms - (last.end_ns - first.start_ns)
        each = len(self._events) * num_steps
        return {
            phase: PhaseTime(
                ms=max(0, busy_ns[phase] + idle_ns[phase] - 1e3 * cost_us * counts[phase])
                / (1e6 * each),
                idle_ms=idle_ns[phase] / (1e6 * each),
                operations=counts[phase] / each,
            )
            for phase in ORDER
            if phase in counts or phase in idle_ns
        }

    def exchanges(self, num_steps: int, cost_us: float) -> tuple[Exchanged, ...]:
        """The collectives of a step, those that are alike together."""
        alike: dict[tuple[str, str, float], list[float]] = collections.defaultdict(list)
        for event in itertools.chain.from_iterable(self._events.values()):
            known = self._operation(event.operation)
            if known is not None and known.is_collective:
                phase = "/".join(sorted({phase_of(scopes) for scopes in known.scopes}))
                took_ms = (event.end_ns - event.start_ns) / 1e6 - cost_us / 1e3
                alike[phase, known.opcode, known.num_bytes].append(max(0, took_ms))
        each = len(self._events) * num_steps
        return tuple(
            Exchanged(*which, len(took) / each, sum(took) / each) for which, took in alike.items()
        )

    def tracks(self) -> dict[str, list[tuple[float, float, str]]]:
        """Which phase went on from when to when, in ns, by device."""
        found = {}
        for device, all_spans in self._spans.items():
            by_phase = itertools.groupby(all_spans, lambda span: self._phase(span.operations[0]))
            track = [(phase, list(together)) for phase, together in by_phase]
            found[device] = [(one[0].start_ns, one[-1].end_ns, phase) for phase, one in track]
        return found

    def _operation(self, name: str | None) -> Operation | None:
        return None if name is None else self._known.get(name)

    def _runs_others(self, name: str | None) -> bool:
        known = self._operation(name)
        return known is not None and known.runs_others

    def _phase(self, name: str | None) -> str:
        """What an operation is part of; one that loops of two phases share is of neither."""
        known = self._operation(name)
        if known is None:
            return UNKNOWN
        if known.is_collective:
            return COLLECTIVES
        parts = {part_of(scopes) for scopes in known.scopes}
        return parts.pop() if len(parts) == 1 else UNKNOWN
