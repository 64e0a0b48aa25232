"""A program: one of two processes of four CPU devices loads a target onto meshes of all eight.

    python -m tests.loading_in_two HOST:PORT INDEX CHECKPOINT MESH ...

It tells as JSON, by mesh, how many bytes it read, how much each device holds, and a hash of every
part of every parameter; `test_restore.py` starts it and judges.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from flax import nnx

from jaxspec.checkpoint import load_target
from jaxspec.config import MeshConfig, Numerics
from jaxspec.processes import Processes, join

FILE_BYTES = "/tensorstore/kvstore/file/bytes_read"


def bytes_read() -> dict[str, int]:
    """By this process so far: as the system counts calls of read, and as TensorStore counts."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counted = dict(line.split(": ") for line in lines)
    metrics = tensorstore.experimental_collect_matching_metrics(FILE_BYTES)
    by_tensorstore = sum(value["value"] for metric in metrics for value in metric["values"])
    return {"system": int(counted["rchar"]), "tensorstore": int(by_tensorstore)}


def hashes(params: Any) -> dict[str, str]:
    """SHA-256 of every part that this process holds, under the parameter's path and the cut."""
    found = {}
    for path, leaf in nnx.to_flat_state(params):
        array = leaf.get_value()
        for shard in array.addressable_shards:
            bounds = [one.indices(n)[:2] for one, n in zip(shard.index, array.shape, strict=True)]
            name = f"{'.'.join(map(str, path))} {json.dumps(bounds)}"
            found[name] = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
    return found


def main() -> None:
    coordinator, index, checkpoint, *meshes = sys.argv[1:]
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    join(Processes(coordinator, 2, int(index)))
    told = {}
    for text in (meshes[0], *meshes):  # the first time modules are read, too
        before = bytes_read()
        numerics = Numerics(dtype="float32", mesh=MeshConfig.parse(text))
        params = nnx.state(load_target(checkpoint, numerics))
        told[text] = {
            "read": {who: count - before[who] for who, count in bytes_read().items()},
            "hashes": hashes(params),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
