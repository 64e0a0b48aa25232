"""Will it fit, and what will it cost: the full-size step, compiled for H200s that are not there.

Memory, collectives and launches are read from the program that XLA makes for these devices. What a
step must read and multiply is arithmetic (`traffic.py`); times are that, and stated costs
(`hardware.py`). Nothing is run, and every figure is a prediction.
"""

import collections
import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import nnx
from jax.stages import Compiled

from jaxspec.aliases import PathLike
from jaxspec.config import LlamaDraftConfig, MeshConfig, TreeConfig
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig
from jaxspec.hlo import Run, runs
from jaxspec.kernels.gqa_attention import ROW, num_turns
from jaxspec.phases import LOOP, PHASES, phase_of
from jaxspec.plan_compile import absent_devices, compile_prefill, compile_step
from jaxspec.plan_models import PlanConfig, abstract_models
from jaxspec.plan_report import Exchange, Memory, PlanReport, ProgramPlan
from jaxspec.report import command
from jaxspec.sharding import check_batch, held_bytes
from jaxspec.step import State
from jaxspec.target import Target
from jaxspec.traffic import StepShape, distinct_experts, most_experts, work_of_step

__all__ = ["plan", "what_runs"]


def plan(
    config: PlanConfig, waiting: Callable[[str], AbstractContextManager] = contextlib.nullcontext
) -> PlanReport:
    """The plan.

    Args:
      waiting: called with what is compiled next; the context is left when it is done.

    Raises:
      InputError: a config that cannot be read or planned, or no CUDA wheels to compile with.
    """
    target, draft = abstract_models(config)
    slots = _check(config, target, draft)
    devices = absent_devices(config.mesh)

    def steps_of(draft: Draft | None, trees: Sequence[TreeConfig | None]) -> list[ProgramPlan]:
        """A step with each tree; no tree shapes the prefill."""
        shape = config.batch_size, slots
        with waiting("compiling a prefill"):
            admitting = compile_prefill(devices, target, draft, *shape)
        programs = []
        for tree in trees:
            with waiting(f"compiling a step, {'no tree' if tree is None else f'tree {tree}'}"):
                started = time.perf_counter()
                step, state = compile_step(devices, target, draft, tree, *shape)
                compile_s = time.perf_counter() - started
            memory = _memory(config.mesh, target, draft, state, step, admitting)
            step_shape = StepShape(tree, *shape)
            programs.append(
                _read(target, draft, step_shape, str(step.as_text()), memory, compile_s)
            )
        return programs

    (plain,) = steps_of(None, [None])
    return PlanReport(
        target=_named(target.identity, config.target),
        draft=None if draft is None else _named(draft.identity, config.draft),
        device="NVIDIA H200",
        mesh=str(config.mesh),
        cache=config.mesh.cache,
        batch_size=config.batch_size,
        context_length=config.context_length,
        assumed=config.assumed,
        plain=plain,
        steps=tuple(steps_of(draft, config.trees)) if config.trees else (),
        jax_version=jax.__version__,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        command=command(),
    )


def _named(identity: str, path: PathLike | None) -> str:
    return f"{identity} ({'the config that ships' if path is None else path})"


def _check(config: PlanConfig, target: Target, draft: Draft | None) -> int:
    """Slots of a sequence; raises InputError for what no step can be."""
    if (draft is None) == bool(config.trees):
        raise InputError("a draft wants a tree and a tree a draft: one of the two is missing")
    check_batch(config.mesh, config.batch_size)
    asked = GenerateConfig(None, context_length=config.context_length, batch_size=config.batch_size)
    asked.check()
    for tree in config.trees:
        tree.check()
    return asked.slots(target.config)


def _read(
    target: Target,
    draft: Draft | None,
    shape: StepShape,
    hlo: str,
    memory: Memory,
    compile_s: float,
) -> ProgramPlan:
    """What a compiled step is predicted to do, from its program and by arithmetic."""
    c, mesh = target.config, target.numerics.mesh
    assert mesh is not None, "a plan has one"
    tokens = shape.batch // mesh.data * shape.nodes
    routed = tokens, c.n_routed_experts, c.num_experts_per_tok
    done = what_runs(hlo, shape.kv_len, _row_width(draft, mesh))
    kernels = [run for run in done if not run.is_collective and run.opcode != "while"]
    return ProgramPlan(
        tree=None if shape.tree is None else str(shape.tree),
        levels=0 if shape.tree is None else shape.tree.levels,
        memory=memory,
        work=work_of_step(target, draft, shape),
        experts=(distinct_experts(*routed), most_experts(*routed, mesh.model)),
        copied=_by_phase(
            (run, run.times * run.num_bytes) for run in kernels if run.opcode == "dynamic-slice"
        ),
        exchanges=_exchanges(done, mesh),
        launches=_by_phase((run, run.times) for run in kernels),
        waits=_by_phase((run, run.times) for run in done if run.opcode == "while"),
        compile_s=compile_s,
    )


def what_runs(hlo: str, slots: int, row_width: int = ROW) -> list[Run]:
    """What a compiled `step.decode` has a device do in one step, every sequence `slots` long.

    XLA does not know how often two kinds of loops turn: the one over steps, which is outermost,
    and the draft's attention over the filled part of its cache, a block of slots at a time.

    Args:
      row_width: see `num_turns`.

    Raises:
      ValueError: there is a third kind, which these counts would be wrong about.
    """

    def turns(scope: str) -> float:
        phases = [phase for phase in PHASES if f"/{phase}/" in scope]
        if not phases:
            return 1
        if phases[0] not in ("propose", "extend"):
            raise ValueError(f"a loop that nobody knows the turns of: {scope}")
        return num_turns(slots, slots, row_width)

    return runs(hlo, turns)


def _row_width(draft: Draft | None, mesh: MeshConfig) -> int:
    """Of the keys of one slot that a device holds; no other draft has a loop over them."""
    if draft is None or not isinstance(draft.config, LlamaDraftConfig):
        return ROW
    return draft.config.num_key_value_heads // mesh.model * draft.config.head_dim


def _by_phase(counted: Iterable[tuple[Run, float]]) -> dict[str, float]:
    sums: dict[str, float] = collections.defaultdict(float)
    for run, amount in counted:
        sums[phase_of(run.scopes)] += amount
    return {phase: sums[phase] for phase in (*PHASES, LOOP) if phase in sums}


def _exchanges(done: Iterable[Run], mesh: MeshConfig) -> tuple[Exchange, ...]:
    """The collectives, those that are alike together."""
    times: dict[tuple[str, str, float], float] = collections.defaultdict(float)
    for run in done:
        if run.is_collective:
            times[phase_of(run.scopes), run.opcode, run.num_bytes] += run.times
    return tuple(Exchange(*alike, count, mesh.model) for alike, count in times.items())


def _memory(
    mesh: MeshConfig,
    target: Target,
    draft: Draft | None,
    state: State,
    step: Compiled,
    admitting: Compiled,
) -> Memory:
    """Of one step: the table's own sums, and XLA's."""

    def held(tree: Any) -> int:
        return sum(held_bytes(tree, mesh).values())

    of_step, of_prefill = step.memory_analysis(), admitting.memory_analysis()
    assert of_step is not None and of_prefill is not None, "XLA:GPU has it"
    caches = held({"latents": state.target_cache}), held({"rows": state.draft_cache})
    return Memory(
        target=held(nnx.state(target)),
        draft=0 if draft is None else held(nnx.state(draft)),
        target_cache=caches[0],
        draft_cache=caches[1],
        other=held(state) - sum(caches),
        temporaries=of_step.temp_size_in_bytes,
        outputs=of_step.output_size_in_bytes - of_step.alias_size_in_bytes,
        prefill_temporaries=of_prefill.temp_size_in_bytes,
        arguments=of_step.argument_size_in_bytes,
    )
