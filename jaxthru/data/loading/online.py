"""A source that is tokenised during training: a text store whose tokens the token workers make.

The tokens of its longest chunks it has itself."""

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
        kept = self.text.are_kept(chunks)
        asked = chunks[~kept]
        tokens = self.workers.request(self.source, self.text, asked) if len(asked) else None

        def finish() -> list[np.ndarray]:
            lengths = self.text.lengths(asked)
            place = np.cumsum(lengths) - lengths  # where each chunk's tokens begin in the answer
            answer = tokens.result() if tokens else np.zeros(0, np.int32)
            if kept.any():
                places = dict(zip(asked.tolist(), place.tolist(), strict=True))
                runs = zip(*(each.tolist() for each in (first, last, start, start + length)), strict=True)
                return [self._joined(places, answer, *run) for run in runs]
            begins = place[np.searchsorted(chunks, first)] + start - self.text.starts(first)
            return [answer[begin:end] for begin, end in zip(begins, begins + length, strict=True)]

        return finish

    def _joined(
        self, places: dict[int, int], answer: np.ndarray, first: int, last: int, start: int, stop: int
    ) -> np.ndarray:
        """Returns the tokens of the stream from `start` to before `stop`, in the chunks from `first` to
        `last`. answer: those of the chunks `places`, from which place on they say."""
        parts = []
        numbers = np.arange(first, last + 1)
        begins = self.text.starts(numbers)
        froms = np.maximum(start - begins, 0).tolist()
        to = np.minimum(stop - begins, self.text.lengths(numbers)).tolist()
        for chunk, begin, end in zip(numbers.tolist(), froms, to, strict=True):
            if chunk in places:
                parts.append(answer[places[chunk] + begin : places[chunk] + end])
            else:
                parts.append(self.text.read_kept(chunk, begin, end))
        return np.concatenate(parts)
