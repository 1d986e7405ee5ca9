"""Gradients of conversations in packed rows, micro-batches and shards are those of one conversation a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from batches import ROWS, SEQUENCE, VOCABULARY

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.packed_rows import PackedRows
from jaxthru.data.mixture.packing_whole import pack_whole
from jaxthru.data.mixture.planner import EMPTY
from jaxthru.data.store.targets import SplitTargets, Targets


class Conversations:
    """A split in memory, of random tokens, of which unequal parts are trained on."""

    def __init__(self, lengths: np.ndarray, seed: int):
        draw = np.random.default_rng(seed)
        self.ends = np.cumsum(lengths)
        self.tokens = draw.integers(0, VOCABULARY, self.ends[-1])
        shares = np.repeat(draw.choice([0.1, 0.5, 1.0], len(lengths)), lengths)
        self.trained = draw.random(self.ends[-1]) < shares
        targets = [Targets.of(len(mask), mask) for mask in np.split(self.trained, self.ends[:-1])]
        self.targets = SplitTargets(lambda: [np.array(targets)])

    def read(self, start, stop):
        return self.tokens[start:stop]

    def read_trained(self, start, stop):
        return self.trained[start:stop]

    def batch(self, sequence: int) -> dict[str, np.ndarray]:
        """Returns all of them packed into rows that hold so many tokens, in rows of SEQUENCE: EMPTY ones to a
        multiple of ROWS."""
        packing, _ = pack_whole(self.ends, self.targets.first, sequence, "drop")
        rows = np.append(np.arange(packing.rows), np.full(-packing.rows % ROWS, EMPTY))
        builder = BatchBuilder([(self, PackedRows.of(packing, SEQUENCE))], SEQUENCE)
        return builder.build(np.zeros_like(rows), rows)


SHARDED = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ((1, 2, 2), (2, 2, 2))]


@pytest.fixture(scope="module")
def conversations():
    return Conversations(np.random.default_rng(0).integers(33, SEQUENCE + 1, 7).repeat(2) // 2, seed=0)


@pytest.mark.parametrize("mesh", [(1, 1, 1), *SHARDED], ids=str)
def test_packed_rows_have_the_gradients_of_one_conversation_a_row(mesh, conversations):
    alone, packed = conversations.batch(SEQUENCE // 2), conversations.batch(SEQUENCE)
    assert (alone["segment_ids"] <= 1).all() and packed["segment_ids"].max() >= 2
    one, made = tiny.make(), tiny.make(mesh, microbatches=2, groups=4)
    params = one.fresh()["params"]
    sums, gradients = one.gradients(params, alone)

    place = lambda array: jax.device_put(array, made.layout.sharding(("batch", "sequence")))  # noqa: E731
    packed = jax.tree.map(place, packed)
    counts = np.asarray(jnp.sum(made.step.split(packed["loss_mask"]), axis=(1, 2)))
    assert counts.max() > 1.2 * counts.min(), "equal micro-batches prove nothing"
    packed_sums, packed_gradients = made.gradients(made.fresh()["params"], packed)
    np.testing.assert_allclose(packed_sums["loss"], sums["loss"], rtol=1e-5)
    for found, expected in zip(*map(jax.tree.leaves, (packed_gradients, gradients)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_sum_over_trained_tokens_divided_by_their_number(conversations):
    """By the logits of each conversation alone."""
    made = tiny.make()
    params, batch = made.fresh()["params"], conversations.batch(SEQUENCE // 2)
    trained = batch["loss_mask"].sum()
    assert trained == conversations.trained.sum() - conversations.trained[[0, *conversations.ends[:-1]]].sum()
    loss = jax.jit(lambda row: made.loss(params, row, jnp.ones(()))[1]["loss"])
    losses = [
        loss({name: array[row : row + 1] for name, array in batch.items()})
        for row in range(len(batch["tokens"]))
        if batch["loss_mask"][row].any()
    ]
    sums, _ = made.gradients(params, batch)
    np.testing.assert_allclose(sums["loss"], np.sum(losses) / trained, rtol=1e-5)
    np.testing.assert_allclose(sums["source_tokens"].sum(), trained)
