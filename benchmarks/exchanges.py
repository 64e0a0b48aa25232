"""What a collective costs alone: in a compiled loop, each waiting for the one before."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, in_turn, seconds
from jax import lax
from jax.sharding import PartitionSpec

from jaxspec.hlo import collectives
from jaxspec.sharding import Devices

CALLS = 50
"""Collectives in one timed call, so that the call's own cost does not matter."""


def exchange(devices: Devices, opcode: str, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Microseconds of one collective whose result has so many bytes on each device, in f32.

    `loop_us` is what the loop takes without it.
    """
    model = devices.config.model
    size = num_bytes // 4 // model * model  # whole parts, in f32

    def all_reduce(x: jax.Array) -> jax.Array:
        return lax.psum(x, "model") / model

    def all_gather(x: jax.Array) -> jax.Array:
        whole = lax.all_gather(x[: size // model], "model", tiled=True)
        return whole + 1

    def all_to_all(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x.reshape(model, -1), "model", 0, 0).reshape(-1) + 1

    known = {"all-reduce": all_reduce, "all-gather": all_gather, "all-to-all": all_to_all}
    programs = {
        "us": _loop(devices, known[opcode], size),
        "loop_us": _loop(devices, lambda x: x + 1, size),
    }
    text = programs["us"].as_text()
    held = [one for found in collectives(text).values() for one in found]
    is_as_asked = [(one.opcode, int(one.num_bytes)) for one in held] == [(opcode, 4 * size)]
    x = devices.put_as(np.ones(size, np.float32), PartitionSpec())
    took = in_turn({name: functools.partial(seconds, p, x) for name, p in programs.items()}, rounds)
    found: dict[str, Any] = {name: Spread.of(t * 1e6 / CALLS).to_dict() for name, t in took.items()}
    return found | {"bytes": 4 * size, "is_correct": is_as_asked}


def _loop(devices: Devices, one: Callable[[jax.Array], jax.Array], size: int) -> Any:
    def run(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, CALLS, lambda _, x: one(x), x)

    spread = devices.spread(run, PartitionSpec(), PartitionSpec())
    where = devices.sharding(PartitionSpec())
    shape = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=where)
    return jax.jit(spread).lower(shape).compile()
