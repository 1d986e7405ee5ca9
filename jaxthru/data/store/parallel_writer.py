"""Writes the stores of all sources of a mix: large ones on all cores, small ones side by side.

One thread reads, source after source. Others tokenise: the tokenizers library leaves Python's lock and has
threads of its own. A source that is one batch they also write, most of whose time is waiting for the disk.
What they return is taken in the order of reading, so that no byte depends on how many they are, and of
several sources that cannot be prepared the first one is told.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jaxthru.data.sources.corpus import Corpus
from jaxthru.data.store.progress import Progress
from jaxthru.data.store.report import Report
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.data.store.writer import Batch, StoreWriter, Written
from jaxthru.runtime.cores import usable_cores
from jaxthru.runtime.errors import InputError

THREADS = min(usable_cores(), 16)
"""Batches of a large source that are tokenised at once."""
SMALL = 16
"""Small sources that are written at once."""


def write_stores(
    corpora: dict[str, Corpus],
    targets: dict[str, Path],
    tokenizer: Tokenizer,
    share: float,
    progress: Progress,
) -> None:
    """Writes the stores of the sources `targets`, in this order, and says what became of each.

    corpora: by source; each of these is taken out, for one may keep its text, which is let go when it is
    written. share: of the documents that is held out. Raises InputError that names the first source of which
    no store can be made; the stores before it, and whole shards, stay.
    """
    if not targets:
        return
    sizes = {name: corpora[name].size for name in targets}
    progress.begin(f"{len(sizes):,} sources" if len(sizes) > 1 else next(iter(sizes)), sum(sizes.values()))
    report, waiting = Report(len(sizes), progress), deque[Future[Written]]()

    def settle(written: Written) -> None:
        progress.correct(written.size - sizes[written.name])  # which were those of files, perhaps compressed
        report.add(written)

    def settle_small(most: int) -> None:
        while len(waiting) > most:
            written = waiting.popleft().result()
            progress.advance(written.size, written.name)
            settle(written)

    def write(name: str, target: Path) -> None:
        try:
            writer = StoreWriter(corpora.pop(name), target, tokenizer, share)
            batches = writer.batches()
            first = next(batches)
        except InputError:
            settle_small(0)  # what is wrong with one before it is told first
            raise
        if first.final:
            waiting.append(pool.submit(writer.write_only, first))
            settle_small(2 * SMALL)
            return
        settle_small(0)
        progress.advance(writer.found, name)
        for batch, encoded in _ahead(pool, writer.encode, itertools.chain([first], batches)):
            writer.take(batch, encoded)
            progress.advance(batch.size, name)
        settle(writer.finish())

    pool = ThreadPoolExecutor(max(SMALL, THREADS))
    try:
        for name, target in targets.items():
            write(name, target)
        settle_small(0)
    finally:
        pool.shutdown(cancel_futures=True)
    progress.end()
    report.end()


def _ahead(
    pool: ThreadPoolExecutor, function: Callable[[Batch], list], batches: Iterable[Batch]
) -> Iterator[tuple[Batch, list]]:
    """Yields each batch with what the function makes of it, in their order; threads work a little ahead."""
    running: deque = deque()
    for batch in batches:
        running.append((batch, pool.submit(function, batch)))
        if len(running) > THREADS:
            done, result = running.popleft()
            yield done, result.result()
    while running:
        done, result = running.popleft()
        yield done, result.result()
