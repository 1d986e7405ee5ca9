"""The constructor: builds the batch of some planned rows, with one gather for each source."""

from collections.abc import Sequence

import numpy as np

from jaxthru.data.batch import BATCH_FIELDS
from jaxthru.data.packing import Packing
from jaxthru.data.store import Split

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
    for number in np.unique(source[row != EMPTY]).tolist():
        split, packing = splits[number]
        _fill(flat, split, packing, np.flatnonzero((source == number) & (row != EMPTY)), row, sequence)
    return batch


def _fill(
    flat: dict[str, np.ndarray],
    split: Split,
    packing: Packing,
    places: np.ndarray,
    row: np.ndarray,
    sequence: int,
) -> None:
    """Writes the rows `row[places]` of one source to the rows `places` of the flat arrays."""
    first = packing.first[row[places]]
    pieces = packing.first[row[places] + 1] - first
    segment = _ranges(pieces)  # [pieces], which of its row
    piece = np.repeat(first, pieces) + segment
    start, length, last = packing.start[piece], packing.length[piece], packing.last[piece]
    if not len(piece):
        return

    within = _ranges(length)  # [tokens], position in the piece
    tokens = split.gather(np.repeat(start, length) + within).astype(np.int32)
    final = np.cumsum(length) - 1  # [pieces], where the last token of each stands
    targets = np.empty_like(tokens)
    targets[:-1] = tokens[1:]
    targets[final] = 0
    goes_on = np.flatnonzero(~last)
    targets[final[goes_on]] = split.gather(start[goes_on] + length[goes_on])
    mask = np.ones(len(tokens), np.float32)
    mask[final[last]] = 0.0

    used = np.add.reduceat(length, np.cumsum(pieces) - pieces)  # [rows], tokens in each
    where = np.repeat(places * sequence, used) + _ranges(used)
    flat["tokens"][where] = tokens
    flat["targets"][where] = targets
    flat["segment_ids"][where] = np.repeat(segment + 1, length)
    flat["positions"][where] = within
    flat["loss_mask"][where] = mask


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Returns 0, 1, ... n-1 for each n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
