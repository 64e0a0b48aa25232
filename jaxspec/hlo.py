"""Reading a compiled program: what do its loops write, and what do its devices say to each other?

A loop that copies a cache or a stack of experts still computes the right thing, only gigabytes a
step slower. The scheduled HLO says so before any machine has run it.
"""

import dataclasses
import math
import re
from typing import NamedTuple

__all__ = ["Collective", "Write", "collectives", "loop_writes"]

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
          "f32": 4, "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5, "f8e4m3fn": 1}  # fmt: skip
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|true_computation|false_computation|calls|to_apply)=%?([\w.\-]+)"
)
_BODY = re.compile(r"body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
                "collective-broadcast", "ragged-all-to-all"}  # fmt: skip

# They hand buffers on, or update one where it lies; a copy they needed would stand there itself.
_IN_PLACE = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
             "dynamic-update-slice", "scatter", "constant", "optimization-barrier"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Write:
    """An array that one instruction of a loop body writes, each time round.

    Attributes:
      opcode: of the instruction; a fusion's is that of its root.
      dtype, shape: of the array.
      text: the instruction.
    """

    opcode: str
    dtype: str
    shape: tuple[int, ...]
    text: str

    @property
    def num_bytes(self) -> float:
        return _BYTES[self.dtype] * math.prod(self.shape)


class _Instruction(NamedTuple):
    is_root: bool
    name: str
    result: str
    opcode: str
    text: str

    def operands(self) -> list[str]:
        """Names of the operands (and of nothing else that is called)."""
        inside = self.text.split(f" {self.opcode}(", 1)[1]
        return re.findall(r"%([\w.\-]+)", inside.split("), ", 1)[0])


_Computations = dict[str, dict[str, _Instruction]]


def loop_writes(hlo: str) -> list[Write]:
    """Every array written by an instruction in a loop body, or in what such a body runs.

    What updates a buffer in place (dynamic-update-slice, scatter, and fusions that end in one)
    is left out: XLA puts an explicit `copy` beside it where it cannot.

    Raises:
      ValueError: the text holds no computation.
    """
    computations = _parse(hlo)
    if not computations:
        raise ValueError("no computation found: this is not the text of a compiled program")
    waiting = [
        body
        for instructions in computations.values()
        for i in instructions.values()
        if i.opcode == "while"
        for body in _BODY.findall(i.text)
    ]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for i in computations[name].values():
            if i.opcode in ("while", "conditional", "call"):
                waiting += _called(i)
    writes = []
    for name in sorted(reached):
        for i in computations[name].values():
            for maker in _makers(i, computations):
                # The result of an asynchronous start also lists what it reads; its -done does not.
                if maker.opcode not in _IN_PLACE and not maker.opcode.endswith("-start"):
                    writes += [
                        Write(maker.opcode, dtype, _shape(dims), i.text.strip())
                        for dtype, dims in _ARRAY.findall(maker.result)
                        if dtype in _BYTES
                    ]
    return writes


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
      opcode: all-reduce, all-gather, all-to-all and the like.
      num_bytes: of its result, on each device.
      text: the instruction.
    """

    opcode: str
    num_bytes: float
    text: str


def collectives(hlo: str) -> dict[str | None, list[Collective]]:
    """The exchanges in the body of each loop, by the body's name, and under None those in no loop.

    Those of a loop within a loop are the inner one's alone. A loop without any is left out.

    Raises:
      ValueError: the text holds no computation.
    """
    computations = _parse(hlo)
    if not computations:
        raise ValueError("no computation found: this is not the text of a compiled program")
    instructions = [i for found in computations.values() for i in found.values()]
    bodies = [b for i in instructions if i.opcode == "while" for b in _BODY.findall(i.text)]
    in_loop: dict[str, str] = {}  # of each computation, the innermost loop that runs it
    for body in bodies:
        waiting = [body]
        while waiting:
            name = waiting.pop()
            in_loop[name] = body
            for i in computations[name].values():
                if i.opcode in ("conditional", "call"):
                    waiting += _called(i)
    found: dict[str | None, list[Collective]] = {}
    for name, computation in computations.items():
        for i in computation.values():
            opcode = i.opcode.removesuffix("-start")
            if opcode in _COLLECTIVES:
                # An asynchronous start lists its operands too; the last array is its result's.
                arrays = [Write(opcode, d, _shape(s), "") for d, s in _ARRAY.findall(i.result)]
                counted = arrays[-1:] if i.opcode.endswith("-start") else arrays
                size = sum(array.num_bytes for array in counted)
                found.setdefault(in_loop.get(name), []).append(
                    Collective(opcode, size, i.text.strip())
                )
    return found


def _called(instruction: _Instruction) -> list[str]:
    """The computations that a call, a conditional or a loop runs."""
    branches = _BRANCHES.findall(instruction.text)
    named = [name.strip(" %") for branch in branches for name in branch.split(",")]
    return _CALLED.findall(instruction.text) + named


def _parse(hlo: str) -> _Computations:
    computations, current = {}, None
    for line in hlo.splitlines():
        if not line.startswith(" ") and (head := _COMPUTATION.match(line.strip())):
            current = computations.setdefault(head[1], {})
        elif current is not None and (found := _INSTRUCTION.match(line)):
            root, name, result, opcode = found.groups()
            current[name] = _Instruction(bool(root), name, result, opcode, line)
    return computations


def _makers(instruction: _Instruction, computations: _Computations) -> list[_Instruction]:
    """The instructions that make each part of a result: of a fusion, those at its root."""
    if instruction.opcode != "fusion":
        return [instruction]
    called = computations[_CALLED.findall(instruction.text)[0]]
    root = next(i for i in called.values() if i.is_root)
    if root.opcode == "tuple":
        return [_through_bitcasts(called[name], called) for name in root.operands()]
    return [_through_bitcasts(root, called)]


def _through_bitcasts(
    instruction: _Instruction, computation: dict[str, _Instruction]
) -> _Instruction:
    """The instruction that makes a value, seen through the bitcasts above it."""
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operands()[0]]
    return instruction


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(n) for n in dims.split(",") if n)
