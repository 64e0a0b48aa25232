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

__all__ = ["IS_INSTALLED", "SHARED_BYTES", "Kernel", "kernel_hashes", "kernels"]

IS_INSTALLED = importlib.util.find_spec("jax_cuda13_plugin") is not None
SHARED_BYTES = 227 * 1024
"""What a CTA may have on an H200."""
SM_SHARED_BYTES = 228 * 1024
CTA_RESERVED_BYTES = 1024
"""Of an SM's shared memory, what the driver keeps for each CTA."""
SM_REGISTERS, SM_THREADS, SM_CTAS, WARP = 65536, 2048, 32, 32
REGISTER_UNIT = 8
"""A thread takes its registers in so many at a time."""
DUMPS = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
"""Besides the folder, what makes jax write down what it compiles."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
      threads: of a CTA.
      registers: of a thread.
      local_bytes: stack frame, spill stores and spill loads of a thread together.
      shared_bytes: shared memory of a CTA, its barriers included.
      remarks: codes of what ptxas had to say, such as C7512.
    """

    name: str
    ptx: str
    threads: int
    registers: int
    local_bytes: int
    shared_bytes: int
    remarks: frozenset[str]

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that run on an SM at once, by registers, shared memory and threads."""
        registers = -(-self.registers // REGISTER_UNIT) * REGISTER_UNIT
        return min(
            SM_REGISTERS // (self.threads * registers),
            SM_SHARED_BYTES // (self.shared_bytes + CTA_RESERVED_BYTES),
            SM_THREADS // self.threads,
            SM_CTAS,
        )


_compiled: dict[bytes, Kernel] = {}
"""By jax's hash of a kernel: newer jax compiles a kernel once in a process, and says so once."""


def kernels(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Kernel]:
    """The Mosaic kernels of `function` in their order, compiled for one H200.

    A kernel that an earlier call of this process has compiled is not compiled again.

    Args:
      args, kwargs: shapes, as jax.ShapeDtypeStruct.

    Raises:
      ModuleNotFoundError: the CUDA plugin is not installed.
    """
    on_gpu = jax.sharding.NamedSharding(h200s(1), jax.sharding.PartitionSpec())
    args, kwargs = jax.tree.map(lambda x: x.update(sharding=on_gpu), (args, kwargs))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": folder, **DUMPS}),
    ):
        lowered = jax.jit(function).lower(*args, **kwargs)
        hashes = kernel_hashes(lowered.as_text())
        new = [key for key in dict.fromkeys(hashes) if key not in _compiled]
        if new:
            lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
            resources = _dumped(folder, ".resources.txt")
            assert len(resources) == len(hashes), (resources, len(hashes))
            _compiled.update(_read(folder, dict(zip(hashes, resources, strict=True)), new))
    return [_compiled[key] for key in hashes]


def kernel_hashes(text: str) -> list[bytes]:
    """What jax knows each Mosaic kernel of a lowered program by, in the program's order.

    Args:
      text: its StableHLO.
    """
    found = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)
    return [key.encode() for key in found]


def _dumped(folder: str, suffix: str) -> list[Path]:
    """The files of that kind, in the order in which jax counted the kernels."""

    def count(path: Path) -> int:
        return int(path.name.removesuffix(suffix).rsplit("_", 1)[1])

    return sorted(Path(folder).glob(f"*{suffix}"), key=count)


def _read(folder: str, resources: dict[bytes, Path], new: list[bytes]) -> dict[bytes, Kernel]:
    """The kernels of those hashes, matched by name and, within a name, by order."""
    ptx = _dumped(folder, ".ptx")
    found = {}
    for key in new:
        name = _name(resources[key], ".resources.txt")
        match = next(path for path in ptx if _name(path, ".ptx") == name)
        ptx.remove(match)
        found[key] = _kernel(name, match, resources[key].read_text())
    assert not ptx, ptx
    return found


def _name(path: Path, suffix: str) -> str:
    return path.name.removesuffix(suffix).rsplit("_", 1)[0]


def _kernel(name: str, ptx: Path, resources: str) -> Kernel:
    report, text = ptx.with_suffix(".ptxas").read_text(), ptx.read_text()
    (threads,) = re.findall(r"^\.maxntid (\d+), 1, 1$", text, re.MULTILINE)
    (registers,) = re.findall(r"Used (\d+) registers", report)
    (local,) = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", resources)
    barriers = re.findall(r"num_barriers=(\d+)[^)]*\): (\d+)", resources)
    return Kernel(
        name=name,
        ptx=text,
        threads=int(threads),
        registers=int(registers),
        local_bytes=sum(map(int, local)),
        shared_bytes=int(shared) + 8 * sum(int(size) * int(count) for size, count in barriers),
        remarks=frozenset(re.findall(r"\((C\d{4})\)", report)),
    )
