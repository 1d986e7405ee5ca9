"""The constructor: builds the batch of some planned rows, with one gather for each source."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxthru.data.batch import BATCH_FIELDS
from jaxthru.data.packing import Packing
from jaxthru.data.store import Split, ranges

EMPTY = -1
"""The row that is padding alone."""


def build(
    splits: Sequence[tuple[Split, Packing]], source: np.ndarray, row: np.ndarray, sequence: int
) -> dict[str, np.ndarray]:
    """Returns the batch (see `batch.py`), arrays of [rows, sequence].

    splits: of each source, its tokens and their packing. source, row: int64 [rows], which row of which
    source; row EMPTY is padding alone. A document that goes on in another row has its next token there as
    target; its positions restart, for attention does not reach across rows.
    """
    batch = {name: np.zeros((len(row), sequence), dtype) for name, dtype in BATCH_FIELDS.items()}
    batch["source"][:] = source[:, None]
    flat = {name: array.reshape(-1) for name, array in batch.items()}
    begun = []
    for number in np.unique(source[row != EMPTY]).tolist():  # all are asked before the first is waited for
        split, packing = splits[number]
        places = np.flatnonzero((source == number) & (row != EMPTY))
        pieces = _pieces(packing, row[places])
        begun.append((places, pieces, split.begin(pieces.start, pieces.read)))
    for places, pieces, finish in begun:
        _fill(flat, places * sequence, pieces, finish())
    return batch


class _Pieces(NamedTuple):
    """The pieces of some rows, in order. per_row: [rows], how many each row has. segment: [pieces], which
    of its row. start, length: [pieces], in the stream. read: [pieces], tokens to read: one more than `length`
    where the document goes on, for that is the last one's target."""

    per_row: np.ndarray
    segment: np.ndarray
    start: np.ndarray
    length: np.ndarray
    read: np.ndarray


def _pieces(packing: Packing, row: np.ndarray) -> _Pieces:
    first = packing.first[row]
    per_row = packing.first[row + 1] - first
    segment = ranges(per_row)
    piece = np.repeat(first, per_row) + segment
    length = packing.length[piece]
    return _Pieces(per_row, segment, packing.start[piece], length, length + ~packing.last[piece])


def _fill(flat: dict[str, np.ndarray], begin: np.ndarray, pieces: _Pieces, read: np.ndarray) -> None:
    """Writes rows of one source. begin: [rows], where each begins in the flat arrays. read: the tokens."""
    if not len(pieces.length):
        return
    within = ranges(pieces.read)  # [tokens read], position in the piece
    is_input = within < np.repeat(pieces.length, pieces.read)
    is_target = within > 0
    position = within[is_input]
    has_target = position < np.repeat(pieces.read, pieces.length) - 1
    targets = np.zeros(len(position), np.int32)
    targets[has_target] = read[is_target]

    used = np.add.reduceat(pieces.length, np.cumsum(pieces.per_row) - pieces.per_row)  # [rows], tokens
    where = np.repeat(begin, used) + ranges(used)
    flat["tokens"][where] = read[is_input]
    flat["targets"][where] = targets
    flat["segment_ids"][where] = np.repeat(pieces.segment + 1, pieces.length)
    flat["positions"][where] = position
    flat["loss_mask"][where] = has_target
