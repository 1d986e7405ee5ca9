"""Progress of a preparation: a bar on a terminal, one line in a notebook, elsewhere a line now and then."""

import contextlib
import sys
import time

import rich.console
import rich.progress

from jaxthru.runtime import notebook

INTERVAL = 5.0
"""Seconds between plain lines."""


class Progress(contextlib.AbstractContextManager):
    """Use as a context manager; everything goes to stderr, so that a command's output stays clean."""

    def __init__(self):
        console = rich.console.Console(stderr=True)
        columns = (
            rich.progress.TextColumn("{task.description:<28}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TimeElapsedColumn(),
        )
        self._bar = rich.progress.Progress(*columns, console=console) if console.is_terminal else None
        self._cell = notebook.Line() if self._bar is None and notebook.in_notebook() else None
        self._start = self._last = time.monotonic()
        self._started = False
        self._task = None
        self._name, self._total, self._done = "", 0, 0

    def __exit__(self, *exception) -> None:
        if self._bar is not None and self._started:
            self._bar.stop()

    def begin(self, name: str, total: int) -> None:
        """Starts a stage of about `total` bytes of text."""
        self._name, self._total, self._done = name, total, 0
        if self._bar is None:
            self._line()
            return
        if not self._started:  # a start that finds everything prepared shows nothing
            self._bar.start()
            self._started = True
        self._task = self._bar.add_task(name, total=total)

    def advance(self, size: int) -> None:
        """Counts `size` bytes of the stage as done."""
        self._done += size
        if self._bar is not None:
            self._bar.update(self._task, advance=size)
        elif time.monotonic() - self._last > INTERVAL:
            self._line()

    def finish(self) -> None:
        """Ends the stage, whose total was an estimate."""
        if self._bar is not None:
            self._bar.update(self._task, total=self._done, completed=self._done)
        elif self._cell is not None:
            self._cell(f"prepared data: {self._name} [{time.monotonic() - self._start:.0f} s]")

    def note(self, line: str) -> None:
        """Prints a line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self._cell is not None:
            notebook.Line()(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _line(self) -> None:
        self._last = time.monotonic()
        done = f"{self._done / 1e6:.1f} of about {self._total / 1e6:.1f} MB"
        (self._cell or self.note)(f"preparing data: {self._name}: {done} [{self._last - self._start:.0f} s]")
