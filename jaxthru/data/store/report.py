"""What a preparation says of the sources it has made: a line each of a few, a summary of many."""

import time
from collections import Counter
from collections.abc import Sequence

from jaxthru.data.store.progress import Progress
from jaxthru.data.store.writer import Written
from jaxthru.runtime.errors import NAMED, listed

FEW = 24
"""Sources that are told one by one: as many lines as a terminal shows at once."""


class Report:
    """sources: how many there will be."""

    def __init__(self, sources: int, progress: Progress):
        self._few, self._progress = sources <= FEW, progress
        self._began = time.monotonic()
        self._sources: list[Written] = []
        self._damaged = 0

    def add(self, written: Written) -> None:
        """Takes a source that is done, and says what cannot wait for the others."""
        self._sources.append(written)
        self._damaged += bool(written.damaged)
        if self._few:
            said = f"{_size([written], written.seconds)}{_aside([written])}; {written.account}"
            self._progress.keep(f"source {written.name}: {said}")
        elif written.damaged and self._damaged <= NAMED:
            self._progress.keep(f"source {written.name}: {written.account}")

    def end(self) -> None:
        """Says what is to be said of all together."""
        without = [each.name for each in self._sources if each.share and not each.tokens["held_out"]]
        if without:
            of = f"source {without[0]}"
            if len(without) > 1:
                of = f"{len(without):,} of {len(self._sources):,} sources ({listed(without)})"
            self._progress.keep(f"{of}: too few documents, none is held out for evaluation")
        if self._few:
            return
        read, damaged = (sum(getattr(each, name) for each in self._sources) for name in ("read", "damaged"))
        lost = f"{damaged:,} damaged in {self._damaged:,} sources" if damaged else "none damaged"
        self._progress.keep(
            f"{len(self._sources):,} sources: {_size(self._sources, time.monotonic() - self._began)}"
            f"{_aside(self._sources)}; {read:,} records, {lost}"
        )


def _size(sources: Sequence[Written], seconds: float) -> str:
    tokens = sum(sum(each.tokens.values()) for each in sources)
    size = sum(each.size - each.found for each in sources)
    return f"{tokens:,} tokens, {size / 1e6:.1f} MB in {seconds:.1f} s"


def _aside(sources: Sequence[Written]) -> str:
    """Returns what was left out, noted, and kept as tokens; of several sources, also of how many."""
    total, by = Counter[str](), Counter[str]()
    for each in sources:
        left_out = {f"{why} left out": count for why, count in sorted(each.left_out.items())}
        found = left_out | {what: count for what, count in each.noted.items() if count}
        total.update(found)
        by.update(found.keys())
    of = [f" of {by[what]:,} sources" if len(sources) > 1 else "" for what in total]
    parts = [f"; {count:,} {what}{some}" for (what, count), some in zip(total.items(), of, strict=True)]
    chunks, size = (sum(each.kept[at] for each in sources) for at in range(2))
    if chunks:
        parts.append(
            f"; {chunks:,} long {'texts' if chunks > 1 else 'text'} kept as tokens, {size / 1e6:.1f} MB"
        )
    return "".join(parts)
