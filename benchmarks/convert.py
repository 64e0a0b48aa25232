"""Times a conversion against `cp` of the same bytes on the same disk, in turn.

    python benchmarks/convert.py [--layers 2] [--experts 64] [--rounds 5] [--place DIR]
    python benchmarks/convert.py --source /models/Kimi-K2.5 --place /fast/disk

Without --source it writes one: layers of Kimi-K2.5's widths with random weights (0.4 GB for each
16 experts). Before each turn the source is put out of the page cache, and a turn ends when all it
wrote is on the disk. Writes results/convert.json, and ends with that object on one line.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import Spread, in_turn, ratio

from jaxspec import convert_checkpoint

sys.path.insert(0, str(common.ROOT))
from tests import real_layouts

GOAL = 0.7
"""The share of cp's speed that a conversion is meant to reach."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, help="checkpoint directory; default: written here")
    parser.add_argument("--place", type=Path, help="directory on the disk in question")
    parser.add_argument("--layers", type=int, default=2, help="the first is dense")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        source = args.source or write_source(
            Path(place) / "source",
            num_hidden_layers=args.layers,
            n_routed_experts=args.experts,
            vocab_size=32768,
        )
        figures = against_cp(source, Path(place) / "out", args.rounds)
    path = common.write_result("convert", figures)
    print(json.dumps(json.loads(path.read_text())))


def against_cp(source: Path, out: Path, rounds: int) -> dict[str, Any]:
    """The speed of a conversion from `source` to `out`, and of `cp`."""
    files = [path for path in source.iterdir() if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    times = in_turn(
        {
            "convert": lambda: _timed(lambda: convert_checkpoint(source, out), files, out),
            "cp": lambda: _timed(lambda: _copy(source, out), files, out),
        },
        rounds,
    )
    share = ratio(times["cp"], times["convert"])
    for name, seconds in times.items():
        print(f"{name:8} {size / 1e9:.2g} GB at {Spread.of(size / 1e9 / seconds)} GB/s")
    print(f"conversion reaches {share} of cp's speed; the goal is {GOAL}")
    return {
        "source_bytes": size,
        "gb_per_s": {name: Spread.of(size / 1e9 / t).to_dict() for name, t in times.items()},
        "share_of_cp": share.to_dict(),
        "goal": GOAL,
        "rounds": rounds,
    }


def write_source(directory: Path, **changed: Any) -> Path:
    """A checkpoint in Kimi-K2.5's layout with random weights, some fields of its config changed."""
    config = real_layouts.kimi_k25_config(**changed)
    files = real_layouts.kimi_k25_files(config)
    return real_layouts.write(directory, config, files, real_layouts.random_weights(0))


def _copy(source: Path, destination: Path) -> None:
    subprocess.run(["cp", "-rL", str(source), str(destination)], check=True)


def _timed(program: Callable[[], object], files: list[Path], out: Path) -> float:
    """Seconds of a program that reads `files` from the disk and writes `out` to it."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only what is on the disk can be put out of the cache
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    os.sync()
    started = time.perf_counter()
    program()
    os.sync()
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


if __name__ == "__main__":
    main()
