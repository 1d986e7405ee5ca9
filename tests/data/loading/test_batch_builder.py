import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.loading.batch import BATCH_FIELDS, check_batch
from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.packed_rows import PackedRows
from jaxthru.data.mixture.packing import pack
from jaxthru.data.mixture.planner import EMPTY


class Stream:
    """A split in memory: token i of the stream is i + 1, so that a token says where it came from."""

    targets = None

    def read(self, start, stop):
        assert start < stop
        return np.arange(start, stop, dtype=np.uint16) + 1


@settings(deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=20), min_size=1, max_size=3),
    sequence=st.integers(2, 20),
    packing=st.sampled_from(["split", "best_fit"]),
    seed=st.integers(0, 9),
)
def test_a_batch_says_what_its_documents_say(lengths, sequence, packing, seed):
    """Compares with one token at a time, in plain Python."""
    ends = [np.cumsum(np.array(item, np.int64)) for item in lengths]
    splits = [(Stream(), PackedRows.of(pack(item, sequence, packing), sequence)) for item in ends]
    pairs = [(number, row) for number, (_, packed) in enumerate(splits) for row in range(packed.rows)]
    pairs.append((0, EMPTY))
    np.random.default_rng(seed).shuffle(pairs)
    source, row = np.array(pairs, np.int64).T
    batch = BatchBuilder(splits, sequence).build(source, row)
    check_batch(batch, len(pairs), sequence)
    seen = [[] for _ in lengths]
    for at, (number, chosen) in enumerate(pairs):
        tokens, targets, segments, positions, mask, sources = (batch[name][at] for name in BATCH_FIELDS)
        assert (sources == number).all()
        used = int((segments > 0).sum())
        assert (chosen == EMPTY) == (used == 0)
        assert not segments[used:].any() and not tokens[used:].any() and not targets[used:].any()
        assert not mask[used:].any() and not positions[used:].any()
        seen[number] += tokens[:used].tolist()
        document = np.searchsorted(ends[number], tokens[:used] - 1, side="right")
        for column in range(used):
            new = column == 0 or document[column] != document[column - 1]
            new = new or tokens[column] != tokens[column - 1] + 1
            assert segments[column] == (segments[column - 1] if column else 0) + new
            assert positions[column] == (0 if new else positions[column - 1] + 1)
            final = tokens[column] in ends[number]
            assert targets[column] == (0 if final else tokens[column] + 1)
            assert mask[column] == (0.0 if final else 1.0)
    for tokens, item in zip(seen, lengths, strict=True):
        assert sorted(tokens) == list(range(1, sum(item) + 1))  # each exactly once


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_only_padding(packing):
    splits = [(Stream(), PackedRows.of(pack(np.array([5]), 4, packing), 4))]
    batch = BatchBuilder(splits, 4).build(np.zeros(3, np.int64), np.full(3, EMPTY))
    check_batch(batch, 3, 4)
    assert not any(array.any() for array in batch.values())
