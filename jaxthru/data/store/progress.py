"""Progress of a preparation, in bytes of text: one stage for the tokenizer, and one for each source."""

import time

import rich.progress

from jaxthru.runtime import progress

COLUMNS = (
    rich.progress.TextColumn("{task.description:<28}", markup=False),
    rich.progress.BarColumn(),
    rich.progress.DownloadColumn(),
    rich.progress.TimeElapsedColumn(),
)


class Progress(progress.Progress):
    """Use as a context manager; a preparation that finds everything prepared shows nothing."""

    def __init__(self):
        super().__init__(COLUMNS)
        self._start = time.monotonic()
        self._name, self._total, self._done = "", 0, 0

    def begin(self, name: str, total: int) -> None:
        """Starts a stage of about `total` bytes of text."""
        self._name, self._total, self._done = name, total, 0
        self.start(total, text=name)
        self.advance(0, now=True)

    def advance(self, size: int, now: bool = False) -> None:
        """Counts `size` bytes of the stage as done."""
        self._done += size
        done = f"{self._done / 1e6:.1f} of about {self._total / 1e6:.1f} MB"
        self.show(self._done, self._name, f"preparing data: {self._name}: {done} {self._seconds()}", now)

    def end(self) -> None:
        """Ends the stage."""
        self.finish(self._done, f"prepared data: {self._name} {self._seconds()}")

    def _seconds(self) -> str:
        return f"[{time.monotonic() - self._start:.0f} s]"
