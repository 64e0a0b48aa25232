"""One run over several processes, each with devices of its own: `jax.distributed`, joined here.

All processes run the same program on the same requests, and read the same decisions off their
devices; the first one speaks for them. What one of them cannot use, all of them refuse: none waits
for another that has gone.
"""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.errors import InputError

__all__ = [
    "JOIN_TIMEOUT_S",
    "Processes",
    "all_or_none",
    "check_agreement",
    "is_first",
    "join",
    "told_by_first",
]

JOIN_TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which process of how many this is.

    Attributes:
      coordinator: HOST:PORT on which the first process listens.
      num: of processes.
      index: this one's, from 0.
      timeout_s: how long it waits for the others.
    """

    coordinator: str
    num: int
    index: int
    timeout_s: int = JOIN_TIMEOUT_S

    def check(self) -> None:
        """Raises InputError for what cannot be joined."""
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"--coordinator {self.coordinator!r}: expected HOST:PORT")
        if self.num < 1 or not 0 <= self.index < self.num:
            raise InputError(
                f"--process-index {self.index} of --num-processes {self.num}: it goes from 0 to "
                f"{self.num - 1}"
            )
        if self.timeout_s < 1:
            raise InputError(f"--join-timeout {self.timeout_s}: it starts at 1 second")


def join(processes: Processes) -> None:
    """Waits until all processes are there; from then on jax sees all their devices.

    Raises:
      InputError: this process is no such one, or the others did not come in time.
    """
    processes.check()
    failed: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                processes.coordinator,
                processes.num,
                processes.index,
                # When this has passed, jax aborts the process. It ends before, and says why.
                initialization_timeout=2 * processes.timeout_s + 60,
            )
        except Exception as error:  # what is raised differs between versions
            failed.append(error)

    waiting = threading.Thread(target=initialize, daemon=True)
    waiting.start()
    waiting.join(processes.timeout_s)
    if not failed and not waiting.is_alive():
        return
    who = f"process {processes.index} of {processes.num}"
    if failed:
        raise InputError(
            f"{who} cannot join --coordinator {processes.coordinator}: "
            f"{str(failed[0]).splitlines()[0]}"
        ) from failed[0]
    if processes.index == 0:
        raise InputError(
            f"{who}: not all of the others came to --coordinator {processes.coordinator}, where "
            f"this one listens, within {processes.timeout_s} s (--join-timeout); are they all "
            "running, with the same --coordinator and --num-processes?"
        )
    raise InputError(
        f"{who}: no answer from --coordinator {processes.coordinator}, where process 0 listens, "
        f"within {processes.timeout_s} s (--join-timeout); are all {processes.num} running, and is "
        "it reached from here?"
    )


def is_first() -> bool:
    """Whether this process speaks for all: prints what was generated, writes what is written."""
    return jax.process_index() == 0


def check_agreement(given: Mapping[str, str]) -> None:
    """Raises InputError, in every process, if they were not all given the same values by name."""
    said = [json.loads(text) for text in _gather(json.dumps(dict(given)))]
    differing = []
    for name in dict.fromkeys(name for one in said for name in one):
        values = [one.get(name, "not there") for one in said]
        if len(set(values)) > 1:
            who = {value: [i for i, v in enumerate(values) if v == value] for value in values}
            differing.append(
                f"  {name}: {'; '.join(f'{v} in {_named(of)}' for v, of in who.items())}"
            )
    if differing:
        raise InputError(
            "the processes of one run must be given the same, and were not:\n"
            + "\n".join(differing)
        )


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """Raises InputError in every process, where what is done inside raised it in one."""
    mine: InputError | None = None
    try:
        yield
    except InputError as error:
        mine = error
    said = _gather("" if mine is None else str(mine))
    if mine is not None:
        raise mine
    for index, problem in enumerate(said):
        if problem:
            raise InputError(f"process {index} of {len(said)} stopped: {problem}")


def told_by_first(text: str) -> str:
    """What the first process says, in every process."""
    return _gather(text)[0]


def _named(indices: list[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _gather(text: str) -> list[str]:
    """What every process says, by its index."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.asarray([len(data)], np.int32)).ravel()
    padded = np.zeros(max(1, lengths.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:n].tobytes().decode() for row, n in zip(rows, lengths, strict=True)]
