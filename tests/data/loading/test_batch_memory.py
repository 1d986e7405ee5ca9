"""Memory of batches: it comes back, and never while anything still reads it."""

import jax
import numpy as np
import pytest

from jaxthru.data.loading.batch import check_batch
from jaxthru.data.loading.batch_memory import MOST, BatchMemory
from jaxthru.data.loading.placement import to_global

ROWS, SEQUENCE = 4, 1024


def filled(memory: BatchMemory, value: int) -> dict[str, np.ndarray]:
    batch = memory.take(ROWS, SEQUENCE)
    for array in batch.values():
        array.fill(value)
    return batch


def address(batch: dict[str, np.ndarray]) -> int:
    return batch["tokens"].ctypes.data


def test_a_batch_that_is_let_go_gives_its_memory_to_the_next():
    memory = BatchMemory()
    batch = filled(memory, 1)
    check_batch(batch, ROWS, SEQUENCE)
    first = address(batch)
    del batch
    assert address(filled(memory, 2)) == first


def test_only_some_memory_is_kept():
    memory = BatchMemory()
    kept = [filled(memory, 1) for _ in range(MOST + 3)]
    kept.clear()
    assert {len(blocks) for blocks in memory._free.values()} == {MOST}


def test_other_sizes_take_other_memory():
    memory = BatchMemory()
    filled(memory, 1)
    assert memory.take(2 * ROWS, SEQUENCE)["source"].shape == (2 * ROWS, SEQUENCE)


@pytest.mark.parametrize(
    "kept",
    [
        lambda batch: batch["positions"],
        lambda batch: batch["loss_mask"][1, 5:9],
        lambda batch: batch["tokens"].reshape(-1).view(np.int16)[::2],
        lambda batch: memoryview(batch["source"]),
        lambda batch: jax.device_put(batch["tokens"]),
        lambda batch: to_global(batch, jax.sharding.SingleDeviceSharding(jax.devices()[0]), ROWS)["targets"],
    ],
    ids=["field", "slice", "view", "buffer", "device", "global"],
)
def test_what_still_refers_to_a_batch_keeps_its_values(kept):
    memory = BatchMemory()
    part = kept(filled(memory, 1))
    before = np.array(part)
    later = [filled(memory, 2) for _ in range(3)]
    assert np.array_equal(np.array(part), before)
    assert len({address(batch) for batch in later}) == 3


def test_batches_in_use_do_not_share_memory():
    memory = BatchMemory()
    batches = [filled(memory, number) for number in range(5)]
    del batches[2]
    batches.append(filled(memory, 9))
    assert [int(batch["tokens"][0, 0]) for batch in batches] == [0, 1, 3, 4, 9]
