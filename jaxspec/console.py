"""Progress on stderr, for whoever looks at a terminal; nothing anywhere else."""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Display"]


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
        if what not in self._tasks:
            self._add(what, total)
        if self._progress is not None:
            count = f"{done} of {total}"
            self._progress.update(self._tasks[what], completed=done, total=total, count=count)
        if done >= total:
            self._remove(what)

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

    def _add(self, what: str, total: int | None) -> None:
        if self._progress is None:
            # Rich would by itself send what is printed to stdout to this console, stderr.
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                disable=not self._console.is_terminal,
            )
            self._progress.start()
        self._tasks[what] = self._progress.add_task(what, total=total, count="")

    def _remove(self, what: str) -> None:
        task = self._tasks.pop(what)
        if self._progress is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()
                self._progress = None
