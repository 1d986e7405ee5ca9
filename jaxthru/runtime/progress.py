"""Progress on stderr: a bar on a terminal, one line in a notebook, elsewhere a line now and then."""

import contextlib
import math
import time
from collections.abc import Iterable

import rich.console
import rich.progress

from jaxthru.runtime import notebook

INTERVAL = 5.0
"""Seconds between plain lines."""


class Progress(contextlib.AbstractContextManager):
    """Shows one task at a time. A context manager; where no task begins, nothing is shown."""

    def __init__(
        self, columns: Iterable[rich.progress.ProgressColumn], console: rich.console.Console | None = None
    ):
        """columns: of the bar. console: by default stderr, so that output stays clean."""
        self.console = console or rich.console.Console(stderr=True)
        terminal = self.console.is_terminal
        self._columns = columns if terminal else None
        self._bar: rich.progress.Progress | None = None  # of a terminal, from the first task on
        self._cell = notebook.Line() if not terminal and notebook.in_notebook() else None
        self._task: rich.progress.TaskID | None = None
        self._last, self._rest = -math.inf, ""

    def __exit__(self, *exception) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._cell is not None and self._rest:  # and not what was waited for last
            self._cell(self._rest)

    def start(self, total: int, done: int = 0, text: str = "") -> None:
        """Begins a task. text: stands beside its bar."""
        if self._columns is not None and self._bar is None:
            self._bar = rich.progress.Progress(*self._columns, console=self.console)
            self._bar.start()
        if self._bar is not None:
            self._task = self._bar.add_task(text, total=total, completed=done)

    def show(self, done: int, text: str, line: str, now: bool = False) -> None:
        """Says how much of the task is done. line: the same where there is no bar, INTERVAL after the last
        one, or now."""
        self._rest = line
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif now or time.monotonic() - self._last >= INTERVAL:
            self._last = time.monotonic()
            self.wait(line)

    def total(self, total: int) -> None:
        """Corrects how much the task is in all."""
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def finish(self, done: int, line: str) -> None:
        """Ends a task whose total was an estimate. line: what a notebook shows of it then."""
        self._rest = line
        if self._bar is not None:
            self._bar.update(self._task, total=done, completed=done)

    def wait(self, text: str) -> None:
        """Says what is waited for; before a task begins, a terminal keeps it as a line."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif self._cell is not None:
            self._cell(text)
        else:
            self.keep(text)

    def keep(self, line: str) -> None:
        """Prints a line that stays."""
        if self._cell is not None:
            notebook.Line()(line)
        else:
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
