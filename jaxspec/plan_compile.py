"""The programs of `step.py`, compiled for H200s that are not there."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxspec.aot import h200s
from jaxspec.config import MeshConfig, TreeConfig
from jaxspec.draft import Draft
from jaxspec.errors import InputError
from jaxspec.generator import GenerateConfig
from jaxspec.sampling import Sampling
from jaxspec.sharding import Devices, specs_of
from jaxspec.step import (
    NUM_STOP_IDS,
    Admission,
    Settings,
    State,
    compiler_options,
    decode,
    empty_state,
    prefill,
)
from jaxspec.target import Target

__all__ = ["NO_AUTOTUNING", "absent_devices", "compile_prefill", "compile_step"]

NO_AUTOTUNING = {"xla_gpu_autotune_level": 0}  # there is nothing to time kernels on


def absent_devices(mesh: MeshConfig) -> Devices:
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


def compile_prefill(
    devices: Devices, target: Target, draft: Draft | None, batch: int, slots: int
) -> Compiled:
    """`step.prefill` likewise."""
    tree = None if draft is None else TreeConfig(1, 1, 2)  # no tree shapes a prefill

    def admission() -> Admission:
        each, prompt = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32)
        stop_ids = jnp.zeros((batch, NUM_STOP_IDS), jnp.int32)
        return Admission(each > 0, prompt, each, each, stop_ids, Sampling.of(batch))

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
    settings = Settings(tree, capture, chunk)
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
    return lowered.compile(NO_AUTOTUNING | compiler_options("gpu")), state
