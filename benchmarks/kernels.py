"""Times each kernel's cases on a Hopper GPU, beside plain XLA and two floors.

    python benchmarks/kernels.py [--only NAME] [--quick] [--minutes M] [--out FOLDER]
    python benchmarks/kernels.py --self-check

First the two ceilings: copy bandwidth and bf16 matmul rate. Then, case by case, correctness against
the reference, and the time of a call in a compiled loop whose layer index walks over a stack of 400
MB or more, so that nothing is served from L2. Without a Hopper GPU: the floors that the stated
ceilings make, and why there is no time.

`--only` takes a kernel (mla_attention), a case (8h-1t-32k) or both (mla_attention/8h-1t-32k).
`--self-check` runs a small case of each through all of it in plain XLA, on any device: it shows
that the harness works, and its times say nothing. Ends with a line of JSON; what was measured goes
to results/kernels-DEVICE.json too. Exits with 1 if an output was wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax
from kernel_timing import (
    Ceilings,
    ceilings_to_dict,
    described,
    harness_us,
    measure,
    measure_ceilings,
    print_case,
    print_ceilings,
    print_header,
    write,
)
from ops import OPS, chosen

from jaxspec.kernels.hopper import why_not_hopper


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help="a kernel, a case, or KERNEL/CASE; repeats")
    parser.add_argument("--quick", action="store_true", help="the foremost cases, fewer rounds")
    parser.add_argument("--self-check", action="store_true", help="of the harness, on any device")
    parser.add_argument("--rounds", type=int, help="of every comparison; 9, or 5 with --quick")
    parser.add_argument("--minutes", type=float, help="begin no case after so long")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the JSON file")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        cases = list(chosen(args.only, args.quick))
    except ValueError as error:
        parser.error(str(error))
    if args.self_check:
        return self_check()
    reason = why_not_hopper()
    if reason is not None:
        print(json.dumps(common.rounded(floors(cases, reason))))
        return 0
    figures: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    ceilings = measure_ceilings()
    figures |= ceilings_to_dict(ceilings) | {"harness_us": harness_us(), "cases": []}
    print_ceilings(figures)
    print_header()
    rounds = args.rounds or (5 if args.quick else 9)
    for op, name in cases:
        if args.minutes and time.monotonic() - started > 60 * args.minutes:
            figures["cases"].append({"kernel": op, "case": name, "why_not": "no time was left"})
            continue
        figures["cases"].append(measure(name, OPS[op].cases[name], op, ceilings, rounds))
        print_case(figures["cases"][-1])
        write(figures, args.out)
    print(json.dumps(json.loads(write(figures, args.out).read_text())))
    return 0 if all(case.get("is_correct", True) for case in figures["cases"]) else 1


def self_check() -> int:
    """Everything that a measurement does, with small cases of plain XLA."""
    ceilings = measure_ceilings(copied_bytes=2**20, width=64, turns=2)
    harness = harness_us(calls=16)
    cases = [
        measure("small", op.small, name, ceilings, 2, implementations=["xla"], rotated_bytes=10**6)
        for name, op in OPS.items()
    ]
    is_correct = all(case["is_correct"] for case in cases)
    found = {"kind": "self-check of the harness; its times say nothing"}
    found |= ceilings_to_dict(ceilings) | {"harness_us": harness, "cases": cases}
    print(json.dumps(common.rounded(found | {"is_correct": is_correct})))
    return 0 if is_correct else 1


def floors(cases: Sequence[tuple[str, str]], reason: str) -> dict[str, Any]:
    """What can be said without a GPU, printed as a table."""
    ceilings = Ceilings()
    print(f"no times: {reason}\n")
    found = {"kind": "predicted", "why_no_time": reason} | ceilings_to_dict(ceilings)
    found["cases"] = []
    print_ceilings(found)
    print_header(has_times=False)
    for op, name in cases:
        found["cases"].append(described(op, name, OPS[op].cases[name], ceilings))
        print_case(found["cases"][-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
