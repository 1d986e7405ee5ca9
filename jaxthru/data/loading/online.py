"""A source that is tokenised during training: a text store whose tokens the token workers make."""

from collections.abc import Callable

import numpy as np

from jaxthru.data.loading.token_workers import TokenWorkers
from jaxthru.data.mixture.packing import ranges
from jaxthru.data.store.text_store import TextSplit


class OnlineSplit:
    """One split, read as that of a token store is. source: its name in the pool. See `store.Split`."""

    def __init__(self, source: str, text: TextSplit, workers: TokenWorkers):
        self.source, self.text, self.workers = source, text, workers
        self.tokens, self.targets = text.tokens, text.targets

    def begin(self, start: np.ndarray, length: np.ndarray) -> Callable[[], list[np.ndarray]]:
        """Asks for runs of the stream and returns a function that waits for their tokens, an array each.

        A token that is no target that is trained on comes as ~token.

        start, length: int64 [runs], none empty. The function raises InputError for what cannot be read.
        """
        first, last = map(self.text.chunks_at, (start, start + length - 1))
        # Runs may share a chunk, and a long one has several: each chunk is asked for once.
        chunks = np.unique(np.repeat(first, last - first + 1) + ranges(last - first + 1))
        tokens = self.workers.request(self.source, self.text, chunks)

        def finish() -> list[np.ndarray]:
            lengths = self.text.lengths(chunks)
            place = np.cumsum(lengths) - lengths  # where each chunk's tokens begin in the answer
            begins = place[np.searchsorted(chunks, first)] + start - self.text.starts(first)
            answer = tokens.result()
            return [answer[begin:end] for begin, end in zip(begins, begins + length, strict=True)]

        return finish
