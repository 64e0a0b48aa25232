"""Plans Kimi-K2.5 on eight H200s: two trees, 32k tokens of context, three batches.

    JAX_PLATFORMS=cpu python benchmarks/plan.py     needs the `cuda` extra, no GPU; 10 minutes

Compiles each step at full size, writes results/plan_h200.json and a picture of each batch, and ends
with that object on one line. Exits with 1 if a step does not fit, has temporaries of 4 GiB, or took
10 minutes to compile.
"""

import json
import sys

import common

from jaxspec import MeshConfig, PlanConfig, TreeConfig, plan_devices
from jaxspec.plan_report import PlanReport
from jaxspec.plan_view import draw, verdict

TREES = (TreeConfig(3, 1, 4), TreeConfig(3, 4, 16))
CASES = (
    (1, MeshConfig(1, 8)),
    (8, MeshConfig(1, 8)),
    (32, MeshConfig(1, 8, "slots")),
)
MOST_TEMPORARIES = 4 * 2**30
MOST_SECONDS = 600


def main() -> int:
    reports = []
    for batch, mesh in CASES:
        report = plan_devices(PlanConfig(mesh=mesh, trees=TREES, batch_size=batch))
        print(f"batch {batch}, cache {mesh.cache}\n{verdict(report)}\n")
        draw(report, common.RESULTS / f"plan_h200-batch{batch}.png")
        reports.append(report)
    once = ("assumptions", "compiled_on", "command", "jax_version")
    found = [report.to_dict() for report in reports]
    figures = {
        "kind": "predicted; only compile_s is measured",
        "assumptions": found[0]["assumptions"],
        "cases": [{k: v for k, v in case.items() if k not in once} for case in found],
    }
    path = common.write_result("plan_h200", figures)
    print(json.dumps(json.loads(path.read_text())))
    return 0 if all(map(holds, reports)) else 1


def holds(report: PlanReport) -> bool:
    """Whether the steps fit, with temporaries and times to compile within their limits."""
    return (
        report.fits
        and report.agrees
        and all(
            program.memory.temporaries < MOST_TEMPORARIES and program.compile_s < MOST_SECONDS
            for program in report.programs
        )
    )


if __name__ == "__main__":
    sys.exit(main())
