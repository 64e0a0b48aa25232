"""What an H200, and a node of eight, is assumed to do: the constants that predictions rest on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.errors import InputError

__all__ = ["NODE", "Assumptions"]

NODE = 8
"""Devices that NVLink joins, of which the costs of collectives are."""


def _figure(value: float, unit: str, source: str) -> Any:
    return dataclasses.field(default=value, metadata={"unit": unit, "source": source})


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Of an H200 in a node of eight. Every one can be overridden; what one is, its metadata say."""

    memory_gb: float = _figure(
        141, "GB", "NVIDIA's data sheet; the driver and CUDA take some of it"
    )
    bandwidth_gb_per_s: float = _figure(
        4300, "GB/s", "bytes read and written by a copy, measured on other H200s; 4800 on paper"
    )
    tflops: float = _figure(
        780, "TFLOP/s", "a bf16 matmul of 8192, measured on other H200s; 989 on paper"
    )
    collective_us: float = _figure(
        20,
        "us",
        "NCCL among 8 H100s up to 512 KB, reported: 19 to 25 us (ByteDance-Seed/Triton-distributed "
        "issue 57), 23 us (vllm pull request 24111)",
    )
    bus_gb_per_s: float = _figure(
        230,
        "GB/s",
        "what the same two report from 1 to 16 MB, counted as nccl-tests counts bus bandwidth; "
        "large messages reach 480",
    )
    launch_us: float = _figure(
        2,
        "us",
        "our judgement: 0.6 us a node of a replayed CUDA graph, 2.7 us an asynchronous launch "
        "(reported on other GPUs, ahrefs/ocannl issue 488), and a kernel's own start and end",
    )
    wait_us: float = _figure(
        15, "us", "our judgement, 10 to 20 us: the host reads a loop's condition before each turn"
    )

    def replaced(self, settings: Sequence[str]) -> "Assumptions":
        """These, some of them overridden, each setting as in `launch_us=3`.

        Raises:
          InputError: one of another form, a name that is none, or a value that is not positive.
        """
        known = {field.name for field in dataclasses.fields(self)}
        values: dict[str, float] = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if name not in known or not value > 0:
                raise InputError(
                    f"--assume {setting!r}: expected NAME=NUMBER, above 0; names are "
                    f"{', '.join(sorted(known))}"
                )
            values[name] = value
        return dataclasses.replace(self, **values)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Value, unit and source of each, by name."""
        described = {}
        for field in dataclasses.fields(self):
            value, source = getattr(self, field.name), field.metadata["source"]
            if value != field.default:
                source = f"set by --assume, in place of {field.default:g}"
            described[field.name] = {
                "value": value,
                "unit": field.metadata["unit"],
                "source": source,
            }
        return described
