"""Sequence packing: which pieces of which documents make up each row. Only indices; no token is read."""

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packing:
    """Pieces of documents, row after row; a piece is a segment of its row.

    first: int64 [rows + 1], the first piece of each row. start: int64 [pieces], where the piece begins in
    the token stream of its split. length: int64 [pieces]. last: bool [pieces], whether the document ends
    with this piece, so that its last token has no target; a piece whose document goes on ends its row, and
    the row is full.
    """

    first: np.ndarray
    start: np.ndarray
    length: np.ndarray
    last: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.first) - 1

    @classmethod
    def together(cls, packings: Sequence["Packing"]) -> "Packing":
        """Returns the rows of several packings, one after the other."""
        before = np.cumsum([0, *(len(item.start) for item in packings)])
        first = [item.first[:-1] + pieces for item, pieces in zip(packings, before[:-1], strict=True)]
        columns = ([getattr(item, name) for item in packings] for name in ("start", "length", "last"))
        return cls(np.concatenate([*first, before[-1:]]), *(np.concatenate(column) for column in columns))

    def laid(self, row: np.ndarray) -> "Packing":
        """Returns these pieces in rows, in their order. row: int64 [pieces], the row of each."""
        order = np.argsort(row, kind="stable")
        return Packing(
            first=np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2)),
            start=self.start[order],
            length=self.length[order],
            last=self.last[order],
        )

    @property
    def used(self) -> np.ndarray:
        """int64 [rows], the tokens in each row."""
        return np.diff(np.concatenate([[0], np.cumsum(self.length, dtype=np.int64)])[self.first])

    @property
    def spans(self) -> np.ndarray:
        """int64 [rows], the Σ length² of each row, in tokens²: what attention costs in it."""
        return np.add.reduceat(self.length**2, self.first[:-1]) if self.rows else np.zeros(0, np.int64)

    @property
    def max_segments(self) -> int:
        """The most segments of any row."""
        return int(np.diff(self.first).max(initial=0))


def pack(ends: np.ndarray, sequence: int, packing: Literal["split", "best_fit"]) -> Packing:
    """Packs documents into rows of at most `sequence` tokens; every token falls into exactly one piece.

    ends: int64 [documents], where each document ends in the stream; none is empty.
    split: the stream is cut every `sequence` tokens, so that all rows but the last are full.
    best_fit: a document stays whole, but for one longer than a row, which is cut from its start; a row may
        end with padding.
    """
    if packing == "split":
        return Packing.together(list(split_rows([ends], sequence)))
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    long = np.flatnonzero(ends - starts > sequence)
    cuts = [np.arange(starts[item], ends[item], sequence)[1:] for item in long]
    pieces = _cut(ends, np.concatenate([np.zeros(1, np.int64), *cuts]))
    return pieces.laid(best_fit(pieces.length, sequence))


def split_rows(ends: Iterable[np.ndarray], sequence: int) -> Iterator[Packing]:
    """Yields the rows of a stream that is cut every `sequence` tokens, some at a time: memory holds no more.

    ends: int64 [some documents] each, where they end in the stream; one after the other.
    """
    begin, waiting = 0, np.zeros(0, np.int64)  # the first row not yet there, and documents that end behind it
    for part in ends:
        waiting = np.concatenate([waiting, part])
        reached = int(waiting[-1]) // sequence * sequence if len(waiting) else begin
        if reached > begin:
            done = int(np.searchsorted(waiting, reached, side="right"))
            yield _rows_of(waiting[:done], begin, reached, sequence)
            begin, waiting = reached, waiting[done:]
    # The last row, which need not be full, or none.
    yield _rows_of(waiting, begin, int(waiting[-1]) if len(waiting) else begin, sequence)


def _rows_of(ends: np.ndarray, begin: int, stop: int, sequence: int) -> Packing:
    """Returns the rows from `begin`, where one begins, to `stop`. ends: of the documents that end there."""
    rows = np.arange(begin, stop, sequence)
    pieces = _cut(ends, np.append(rows, stop))
    return dataclasses.replace(
        pieces, first=np.append(np.searchsorted(pieces.start, rows), len(pieces.start))
    )


def _cut(ends: np.ndarray, cuts: np.ndarray) -> Packing:
    """Returns the documents cut at the positions `cuts`, of which the first is the start of them all, in the
    order of the stream, as one row. Both are sorted."""
    begin, cuts = cuts[:1], cuts[1:]
    at = np.searchsorted(ends, cuts)
    within = np.append(ends, -1)[at] != cuts
    end = np.insert(ends, at[within], cuts[within])
    last = np.insert(np.ones(len(ends), bool), at[within], False)
    start = np.append(begin, end)[:-1]
    return Packing(np.array([0, len(end)]), start, end - start, last)


def best_fit(lengths: np.ndarray, sequence: int) -> np.ndarray:
    """Returns the row of each piece by best fit decreasing: each goes where it leaves the least room.

    lengths: int64 [pieces], none above `sequence`.

    Pieces of equal length are placed together: best fit fills one row with as many as it takes before it
    turns to the next row of the same room. So the work grows with the number of distinct lengths (at most
    `sequence`) and hardly with the number of pieces.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    room: dict[int, list[np.ndarray]] = {}  # room left -> rows
    sizes: list[int] = []  # the keys of `room`, sorted
    opened = done = 0

    def leave(left: int, chosen: np.ndarray) -> None:
        if left and len(chosen):
            if left not in room:
                bisect.insort(sizes, left)
            room.setdefault(left, []).append(chosen)

    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect.bisect_left(sizes, length)
            if at < len(sizes):
                left = sizes[at]
                chosen = room[left].pop()
                if not room[left]:
                    del room[left], sizes[at]
            else:
                left = sequence
                needed = -(-count // (sequence // length))
                chosen = np.arange(opened, opened + needed)
                opened += needed
            each = left // length
            placed = min(count, each * len(chosen))
            rows[order[done : done + placed]] = chosen[np.arange(placed) // each]
            full, rest = divmod(placed, each)
            leave(left - each * length, chosen[:full])
            if rest:
                leave(left - rest * length, chosen[full : full + 1])
            leave(left, chosen[full + bool(rest) :])
            count, done = count - placed, done + placed
    return rows


def ranges(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... n-1 for each n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
