"""Programs that run at the same time and need each other, in a time that is bounded."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest

__all__ = ["Ended", "free_address", "run_together"]


class Ended(NamedTuple):
    """What a program left: its exit status, and what it printed."""

    status: int | None
    out: str
    err: str


def free_address() -> str:
    """HOST:PORT of the loopback interface on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def run_together(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> list[Ended]:
    """How each of the commands ended, all started at once.

    The test fails, with what they printed, if they have not all ended in time; they are killed
    then, whatever they wait for.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        said = [[stack.enter_context(tempfile.TemporaryFile()) for _ in "oe"] for _ in commands]
        started = [
            subprocess.Popen(
                command, cwd=cwd, env=os.environ | dict(env or {}), stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, start_new_session=True,
            )
            for command, (out, err) in zip(commands, said, strict=True)
        ]  # fmt: skip
        try:
            while any(process.poll() is None for process in started):
                if time.monotonic() > deadline:
                    pytest.fail(f"not all have ended after {timeout_s} s: {_left(started, said)}")
                time.sleep(0.05)
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _left(started, said)


def _left(
    started: Sequence[subprocess.Popen[bytes]], said: Sequence[Sequence[IO[bytes]]]
) -> list[Ended]:
    """What the programs have left so far; the status of one that goes on is None."""
    for file in (file for files in said for file in files):
        file.seek(0)
    return [
        Ended(process.returncode, out.read().decode(), err.read().decode())
        for process, (out, err) in zip(started, said, strict=True)
    ]
