"""Does the cost of a step grow as it should with context, batch and tree? Predicted and measured.

    python benchmarks/scaling.py

Predicted, by this program: Kimi-K2.5 on eight H200s, the work of a step by arithmetic
(`jaxspec/traffic.py`); nothing is compiled, so that launches and collectives are not in it
(`benchmarks/plan.py`). Writes results/scaling.json and a picture, and ends with that object on one
line. Exits with 1 if what is linear by arithmetic is not.

Measured, by `benchmarks/suite.py` with what is here: whole steps of the shipped pair, and prefill.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, in_turn, seconds
from flax import nnx
from generate import admission
from matplotlib.figure import Figure

from jaxspec import TreeConfig
from jaxspec.draft import Draft
from jaxspec.hardware import Assumptions
from jaxspec.plan_models import PlanConfig, abstract_models
from jaxspec.plan_report import bound_of, work_ms
from jaxspec.step import Settings, State, Status, decode, empty_state, prefill
from jaxspec.target import Target
from jaxspec.traffic import StepShape, Work, work_of_step

TREES = ("3x8x4", "3x8x8", "3x8x16", "3x8x32", "3x8x64")
AXES = ("context", "batch", "nodes")
NAMES = {
    "prompt": "tokens of a prompt",
    "context": "cached tokens of each sequence",
    "batch": "sequences",
    "nodes": "nodes of the tree",
}
PREDICTED = {
    "context": (4096, 8192, 16384, 32768, 65536, 131072),
    "batch": (1, 2, 4, 8, 16, 32, 64),
    "nodes": TREES,
}
LINEAR = {
    ("attention cache", "context"),
    ("attention cache", "batch"),
    ("draft", "context"),
    ("draft", "batch"),
    ("head", "batch"),
    ("head", "nodes"),
}
"""Parts whose bytes arithmetic makes linear in what grows. Their times turn where FLOP begin to
bind; experts fill up, until all of them are read."""
EXACT, NEARLY = 1e-9, 0.15
"""The largest residual of what is called linear, over the value itself: predicted, measured."""
CHUNK = 128
"""Prompt tokens in one target pass."""
ROOM = 128
"""Slots beyond the cached tokens, for those that the timed steps emit."""


@dataclasses.dataclass(frozen=True)
class Fit:
    """A least-squares line, and how far the values are from it.

    Attributes:
      residual: the largest distance of a value from the line, over the value.
    """

    intercept: float
    slope: float
    residual: float

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> "Fit":
        """By relative distances: with sizes that double, the largest would else decide alone."""
        x, y = np.asarray(x, float), np.asarray(y, float)
        design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
        (intercept, slope), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
        residual = np.abs((intercept + slope * x) / y - 1).max()
        return cls(float(intercept), float(slope), float(residual))

    def to_dict(self, tolerance: float) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_linear": self.residual <= tolerance}


class Point(NamedTuple):
    """A step whose cost is asked for."""

    context: int
    batch: int
    tree: str

    def along(self, axis: str) -> float:
        """Where it stands on that axis."""
        return TreeConfig.parse(self.tree).nodes if axis == "nodes" else getattr(self, axis)

    def moved(self, axis: str, to: Any) -> "Point":
        return self._replace(**{"tree" if axis == "nodes" else axis: to})


def main() -> int:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    found = predicted(PREDICTED)
    draw_predicted(found)
    path = common.write_result("scaling", {"kind": "predicted", **found})
    print(json.dumps(json.loads(path.read_text())))
    return 0 if holds(found) else 1


def predicted(sizes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """By axis and part of a step: bytes, floors in ms, and whether they lie on a line.

    Everything else is as at 32k tokens of context, one sequence and a tree of 16 nodes.
    """
    config, assumed = PlanConfig(), Assumptions()
    target, draft = abstract_models(config)
    base = Point(config.context_length, 1, "3x8x16")
    found: dict[str, Any] = {
        "target": target.identity,
        "device": f"H200, mesh {config.mesh}",
        "assumptions": assumed.to_dict(),
    }
    for axis in AXES:
        points = [base.moved(axis, size) for size in sizes[axis]]
        works = [
            work_of_step(target, draft, StepShape(TreeConfig.parse(p.tree), p.batch, p.context))
            for p in points
        ]
        x = [point.along(axis) for point in points]
        found[axis] = {
            "sizes": x,
            "others": base._asdict(),
            "parts": {part: _part([work[part] for work in works], x, assumed) for part in works[0]},
            "should_be_linear": sorted(part for part, along in LINEAR if along == axis),
        }
    return found


def _part(works: Sequence[Work], x: Sequence[float], assumed: Assumptions) -> dict[str, Any]:
    """One part of a step at every size."""
    num_bytes, ms = [w.num_bytes for w in works], [work_ms(w, assumed) for w in works]
    return {
        "bytes": num_bytes,
        "ms": ms,
        "bound": [bound_of(work, assumed) for work in works],
        "bytes_on_a_line": Fit.of(x, num_bytes).to_dict(EXACT),
        "ms_on_a_line": Fit.of(x, ms).to_dict(EXACT),
    }


def holds(found: Mapping[str, Any]) -> bool:
    """Whether the bytes of every part that should be linear are."""
    return all(
        found[axis]["parts"][part]["bytes_on_a_line"]["is_linear"]
        for axis in AXES
        for part in found[axis]["should_be_linear"]
    )


def measured(
    target: Target,
    draft: Draft,
    sizes: Mapping[str, Sequence[Any]],
    base: Point,
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """By axis: milliseconds of a step, and whether the least disturbed ones lie on a line."""
    found: dict[str, Any] = {}
    program_of = functools.cache(functools.partial(decoding, target, draft, steps))
    for axis in AXES:
        points = [base.moved(axis, size) for size in sizes[axis]]
        # One program serves every length: its caches have room for the longest.
        slots = max(point.context for point in points) + ROOM
        timed = {
            str(point.along(axis)): steps_of(program_of(point.tree), target, draft, point, slots)
            for point in points
        }
        took = in_turn(timed, rounds)
        found[axis] = {"others": base._asdict()}
        found[axis] |= fitted(axis, [point.along(axis) for point in points], took, 1e3 / steps)
    return found


def prefilled(
    target: Target, draft: Draft, tree: str, lengths: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Milliseconds of prefill for one prompt of each length, the draft's included, and its line."""
    capture = target.boundaries(draft.config.boundaries.ids, "benchmark")
    settings = Settings(TreeConfig.parse(tree), capture, CHUNK)
    slots, vocab_size = max(lengths) + ROOM, target.config.vocab_size
    graph, params = nnx.split((target, draft))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params: Any, state: State, new: Any) -> State:
        return prefill(*nnx.merge(graph, params), state, new, settings)

    def timer(length: int) -> Callable[[], float]:
        # Prime steps through the vocabulary: neighbours choose different experts.
        new = admission([37 * index % vocab_size for index in range(length)], 1, slots)

        def timed() -> float:
            state = jax.block_until_ready(empty_state(target, draft, 1, slots))
            return seconds(run, params, state, new)

        return timed

    took = in_turn({str(length): timer(length) for length in lengths}, rounds)
    return {"others": {"batch": 1, "chunk": CHUNK}} | fitted("prompt", lengths, took, 1e3)


def fitted(
    axis: str, x: Sequence[float], took: Mapping[str, np.ndarray], unit: float
) -> dict[str, Any]:
    """What each size took, in ms, and the line through the least disturbed rounds."""
    spreads = [Spread.of(unit * times) for times in took.values()]
    # Other work on the machine only adds time.
    fit = Fit.of(x, [spread.low for spread in spreads])
    print(f"{axis}: " + ", ".join(f"{a:g}: {b} ms" for a, b in zip(x, spreads, strict=True)))
    print(f"  {fit.intercept:.3g} ms + {fit.slope:.3g} ms x {axis}, off by {fit.residual:.1%}")
    return {"sizes": x, "ms": [spread.to_dict() for spread in spreads], **fit.to_dict(NEARLY)}


def decoding(target: Target, draft: Draft, steps: int, tree: str) -> Callable[[State], State]:
    """A program of so many steps with a tree."""
    capture = target.boundaries(draft.config.boundaries.ids, "benchmark")
    settings = Settings(TreeConfig.parse(tree), capture, chunk=16)
    graph, params = nnx.split((target, draft))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params: Any, state: State) -> State:
        return decode(*nnx.merge(graph, params), state, jnp.int32(steps), settings)

    return functools.partial(run, params)


def steps_of(
    program: Callable[[State], State], target: Target, draft: Draft, point: Point, slots: int
) -> Callable[[], float]:
    """Times a program on sequences that are all as long; what they cached are zeros."""

    def timed() -> float:
        each = jnp.ones((point.batch,), jnp.int32)
        state = dataclasses.replace(
            empty_state(target, draft, point.batch, slots),
            length=point.context * each,
            status=Status.RUNNING * each,
            limit=slots * each,
        )
        return seconds(program, jax.block_until_ready(state))

    return timed


def draw_predicted(found: Mapping[str, Any]) -> None:
    """A panel for each axis, a line for each part."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for axes, axis in zip(figure.subplots(1, 3), AXES, strict=True):
        for index, (part, of) in enumerate(found[axis]["parts"].items()):
            style = "-" if of["ms_on_a_line"]["is_linear"] else "--"
            axes.loglog(found[axis]["sizes"], of["ms"], style, color=f"C{index}", marker=".",
                        label=part)  # fmt: skip
        axes.yaxis.set_major_formatter("{x:g}")
        _finish(axes, axis, found[axis]["sizes"])
        axes.set_ylabel("ms, predicted floor")
    axes.legend(frameon=False, fontsize="small")
    figure.suptitle(f"predicted: {found['target']} on {found['device']}; dashed is not linear",
                    x=0.01, ha="left")  # fmt: skip
    figure.savefig(common.RESULTS / "scaling_predicted.png", dpi=130)


def draw_measured(found: Mapping[str, Any], of: str, path: Path) -> None:
    """A panel for each axis: medians, what a tenth lies below and above, and the line.

    Args:
      of: which model, in what and on what.
    """
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, (axis, part) in zip(panels, found.items(), strict=True):
        x = np.asarray(part["sizes"])
        median, low, high = (
            np.asarray([one[name] for one in part["ms"]]) for name in ("median", "low", "high")
        )
        axes.errorbar(x, median, [median - low, high - median], fmt="o", capsize=3)
        axes.plot(x, part["intercept"] + part["slope"] * x, "-", color="0.5")
        axes.set_title(f"off the line by at most {part['residual']:.0%}", fontsize="medium")
        _finish(axes, axis, x)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms of prefill" if axis == "prompt" else "ms of a step")
    figure.suptitle(f"measured: {of}", x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def _finish(axes: Any, axis: str, sizes: Sequence[float]) -> None:
    """Ticks where something was computed or timed, 4096 written as 4k."""
    labels = [f"{n // 1024}k" if n % 1024 == 0 else f"{n}" for n in map(int, sizes)]
    axes.set_xticks(sizes, labels)
    axes.minorticks_off()
    axes.set_xlabel(NAMES[axis])
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
