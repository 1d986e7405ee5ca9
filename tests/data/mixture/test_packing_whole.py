import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.mixture.packing_whole import pack_whole

documents = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 32)), max_size=40)


def as_arrays(documents):
    lengths, first = np.array(documents, np.int64).reshape(-1, 2).T
    return np.cumsum(lengths), first.astype(np.int32)


def rows_of(packed):
    """Returns [[(start, length, last)]], the pieces of each row."""
    pieces = list(zip(packed.start.tolist(), packed.length.tolist(), packed.last.tolist(), strict=True))
    return [pieces[begin:end] for begin, end in zip(packed.first[:-1], packed.first[1:], strict=True)]


@settings(deadline=None)
@given(documents, st.integers(2, 24), st.sampled_from(["drop", "truncate", "cut"]))
def test_a_document_is_whole_or_as_asked_or_left_out_and_counted(documents, sequence, over_long):
    """Compares with one document at a time, in plain Python."""
    packed, counted = pack_whole(*as_arrays(documents), sequence, over_long)
    expected, start = [], 0
    too_long = truncated = untrained = 0
    for length, first in documents:
        kept = min(length, sequence) if over_long == "truncate" else length
        if first >= kept:
            untrained += 1
        elif length > sequence and over_long == "drop":
            too_long += 1
        else:
            truncated += kept < length
            for begin in range(0, kept, sequence):
                size = min(sequence, kept - begin)
                expected.append((start + begin, size, begin + size == kept))
        start += length
    rows = rows_of(packed)
    assert sorted(piece for row in rows for piece in row) == expected
    assert all(1 <= sum(size for _, size, _ in row) <= sequence for row in rows)
    assert counted == (len(documents), too_long, truncated, untrained)
    assert counted.kept == len(documents) - too_long - untrained


@settings(deadline=None)
@given(documents, st.integers(2, 24), st.sampled_from(["drop", "truncate"]))
def test_a_pair_lies_in_one_row_as_neighbours_or_not_at_all(documents, sequence, over_long):
    documents = documents[: len(documents) // 2 * 2]
    ends, first = as_arrays(documents)
    packed, counted = pack_whole(ends, first, sequence, over_long, unit=2)
    starts = (ends - np.array([length for length, _ in documents], np.int64)).tolist()
    seen = set()
    for row in rows_of(packed):
        assert len(row) % 2 == 0 and sum(size for _, size, _ in row) <= sequence
        for (chosen, one, _), (rejected, other, _) in zip(row[::2], row[1::2], strict=True):
            at = starts.index(chosen)
            assert at % 2 == 0 and starts[at + 1] == rejected
            seen.add(at)
            whole = (documents[at][0], documents[at + 1][0])
            assert documents[at][1] < one and documents[at + 1][1] < other
            if sum(whole) <= sequence:
                assert (one, other) == whole
            else:  # the longer of the two lost its end first, and no more than needed
                assert over_long == "truncate" and one + other >= sequence - 1
                bound = max(one, other)
                assert (one, other) == tuple(min(size, bound) for size in whole)
    assert len(seen) == counted.kept and counted.documents == len(documents) // 2
    if over_long == "drop":
        expected = [
            at
            for at in range(0, len(documents), 2)
            if documents[at][0] + documents[at + 1][0] <= sequence
            and all(first < length for length, first in documents[at : at + 2])
        ]
        assert sorted(seen) == expected


def lengths_of(median, spread, count, seed):
    draw = np.random.default_rng(seed)
    return np.maximum(2, draw.lognormal(np.log(median), spread, count)).astype(np.int64)


@pytest.mark.parametrize("sequence", [2048, 4096])
@pytest.mark.parametrize(("median", "spread"), [(60, 0.8), (110, 0.9), (400, 1.0), (900, 0.8)])
def test_rows_of_chat_are_full(median, spread, sequence):
    """At least 95 %, from one-line answers to long conversations."""
    lengths = lengths_of(median, spread, 7_000, seed=median)
    trained = np.ones(len(lengths), np.int32)
    packed, counted = pack_whole(np.cumsum(lengths), trained, sequence, "drop")
    assert packed.used.sum() / (packed.rows * sequence) >= 0.95
    assert packed.length.sum() == lengths[lengths <= sequence].sum()
    assert counted.too_long == (lengths > sequence).sum()


def test_rows_of_short_answers_are_as_full():
    lengths = lengths_of(12, 0.5, 50_000, seed=1)
    packed, _ = pack_whole(np.cumsum(lengths), np.ones(50_000, np.int32), 4096, "drop")
    assert packed.used.sum() / (packed.rows * 4096) >= 0.99 and packed.max_segments > 300
