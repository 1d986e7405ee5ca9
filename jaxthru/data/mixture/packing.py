"""Sequence packing: which pieces of which documents make up each row. Only indices; no token is read."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np


def most_segments(sequence: int) -> int:
    """Returns how many pieces `best_fit` puts into a row: attention kernels size tables by what occurs."""
    return max(64, sequence // 128)


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

    def apart(self, rows: Sequence[int]) -> list["Packing"]:
        """Returns packings of so many rows each, one after the other: what `together` would make this one of.
        Their pieces are views of this one's."""
        packings = []
        for count, end in zip(rows, np.cumsum(rows).tolist(), strict=True):
            first = self.first[end - count : end + 1]
            pieces = slice(first[0], first[-1])
            packings.append(
                Packing(first - first[0], self.start[pieces], self.length[pieces], self.last[pieces])
            )
        return packings

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
    def max_segments(self) -> int:
        """The most segments of any row."""
        return int(np.diff(self.first).max(initial=0))


def pack(ends: np.ndarray, sequence: int, packing: Literal["split", "best_fit"]) -> Packing:
    """Packs documents into rows of at most `sequence` tokens; every token falls into exactly one piece.

    ends: int64 [documents], where each document ends in the stream; none is empty.
    split: the stream is cut every `sequence` tokens, so that all rows but the last are full.
    best_fit: a document stays whole, but for one longer than a row, which is cut from its start; a row
        holds at most `most_segments` pieces and may end with padding.
    """
    if packing == "split":
        tokens = int(ends[-1]) if len(ends) else 0
        rows = -(-tokens // sequence)
        pieces = _cut(ends, np.arange(rows) * sequence)
        first = np.searchsorted(pieces.start, np.arange(rows + 1) * sequence)
        return dataclasses.replace(pieces, first=first)
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    long = np.flatnonzero(ends - starts > sequence)
    cuts = [np.arange(starts[item], ends[item], sequence)[1:] for item in long]
    pieces = _cut(ends, np.concatenate([np.zeros(0, np.int64), *cuts]))
    return pieces.laid(best_fit(pieces.length, sequence, most_segments(sequence)))


def _cut(ends: np.ndarray, cuts: np.ndarray) -> Packing:
    """Returns the documents cut at the positions `cuts`, in the order of the stream, as one row."""
    borders = np.unique(np.concatenate([[0], ends, cuts]))
    start, end = borders[:-1], borders[1:]
    return Packing(np.array([0, len(start)]), start, end - start, ends[np.searchsorted(ends, end)] == end)


def best_fit(lengths: np.ndarray, sequence: int, most: int) -> np.ndarray:
    """Returns the row of each piece by best fit decreasing: each goes where it leaves the least room.

    lengths: int64 [pieces], none above `sequence`. most: pieces in a row.

    Pieces of equal length are placed together: best fit fills one row with as many as it takes before it
    turns to the next row of the same room. So the work grows with the number of distinct lengths (at most
    `sequence`) and hardly with the number of pieces.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    room: dict[int, list[tuple[int, np.ndarray]]] = {}  # room left -> [(pieces in the row, rows)]
    sizes: list[int] = []  # the keys of `room`, sorted
    opened = done = 0

    def leave(left: int, pieces: int, chosen: np.ndarray) -> None:
        if left and pieces < most and len(chosen):
            if left not in room:
                bisect.insort(sizes, left)
            room.setdefault(left, []).append((pieces, chosen))

    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect.bisect_left(sizes, length)
            if at < len(sizes):
                left = sizes[at]
                pieces, chosen = room[left].pop()
                if not room[left]:
                    del room[left], sizes[at]
            else:
                left, pieces = sequence, 0
                needed = -(-count // min(sequence // length, most))
                chosen = np.arange(opened, opened + needed)
                opened += needed
            each = min(left // length, most - pieces)
            placed = min(count, each * len(chosen))
            rows[order[done : done + placed]] = chosen[np.arange(placed) // each]
            full, rest = divmod(placed, each)
            leave(left - each * length, pieces + each, chosen[:full])
            if rest:
                leave(left - rest * length, pieces + rest, chosen[full : full + 1])
            leave(left, pieces, chosen[full + bool(rest) :])
            count, done = count - placed, done + placed
    return rows


def ranges(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... n-1 for each n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
