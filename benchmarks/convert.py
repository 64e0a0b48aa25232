"""Times a conversion against `cp` of the same bytes on the same disk, in turn.

    python benchmarks/convert.py [--layers 5] [--experts 96] [--rounds 5] [--place DIR]
    python benchmarks/convert.py --source /models/Kimi-K2.5 --place /fast/disk

Without --source it writes one: layers of Kimi-K2.5's widths with random weights, a share of the
experts and of all else (0.4 GB for each 16 experts of a layer), a layer a file. Before each turn
the source is put out of the page cache, and a turn ends when all it wrote is on the disk. Writes
results/convert.json, and ends with that object on one line.
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
    parser.add_argument("--layers", type=int, default=5, help="the first is dense")
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        source = args.source or _write_source(Path(place) / "source", args.layers, args.experts)
        files = [path for path in source.iterdir() if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        out = Path(place) / "out"
        turns = in_turn(
            {
                "convert": lambda: _timed(lambda: convert_checkpoint(source, out), files, out),
                "cp": lambda: _timed(lambda: _copy(source, out), files, out),
            },
            args.rounds,
        )
    times, core_times = ({name: turn.T[i] for name, turn in turns.items()} for i in (0, 1))
    share = ratio(times["cp"], times["convert"])
    figures = {
        "source_bytes": size,
        "gb_per_s": {name: Spread.of(size / 1e9 / t).to_dict() for name, t in times.items()},
        "share_of_cp": share.to_dict(),
        "goal": GOAL,
        "core_s_per_gb": {
            name: Spread.of(t / (size / 1e9)).to_dict() for name, t in core_times.items()
        },
        "share_of_cp_per_core_s": ratio(core_times["cp"], core_times["convert"]).to_dict(),
        "rounds": args.rounds,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    for name, seconds in times.items():
        print(f"{name:8} {size / 1e9:.1f} GB at {Spread.of(size / 1e9 / seconds)} GB/s")
    print(f"conversion reaches {share} of cp's speed; the goal is {GOAL}")
    path = common.write_result("convert", figures)
    print(json.dumps(json.loads(path.read_text())))


def _write_source(directory: Path, layers: int, experts: int) -> Path:
    """Layers with a share of Kimi's experts, and about that share of all else they have.

    An expert's matrices have their true size. Vocabulary and dense layer are as small as they are
    in 61 layers; the vision tower, which is hashed and not converted, is left out.
    """
    share = experts / real_layouts.TEXT["n_routed_experts"]
    heads = round(share * real_layouts.TEXT["num_attention_heads"])
    config = real_layouts.kimi_k25_config(
        num_hidden_layers=layers,
        n_routed_experts=experts,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=512,
        vocab_size=2816,
    )
    files = real_layouts.kimi_k25_files(config)
    files = {name: tensors for name, tensors in files.items() if not _is_vision(tensors)}
    return real_layouts.write(directory, config, files, real_layouts.random_weights(0))


def _is_vision(tensors: real_layouts.Tensors) -> bool:
    return any(name.startswith(("mm_projector", "vision_tower")) for name in tensors)


def _copy(source: Path, destination: Path) -> None:
    subprocess.run(["cp", "-rL", str(source), str(destination)], check=True)


def _timed(program: Callable[[], object], files: list[Path], out: Path) -> tuple[float, float]:
    """Seconds, and seconds of all cores, of what reads `files` from the disk and writes `out`."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only what is on the disk can be put out of the cache
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    os.sync()
    started, cores_started = time.perf_counter(), sum(os.times()[:4])
    program()
    os.sync()
    seconds, core_seconds = time.perf_counter() - started, sum(os.times()[:4]) - cores_started
    shutil.rmtree(out)
    return seconds, core_seconds


if __name__ == "__main__":
    main()
