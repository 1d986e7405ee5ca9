"""What every implementation of a ring pass relies on in the tables of its schedule."""

import itertools

import pytest

from pallas_kernels.collective_matmul.schedule import ring

every_ring = pytest.mark.parametrize("directions", [1, 2])
every_size = pytest.mark.parametrize("t", [1, 2, 3, 4, 8])


def shards(offsets, t):
    """Returns [step][rank]: the shard that each rank works on."""
    return [[(rank + offset) % t for rank in range(t)] for offset in offsets]


@every_size
@every_ring
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_lanes_are_all_rows_once(t, rows, directions):
    lanes = ring(t, rows, directions)
    taken = [row for lane in lanes for row in range(lane.start, lane.start + lane.rows)]
    assert sorted(taken) == list(range(rows))
    assert len(lanes) == min(directions, rows)
    assert len({lane.shift for lane in lanes}) == len(lanes)
    assert max(lane.rows for lane in lanes) - min(lane.rows for lane in lanes) <= 1


@every_size
@every_ring
def test_what_is_passed_on_goes_to_every_rank_once(t, directions):
    for lane in ring(t, 2, directions):
        sources, destinations = zip(*lane.permutation(), strict=True)
        assert sorted(sources) == sorted(destinations) == list(range(t))


@every_size
@every_ring
@pytest.mark.parametrize("table", ["gather", "reduce"])
def test_each_shard_visits_all(t, directions, table):
    """In each step the ranks work on different shards, and over all steps each rank on all of them."""
    for lane in ring(t, 2, directions):
        steps = shards(getattr(lane, table), t)
        assert len(steps) == t
        for by_rank in (*steps, *zip(*steps, strict=True)):
            assert sorted(by_rank) == list(range(t))


@every_size
@every_ring
@pytest.mark.parametrize("table", ["gather", "reduce"])
def test_what_arrives_is_what_the_next_step_works_on(t, directions, table):
    for lane in ring(t, 2, directions):
        steps = shards(getattr(lane, table), t)
        for now, later in itertools.pairwise(steps):
            assert all(later[destination] == now[source] for source, destination in lane.permutation())


@every_size
@every_ring
def test_own_rows_are_gathered_first_and_reduced_last(t, directions):
    for lane in ring(t, 2, directions):
        assert shards(lane.gather, t)[0] == list(range(t))
        assert shards(lane.reduce, t)[-1] == list(range(t))


@every_size
@every_ring
def test_order_of_addition(t, directions):
    for lane in ring(t, 2, directions):
        steps = shards(lane.reduce, t)
        for owner in range(t):
            order = [by_rank.index(owner) for by_rank in steps]
            assert order == [(owner + (k + 1) * lane.shift) % t for k in range(t)]


@pytest.mark.parametrize("directions", [0, 3])
def test_other_directions_are_refused(directions):
    with pytest.raises(ValueError, match=f"1 or 2 directions, not {directions}"):
        ring(2, 2, directions)
