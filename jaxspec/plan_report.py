"""What a plan says: memory, work, collectives, kernels and the time they make, all predicted."""

import dataclasses
from typing import Any

from jaxspec.hardware import Assumptions
from jaxspec.traffic import Work

__all__ = [
    "Exchange",
    "Memory",
    "PlanReport",
    "ProgramPlan",
    "accept_lengths",
    "bound_of",
    "in_units",
    "work_ms",
]

AGREEMENT = 0.005
"""By how much the rule table's own sum may differ from what XLA says a program takes."""
GB = 1e9
EXCHANGED = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "all-to-all": 1.0,
    "collective-broadcast": 1.0,
    "collective-permute": 1.0,
}
"""How often a result crosses the bus, times (devices - 1) / devices, as nccl-tests counts it."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
      target, draft: weights, by the table of sharding rules.
      target_cache, draft_cache: for the whole context, by the same table.
      other: the rest of what lives between steps.
      temporaries, outputs: what the compiled step takes besides; outputs that update an input in
        place are no more than that input.
      prefill_temporaries: what admitting prompts takes in place of a step's temporaries.
      arguments: what XLA says the compiled step is given.
    """

    target: int
    draft: int
    target_cache: int
    draft_cache: int
    other: int
    temporaries: int
    outputs: int
    prefill_temporaries: int
    arguments: int

    @property
    def resident(self) -> int:
        """Weights and state, by the table of rules."""
        return self.target + self.draft + self.target_cache + self.draft_cache + self.other

    @property
    def total(self) -> int:
        return self.resident + self.outputs + max(self.temporaries, self.prefill_temporaries)

    @property
    def disagreement(self) -> float:
        """By how much the table's sum misses what XLA says, relative."""
        return abs(self.resident - self.arguments) / self.arguments

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "total": self.total,
            "disagreement": self.disagreement,
        }


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind and size within one phase of a step.

    Attributes:
      num_bytes: of the result of one, on each device.
      times: in a step.
      devices: that take part.
    """

    phase: str
    opcode: str
    num_bytes: float
    times: float
    devices: int

    def ms(self, assumed: Assumptions) -> float:
        """Time of all of them in a step: a latency each, and their bytes over the bus."""
        share = (self.devices - 1) / self.devices
        # Of a reduce-scatter the result is a device's share of what crosses.
        crossings = EXCHANGED.get(self.opcode, self.devices) * share
        bus_us = crossings * self.num_bytes / (assumed.bus_gb_per_s * 1e3)
        return self.times * (assumed.collective_us + bus_us) / 1e3

    def to_dict(self, assumed: Assumptions) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ms": self.ms(assumed)}


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One compiled step.

    Attributes:
      tree: None is plain decoding.
      levels: of the tree; 0 without.
      work: what it has to read and multiply at least, by part.
      experts: distinct ones read in a layer: expected of all devices together, and of the device
        with the most.
      copied: bytes of slices that the compiled program copies out of larger arrays before it uses
        them, by phase.
      exchanges: collectives.
      launches: kernels and copies started, by phase.
      waits: how often the host has to look at a loop's condition, by phase.
      compile_s: seconds that tracing and compiling took here, measured.
    """

    tree: str | None
    levels: int
    memory: Memory
    work: dict[str, Work]
    experts: tuple[float, float]
    copied: dict[str, float]
    exchanges: tuple[Exchange, ...]
    launches: dict[str, float]
    waits: dict[str, float]
    compile_s: float

    def times_ms(self, assumed: Assumptions) -> dict[str, float]:
        """Where a step's time goes; their sum is the step's, since nothing is taken to overlap."""
        times = {name: work_ms(work, assumed) for name, work in self.work.items()}
        copied = Work(2 * sum(self.copied.values()), 0)
        times["slices copied"] = work_ms(copied, assumed)
        times["collectives"] = sum(exchange.ms(assumed) for exchange in self.exchanges)
        times["launches"] = sum(self.launches.values()) * assumed.launch_us / 1e3
        times["waits"] = sum(self.waits.values()) * assumed.wait_us / 1e3
        return times

    def step_ms(self, assumed: Assumptions) -> float:
        return sum(self.times_ms(assumed).values())

    def to_dict(self, assumed: Assumptions) -> dict[str, Any]:
        return {
            "tree": self.tree,
            "step_ms": self.step_ms(assumed),
            "times_ms": self.times_ms(assumed),
            "memory_bytes": self.memory.to_dict(),
            "work": {
                name: {
                    "bytes": work.num_bytes,
                    "flops": work.num_flops,
                    "bound": bound_of(work, assumed),
                }
                for name, work in self.work.items()
            },
            "distinct_experts_per_layer": {
                "all_devices": self.experts[0],
                "most_on_a_device": self.experts[1],
            },
            "slices_copied_bytes": self.copied,
            "collectives": [exchange.to_dict(assumed) for exchange in self.exchanges],
            "launches": self.launches,
            "waits": self.waits,
            "compile_s": self.compile_s,
        }


def work_ms(work: Work, assumed: Assumptions) -> float:
    """The larger of the two floors: bytes over bandwidth, FLOP over the rate of a matmul."""
    by_bytes = work.num_bytes / (assumed.bandwidth_gb_per_s * GB)
    return 1e3 * max(by_bytes, work.num_flops / (assumed.tflops * 1e12))


def bound_of(work: Work, assumed: Assumptions) -> str:
    """Which of the two floors is the larger: "bytes" or "arithmetic"."""
    only_bytes = dataclasses.replace(work, num_flops=0)
    return "bytes" if work_ms(only_bytes, assumed) >= work_ms(work, assumed) else "arithmetic"


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan for some devices: plain decoding, and a step with each tree.

    Attributes:
      target, draft: which configs, in words; draft None for none.
      mesh, cache: the devices, and how the target's cache lies on them.
      context_length: of each sequence, and full.
      plain: the autoregressive step.
      steps: with each tree.
    """

    target: str
    draft: str | None
    device: str
    mesh: str
    cache: str
    batch_size: int
    context_length: int
    assumed: Assumptions
    plain: ProgramPlan
    steps: tuple[ProgramPlan, ...]
    jax_version: str
    machine: str
    command: str

    @property
    def programs(self) -> tuple[ProgramPlan, ...]:
        return (self.plain, *self.steps)

    @property
    def memory_bytes(self) -> float:
        """What a device has."""
        return self.assumed.memory_gb * GB

    @property
    def fits(self) -> bool:
        """Whether every one of the programs does."""
        return all(program.memory.total <= self.memory_bytes for program in self.programs)

    @property
    def agrees(self) -> bool:
        """Whether the rule table's sum is what XLA says the programs take, to half a percent."""
        return all(program.memory.disagreement <= AGREEMENT for program in self.programs)

    def tokens_per_s(self, program: ProgramPlan, accept_length: float = 1.0) -> float:
        """Of all sequences together, where a step emits `accept_length` tokens of each."""
        return 1e3 * self.batch_size * accept_length / program.step_ms(self.assumed)

    def break_even(self, step: ProgramPlan) -> float:
        """The accept_length above which a tree is faster than plain decoding."""
        return step.step_ms(self.assumed) / self.plain.step_ms(self.assumed)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "kind": "predicted",
            "target": self.target,
            "draft": self.draft,
            "device": self.device,
            "mesh": self.mesh,
            "cache": self.cache,
            "batch_size": self.batch_size,
            "context_length": self.context_length,
            "fits": self.fits,
            "rule_table_agrees": self.agrees,
            "memory_bytes": self.memory_bytes,
            "autoregressive": {
                **self.plain.to_dict(self.assumed),
                "tokens_per_s": self.tokens_per_s(self.plain),
            },
            "speculative": [
                {
                    **step.to_dict(self.assumed),
                    "break_even_accept_length": self.break_even(step),
                    "tokens_per_s": [
                        {"accept_length": length, "tokens_per_s": self.tokens_per_s(step, length)}
                        for length in accept_lengths(step)
                    ],
                }
                for step in self.steps
            ],
            "assumptions": self.assumed.to_dict(),
            "jax_version": self.jax_version,
            "compiled_on": self.machine,
            "command": self.command,
        }


def accept_lengths(step: ProgramPlan) -> list[float]:
    """From nothing accepted to everything, by halves."""
    return [1 + half / 2 for half in range(2 * step.levels + 1)]


def in_units(num_bytes: float) -> str:
    """Bytes for a reader, with a digit or more before the point."""
    if num_bytes >= GB / 10:
        return f"{num_bytes / GB:,.2f} GB"
    if num_bytes >= 1e5:
        return f"{num_bytes / 1e6:,.2f} MB"
    return f"{num_bytes:,.0f} bytes"
