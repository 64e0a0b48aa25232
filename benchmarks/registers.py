"""Compiles the Mosaic kernels of every case for an H200 that is not there, and reads ptxas.

    JAX_PLATFORMS=cpu python benchmarks/registers.py [--only NAME]   needs the `cuda` extra, no GPU

Writes registers, spills, shared memory, stages, occupancy and ptxas' remarks of each kernel of each
case to results/kernels_sm90.json, and what they come to to results/kernels_sm90.md. Exits with 1 if
a kernel spills, or takes more shared memory than there is.
"""

import argparse
import collections
import functools
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from typing import Any

import common
import jax
import jax.numpy as jnp
from ops import OPS, chosen

from jaxspec import ptxas


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help="a kernel, a case, or KERNEL/CASE; repeats")
    args = parser.parse_args()
    if not ptxas.IS_INSTALLED:
        parser.error("compiling for an H200 needs the CUDA plugin: pip install 'jaxspec[cuda]'")
    try:
        cases = list(chosen(args.only, quick=False))
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for op, name in cases:
        rows += compiled(op, name)
        print(f"{op}/{name}", file=sys.stderr)
    table = summary(rows)
    print(table)
    figures = {
        "kind": "compiled for sm_90a; nothing was run",
        "ptxas": importlib.metadata.version("nvidia-cuda-nvcc"),
        "kernels": rows,
    }
    path = common.write_result("kernels_sm90" if not args.only else "kernels_sm90-only", figures)
    path.with_suffix(".md").write_text(
        f"jax {jax.__version__}, ptxas {figures['ptxas']}; "
        f"written by `benchmarks/registers.py`, which says all in `{path.name}`.\n\n{table}\n"
    )
    print(json.dumps(json.loads(path.read_text())))
    return 0 if all(holds(row) for row in rows) else 1


def compiled(op: str, name: str) -> list[dict[str, Any]]:
    """A row for each kernel of the case."""
    case = OPS[op].cases[name]
    call = functools.partial(OPS[op].call, implementation="mosaic")
    shapes, layer = OPS[op].shapes(case, 2), jax.ShapeDtypeStruct((), jnp.int32)
    if isinstance(shapes, tuple):
        shapes = shapes[0]
    tuning = OPS[op].tuning(case)
    found = ptxas.kernels(call, shapes, layer)
    if [kernel.name for kernel in found] != list(tuning):
        raise ValueError(f"{op}/{name} compiled {[k.name for k in found]}, not {list(tuning)}")
    return [
        {
            "op": op,
            "case": name,
            "kernel": kernel.name,
            "tuning": tuning[kernel.name],
            "threads": kernel.threads,
            "registers": kernel.registers,
            "local_bytes": kernel.local_bytes,
            "shared_bytes": kernel.shared_bytes,
            "ctas_per_sm": kernel.ctas_per_sm,
            "remarks": sorted(kernel.remarks),
        }
        for kernel in found
    ]


def holds(row: dict[str, Any]) -> bool:
    """Whether the kernel can run as it was meant to."""
    return row["local_bytes"] == 0 and row["shared_bytes"] <= ptxas.SHARED_BYTES


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line for each kernel and tuning; of figures that differ, the range.

    Splits are no part of a line: they go with the case.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        tuning = {k: v for k, v in row["tuning"].items() if k not in ("splits", "stages")}
        groups[row["kernel"], ", ".join(f"{k} {v}" for k, v in tuning.items())].append(row)
    names = ("threads", "registers", "local_bytes", "shared_bytes", "ctas_per_sm")
    lines = [
        "| kernel | tuning | cases | stages | threads | registers | spills, stack | shared memory "
        "| CTAs an SM | remarks |",
        "|" + "---|" * 10,
    ]
    for (kernel, tuning), group in groups.items():
        stages = {str(row["tuning"].get("stages", "-")) for row in group}
        remarks = sorted({code for row in group for code in row["remarks"]})
        figures = [_range([row[name] for row in group]) for name in names]
        cells = [kernel, tuning or "-", str(len(group)), ", ".join(sorted(stages)), *figures]
        lines.append("| " + " | ".join([*cells, ", ".join(remarks) or "none"]) + " |")
    return "\n".join(lines)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


if __name__ == "__main__":
    sys.exit(main())
