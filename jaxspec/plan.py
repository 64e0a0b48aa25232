"""Will it fit, and what will it cost: the full-size step, compiled for H200s that are not there.

Memory, collectives and launches are read from the program that XLA makes for these devices. What a
step must read and multiply is arithmetic (`traffic.py`); times are that, and stated costs
(`hardware.py`). Nothing is run, and every figure is a prediction.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxspec.aliases import PathLike
from jaxspec.aot import h200s
from jaxspec.checkpoint import locate
from jaxspec.config import DraftConfig, MeshConfig, Numerics, TargetConfig, TreeConfig
from jaxspec.convert.configs import read_target_config
from jaxspec.convert.drafts import UNTIED, read_draft
from jaxspec.convert.manifest import is_converted, read_manifest
from jaxspec.convert.prepare import TargetCard, abstract_draft, abstract_target, tie
from jaxspec.convert.problems import CheckpointError, Problems
from jaxspec.convert.source import Source
from jaxspec.draft import Draft
from jaxspec.environment import KIMI_DRAFT_CONFIG, KIMI_TARGET_CONFIG
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig
from jaxspec.hardware import Assumptions
from jaxspec.hlo import Run, runs
from jaxspec.kernels.gqa_attention import BLOCK as DRAFT_BLOCK
from jaxspec.plan_report import Exchange, Memory, PlanReport, ProgramPlan
from jaxspec.report import command
from jaxspec.sampling import Sampling
from jaxspec.sharding import Devices, check_batch, check_draft, check_target, held_bytes, specs_of
from jaxspec.step import Admission, Settings, State, decode, empty_state, prefill
from jaxspec.target import Target
from jaxspec.traffic import StepShape, distinct_experts, most_experts, work_of_step

__all__ = ["PlanConfig", "abstract_models", "compile_step", "plan", "what_runs"]

PHASES = ("propose", "verify", "accept", "commit", "extend")
"""The named scopes of `step.step`; what stands in none of them is the loop's own."""
COMPILER_OPTIONS = {"xla_gpu_autotune_level": 0}  # there is nothing to time kernels on
MESH = MeshConfig(1, 8)
CONTEXT = 32768


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What is planned.

    Attributes:
      target: a checkpoint's directory, or its config.json; None is Kimi-K2.5's.
      draft: likewise; None is the published Llama-type draft for Kimi-K2.5, "none" is none.
      trees: a step is planned with each.
      context_length: tokens that every sequence has room for, and has filled.
    """

    target: PathLike | None = None
    draft: PathLike | None = None
    mesh: MeshConfig = MESH
    trees: tuple[TreeConfig, ...] = (TreeConfig(3, 1, 4),)
    batch_size: int = 1
    context_length: int = CONTEXT
    assumed: Assumptions = dataclasses.field(default_factory=Assumptions)


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
    devices = _devices(config.mesh)
    program_of = functools.partial(_planned, config, target, devices, slots, waiting=waiting)
    plain = program_of(None, None)
    steps = [program_of(draft, tree) for tree in config.trees]
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
        steps=tuple(steps),
        jax_version=jax.__version__,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        command=command(),
    )


def abstract_models(config: PlanConfig) -> tuple[Target, Draft | None]:
    """The models as shapes, on the plan's mesh, from what their configs say.

    Of a draft's config alone, nothing says whether it has an embedding and a head of its own: it
    is taken to have both, which is the most it can take.

    Raises:
      InputError: a config that cannot be read, or that the mesh does not cut evenly.
    """
    numerics = Numerics("bfloat16", implementation="mosaic", mesh=config.mesh)
    where = _place(config.target or KIMI_TARGET_CONFIG)
    problems = Problems(str(where))
    if is_converted(where):
        manifest = read_manifest(where)
        of_target, identity = manifest.config, manifest.identity
    else:
        facts = read_target_config(Source(where, needs_weights=False), problems)
        of_target, identity = facts.config, f"{facts.model_type}@config"
    if not isinstance(of_target, TargetConfig):
        raise CheckpointError(str(where), ["this is a draft, not a target"])
    check_target(config.mesh, of_target)
    target = abstract_target(of_target, numerics, identity)
    if config.draft == "none":
        return target, None
    of_draft, identity = _draft_config(_place(config.draft or KIMI_DRAFT_CONFIG), target)
    check_draft(config.mesh, of_draft)
    return target, abstract_draft(of_draft, numerics, identity)


def _draft_config(where: Path, target: Target) -> tuple[DraftConfig, str]:
    """A draft's config, tied to the target, and the draft's identity."""
    problems = Problems(str(where))
    if is_converted(where):
        manifest = read_manifest(where)
        found, identity = manifest.config, manifest.identity
    else:
        has_weights = any(where.glob("*.safetensors"))
        found, _ = read_draft(Source(where, needs_weights=has_weights), problems)
        identity = "eagle3@config"
        if not has_weights:
            found = dataclasses.replace(found, has_embedding=True, has_head=True)
    if not isinstance(found, DraftConfig):
        raise CheckpointError(str(where), ["this is a target, not a draft"])
    if found.boundaries.target == UNTIED:
        found = tie(found, TargetCard(target.identity, target.config), problems, "to plan")
    problems.raise_any()
    return found, identity


def _place(path: PathLike) -> Path:
    """The directory of a checkpoint; that of a config.json, for the file itself."""
    file = Path(path)
    return file.parent if file.name == "config.json" and file.is_file() else locate(path)


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


def _devices(mesh: MeshConfig) -> Devices:
    """A mesh of compile-only H200s.

    Raises:
      InputError: there are no CUDA wheels.
    """
    try:
        there = h200s(mesh.data * mesh.model).devices
    except ModuleNotFoundError:
        raise InputError(
            "jaxspec plan compiles for H200s, which takes the CUDA wheels and no GPU: "
            "pip install -e '.[cuda]'"
        ) from None
    return Devices(mesh, Mesh(there.reshape(mesh.data, mesh.model), ("data", "model")))


def compile_step(
    devices: Devices,
    target: Target,
    draft: Draft | None,
    tree: TreeConfig | None,
    batch: int,
    slots: int,
) -> tuple[Compiled, State]:
    """`step.decode` compiled for these devices, and what lives between its steps, as shapes.

    Raises:
      InputError: a Mosaic kernel cannot take these sizes.
    """
    max_steps = jax.ShapeDtypeStruct((), jnp.int32)
    return _compiled(devices, decode, target, draft, tree, batch, slots, max_steps)


def _compile_prefill(
    devices: Devices, target: Target, draft: Draft | None, batch: int, slots: int
) -> Compiled:
    """`step.prefill` likewise."""
    tree = None if draft is None else TreeConfig(1, 1, 2)  # no tree shapes a prefill

    def admission() -> Admission:
        each = jnp.zeros((batch,), jnp.int32)
        sampling = Sampling(
            each.astype(jnp.uint32), each.astype(jnp.float32), each, each.astype(jnp.float32)
        )
        return Admission(each > 0, jnp.zeros((batch, slots), jnp.int32), each, each, sampling)

    new = jax.eval_shape(admission)
    return _compiled(devices, prefill, target, draft, tree, batch, slots, new)[0]


def _compiled(
    devices: Devices,
    program: Callable[..., State],
    target: Target,
    draft: Draft | None,
    tree: TreeConfig | None,
    batch: int,
    slots: int,
    argument: Any,
) -> tuple[Compiled, State]:
    capture = None if draft is None else target.asked_for(draft.config.boundaries)
    chunk = GenerateConfig(None).prefill_chunk
    settings = Settings(tree, capture, target.config.eos_token_ids, chunk)
    graph, params = nnx.split((target, draft))
    state = jax.eval_shape(functools.partial(empty_state, target, draft, batch, slots))

    def traced(params: Any, state: State, argument: Any) -> State:
        return program(*nnx.merge(graph, params), state, argument, settings)

    arguments = params, state, argument
    specs = specs_of(arguments, devices.config)
    spread = jax.jit(devices.spread(traced, specs, specs[1]), donate_argnums=1)
    try:
        lowered = spread.lower(*devices.shapes(arguments))
    except ValueError as error:
        if "mosaic" not in str(error):
            raise
        raise InputError(
            f"this cannot be planned, nor run with the Mosaic kernels: {error}"
        ) from None
    return lowered.compile(compiler_options=COMPILER_OPTIONS), state


def _planned(
    config: PlanConfig,
    target: Target,
    devices: Devices,
    slots: int,
    draft: Draft | None,
    tree: TreeConfig | None,
    *,
    waiting: Callable[[str], AbstractContextManager],
) -> ProgramPlan:
    """One step: compiled, read, and what admitting its prompts takes besides."""
    what = "plain decoding" if tree is None else f"tree {tree}"
    shape = config.batch_size, slots
    with waiting(f"compiling the prefill of {what}"):
        admitting = _compile_prefill(devices, target, draft, *shape)
    with waiting(f"compiling a step of {what}"):
        started = time.perf_counter()
        step, state = compile_step(devices, target, draft, tree, *shape)
        compile_s = time.perf_counter() - started
    c, step_shape = target.config, StepShape(tree, config.batch_size, slots)
    tokens = config.batch_size // config.mesh.data * step_shape.nodes
    routed = tokens, c.n_routed_experts, c.num_experts_per_tok
    done = what_runs(str(step.as_text()), slots)
    kernels = [run for run in done if not run.is_collective and run.opcode != "while"]
    return ProgramPlan(
        tree=None if tree is None else str(tree),
        levels=0 if tree is None else tree.levels,
        memory=_memory(config.mesh, target, draft, state, step, admitting),
        work=work_of_step(target, draft, step_shape),
        experts=(distinct_experts(*routed), most_experts(*routed, config.mesh.model)),
        copied=_by_phase(
            (run, run.times * run.num_bytes) for run in kernels if run.opcode == "dynamic-slice"
        ),
        exchanges=_exchanges(done, config.mesh),
        launches=_by_phase((run, run.times) for run in kernels),
        waits=_by_phase((run, run.times) for run in done if run.opcode == "while"),
        compile_s=compile_s,
    )


def what_runs(hlo: str, slots: int) -> list[Run]:
    """What a compiled `step.decode` has a device do in one step, every sequence `slots` long.

    XLA does not know how often two kinds of loops turn: the one over steps, which is outermost,
    and the draft's attention over the filled part of its cache, a block of slots at a time.

    Raises:
      ValueError: there is a third kind, which these counts would be wrong about.
    """

    def turns(scope: str) -> float:
        phases = [phase for phase in PHASES if f"/{phase}/" in scope]
        if not phases:
            return 1
        if phases[0] not in ("propose", "extend"):
            raise ValueError(f"a loop that nobody knows the turns of: {scope}")
        return math.ceil(slots / min(DRAFT_BLOCK, slots))

    return runs(hlo, turns)


def phase_of(run: Run) -> str:
    """The phase of the step that something is part of; "loop" is around them."""
    for scope in run.scopes:
        for phase in PHASES:
            if f"/{phase}/" in scope:
                return phase
    return "loop"


def _by_phase(counted: Iterable[tuple[Run, float]]) -> dict[str, float]:
    sums: dict[str, float] = collections.defaultdict(float)
    for run, amount in counted:
        sums[phase_of(run)] += amount
    return {phase: sums[phase] for phase in (*PHASES, "loop") if phase in sums}


def _exchanges(done: Iterable[Run], mesh: MeshConfig) -> tuple[Exchange, ...]:
    """The collectives, those that are alike together."""
    times: dict[tuple[str, str, float], float] = collections.defaultdict(float)
    for run in done:
        if run.is_collective:
            times[phase_of(run), run.opcode, run.num_bytes] += run.times
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
