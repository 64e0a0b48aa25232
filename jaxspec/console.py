"""Progress on stderr, for whoever looks at a terminal; nothing anywhere else."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["Display"]


class Display:
    """What a command is at, one line at a time, each gone when the next begins."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._tasks = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` parts of something are done; away with it after the last."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, count="")
        count = f"{done} of {total}"
        self._progress.update(self._tasks[what], completed=done, total=total, count=count)
        if done >= total:
            self._progress.remove_task(self._tasks.pop(what))

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows that something of unknown length goes on."""
        task = self._progress.add_task(what, total=None, count="")
        try:
            yield
        finally:
            self._progress.remove_task(task)

    def say(self, text: str) -> None:
        """Prints a line to stderr, terminal or not."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
