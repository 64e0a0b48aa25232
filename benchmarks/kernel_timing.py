"""The time of a kernel's call beside plain XLA's, and the floors that two ceilings make.

A call is timed in a compiled loop whose layer index walks over a stack of 400 MB or more, so that
nothing is served from L2.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, copying, in_turn, ratio, seconds
from jax import lax
from ops import OPS, Agreement, Arguments, Op, Work, layers_of

ROTATED_BYTES = 400_000_000
"""Read before anything is read again; an H200's L2 holds 50 MB."""
CALL_SECONDS = 0.02
"""At least so long is what is timed at once."""
PROGRAM_SECONDS = 2e-3
"""What one compiled loop should take at the floor."""
MEMORY_SHARE = 0.6
"""Of the device's memory, what a case's operands may take."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What no kernel goes beyond, in bytes and in FLOP a second.

    Attributes:
      source: where the two were read; "measured" is here.
    """

    bytes_per_s: float = 4.3e12
    flops_per_s: float = 780e12
    source: str = "predicted: measured on other H200s"

    def floor(self, work: Work) -> float:
        """Seconds below which no kernel does the work."""
        return max(self.bytes_floor(work), self.flops_floor(work))

    def bytes_floor(self, work: Work) -> float:
        return work.num_bytes / self.bytes_per_s

    def flops_floor(self, work: Work) -> float:
        return work.num_flops / self.flops_per_s


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one case is timed.

    Attributes:
      layers: of the stack that the calls walk over.
      calls: in one compiled loop.
      unroll: calls in a turn of the loop: a turn has costs of its own.
    """

    layers: int
    calls: int
    unroll: int

    @classmethod
    def of(cls, op: Op, work: Work, floor: float, rotated_bytes: int = ROTATED_BYTES) -> "Plan":
        calls = max(1, min(256, math.ceil(PROGRAM_SECONDS / floor)))
        unroll = min(8, calls)
        return cls(layers_of(op, work, rotated_bytes), math.ceil(calls / unroll) * unroll, unroll)


def described(op: str, name: str, case: Any, ceilings: Ceilings) -> dict[str, Any]:
    """A case's work and its floors."""
    work = OPS[op].work(case)
    by_bytes, by_flops = ceilings.bytes_floor(work), ceilings.flops_floor(work)
    return {
        "kernel": op,
        "case": name,
        "bytes": work.num_bytes,
        "flops": work.num_flops,
        "bytes_floor_us": 1e6 * by_bytes,
        "flops_floor_us": 1e6 * by_flops,
        "bound": "bytes" if by_bytes >= by_flops else "arithmetic",
    }


def measure(
    name: str,
    case: Any,
    op: str,
    ceilings: Ceilings,
    rounds: int,
    implementations: Sequence[str] = ("mosaic", "xla"),
    rotated_bytes: int = ROTATED_BYTES,
) -> dict[str, Any]:
    """A case's correctness and times; a failure is a figure too, and the next case goes on."""
    figures = described(op, name, case, ceilings)
    work = OPS[op].work(case)
    plan = Plan.of(OPS[op], work, ceilings.floor(work), rotated_bytes)
    try:
        why_not = too_large(OPS[op].shapes(case, plan.layers))
        if why_not is not None:
            return figures | {"why_not": why_not}
        arguments = OPS[op].arguments(case, plan.layers)
        correct = {which: checked(OPS[op], arguments, which) for which in implementations}
        figures["agreement"] = {which: to_dict(found) for which, found in correct.items()}
        figures["is_correct"] = all(found.holds for found in correct.values())
        figures["rotated_bytes"] = plan.layers * work.layer_bytes
        figures |= timed(OPS[op], arguments, plan, rounds, implementations)
        floor, time = 1e6 * ceilings.floor(work), figures[f"{implementations[0]}_us"]
        figures["share_of_floor"] = floor / time["median"]
    except Exception as error:  # of any kind: one case must not cost the others their time
        figures |= {"is_correct": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return figures


def too_large(shapes: Any) -> str | None:
    """Why these operands are not allocated, or None."""
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    room = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if needed > MEMORY_SHARE * room:
        return f"operands of {needed / 1e9:.1f} GB on a device of {room / 1e9:.1f} GB"
    return None


def checked(op: Op, arguments: Any, implementation: str) -> Agreement:
    """How far an implementation's outputs are from the reference's; of the first set of several."""
    if isinstance(arguments, tuple):
        one, layer = arguments[0], jnp.int32(0)
    else:
        one, layer = arguments, arguments["layer"]
    call = jax.jit(functools.partial(op.call, implementation=implementation))
    return op.agreement(one, call(one, layer))


def to_dict(found: Agreement) -> dict[str, float | None]:
    """JSON knows no NaN: null."""
    return {key: value if math.isfinite(value) else None for key, value in found._asdict().items()}


def timed(
    op: Op, arguments: Any, plan: Plan, rounds: int, implementations: Sequence[str]
) -> dict[str, Any]:
    """Microseconds of a call by each implementation, taken in turn.

    Plain XLA's loop is not unrolled: a call of its has many kernels, and they take long to compile.
    """
    plans = {"mosaic": plan, "xla": dataclasses.replace(plan, unroll=1)}
    took = in_turn({w: looped(op, arguments, plans[w], w) for w in implementations}, rounds)
    found: dict[str, Any] = {"layers": plan.layers, "calls": plan.calls, "rounds": rounds}
    for which in implementations:
        found[f"{which}_us"] = Spread.of(1e6 * took[which]).to_dict()
    if len(took) == 2:
        found["times_faster"] = ratio(took["xla"], took["mosaic"]).to_dict()
    return found


def looped(op: Op, arguments: Any, plan: Plan, implementation: str) -> Callable[[], float]:
    """Times calls one after another over the layers of the stack: seconds of a call, per round."""
    run = loop(op, plan, implementation)
    calls = plan.calls
    if isinstance(arguments, tuple):  # whole turns of all sets
        calls = max(1, calls // len(arguments)) * len(arguments)
    started = jnp.int32(0)
    jax.block_until_ready(run(arguments, started))
    repeats = max(1, math.ceil(CALL_SECONDS / seconds(run, arguments, started)))

    def repeated() -> jax.Array:
        layer = started
        for _ in range(repeats):
            layer, _ = run(arguments, layer)
        return layer

    return lambda: seconds(repeated) / (repeats * calls)


def loop(op: Op, plan: Plan, implementation: str) -> Callable[..., tuple[jax.Array, list[Any]]]:
    """(arguments, first layer) -> the layer that comes next, the outputs of the last turn.

    Each call's layer is computed from an element of the output before it, so that no call begins
    before the last one ended; and all outputs leave the loop, so that all are computed. Sets of
    arguments are called in turn, all of them in each turn of the loop.
    """

    @jax.jit
    def call(arguments: Arguments, layer: jax.Array) -> Any:
        return op.call(arguments, layer, implementation)

    @jax.jit
    def run(arguments: Any, layer: jax.Array) -> tuple[jax.Array, list[Any]]:
        is_stack = not isinstance(arguments, tuple)
        sets = (arguments,) * plan.unroll if is_stack else arguments
        layers = plan.layers if is_stack else 1

        def turn(_: Any, state: tuple[jax.Array, list[Any]]) -> tuple[jax.Array, list[Any]]:
            layer, outputs = state[0], []
            for one in sets:
                outputs.append(call(one, layer))
                first = jax.tree.leaves(outputs[-1])[0]
                # No output is this one: the comparison only makes the next call wait.
                is_special = lax.slice(first, (0,) * first.ndim, (1,) * first.ndim) == -12345
                following = lax.rem(layer + 1, jnp.int32(layers))
                layer = jnp.where(is_special.reshape(()), jnp.int32(layers), following)
            return layer, outputs

        shapes = jax.eval_shape(call, sets[0], layer)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), [shapes] * len(sets))
        turns = max(1, plan.calls // len(sets))
        return lax.fori_loop(0, turns, turn, (layer, nothing))

    return run


def measure_ceilings(copied_bytes: int = 2**31, width: int = 8192, turns: int = 20) -> Ceilings:
    """Copy bandwidth, read and written bytes together, and the rate of a bf16 matmul: the best of
    five rounds."""

    @jax.jit
    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.fori_loop(0, turns, lambda _, x: x @ y, x)

    left, right = jax.random.normal(jax.random.key(0), (2, width, width), jnp.bfloat16)
    right *= width**-0.5  # the product of normal numbers is again of about their size
    took = in_turn(
        {
            "copy": copying(copied_bytes, turns),
            "multiply": lambda: seconds(multiply, left, right) / turns,
        },
        rounds=5,
    )
    return Ceilings(
        float(took["copy"].max()),
        2 * width**3 / float(took["multiply"].min()),
        "measured",
    )


def harness_us(calls: int = 256) -> float:
    """What the loop itself takes for a call: that of a call which reads one number of its layer."""
    op = dataclasses.replace(
        next(iter(OPS.values())),
        call=lambda args, layer, _: lax.dynamic_slice(args["x"], (layer,), (1,)),
    )
    timer = looped(op, {"x": jnp.arange(8.0)}, Plan(layers=8, calls=calls, unroll=8), "none")
    return float(1e6 * np.median([timer() for _ in range(5)]))


def ceilings_to_dict(ceilings: Ceilings) -> dict[str, Any]:
    return {
        "ceilings": ceilings.source,
        "copy_gb_per_s": ceilings.bytes_per_s / 1e9,
        "matmul_tflop_per_s": ceilings.flops_per_s / 1e12,
    }


def print_ceilings(figures: dict[str, Any]) -> None:
    print(
        f"copy {figures['copy_gb_per_s']:.0f} GB/s, bf16 matmul "
        f"{figures['matmul_tflop_per_s']:.0f} TFLOP/s ({figures['ceilings']})"
    )
    if "harness_us" in figures:
        print(f"the loop itself: {figures['harness_us']:.2f} us a call")


def print_header(*, has_times: bool = True) -> None:
    times = f"{'mosaic us (10 % to 90 %)':28}{'of floor':>9}  {'xla us':>9}  times faster"
    floors = f"\n{'case':32}{'MB':>9}{'GFLOP':>10}{'floors us':>18}"
    print(f"{floors}  {times}" if has_times else floors)


def print_case(figures: dict[str, Any]) -> None:
    name = f"{figures['kernel']}/{figures['case']}"
    line = (
        f"{name:32}{figures['bytes'] / 1e6:9.2f}{figures['flops'] / 1e9:10.2f}"
        f"{figures['bytes_floor_us']:9.2f}{figures['flops_floor_us']:9.2f}  "
    )
    if "mosaic_us" in figures:
        spread, faster = Spread(**figures["mosaic_us"]), Spread(**figures["times_faster"])
        line += (
            f"{spread!s:28}{figures['share_of_floor']:9.0%}  "
            f"{figures['xla_us']['median']:9.1f}  {faster}"
        )
    line += figures.get("why_not", "")
    if not figures.get("is_correct", True):
        line += f"  WRONG: {figures.get('error') or figures['agreement']}"
    print(line.rstrip(), flush=True)


def write(figures: dict[str, Any], folder: Path) -> Path:
    device = figures["device"].lower().replace(" ", "-")
    return common.write_result(f"kernels-{device}", figures, folder)
