"""Measuring in pairs on a machine that others use too, and writing down what was measured.

Two programs are timed in turn, A B A B, and the ratio is taken within each round: what else the
machine does then falls on both. A figure is a median, with the quantiles beside it.
"""

import dataclasses
import datetime
import json
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jaxlib
import numpy as np

from jaxspec import SHIPPED_TARGET, load_tokenizer
from jaxspec.report import machine
from jaxspec.version import version

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PROMPTS = ROOT / "tests" / "golden" / "prompts.json"


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some values, and what a tenth of them lies below and above."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Spread":
        low, median, high = np.quantile(np.asarray(values), [0.1, 0.5, 0.9])
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"

    def to_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


def seconds(program: Callable[..., Any], *args: Any) -> float:
    """Wall time of program(*args), until the arrays that it returns are there."""
    started = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - started


def in_turn(
    programs: Mapping[str, Callable[[], float | tuple[float, ...]]], rounds: int
) -> dict[str, np.ndarray]:
    """What each program returned in each round, [rounds] or [rounds, figures]: times, or speeds.

    Every round runs all programs once, in their order. A first round warms up and is not counted.
    """
    figures: dict[str, list[float | tuple[float, ...]]] = {name: [] for name in programs}
    for index in range(rounds + 1):
        for name, program in programs.items():
            figure = program()
            if index:
                figures[name].append(figure)
    return {name: np.asarray(values) for name, values in figures.items()}


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> Spread:
    """The quotient of two programs' figures, taken round by round."""
    return Spread.of(numerator / denominator)


def attempt(takes_s: float, end: float, what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it found, or why it found nothing; an error of any kind is one of its findings.

    Args:
      takes_s: what it takes about; with less than that left until `end` it is not begun.
    """
    left = end - time.monotonic()
    if left < takes_s:
        return {"why_not": f"{left:.0f} s were left, and it takes about {takes_s:.0f}"}
    started = time.monotonic()
    try:
        found = what()
    except Exception as error:
        traceback.print_exc()
        found = {"is_correct": False, "error": f"{type(error).__name__}: {error}"[:500]}
    return found | {"took_s": time.monotonic() - started}


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of the mean of independent values."""
    values = np.asarray(values, np.float64)
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def processor() -> str:
    """The kind of processor, as it calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_result(name: str, figures: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `NAME.json` in a folder: the figures, and where, when and with which command."""
    content = {
        "kind": "measured",
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_arguments()]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{machine()}, {processor()}",
        "versions": {
            "jaxspec": version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(rounded(content), indent=1) + "\n")
    return path


def _arguments() -> list[str]:
    """This process's arguments; a path outside the repository is shown by its name alone."""
    return [Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]]


def rounded(value: Any) -> Any:
    """The same, every float in it with four significant digits: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def held_out_prompts(part: Literal["golden", "evaluation"]) -> list[list[int]]:
    """The ids of 64 or 32 prompts from files that the shipped pair was not trained on."""
    tokenizer = load_tokenizer(SHIPPED_TARGET)
    assert tokenizer is not None
    prompts = json.loads(PROMPTS.read_text())[part]
    return [tokenizer.encode(prompt["text"]) for prompt in prompts]
