"""Packing of conversations: each lies whole in one row, for what it answers depends on all that came before.

Unlike text, they are never cut over rows unbidden. One that is longer than a row is left out or truncated,
one without a token to train on is left out, and all of them are counted.
"""

from typing import Literal, NamedTuple

import numpy as np

from jaxthru.data.mixture.packing import Packing, best_fit, ranges

OverLong = Literal["drop", "truncate", "cut"]


class Packed(NamedTuple):
    """How many documents (of pairs: pairs) a split has, and what became of them. All that are neither too
    long nor untrained lie in a row, truncated or not.

    too_long: left out, as longer than a row. truncated: on the right, to fit into a row. untrained: left out,
    as no token of what fits is trained on.
    """

    documents: int
    too_long: int
    truncated: int
    untrained: int

    @property
    def kept(self) -> int:
        return self.documents - self.too_long - self.untrained


def pack_whole(
    ends: np.ndarray, first_trained: np.ndarray, sequence: int, over_long: OverLong, unit: int = 1
) -> tuple[Packing, Packed]:
    """Packs whole documents into rows of at most `sequence` tokens by best fit, and counts those left out.

    ends: int64 [documents], where each document ends in the stream; none is empty. first_trained: int32
    [documents], the place in its document of the first token, but for the document's first, that is trained
    on; any place beyond its end if none is. over_long: what becomes of a document longer than a row: it is
    left out, loses its end, or is cut over rows as text is. unit: documents that lie together, one after the
    other in one row, or not at all; 2 of pairs, which cannot be cut and of which a truncated one has its
    longer document shortened first.
    """
    assert unit == 1 or over_long != "cut"
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1].reshape(-1, unit)
    lengths, first = ends.reshape(-1, unit) - starts, first_trained.reshape(-1, unit)
    long = lengths.sum(axis=1) > sequence
    if over_long == "truncate":
        most = np.maximum(sequence // unit, sequence - lengths.min(axis=1, initial=sequence))
        lengths = np.where(long[:, None], np.minimum(lengths, most[:, None]), lengths)
    untrained = (first >= lengths).any(axis=1)
    too_long = long & ~untrained if over_long == "drop" else np.zeros_like(long)
    truncated = long & ~untrained if over_long == "truncate" else np.zeros_like(long)
    kept = ~(untrained | too_long)

    start, length = starts[kept].ravel(), lengths[kept].ravel()
    pieces = -(-length // sequence)  # one, but where documents are cut
    begin = np.repeat(start, pieces) + ranges(pieces) * sequence
    end = np.repeat(start + length, pieces)
    size = np.minimum(end - begin, sequence)
    row = best_fit(size.reshape(-1, unit).sum(axis=1), sequence)
    packing = Packing(np.array([0, len(begin)]), begin, size, begin + size == end)
    counts = (int(np.count_nonzero(each)) for each in (too_long, truncated, untrained))
    return packing.laid(np.repeat(row, unit)), Packed(len(lengths), *counts)
