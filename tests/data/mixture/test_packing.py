import bisect
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.loading.packed_rows import PackedRows
from jaxthru.data.mixture import packing as module
from jaxthru.data.mixture.packing import Packing, pack, split_rows

lengths = st.lists(st.integers(1, 40), max_size=60)
sequences = st.integers(2, 24)


def pieces_of(ends, sequence, packing):
    """Returns [(row, start, length, last)], and checks what holds for every packing."""
    packed = pack(ends, sequence, packing)
    rows = np.repeat(np.arange(packed.rows), np.diff(packed.first))
    assert packed.first[0] == 0 and packed.first[-1] == len(packed.start) == len(packed.length) == len(
        packed.last
    )
    assert packed.max_segments == max(np.diff(packed.first), default=0)
    return list(zip(rows, packed.start, packed.length, packed.last, strict=True)), packed


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@settings(deadline=None)
@given(lengths=lengths, sequence=sequences)
def test_every_token_once_and_no_piece_crosses_a_document(packing, lengths, sequence):
    ends = np.cumsum(np.array(lengths, np.int64))
    pieces, packed = pieces_of(ends, sequence, packing)
    tokens = [token for _, start, length, _ in pieces for token in range(start, start + length)]
    assert sorted(tokens) == list(range(sum(lengths)))
    document = np.repeat(np.arange(len(lengths)), lengths)
    for row, start, length, last in pieces:
        assert length >= 1 and document[start] == document[start + length - 1]
        assert last == (start + length in ends)
        assert 0 <= row < packed.rows
    in_row = np.bincount([piece[0] for piece in pieces], [piece[2] for piece in pieces], packed.rows)
    assert (in_row >= 1).all() and (in_row <= sequence).all()
    np.testing.assert_array_equal(packed.used, in_row)


@settings(deadline=None)
@given(lengths=lengths, sequence=sequences)
def test_split_keeps_the_order_and_fills_all_rows_but_the_last(lengths, sequence):
    pieces, packed = pieces_of(np.cumsum(np.array(lengths, np.int64)), sequence, "split")
    assert packed.rows == -(-sum(lengths) // sequence)
    assert [start for _, start, _, _ in pieces] == sorted(start for _, start, _, _ in pieces)
    for row in range(packed.rows - 1):
        assert sum(length for at, _, length, _ in pieces if at == row) == sequence


@settings(deadline=None)
@given(lengths=lengths, sequence=sequences)
def test_best_fit_keeps_whole_what_fits_and_leaves_no_row_that_another_could_take(lengths, sequence):
    ends = np.cumsum(np.array(lengths, np.int64))
    pieces, packed = pieces_of(ends, sequence, "best_fit")
    lasts = sum(last for *_, last in pieces)
    assert lasts == len(lengths)
    cuts = sum(-(-length // sequence) for length in lengths)
    assert len(pieces) == cuts  # a document in one piece, a longer one in as few as possible
    filled = np.bincount([piece[0] for piece in pieces], [piece[2] for piece in pieces], packed.rows)
    assert (filled <= sequence / 2).sum() <= 1  # two rows that are half empty would have been one


def test_rows_of_tiny_documents_are_full():
    """Of 10 tokens each: as many as fit, and no row but the last with room for another."""
    _, packed = pieces_of(10 * np.arange(1, 100_001), 1024, "best_fit")
    assert packed.max_segments == 102 and packed.rows == -(-100_000 // 102)
    assert (packed.used[:-1] == 1020).all()


@settings(deadline=None)
@given(st.integers(0, 5))
def test_best_fit_is_near_the_bound(seed):
    draw = np.random.default_rng(seed)
    ends = np.cumsum(np.maximum(1, draw.lognormal(6, 1, 5000)).astype(np.int64))
    assert ends[-1] / (pack(ends, 4096, "best_fit").rows * 4096) > 0.99


def test_the_work_of_best_fit_grows_with_the_lengths_there_are_and_not_with_the_documents(monkeypatch):
    """Looks for a row: one for each of 200,000 documents would be 20 times as many."""
    looks = []
    find = lambda *arguments: looks.append(1) or bisect.bisect_left(*arguments)  # noqa: E731
    monkeypatch.setattr(module, "bisect", SimpleNamespace(bisect_left=find, insort=bisect.insort))
    ends = np.cumsum(np.maximum(1, np.random.default_rng(0).lognormal(6, 1.5, 200_000)).astype(np.int64))
    packed = pack(ends, 4096, "best_fit")
    assert packed.length.sum() == ends[-1] and len(np.unique(packed.length)) > 4000
    assert len(looks) < 4 * 4096


def same(found, expected):
    for name in ("first", "start", "length", "last"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@settings(deadline=None)
@given(st.lists(lengths, min_size=1, max_size=5), sequences)
def test_a_stream_is_split_alike_in_whatever_parts_it_comes(documents, sequence):
    ends = np.cumsum(np.array([length for part in documents for length in part], np.int64))
    parts = np.split(ends, np.cumsum([len(part) for part in documents])[:-1])
    same(Packing.together(list(split_rows(parts, sequence))), pack(ends, sequence, "split"))


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@settings(deadline=None)
@given(lengths=lengths, sequence=sequences)
def test_packed_rows_say_what_the_packing_says(packing, lengths, sequence):
    packed = pack(np.cumsum(np.array(lengths, np.int64)), sequence, packing)
    rows = PackedRows.of(packed, sequence)
    same(rows.packing(), packed)
    assert (rows.rows, rows.pieces, rows.tokens) == (packed.rows, len(packed.length), packed.length.sum())
    assert rows.documents == len(lengths) and rows.max_segments == packed.max_segments
    for row in range(packed.rows):
        first, end, more, length, _ = rows.row(row)
        assert length.tolist() == packed.length[first:end].tolist()
        assert (first, end) == tuple(packed.first[row : row + 2]) and more != packed.last[end - 1]
        assert rows.span(row) == (packed.length[first:end] ** 2).sum()
