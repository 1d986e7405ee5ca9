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


class Columns(Protocol):
    """What reads columns by name, and what was noted with them: a `ColumnFile`, or `InMemory`."""

    facts: dict[str, Any]

    def count(self, name: str) -> int: ...

    def read(self, name: str, start: int, stop: int) -> np.ndarray: ...

    def at(self, name: str, index: np.ndarray) -> np.ndarray: ...


class InMemory:
    """Columns in memory, which are written as those of a file are."""

    def __init__(self):
        self.facts: dict[str, Any] = {}
        self._parts: dict[str, list[np.ndarray]] = {}

    def add(self, name: str, dtype: str, most: int) -> None:
        self._parts[name] = [np.zeros(0, dtype)]

    def write(self, name: str, values: np.ndarray) -> None:
        parts = self._parts[name]
        parts[:] = [np.concatenate([*parts, np.asarray(values, parts[0].dtype)])]

    def count(self, name: str) -> int:
        return len(self._parts[name][0])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._parts[name][0][start:stop]

    def at(self, name: str, index: np.ndarray) -> np.ndarray:
        return self._parts[name][0][index]


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
    columns.add("length", "<u2" if sequence < 2**16 else "<u4", pieces)
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


class PackedRows:
    """The rows of a split. rows, pieces: how many. documents: how many end in a row, all that lie in rows.
    tokens: in all rows. max_segments: pieces of a row, at most. in_order: whether its rows follow the stream.
    """

    def __init__(self, columns: Columns, sequence: int, *, in_order: bool):
        """columns: see `write_rows`, whose facts are among theirs."""
        self._columns, self.sequence, self.in_order = columns, sequence, in_order
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

    def borders(self, row: int) -> tuple[int, int, bool]:
        """Returns of a row its first piece, the piece behind its last, and whether its last document goes on
        in another row. Raises InputError for a damaged file."""
        first, end = self._columns.read("first", row, row + 2).tolist()
        return first >> 1, end >> 1, bool(first & 1)

    def lengths(self, first: int, end: int) -> np.ndarray:
        """Returns the lengths of pieces. Raises InputError for a damaged file."""
        return self._columns.read("length", first, end)

    def starts(self, first: int, end: int) -> np.ndarray:
        """Returns where pieces of a packing that is not in order begin in the stream, int64. Raises
        InputError for a damaged file."""
        return self._columns.read("start", first, end)

    def spans(self, row: np.ndarray) -> np.ndarray:
        """Returns int64 [n], the Σ length² of these rows. Raises InputError for a damaged file."""
        return self._columns.at("span", row).astype(np.int64)

    def packing(self) -> Packing:
        """Returns the whole of it, in memory. Raises InputError for a damaged file."""
        first = self._columns.read("first", 0, self.rows + 1)
        length = self.lengths(0, self.pieces).astype(np.int64)
        last = np.ones(self.pieces, bool)
        last[(first[1:] >> 1)[first[:-1] & 1 > 0] - 1] = False
        start = np.cumsum(length) - length if self.in_order else self.starts(0, self.pieces)
        return Packing(first >> 1, start, length, last)
