"""The packing of a split as it is read: the pieces and the cost of any row, in columns of a file.

    first    int64 [rows + 1], twice the first piece of each row, and 1 more where the row's last document
             goes on in another row
    span     [rows], Σ length² of its pieces, as uint32 where no row's is more
    length   [pieces], in tokens, as uint16 where no piece is longer
    start    int64 [pieces], where the piece begins in the stream of its split; not of `split`, whose row r
             begins at r × sequence

So a row of `split` costs two pages of disk, one of `best_fit` three, and its cost one.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from jaxthru.data.mixture.packing import Packing
from jaxthru.data.store.flat_file import Maps

ROWS_TOGETHER = 1 << 13
"""Rows of which it is asked at once whether their spans were verified."""


class Columns(Protocol):
    """What reads columns by name, and what was noted with them: a `ColumnFile`, or `InMemory`."""

    facts: dict[str, Any]
    unverified: int

    def views(self) -> dict[str, memoryview]: ...

    def verify_range(self, name: str, start: int, stop: int) -> None: ...


class InMemory:
    """Columns in memory, which are written as those of a file are."""

    unverified = 0

    def __init__(self):
        self.facts: dict[str, Any] = {}
        self._columns: dict[str, np.ndarray] = {}

    def add(self, name: str, dtype: str, most: int) -> None:
        self._columns[name] = np.zeros(0, dtype)

    def write(self, name: str, values: np.ndarray) -> None:
        column = self._columns[name]
        self._columns[name] = np.concatenate([column, np.asarray(values, column.dtype)])

    def views(self) -> dict[str, memoryview]:
        return {name: memoryview(column) for name, column in self._columns.items()}


def write_rows(
    columns: Any, parts: Iterable[Packing], sequence: int, rows: int, pieces: int, *, in_order: bool
) -> dict[str, int]:
    """Writes the columns of a packing and returns its facts, what `PackedRows` says of all rows together.

    columns: has `add` and `write`. parts: the packing, some rows at a time. rows, pieces: how many there are,
    at most for pieces. in_order: whether it is `split`.
    """
    columns.add("first", "<i8", rows + 1)
    columns.add("span", "<u4" if sequence < 2**16 else "<i8", rows)
    if not in_order:
        columns.add("start", "<i8", pieces)
    columns.add("length", length_type(sequence), pieces)
    facts = dict.fromkeys(("rows", "pieces", "documents", "tokens", "max_segments"), 0)
    for part in parts:
        if not part.rows:
            continue
        goes_on = ~part.last[part.first[1:] - 1]
        columns.write("first", 2 * (part.first[:-1] + facts["pieces"]) + goes_on)
        columns.write("span", part.spans)
        if not in_order:
            columns.write("start", part.start)
        columns.write("length", part.length)
        facts["rows"] += part.rows
        facts["pieces"] += len(part.length)
        facts["documents"] += int(np.count_nonzero(part.last))
        facts["tokens"] += int(part.length.sum())
        facts["max_segments"] = max(facts["max_segments"], part.max_segments)
    columns.write("first", np.array([2 * facts["pieces"]]))
    assert facts["rows"] == rows
    return facts


def length_type(sequence: int) -> str:
    """Returns the dtype of the lengths of pieces in rows of so many tokens."""
    return "<u2" if sequence < 2**16 else "<u4"


class PackedRows:
    """The rows of a split. rows, pieces: how many. documents: how many end in a row, all that lie in rows.
    tokens: in all rows. max_segments: pieces of a row, at most. in_order: whether its rows follow the stream.
    """

    def __init__(self, columns: Columns, sequence: int, *, in_order: bool):
        """columns: see `write_rows`, whose facts are among theirs."""
        self._columns, self.sequence, self.in_order = columns, sequence, in_order
        self._views, self._verified = Maps(), not columns.unverified
        numbers = ("rows", "pieces", "documents", "tokens", "max_segments")
        self.rows, self.pieces, self.documents, self.tokens, self.max_segments = (
            int(columns.facts[name]) for name in numbers
        )

    @classmethod
    def of(cls, packing: Packing, sequence: int) -> "PackedRows":
        """Returns a packing of any kind, held in memory."""
        columns = InMemory()
        given = [packing], sequence, packing.rows, len(packing.length)
        columns.facts = write_rows(columns, *given, in_order=False)
        return cls(columns, sequence, in_order=False)

    def row(self, row: int) -> tuple[int, int, int, memoryview, memoryview]:
        """Returns of a row its first piece, the piece behind its last, whether its last document goes on in
        another row, and of each piece its length and where it begins in the stream; nothing for the latter of
        rows in order. Raises InputError for a damaged file."""
        if not self._verified:
            self._verify(row)
        first, length, start, _ = self._views.get(0) or self._view()
        begin, end = first[row], first[row + 1] >> 1
        more, begin = begin & 1, begin >> 1
        return begin, end, more, length[begin:end], start[begin:end]

    def span(self, row: int) -> int:
        """Returns the Σ length² of a row, in tokens². Raises InputError for a damaged file."""
        if not self._verified:
            self._columns.verify_range("span", row, row + 1)
        return (self._views.get(0) or self._view())[3][row]

    def spans(self, row: np.ndarray) -> np.ndarray:
        """Returns int64 [n], `span` of each of these rows, for many. Raises InputError for a damaged file."""
        columns, view = self._columns, self._columns.views()["span"]
        if columns.unverified:
            for block in np.unique(row // ROWS_TOGETHER).tolist():
                begin = block * ROWS_TOGETHER
                columns.verify_range("span", begin, min(begin + ROWS_TOGETHER, self.rows))
        return np.asarray(view)[row].astype(np.int64)

    def _view(self) -> tuple:
        """Returns the columns first, length, start and span, which are kept at hand: of many sources much of
        the time would go into finding them."""
        views = self._columns.views()
        start = b"" if self.in_order else views["start"]
        return self._views.keep(0, (views["first"], views["length"], start, views["span"]))

    def _verify(self, row: int) -> None:
        columns = self._columns
        columns.verify_range("first", row, row + 2)
        begin, end = (each >> 1 for each in columns.views()["first"][row : row + 2].tolist())
        for name in ("length",) if self.in_order else ("length", "start"):
            columns.verify_range(name, begin, end)
        self._verified = not columns.unverified

    def packing(self) -> Packing:
        """Returns the whole of it, in memory. Raises InputError for a damaged file."""
        views = self._columns.views()
        if self._columns.unverified:
            for name in ("first", "length") if self.in_order else ("first", "length", "start"):
                self._columns.verify_range(name, 0, len(views[name]))
        first, length = np.asarray(views["first"]), np.asarray(views["length"]).astype(np.int64)
        last = np.ones(self.pieces, bool)
        last[(first[1:] >> 1)[first[:-1] & 1 > 0] - 1] = False
        start = np.cumsum(length) - length if self.in_order else np.asarray(views["start"])
        return Packing(first >> 1, start, length, last)
