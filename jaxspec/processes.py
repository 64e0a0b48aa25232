"""One run over several processes, each with devices of its own: `jax.distributed`, joined here.

All processes run the same program on the same requests, and read the same decisions off their
devices; the first one speaks for them.
"""

import dataclasses
import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.errors import InputError

__all__ = ["Processes", "check_agreement", "is_first", "join"]

TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which process of how many this is.

    Attributes:
      coordinator: HOST:PORT on which the first process listens.
      num: of processes.
      index: this one's, from 0.
    """

    coordinator: str
    num: int
    index: int

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


def join(processes: Processes) -> None:
    """Waits until all processes are there; from then on jax sees all their devices.

    Raises:
      InputError: this process is no such one, or the others did not come in time.
    """
    processes.check()
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.num,
            processes.index,
            initialization_timeout=TIMEOUT_S,
        )
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise InputError(
            f"process {processes.index} of {processes.num}: no answer from --coordinator "
            f"{processes.coordinator}, where process 0 listens, within {TIMEOUT_S} s "
            f"({first_line}); are all {processes.num} running, and is it reached from here?"
        ) from error


def is_first() -> bool:
    """Whether this process speaks for all: prints what was generated, writes what is written."""
    return jax.process_index() == 0


def check_agreement(what: str) -> None:
    """Raises InputError, in every process, if they were not all given the same `what`."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(what.encode()).digest(), np.uint8)
    all_digests = multihost_utils.process_allgather(digest)
    others = [i for i, other in enumerate(all_digests) if (other != all_digests[0]).any()]
    if others:
        raise InputError(
            f"processes {', '.join(map(str, others))} were given other arguments than process 0; "
            f"all must be given the same. Process {jax.process_index()} has: {what}"
        )
