"""Measures all that this machine can measure of the shipped pair, into one JSON file.

    python benchmarks/suite.py [--reference-python PYTHON] [--rounds 9] [--only PART]
    python benchmarks/suite.py --quick        a rehearsal, small; writes to --out alone

- start: a command in a fresh process, compiling, then again with what was compiled; its memory;
- sweep: the fastest tree of each batch size, as `jaxspec sweep` finds it in a fresh process;
- verify: one target pass over T tokens against one token;
- step: with every tree against plain decoding, and against reading the bytes that it has to;
- speed: tokens per second with a draft and without, greedy and at temperature 0.8;
- transformers: its greedy generation in f32 against ours; wants the Python of its environment
  (benchmarks/reference_env/);
- scaling: prefill as the prompt grows, a step as context, batch and tree do;
- conversion: against `cp` of the same bytes;
- kernels: each one's foremost cases on a Hopper GPU;
- device_memory: the most that the accelerator held.

What cannot run here stands in the file with its reason. Writes results/suite-DEVICE.json after
every part (with --only, suite-DEVICE-PART.json), and ends with that object on one line. Exit status
1 if a part failed. 14 minutes on two cores; nothing else should run on them.
"""

import argparse
import dataclasses
import functools
import json
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import common
import generate
import jax
import kernel_timing
import scaling
from common import Spread, attempt
from fresh import Finished, run_fresh
from ops import OPS, chosen

import convert
from jaxspec import SHIPPED_DRAFT, SHIPPED_TARGET, Numerics, load_draft, load_target
from jaxspec.draft import Draft
from jaxspec.kernels.hopper import why_not_hopper
from jaxspec.sweep_report import Figure
from jaxspec.target import Target

PROMPT = "def fibonacci(n):"
STARTS = {"3x1x4": ("--tree", "3x1x4"), "None": ("--draft", "none")}
"""What a fresh process is asked for; None is plain decoding."""
STEPS = 8
"""In one timed call of `scaling`."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
      rounds: of programs that take turns; `few_rounds` of those that take seconds.
      trees: of `step` and `speed`; `num_tokens`, T of `verify`.
      prompts, new_tokens: of `speed` and `transformers`.
      prompt_lengths, sizes: of `scaling`; `base` is what stays as it is along an axis.
      sweep: flags of `jaxspec sweep`.
      source: layers and experts of the converted checkpoint; None takes the target that ships.
        Its size is about `source_bytes`.
    """

    rounds: int
    few_rounds: int
    trees: tuple[str, ...]
    num_tokens: tuple[int, ...]
    prompts: int
    new_tokens: int
    prompt_lengths: tuple[int, ...]
    base: scaling.Point
    sizes: Mapping[str, tuple[Any, ...]]
    sweep: tuple[str, ...]
    source: tuple[int, int] | None
    source_bytes: float


FULL = Extent(
    rounds=9,
    few_rounds=3,
    trees=("1x1x2", "2x1x3", "3x1x4", "3x4x16"),
    num_tokens=(1, 2, 3, 4, 8, 16, 32),
    prompts=8,
    new_tokens=64,
    prompt_lengths=(128, 256, 512, 1024, 2048),
    base=scaling.Point(1024, 1, "3x1x4"),
    sizes={
        "context": (512, 1024, 2048, 4096, 8192),
        "batch": (1, 2, 4, 8, 16),
        "nodes": scaling.TREES,
    },
    sweep=(),
    source=(3, 48),
    source_bytes=2.7e9,
)
QUICK = Extent(
    rounds=1,
    few_rounds=1,
    trees=("3x1x4",),
    num_tokens=(1, 4),
    prompts=1,
    new_tokens=8,
    prompt_lengths=(32, 64),
    base=scaling.Point(64, 1, "3x1x4"),
    sizes={"context": (32, 64), "batch": (1, 2), "nodes": ("3x1x4",)},
    sweep=("--tree", "3x1x4", "--batch-size", "1", "--rounds", "1", "--max-new-tokens", "32"),
    source=None,
    source_bytes=5e7,
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured, and what with. The pair is loaded when it is first asked for, since fresh
    processes come before: two of them would not fit on one accelerator."""

    extent: Extent
    dtype: str
    reference_python: str | None
    place: Path | None

    @functools.cached_property
    def target(self) -> Target:
        return load_target(SHIPPED_TARGET, Numerics(dtype=self.dtype))

    @functools.cached_property
    def draft(self) -> Draft:
        return load_draft(SHIPPED_DRAFT, Numerics(dtype=self.dtype), target=self.target)

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        return common.held_out_prompts("evaluation")[: self.extent.prompts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reference-python", help="of the reference environment")
    parser.add_argument("--quick", action="store_true", help="a rehearsal; its times say nothing")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="a part; repeats")
    parser.add_argument("--rounds", type=int, help="of every comparison; default: 9")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--place", type=Path, help="folder on the disk to convert on")
    parser.add_argument("--out", type=Path, help="folder of the JSON file; default: results/")
    args = parser.parse_args()
    extent = QUICK if args.quick else FULL
    if args.rounds:
        few = max(1, args.rounds // 3)
        extent = dataclasses.replace(extent, rounds=args.rounds, few_rounds=few)
    bench = Bench(extent, args.dtype, args.reference_python, args.place)
    parts = {name: part for name, part in PARTS.items() if name in (args.only or PARTS)}
    suffixes = [*(args.only or []), *["quick"] * args.quick]
    with tempfile.TemporaryDirectory() as nowhere:
        out = args.out or (Path(nowhere) if args.quick else common.RESULTS)
        figures = measured(bench, parts, suffixes, out)
    print(json.dumps(figures))
    failed = [name for name, part in figures["parts"].items() if not part.get("is_correct", True)]
    print("failed: " + ", ".join(failed) if failed else "all parts ended well", file=sys.stderr)
    return 1 if failed else 0


def measured(
    bench: Bench, parts: Mapping[str, "Part"], suffixes: list[str], out: Path
) -> dict[str, Any]:
    """The parts' figures as they are in the file, which is written anew after each of them."""
    not_yet = {name: {"why_not": "the run had not come to it"} for name in parts}
    found: dict[str, Any] = {"dtype": bench.dtype, "rounds": bench.extent.rounds, "parts": not_yet}
    written: dict[str, Any] = {}
    for index, (name, part) in enumerate(parts.items(), 1):
        print(f"\n[{index} of {len(parts)}] {name}, about {part.minutes:g} min", flush=True)
        found["parts"][name] = attempt(0, math.inf, functools.partial(part.measure, bench))
        if "why_not" in found["parts"][name]:
            print(f"not here: {found['parts'][name]['why_not']}")
        found |= {"target": bench.target.identity, "draft": bench.draft.identity}
        device = jax.devices()[0].device_kind.lower().replace(" ", "-")
        dtype = [bench.dtype] * (bench.dtype != "float32")
        path = common.write_result("-".join(["suite", device, *dtype, *suffixes]), found, out)
        written = json.loads(path.read_text())
    if "error" not in found["parts"].get("scaling", {"error": "not asked for"}):
        of = f"{written['target']} in {written['dtype']} on {common.processor()}"
        axes = {axis: written["parts"]["scaling"][axis] for axis in ("prompt", *scaling.AXES)}
        scaling.draw_measured(axes, of, out / "scaling_measured.png")
    return written


def start(bench: Bench) -> dict[str, Any]:
    """A short text by a fresh process, with an empty compile cache and again with a full one."""
    done: dict[str, dict[str, list[Finished]]] = {name: {"cold": [], "warm": []} for name in STARTS}
    for _ in range(bench.extent.few_rounds):
        for name, flags in STARTS.items():
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, "-m", "jaxspec", "generate", PROMPT, "--json"]
                command += ["--max-new-tokens", "16", "--dtype", bench.dtype]
                command += ["--compile-cache", cache, *flags]
                for cache_is in ("cold", "warm"):
                    done[name][cache_is].append(run_fresh(command))
    figures = {"rounds": bench.extent.few_rounds}
    for name, of in done.items():
        figures[name] = {cache_is: _of_processes(runs) for cache_is, runs in of.items()}
        for cache_is, of_runs in figures[name].items():
            wall, compiling = (Spread(**of_runs[key]) for key in ("wall_s", "compile_s"))
            print(f"  {name:8}{cache_is}: {wall} s, of which compiling {compiling} s")
    return figures


def _of_processes(runs: list[Finished]) -> dict[str, Any]:
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return {
        "wall_s": Spread.of([run.wall_s for run in runs]).to_dict(),
        "compile_s": Spread.of([json.loads(run.output)["compile_s"] for run in runs]).to_dict(),
        "peak_bytes": Spread.of(peaks).to_dict() if peaks else None,
    }


def sweep(bench: Bench) -> dict[str, Any]:
    """The trees that `jaxspec sweep` timed over the prompts that ship, batch size by batch size."""
    flags = ("sweep", "--dtype", bench.dtype, *bench.extent.sweep)
    found = json.loads(run_fresh([sys.executable, "-m", "jaxspec", *flags, "--json"]).output)
    (setting,) = found["settings"]
    for batch in setting["batches"]:
        over_plain = Figure(**batch["whole"])
        print(f"  batch {batch['batch_size']}: {batch['best']} {over_plain} times plain decoding")
    kept = ("temperature", "num_texts", "num_tokens", "looping", "checks")
    return {
        "command": shlex.join(("jaxspec", *flags)),
        "num_trees": len(found["accept_length"]),
        **{name: found[name] for name in kept},
        "batches": setting["batches"],
    }


def verify(bench: Bench) -> dict[str, Any]:
    return generate.passes(bench.target, bench.extent.num_tokens, bench.extent.rounds)


def step(bench: Bench) -> dict[str, Any]:
    extent = bench.extent
    return generate.steps_and_floors(
        bench.target, bench.draft, bench.prompts[0], extent.trees, extent.rounds
    )


def speed(bench: Bench) -> dict[str, Any]:
    extent = bench.extent
    return generate.speeds(
        bench.target, bench.draft, bench.prompts, extent.trees, extent.rounds, extent.new_tokens
    )


def transformers(bench: Bench) -> dict[str, Any]:
    if bench.reference_python is None:
        return {"why_not": "--reference-python was not given"}
    plain = generate.generator(bench.target, bench.draft, 1, None, bench.extent.new_tokens)
    return generate.against_transformers(
        plain, bench.prompts, bench.reference_python, bench.extent.rounds
    )


def scaled(bench: Bench) -> dict[str, Any]:
    pair, extent = (bench.target, bench.draft), bench.extent
    prompt = scaling.prefilled(*pair, extent.base.tree, extent.prompt_lengths, extent.rounds)
    steps = scaling.measured(*pair, extent.sizes, extent.base, extent.rounds, STEPS)
    return {"prompt": prompt, **steps}


def conversion(bench: Bench) -> dict[str, Any]:
    extent = bench.extent
    with tempfile.TemporaryDirectory(dir=bench.place) as folder:
        free = shutil.disk_usage(folder).free
        needed = 3 * extent.source_bytes  # source, what is written, and some to spare
        if free < needed:
            return {"why_not": f"{free / 1e9:.1f} GB are free, and it takes {needed / 1e9:.1f}"}
        if extent.source is None:
            source = SHIPPED_TARGET
        else:
            source = convert.write_source(Path(folder) / "source", *extent.source)
        return convert.against_cp(source, Path(folder) / "out", extent.few_rounds)


def kernels(bench: Bench) -> dict[str, Any]:
    reason = why_not_hopper()
    if reason is not None:
        return {"why_not": reason}
    ceilings = kernel_timing.measure_ceilings()
    cases = [
        kernel_timing.measure(name, OPS[op].cases[name], op, ceilings, bench.extent.rounds)
        for op, name in chosen(None, True)
    ]
    is_correct = all(case.get("is_correct", True) for case in cases)
    return kernel_timing.ceilings_to_dict(ceilings) | {"cases": cases, "is_correct": is_correct}


def device_memory(_: Bench) -> dict[str, Any]:
    stats = jax.devices()[0].memory_stats()
    if not stats:
        return {"why_not": "this device does not count its memory; `start` has that of processes"}
    return {"peak_bytes": stats["peak_bytes_in_use"], "limit_bytes": stats.get("bytes_limit")}


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the suite.

    Attributes:
      measure: its figures, or `why_not`.
      minutes: about, on two cores.
    """

    measure: Callable[[Bench], dict[str, Any]]
    minutes: float


PARTS = {
    "start": Part(start, 1.5),  # before this process holds the accelerator
    "sweep": Part(sweep, 2.5),
    "verify": Part(verify, 0.5),
    "step": Part(step, 0.5),
    "speed": Part(speed, 3),
    "transformers": Part(transformers, 2),
    "scaling": Part(scaled, 3),
    "conversion": Part(conversion, 1.5),
    "kernels": Part(kernels, 3),
    "device_memory": Part(device_memory, 0),
}


if __name__ == "__main__":
    sys.exit(main())
