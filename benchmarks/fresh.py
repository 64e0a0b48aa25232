"""A command in a process of its own: what it printed, how long it took, how much memory it held."""

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import ROOT

LOOK_S = 0.01
"""Between two looks at the process."""


class Finished(NamedTuple):
    """A process that ended well.

    Attributes:
      output: its stdout.
      wall_s: from the command to its end.
      peak_bytes: of physical memory, the most it held; None where the system does not tell.
    """

    output: str
    wall_s: float
    peak_bytes: int | None


def run_fresh(command: Sequence[str]) -> Finished:
    """Runs a command in the repository's root.

    Raises:
      RuntimeError: it failed; with the end of its stderr.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started, peak = time.perf_counter(), None
        process = subprocess.Popen(command, stdout=output, stderr=errors, cwd=ROOT)
        while process.poll() is None:
            # The kernel's own high-water mark; what wait4 reports begins at the parent's memory.
            peak = _high_water_bytes(process.pid) or peak
            time.sleep(LOOK_S)
        wall_s = time.perf_counter() - started
        errors.seek(0)
        output.seek(0)
        if process.returncode:
            raise RuntimeError(
                f"{command[1:4]} ended with {process.returncode}: {errors.read()[-300:]}"
            )
        return Finished(output.read(), wall_s, peak)


def _high_water_bytes(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
