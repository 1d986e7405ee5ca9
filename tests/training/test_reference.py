"""The reference's log-probabilities: asked once for the rows that are read, kept, fed, and checked."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.data.loading.batch import check_batch
from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.packed_rows import PackedRows
from jaxthru.data.mixture.packing import Packing
from jaxthru.data.mixture.planner import EMPTY
from jaxthru.runtime.errors import InputError
from jaxthru.training.reference import Reference, weights_checksum

ROWS, SEGMENTS = 2, 8
PARAMS = {"w": jnp.arange(6, dtype=jnp.float32)}


class Tokens:
    """A stream whose tokens are their places."""

    targets = None

    def read(self, start, stop):
        return np.arange(start, stop, dtype=np.int32)

    def read_trained(self, start, stop):
        return None


def packing(counts: list[int]) -> PackedRows:
    """Rows of so many documents of 3 tokens each."""
    pieces = sum(counts)
    first = np.concatenate([[0], np.cumsum(counts)])
    made = Packing(first, 3 * np.arange(pieces), np.full(pieces, 3), np.ones(pieces, bool))
    return PackedRows.of(made, 16)


@pytest.fixture
def builders():
    train = [(Tokens(), packing([2, 4, 2])), (Tokens(), packing([4, 2]))]
    return {"train": BatchBuilder(train, 16), "held_out": BatchBuilder([(Tokens(), packing([2]))], 16)}


KEYS = {"one": "a1", "other": "b2"}
WANTED = {
    "train": (np.array([0, 1, 0, 1, 0]), np.array([2, 1, 0, 1, EMPTY])),
    "held_out": (np.array([0]), np.array([0])),
}


class Model:
    """Answers with the place of each document's first token, and counts what it is asked."""

    def __init__(self):
        self.asked = []

    def place(self, split, source, row):
        assert len(row) == ROWS
        self.asked += [(split, *pair) for pair in zip(source.tolist(), row.tolist(), strict=True)]
        return split, source, row

    def answers(self, builders):
        def answer(params, batch, one):
            split, source, row = batch
            values = np.full((ROWS, SEGMENTS), np.nan, np.float32)
            pieces = builders[split].pieces(source, row)
            values[pieces.in_row, pieces.segment] = -1.0 - pieces.start - 100 * source[pieces.in_row]
            return {"answers": jnp.asarray(values)}

        return answer


def complete(reference, builders, wanted=WANTED, params=PARAMS) -> Model:
    model = Model()
    reference.complete(wanted, params, model.answers(builders), ROWS, model.place)
    return model


def test_what_is_read_is_asked_once_and_kept(builders, tmp_path):
    path = tmp_path / "reference.npz"
    model = complete(Reference(path, builders, KEYS), builders)
    rows = [each for each in model.asked if each[2] != EMPTY]
    assert sorted(rows) == [("held_out", 0, 0), ("train", 0, 0), ("train", 0, 2), ("train", 1, 1)]
    again = Reference(path, builders, KEYS)
    assert not again.missing(WANTED) and not complete(again, builders).asked
    more = {"train": (np.array([0, 0]), np.array([0, 1]))}
    assert complete(again, builders, more).asked == [("train", 0, 1), ("train", 0, EMPTY)]


def test_batches_bring_the_answers_of_their_documents(builders, tmp_path):
    reference = Reference(tmp_path / "reference.npz", builders, KEYS)
    complete(reference, builders)
    reference.feed(SEGMENTS)
    batch = builders["train"].build(np.array([1, 0, 0]), np.array([1, EMPTY, 2]))
    check_batch(batch, 3, 16, ["reference"])
    expected = np.zeros((3, SEGMENTS), np.float32)
    expected[0, :2] = -1 - 12 - 100, -1 - 15 - 100  # the fifth and sixth document of that source
    expected[2, :2] = -1 - 18, -1 - 21
    np.testing.assert_array_equal(batch["reference"], expected)
    with pytest.raises(ValueError, match="batch has fields"):
        check_batch(batch, 3, 16)


def test_what_is_kept_is_of_these_documents_and_weights(builders, tmp_path):
    path = tmp_path / "reference.npz"
    complete(Reference(path, builders, KEYS), builders)
    with pytest.raises(
        InputError, match=r"reference\.npz: is of other documents than this run reads; delete"
    ):
        Reference(path, builders, KEYS | {"other": "c3"})
    other = {"train": BatchBuilder([(Tokens(), packing([2, 4, 2, 6]))], 32), "held_out": builders["held_out"]}
    with pytest.raises(InputError, match="other documents"):
        Reference(path, other, KEYS)
    more = {"train": (np.array([0]), np.array([1]))}
    with pytest.raises(InputError, match=r"is of other weights than training begins with here"):
        complete(Reference(path, builders, KEYS), builders, more, {"w": PARAMS["w"].at[3].add(1e-6)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"reference\.npz: is damaged \(.*\); delete it"):
        Reference(path, builders, KEYS)


def test_a_model_that_is_not_finite_is_refused(builders, tmp_path):
    reference = Reference(tmp_path / "reference.npz", builders, KEYS)
    nothing = lambda *_: {"answers": jnp.full((ROWS, SEGMENTS), jnp.nan)}  # noqa: E731
    with pytest.raises(InputError, match="not all finite"):
        reference.complete(WANTED, PARAMS, nothing, ROWS, lambda *of: of)


def test_the_checksum_of_weights_is_of_their_bits_alone():
    stacked = {"layers": jnp.arange(8.0).reshape(2, 4), "scale": jnp.ones(3, jnp.bfloat16)}
    apart = {"layers": tuple(stacked["layers"]), "scale": stacked["scale"]}
    assert weights_checksum(stacked) == weights_checksum(apart)
    assert weights_checksum(stacked) != weights_checksum(stacked | {"scale": jnp.zeros(3, jnp.bfloat16)})


def test_nothing_in_it_runs(builders, tmp_path):
    """It is read without pickle."""
    path = tmp_path / "reference.npz"
    about = np.frombuffer(json.dumps({"keys": KEYS}).encode(), np.uint8)
    np.savez(path, about=about, train=np.array([SimpleNamespace()], object), held_out=np.zeros(2))
    with pytest.raises(InputError, match="is damaged"):
        Reference(path, builders, KEYS)
