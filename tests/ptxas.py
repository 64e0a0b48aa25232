"""What ptxas says about the Mosaic kernels of a program compiled for an H200 that is not there."""

import dataclasses
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from jaxspec.aot import h200s

__all__ = ["IS_INSTALLED", "SHARED_BYTES", "Kernel", "kernels"]

IS_INSTALLED = importlib.util.find_spec("jax_cuda13_plugin") is not None
SHARED_BYTES = 227 * 1024
"""What a CTA may have on an H200."""
DUMPS = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
"""Besides the folder, what makes jax write down what it compiles."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
      registers: of a thread.
      local_bytes: stack frame, spill stores and spill loads of a thread together.
      shared_bytes: shared memory of a CTA, its barriers included.
      remarks: codes of what ptxas had to say, such as C7512.
    """

    name: str
    ptx: str
    registers: int
    local_bytes: int
    shared_bytes: int
    remarks: frozenset[str]


def kernels(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Kernel]:
    """The Mosaic kernels of `function`, compiled for one H200; arguments are shapes."""
    on_gpu = jax.sharding.NamedSharding(h200s(1), jax.sharding.PartitionSpec())
    args, kwargs = jax.tree.map(lambda x: x.update(sharding=on_gpu), (args, kwargs))
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": folder, **DUMPS}):
            lowered = jax.jit(function).lower(*args, **kwargs)
            lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        return [_read(ptx) for ptx in sorted(Path(folder).glob("*.ptx"))]


def _read(ptx: Path) -> Kernel:
    report = ptx.with_suffix(".ptxas").read_text()
    resources = ptx.with_suffix(".resources.txt").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", report)
    (local,) = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    return Kernel(
        name=ptx.stem,
        ptx=ptx.read_text(),
        registers=int(registers),
        local_bytes=sum(map(int, local)),
        shared_bytes=int(shared) + 8 * sum(int(size) * int(count) for size, count in barriers),
        remarks=frozenset(re.findall(r"\((C\d{4})\)", report)),
    )
