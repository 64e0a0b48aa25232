"""What a profile found: where a step's time goes, all of it measured."""

import dataclasses
from typing import Any

from jaxspec.config import MeshConfig
from jaxspec.phases import LOOP, PARTS

__all__ = [
    "CALL",
    "COLLECTIVES",
    "METHOD",
    "ORDER",
    "UNKNOWN",
    "Exchanged",
    "PhaseTime",
    "ProfileReport",
    "StepProfile",
]

AGREEMENT = 0.1
"""By how much the sum of the phases may miss the whole step."""
COLLECTIVES = "collectives"
UNKNOWN = "not attributed"
CALL = "call"
ORDER = (*(part for part in PARTS if part != LOOP), COLLECTIVES, LOOP, UNKNOWN, CALL)
"""Of the phases in a report: the verification first, what is no phase last."""
METHOD = (
    "The whole step is the program that generate runs, timed on the host without a profiler; the "
    "phases are from the same call with JAX's profiler on. Calls with and without it take turns, "
    "and the fastest of each counts, since all else on a machine only adds.",
    "An operation is its phase's by the scope it was traced under; a fusion's is that of its root. "
    "Time in which several run is shared among them; time in which none does, a launch or a wait, "
    "is the next one's, and is given as idle.",
    "On a CPU the profiler slows what it sees: what an event that it notes adds is measured on "
    "another program, of small operations, and taken off for each operation, by how many events "
    "there are of one. On a GPU nothing is.",
    f"{LOOP}: the loop over steps. {UNKNOWN}: the program does not say of which phase it is. "
    f"{CALL}: from the host's call to the first operation, and from the last to the answer.",
)


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """A phase's part of a step, on one device; of several, the mean.

    Attributes:
      ms: of its operations, and of the waits before them, without what the profiler adds.
      idle_ms: of that, with what the profiler adds to it, time in which nothing ran.
      operations: started.
    """

    ms: float
    idle_ms: float
    operations: float


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Collectives of one kind and size within one phase.

    Attributes:
      num_bytes: of the result of one, on each device.
      times: in a step.
      ms: of all of them in a step; on a device that comes first, the wait for the others too.
    """

    phase: str
    opcode: str
    num_bytes: float
    times: float
    ms: float


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One compiled step.

    Attributes:
      tree: None is plain decoding.
      whole_ms: a step in each call without the profiler.
      traced_ms: and in each call with it.
      has_settled: in each of the two, the three fastest are within 5 %: what else the machine did
        has not blurred them.
      phases: of the fastest of these, in the order of `ORDER`.
      exchanges: collectives, which are a phase of their own.
      profiler_us: what the profiler adds to an operation, as taken off; 0 on a GPU.
      compile_s: seconds that tracing and compiling took, or fetching what was compiled before.
    """

    tree: str | None
    whole_ms: tuple[float, ...]
    traced_ms: tuple[float, ...]
    has_settled: bool
    phases: dict[str, PhaseTime]
    exchanges: tuple[Exchanged, ...]
    profiler_us: float
    compile_s: float

    @property
    def step_ms(self) -> float:
        """The whole step without the profiler: its fastest call."""
        return min(self.whole_ms)

    @property
    def sum_ms(self) -> float:
        return sum(phase.ms for phase in self.phases.values())

    @property
    def disagreement(self) -> float:
        """By how much the sum is above the whole step, relative."""
        return self.sum_ms / self.step_ms - 1

    @property
    def agrees(self) -> bool:
        """Whether sum and whole are within 10 %."""
        return abs(self.disagreement) <= AGREEMENT

    def of_phase(self, phase: str) -> float:
        """Milliseconds of a phase, all its parts together."""
        return sum(one.ms for name, one in self.phases.items() if name.split("/")[0] == phase)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tree": self.tree,
            "verify_share": self.of_phase("verify") / self.sum_ms,
            "phases": {
                name: {**dataclasses.asdict(phase), "share": phase.ms / self.sum_ms}
                for name, phase in self.phases.items()
            },
            "sum_ms": self.sum_ms,
            "step_ms": self.step_ms,
            "disagreement": self.disagreement,
            "agrees": self.agrees,
            "has_settled": self.has_settled,
            "whole_ms": list(self.whole_ms),
            "traced_ms": list(self.traced_ms),
            "profiler_us_per_operation": self.profiler_us,
            "collectives": [dataclasses.asdict(one) for one in self.exchanges],
            "compile_s": self.compile_s,
        }


@dataclasses.dataclass(frozen=True)
class ProfileReport:
    """A profile of steps on this machine.

    Attributes:
      target, draft: identity of the weights; None without a draft.
      prompt_lens: tokens of the prompts, which fill the batch.
      num_steps: in a call, after the prompts.
      steps: with each tree.
      implementations: of the kernels that have several, by the kernel's name.
    """

    target: str
    draft: str | None
    device: str
    dtype: str
    mesh: MeshConfig | None
    implementations: dict[str, str]
    context_length: int
    prompt_lens: tuple[int, ...]
    num_steps: int
    steps: tuple[StepProfile, ...]
    jax_version: str
    machine: str
    command: str

    @property
    def agrees(self) -> bool:
        """Whether every step's phases sum to the whole."""
        return all(step.agrees for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` object."""
        return {
            "kind": "measured",
            "method": " ".join(METHOD),
            "target": self.target,
            "draft": self.draft,
            "device": self.device,
            "dtype": self.dtype,
            "mesh": None if self.mesh is None else str(self.mesh),
            "cache": None if self.mesh is None else self.mesh.cache,
            "implementations": self.implementations,
            "batch_size": len(self.prompt_lens),
            "context_length": self.context_length,
            "prompt_lens": list(self.prompt_lens),
            "num_steps": self.num_steps,
            "steps": [step.to_dict() for step in self.steps],
            "agrees": self.agrees,
            "jax_version": self.jax_version,
            "machine": self.machine,
            "command": self.command,
        }
