"""Progress of a preparation, in bytes of text: one stage for the tokenizer, and one for the stores."""

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

    def advance(self, size: int, name: str | None = None, now: bool = False) -> None:
        """Counts `size` bytes of the stage as done. name: of what they are, if not of all the stage."""
        self._done += size
        done = f"{self._done / 1e6:.1f} of about {self._total / 1e6:.1f} MB"
        name = name or self._name
        self.show(self._done, name, f"preparing data: {name}: {done} {self._seconds()}", now)

    def correct(self, size: int) -> None:
        """Adds what a part of the stage, now done, had more than was thought; less, if below 0."""
        self._total += size
        self.total(self._total)

    def end(self) -> None:
        """Ends the stage."""
        self.finish(self._done, f"prepared data: {self._name} {self._seconds()}")

    def _seconds(self) -> str:
        return f"[{time.monotonic() - self._start:.0f} s]"
