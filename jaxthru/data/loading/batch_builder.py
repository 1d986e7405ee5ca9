"""The batch builder: fills a batch with the tokens of planned rows, packed.

What stands in memory in one run is copied in one go, and everything else is computed for all rows of all
sources together: so a batch costs as much from 306 sources as from five, and little more than writing it.
"""

import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxthru.data.loading.batch_memory import BatchMemory
from jaxthru.data.loading.online import OnlineSplit
from jaxthru.data.loading.packed_rows import PackedRows, length_type
from jaxthru.data.mixture.packing import ranges
from jaxthru.data.mixture.planner import EMPTY
from jaxthru.data.store.token_store import Split

NOTHING = (0, 0, 0, b"", b"")
"""The pieces of a row that is EMPTY, as `PackedRows.row` has them."""


class Pieces(NamedTuple):
    """The pieces of some rows, int64 [pieces] but for `last`. in_row: which of the rows each is in. segment:
    its place among that row's pieces, from 0. number: among the pieces of all rows of all sources. start,
    length, last: see `Packing`."""

    in_row: np.ndarray
    segment: np.ndarray
    number: np.ndarray
    start: np.ndarray
    length: np.ndarray
    last: np.ndarray


class BatchBuilder:
    """Builds batches of rows of `sequence` tokens.

    splits: of each source, its tokens and their packing. piece_count: pieces of all their rows.
    memory: of batches.
    """

    def __init__(self, splits: Sequence[tuple[Split | OnlineSplit, PackedRows]], sequence: int):
        self.splits = list(splits)
        self._streams, self._packed = zip(*splits, strict=True)
        self._online = np.array([isinstance(stream, OnlineSplit) for stream in self._streams])
        self._marked = np.array([stream.targets is not None for stream in self._streams])
        self._in_order = np.array([packed.in_order for packed in self._packed])
        self._all_in_order = bool(self._in_order.all())
        self._sequence, self.memory = sequence, BatchMemory()
        *first, self.piece_count = itertools.accumulate((each.pieces for each in self._packed), initial=0)
        self._first_piece = np.array(first)
        self._columns: dict[str, tuple[np.ndarray, int]] = {}

    def add_column(self, name: str, values: np.ndarray, width: int) -> None:
        """Has batches bring along `name`, float32 [rows, width]: a value of each of a row's pieces, in their
        order, and 0 where there is none. values: float32 [pieces], of all sources."""
        self._columns[name] = values, width

    @property
    def columns(self) -> tuple[str, ...]:
        """What batches bring along beside the fields of every batch."""
        return tuple(self._columns)

    def spans(self, source: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Returns int64 [rows], the Σ length² of the pieces of these rows. source, row: as of `build`, but
        none is EMPTY. Raises InputError for a damaged file."""
        packed = self._packed
        if len(row) < 16 * len(packed):  # else a call for each source pays
            pairs = zip(source.tolist(), row.tolist(), strict=True)
            return np.array([packed[name].span(number) for name, number in pairs], np.int64)
        found = np.empty(len(row), np.int64)
        order = np.argsort(source, kind="stable")
        borders = np.searchsorted(source[order], np.arange(len(packed) + 1)).tolist()
        for name, (begin, end) in enumerate(itertools.pairwise(borders)):
            chosen = order[begin:end]
            found[chosen] = packed[name].spans(row[chosen]) if begin < end else 0
        return found

    def pieces(self, source: np.ndarray, row: np.ndarray) -> Pieces:
        """Returns the pieces of these rows, row after row. source, row: as of `build`. Raises InputError for
        a damaged file."""
        packed, pairs = self._packed, zip(source.tolist(), row.tolist(), strict=True)
        rows = [NOTHING if number == EMPTY else packed[name].row(number) for name, number in pairs]
        first, end, more, lengths, starts = zip(*rows, strict=True) if rows else ((),) * 5
        first = np.array(first, np.int64)
        count = np.array(end, np.int64) - first
        length = np.frombuffer(b"".join(lengths), length_type(self._sequence)).astype(np.int64)
        in_row, segment = np.repeat(np.arange(len(row)), count), ranges(count)
        ends = np.cumsum(length)
        behind = np.cumsum(count)  # the last piece of each row, and one
        before = np.concatenate([[0], ends])[behind - count]  # tokens of the rows before
        start = ends - length + (row * self._sequence - before)[in_row]
        if not self._all_in_order:
            start[~self._in_order[source][in_row]] = np.frombuffer(b"".join(starts), np.int64)
        last = np.ones(len(length), bool)
        last[behind[np.array(more, bool)] - 1] = False
        number = (self._first_piece[source] + first)[in_row] + segment
        return Pieces(in_row, segment, number, start, length, last)

    def checksum(self) -> int:
        """Returns a checksum of which documents lie in which rows. Reads the whole packing; raises InputError
        for a damaged file."""
        crc32 = 0
        for base, packed in zip(self._first_piece.tolist(), self._packed, strict=True):
            crc32 = zlib.crc32((packed.packing().first[:-1] + base).astype("<i8"), crc32)
        crc32 = zlib.crc32(np.array([self.piece_count], "<i8"), crc32)
        for name in ("start", "length"):
            for packed in self._packed:
                crc32 = zlib.crc32(getattr(packed.packing(), name).astype("<i8"), crc32)
        return crc32

    def build(self, source: np.ndarray, row: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the batch (see `batch.py`), arrays of [rows, sequence].

        source, row: int64 [rows], which row of which source; row EMPTY is padding alone. A document that
        goes on in another row has its next token there as target; its positions restart, for attention does
        not reach across rows. A target counts unless its source says that it is not trained on. Raises
        InputError for what cannot be read.
        """
        sequence = self._sequence
        batch = self.memory.take(len(row), sequence)
        flat = {name: array.reshape(-1) for name, array in batch.items()}

        # Of each row: its pieces, how many, and what they sum to.
        in_row, segment, piece, start, length, last = self.pieces(source, row)
        per_row = np.bincount(in_row, minlength=len(row))
        used = np.bincount(in_row, length, len(row)).astype(np.int64)
        ends = np.cumsum(length)
        begin = ends - length + (in_row * sequence - (np.cumsum(used) - used)[in_row])  # in the flat arrays

        # Pieces that follow one another in a stream are one run. Where its last document goes on, it has one
        # token more, the last one's target: such a piece fills its row to the end.
        new = (in_row[1:] != in_row[:-1]) | (start[1:] != start[:-1] + length[:-1])
        head = np.flatnonzero(np.append(True, new)[: len(piece)])
        tail = np.append(head[1:], len(piece))[: len(head)] - 1
        size = ends[tail] - ends[head] + length[head]
        goes_on = ~last[tail]
        runs, trained = self._read(source[in_row[head]], start[head], size + goes_on)
        for where, count, run in zip(begin[head].tolist(), size.tolist(), runs, strict=True):
            flat["tokens"][where : where + count] = run[:count]
        flat["targets"][:-1] = flat["tokens"][1:]
        flat["targets"][(begin[head] + size - 1)[goes_on]] = [
            run[-1] for run, more in zip(runs, goes_on.tolist(), strict=True) if more
        ]
        final = (begin + length - 1)[last]  # the last tokens of documents
        flat["targets"][final] = 0
        batch["loss_mask"].fill(1.0)
        for run, mask in trained.items():  # the target of each token is the next
            where = begin[head[run]]
            flat["loss_mask"][where : where + len(mask) - 1] = mask[1:]
        flat["loss_mask"][final] = 0.0
        batch["source"][:] = source.astype(np.int32)[:, None]  # cast before it is spread

        # Behind a row's pieces comes one more, of padding, which may be empty.
        at = np.arange(len(piece)) + in_row
        pad = np.cumsum(per_row) + np.arange(len(row))
        counts, numbers, begins = (np.zeros(len(piece) + len(row), np.int32) for _ in range(3))
        counts[at], counts[pad] = length, sequence - used
        numbers[at], begins[at] = segment + 1, begin
        flat["segment_ids"][:] = np.repeat(numbers, counts)
        np.subtract(_upto(row.size * sequence), np.repeat(begins, counts), flat["positions"])
        for padded in np.flatnonzero(used < sequence).tolist():
            for name in ("tokens", "targets", "positions", "loss_mask"):
                batch[name][padded, used[padded] :] = 0
        for name, (values, width) in self._columns.items():
            batch[name] = np.zeros((len(row), width), np.float32)
            batch[name][in_row, segment] = values[piece]
        return batch

    def _read(
        self, source: np.ndarray, start: np.ndarray, length: np.ndarray
    ) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
        """Returns the tokens of runs of the sources' streams, and {run: which of them are targets that are
        trained on} of the runs that say so. source, start, length: int64 [runs]."""
        asked = {}
        for name in sorted(set(source[self._online[source]].tolist())):  # all, before any is waited for
            chosen = source == name
            asked[name] = self._streams[name].begin(start[chosen], length[chosen])
        online = {name: iter(finish()) for name, finish in asked.items()}
        places = list(zip(source.tolist(), start.tolist(), (start + length).tolist(), strict=True))
        runs = [
            next(online[name]) if name in online else self._streams[name].read(begin, stop)
            for name, begin, stop in places
        ]
        trained = {}
        for run in np.flatnonzero(self._marked[source]).tolist():
            name, *place = places[run]
            if name in online:  # ~token of those that are not
                trained[run], runs[run] = runs[run] >= 0, np.maximum(runs[run], ~runs[run])
            elif (mask := self._streams[name].read_trained(*place)) is not None:
                trained[run] = mask
        return runs, trained


@functools.lru_cache(maxsize=2)
def _upto(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)
