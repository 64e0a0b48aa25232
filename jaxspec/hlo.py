"""Reading a compiled program: what do its loops write, and what do its devices say to each other?

A loop that copies a cache or a stack of experts still computes the right thing, only gigabytes a
step slower. The scheduled HLO says so before any machine has run it.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "Collective",
    "Operation",
    "Run",
    "Write",
    "collectives",
    "loop_writes",
    "module_name",
    "operations",
    "runs",
]

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
          "f32": 4, "s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5, "f8e4m3fn": 1}  # fmt: skip
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\(")
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|true_computation|false_computation|calls|to_apply)=%?([\w.\-]+)"
)
_BODY = re.compile(r"body=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SCOPE = re.compile(r'op_name="([^"]*)"')
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
                "collective-broadcast", "ragged-all-to-all"}  # fmt: skip

# They hand buffers on, or update one where it lies; a copy they needed would stand there itself.
_IN_PLACE = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
             "dynamic-update-slice", "scatter", "constant", "optimization-barrier"}  # fmt: skip

_RUNS_OTHERS = {"while", "conditional", "call"}

# XLA:CPU compiles a small loop into one kernel, and a call of this attribute is that kernel.
_KERNEL_CALL = 'xla_cpu_small_call="true"'

# They start nothing on the device. An asynchronous -done waits for what its -start has started.
_STARTS_NOTHING = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all",
                   "optimization-barrier", "while", "conditional", "call"}  # fmt: skip


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
                exchange = Collective(opcode, _result_bytes(i), i.text.strip())
                found.setdefault(in_loop.get(name), []).append(exchange)
    return found


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction that has the device do something, and how often it does.

    Attributes:
      opcode: of the instruction; a fusion's is that of its root. "while" is the host's look at a
        loop's condition, for which it waits; a loop whose turns are counted beforehand has none.
      scopes: what it was traced under, as in `jit(program)/while/body/verify/psum`: of each loop
        that it is in, the outermost first, and of itself. XLA lets equal loops share a body, so the
        last alone may be another loop's.
      times: in one run of the program.
      num_bytes: of its result, on each device.
    """

    opcode: str
    scopes: tuple[str, ...]
    times: float
    num_bytes: float

    @property
    def is_collective(self) -> bool:
        return self.opcode in _COLLECTIVES


def runs(hlo: str, turns_of: Callable[[str], float]) -> list[Run]:
    """What one run of a program has the device do: kernels, copies, collectives; and waits.

    Of the branches of a conditional, those of the one that starts least.

    Args:
      turns_of: how often a loop turns whose count XLA does not know, by its scope.

    Raises:
      ValueError: the text holds no computation.
    """
    computations = _parse(hlo)

    def visit(name: str, times: float, outer: tuple[str, ...]) -> list[Run]:
        found = []
        for i in computations[name].values():
            scopes = (*outer, _scope(i))
            if i.opcode == "while":
                found += of_loop(i, times, scopes)
            elif i.opcode == "conditional":
                branches = [visit(branch, times, scopes) for branch in _called(i)]
                found += min(branches, key=lambda branch: sum(run.times for run in branch))
            elif i.opcode == "call":
                found += [run for called in _called(i) for run in visit(called, times, outer)]
            elif i.opcode not in _STARTS_NOTHING and not i.opcode.endswith("-done"):
                whole = i._replace(opcode=i.opcode.removesuffix("-start"))
                opcode = _makers(whole, computations)[0].opcode
                found.append(Run(opcode, scopes, times, _result_bytes(i)))
        return found

    def of_loop(loop: _Instruction, times: float, scopes: tuple[str, ...]) -> list[Run]:
        (body,), (condition,) = _BODY.findall(loop.text), _CONDITION.findall(loop.text)
        known = _TURNS.search(loop.text)
        if known is not None:
            return visit(body, times * int(known[1]), scopes)
        turns = turns_of(scopes[-1])
        looks = times * (turns + 1)
        wait = Run("while", scopes, looks, 0)
        return [wait, *visit(condition, looks, scopes), *visit(body, times * turns, scopes)]

    return visit(_entry(hlo), 1, ())


class Operation(NamedTuple):
    """An instruction that a profile may name.

    Attributes:
      opcode: of the instruction itself; of an asynchronous start or end, that of the whole;
        "fusion" of a call that XLA:CPU compiled into one kernel.
      num_bytes: of its result, on each device.
      scopes: each way of reaching it, as `Run.scopes` has one: two loops that are equal may share a
        body.
    """

    opcode: str
    num_bytes: float
    scopes: set[tuple[str, ...]]

    @property
    def is_collective(self) -> bool:
        return self.opcode in _COLLECTIVES

    @property
    def runs_others(self) -> bool:
        """Whether all that it does is to run other instructions."""
        return self.opcode in _RUNS_OTHERS


def operations(hlo: str) -> dict[str, Operation]:
    """The instructions of a program by name, without those inside fusions.

    Raises:
      ValueError: the text holds no computation.
    """
    computations, found = _parse(hlo), {}

    def visit(name: str, outer: tuple[str, ...]) -> None:
        for i in computations[name].values():
            opcode = i.opcode.removesuffix("-start").removesuffix("-done")
            if _KERNEL_CALL in i.text:
                opcode = "fusion"
            operation = found.setdefault(i.name, Operation(opcode, _result_bytes(i), set()))
            scopes = (*outer, _scope(i))
            if scopes not in operation.scopes:
                operation.scopes.add(scopes)
                if operation.runs_others:
                    for called in _called(i):
                        visit(called, scopes)

    visit(_entry(hlo), ())
    return found


def module_name(hlo: str) -> str:
    """The name under which a profile lists the program.

    Raises:
      ValueError: the text has no such header.
    """
    found = _MODULE.match(hlo)
    if found is None:
        raise ValueError("no HloModule line: this is not the text of a compiled program")
    return found[1]


def _entry(hlo: str) -> str:
    """The name of the computation with which a program begins."""
    entry = next(line for line in hlo.splitlines() if line.startswith("ENTRY "))
    return _COMPUTATION.findall(entry)[0]


def _result_bytes(instruction: _Instruction) -> float:
    """Bytes of a result; of an asynchronous start, which lists what it reads too, of its last."""
    found = [(d, s) for d, s in _ARRAY.findall(instruction.result) if d in _BYTES]
    if instruction.opcode in ("fusion-start", "async-start", "copy-start"):
        found = found[:-1]  # a context, which is no array
    if instruction.opcode.endswith("-start"):
        found = found[-1:]
    return sum(_BYTES[dtype] * math.prod(_shape(dims)) for dtype, dims in found)


def _scope(instruction: _Instruction) -> str:
    found = _SCOPE.search(instruction.text)
    return found[1] if found else ""


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
    if not computations:
        raise ValueError("no computation found: this is not the text of a compiled program")
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
