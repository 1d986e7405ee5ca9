"""Where XLA's allocator puts arrays, and what memory a rehearsed step needs by it."""

import itertools
import random

import pytest

from jaxthru.engine.best_fit import SPARE, BestFit

MIB = 1 << 20
WIDE = 1 << 50


def test_an_array_gets_the_smallest_gap_that_holds_it():
    memory = BestFit(WIDE)
    wide, _, narrow, _ = (memory.take(size * MIB) for size in (700, 1, 500, 1))
    memory.give(wide)
    memory.give(narrow)
    assert memory.take(200 * MIB) == narrow
    assert memory.take(300 * MIB) == narrow + 200 * MIB, "what was left of it"
    assert memory.take(300 * MIB) == wide
    assert memory.extent == memory.peak == memory.needs == 1202 * MIB and memory.used == 802 * MIB


@pytest.mark.parametrize(
    ("size", "given"),
    [
        (0, 256),
        (1, 256),
        (257, 512),
        (100 * MIB, 100 * MIB),  # half of the gap: the rest is another
        (100 * MIB + 256, 200 * MIB),  # less than 128 MiB to spare: all of it
        (72 * MIB, 72 * MIB),
        (199 * MIB, 200 * MIB),
    ],
)
def test_little_is_not_cut_off_a_gap(size, given):
    memory = BestFit(WIDE)
    gap, _ = memory.take(200 * MIB), memory.take(1)
    memory.give(gap)
    assert memory.take(size) == gap
    # The next gap, or the end where none is left.
    assert memory.take(256) == (gap + given if given < 200 * MIB else 200 * MIB + 256)


def test_as_much_as_128_mib_is_cut_off():
    memory = BestFit(WIDE)
    size = 3 * SPARE
    gap, _ = memory.take(size + SPARE), memory.take(1)
    memory.give(gap)
    memory.take(size)
    assert memory.take(SPARE) == gap + size


def test_gaps_side_by_side_become_one():
    memory = BestFit(WIDE)
    starts = [memory.take(10 * MIB) for _ in range(5)]
    for at in (1, 3, 2):
        memory.give(starts[at])
    assert memory.take(30 * MIB) == starts[1]
    memory.give(starts[4])
    assert memory.take(50 * MIB) == starts[4], "the last one's memory and all behind it are one gap"
    assert memory.extent == 90 * MIB


def test_what_no_gap_holds_lies_behind_the_memory():
    memory = BestFit(1000 * MIB)
    first, last = memory.take(600 * MIB), memory.take(240 * MIB)
    assert memory.extent == memory.needs == 840 * MIB
    behind = memory.take(200 * MIB)
    assert (behind, memory.extent) == (1000 * MIB, 1200 * MIB)
    assert (memory.peak, memory.needs) == (1040 * MIB, 1200 * MIB)
    assert memory.take(160 * MIB) == 840 * MIB, "what is left at its end is a gap as any other"
    memory.give(behind)
    memory.give(last)
    assert memory.take(240 * MIB) == last
    assert memory.take(100 * MIB) == 1000 * MIB, "nothing behind it is a gap"
    memory.give(first)
    assert memory.take(600 * MIB) == first and memory.extent == 1200 * MIB


@pytest.mark.parametrize("size", [20_000 * MIB, WIDE])
def test_arrays_never_share_memory_and_leave_none_behind(size):
    draw, memory, live = random.Random(0), BestFit(size), {}
    for _ in range(2000):
        if live and draw.random() < 0.48:
            memory.give(live.pop(draw.choice([*live]))[0])
            continue
        asked = draw.choice([1, 256, 8 * MIB, 112 * MIB, 448 * MIB, draw.randrange(2000 * MIB)])
        live[draw.random()] = memory.take(asked), asked
        assert all(a + asked_a <= b for (a, asked_a), (b, _) in itertools.pairwise(sorted(live.values())))
    for start, _ in live.values():
        memory.give(start)
    assert memory.take(size) == 0, "all of it is one gap again"
