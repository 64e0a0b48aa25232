"""Progress on stderr, for whoever looks at a terminal; tables on stdout."""

import contextlib
import datetime
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

__all__ = ["Display", "wide_console"]

WIDTH = 160
"""Of a table in a file or a pipe."""


class Display:
    """What a command is at: a line while it lasts, gone when it is done.

    Between two of them nothing is drawn, so that text can go to the same terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for what in list(self._tasks):
            self._remove(what)

    def progress(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of something are done; away with it after the last."""
        self._show(what, done, total, f"{done} of {total}", in_bytes=False)

    def progress_bytes(self, what: str, done: int, total: int) -> None:
        """The same of bytes, with the bytes per second since the first call and the time left."""
        count = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        self._show(what, done, total, count, in_bytes=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows that something of unknown length goes on."""
        self._add(what, None)
        try:
            yield
        finally:
            self._remove(what)

    def say(self, text: str) -> None:
        """Prints lines to stderr, terminal or not."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, what: str, done: int, total: int, count: str, *, in_bytes: bool) -> None:
        if what not in self._tasks:
            self._add(what, total, done, in_bytes=in_bytes)
        if self._progress is not None:
            self._progress.update(self._tasks[what], completed=done, total=total, count=count)
        if done >= total:
            self._remove(what)

    def _add(self, what: str, total: int | None, done: int = 0, *, in_bytes: bool = False) -> None:
        if self._progress is None:
            # Rich would by itself send what is printed to stdout to this console, stderr.
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                _Rate(),
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                disable=not self._console.is_terminal,
            )
            self._progress.start()
        # What is done already says nothing about the speed, and is no step.
        self._tasks[what] = self._progress.add_task(
            what, total=total, completed=done, count="", in_bytes=in_bytes
        )

    def _remove(self, what: str) -> None:
        task = self._tasks.pop(what)
        if self._progress is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()
                self._progress = None


class _Rate(ProgressColumn):
    """Speed and time left of what is counted in bytes, once there is a speed."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if not task.fields["in_bytes"] or not task.speed or task.time_remaining is None:
            return Text("")
        left = datetime.timedelta(seconds=int(task.time_remaining))
        return Text(f"{task.speed / 1e6:.0f} MB/s, {left} left")


def wide_console() -> Console:
    """Stdout for tables: as wide as a terminal, and wide enough for them where it is none."""
    return Console(width=None if Console().is_terminal else WIDTH)
