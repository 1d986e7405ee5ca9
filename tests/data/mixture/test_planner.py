import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.planner import Planner
from jaxthru.data.mixture.sampler import Supply
from jaxthru.runtime.errors import InputError

ROWS = 8


def planner(available, schedule, seed=0, rows=ROWS, groups=1):
    supplies = {name: Supply(count, count * 100, count) for name, count in available.items()}
    schedule = tuple((step, Mixture.plain(weights)) for step, weights in schedule)
    return Planner(supplies, schedule, seed=seed, rows=rows, groups=groups, sequence=100)


def names(count):
    return [f"s{index}" for index in range(count)]


@settings(deadline=None, max_examples=40)
@given(
    weights=st.lists(st.floats(0, 10) | st.just(0.0), min_size=1, max_size=12).filter(lambda w: sum(w) > 0.1),
    steps=st.integers(1, 3000),
)
def test_weights_hold_at_any_distance(weights, steps):
    made = planner(
        dict.fromkeys(names(len(weights)), 100), ((0, dict(zip(names(12), weights, strict=False))),)
    )
    taken = made.sampler.taken(steps)
    share = np.array(weights) / sum(weights)
    assert taken.sum() == steps * ROWS
    assert (taken[share == 0] == 0).all()
    total = 10_000 * ROWS
    taken = made.sampler.taken(10_000)
    assert np.abs(taken / total - share).max() < 0.01
    heavy = share > 0.02
    assert (np.abs(taken[heavy] / total / share[heavy] - 1) < 0.01).all()


def test_many_sources_of_tiny_weights():
    weights = dict(zip(names(306), 1.0 / np.arange(1, 307), strict=True))
    made = planner(dict.fromkeys(weights, 50), ((0, weights),))
    share = np.array(list(weights.values())) / sum(weights.values())
    for steps in (1, 100, 2000, 10**9):
        assert np.abs(made.sampler.taken(steps) - share * steps * ROWS).max() < 1


schedules = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4), st.integers(0, 4)), max_size=3)


@settings(deadline=None, max_examples=30)
@given(changes=schedules, seed=st.integers(0, 3), order=st.permutations(list(range(40))))
def test_random_access_equals_sequence(changes, seed, order):
    schedule = [(0, {"a": 1.0, "b": 2.0})]
    for ahead, a, b in changes:
        schedule.append((schedule[-1][0] + ahead, {"a": a, "b": b + 0.5}))
    available = {"a": 7, "b": 2000}
    made, other = planner(available, schedule, seed), planner(available, schedule, seed)
    steps = [step * 17 for step in range(40)]
    plans = [made.plan(step) for step in steps]
    for index in order:
        again = other.plan(steps[index])
        assert (again.source == plans[index].source).all() and (again.row == plans[index].row).all()


def test_rows_are_numbered_without_gap_over_steps_and_epochs_cover_each_row_once():
    available = {"a": 30, "b": 1500}
    schedule = ((0, {"a": 1, "b": 3}), (333, {"a": 5, "b": 1}), (400, {"b": 1}), (500, {"a": 1, "b": 8}))
    made = planner(available, schedule)
    plans = [made.plan(step) for step in range(900)]
    source = np.concatenate([plan.source for plan in plans])
    row = np.concatenate([plan.row for plan in plans])
    for index, rows in enumerate(available.values()):
        taken = row[source == index]
        for epoch in range(len(taken) // rows):
            assert sorted(taken[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    first, second = row[source == 0][:30], row[source == 0][30:60]
    assert (first != second).any()
    assert len(row[source == 0]) == made.sampler.taken(900)[0]


def test_a_schedule_change_affects_only_later_steps():
    available, before = {"a": 100, "b": 100}, {"a": 1.0, "b": 1.0}
    plain = planner(available, ((0, before),))
    changed = planner(available, ((0, before), (57, {"a": 1.0, "b": 0.0})))
    for step in range(57):
        assert (plain.plan(step).source == changed.plan(step).source).all()
        assert (plain.plan(step).row == changed.plan(step).row).all()
    later = [changed.plan(step) for step in range(57, 80)]
    assert all((plan.source == 0).all() for plan in later)


def orders(seed):
    """Returns which source gives each row of a few steps, and the rows that each source gives, in turn."""
    made = planner({"a": 100, "b": 100}, ((0, {"a": 1, "b": 1}),), seed, rows=128)
    plans = [made.plan(step) for step in range(24)]
    source, row = (np.concatenate([getattr(plan, name) for plan in plans]) for name in ("source", "row"))
    return {"steps": source.reshape(-1, 128), "a": row[source == 0], "b": row[source == 1]}


@pytest.mark.parametrize("what", ["steps", "a", "b"])
def test_the_seed_decides(what):
    """Each order by itself: which source gives a row, and which of its rows every source gives."""
    assert (orders(1)[what] != orders(2)[what]).any()


def test_no_two_orders_are_one():
    found = orders(1)
    assert (found["a"][:100] != found["b"][:100]).any(), "of two sources of one size"
    assert (found["a"][:100] != found["a"][100:200]).any(), "of two epochs"
    assert (found["steps"][0] != found["steps"][1]).any(), "of two steps"


def test_no_two_entries_of_a_schedule_begin_alike():
    alike = {"a": 1.0, "b": 1.0}
    made = planner({"a": 100, "b": 100}, ((0, alike), (1, alike)), rows=1024)
    assert (made.plan(0).source != made.plan(1).source).any()


def test_the_plan_is_that_of_every_version():
    """Runs are resumed by newer versions: with another plan some rows would come twice and others never."""
    plan = planner({"b": 90, "a": 70}, ((0, {"b": 2, "a": 1}),), seed=7).plan(40)
    assert plan.source.tolist() == [0, 1, 0, 0, 0, 0, 0, 1]
    assert plan.row.tolist() == [61, 7, 77, 37, 22, 9, 63, 48]


@pytest.mark.parametrize(
    ("schedule", "groups", "message"),
    [
        (((0, {"a": 0, "b": 0}),), 1, "sum to 0"),
        (((0, {"a": -1, "b": 2}),), 1, "source a"),
        (((0, {"bb": 1}),), 1, "did you mean 'b'"),
        (((0, {"empty": 1}),), 1, "source empty"),
        (((5, {"a": 1}),), 1, "begin at step 0"),
        (((0, {"a": 1}), (0, {"b": 1})), 1, "increase"),
        (((0, {"a": 1}),), 3, "data.groups = 3"),
    ],
)
def test_refuses(schedule, groups, message):
    with pytest.raises(InputError, match=message):
        planner({"a": 5, "b": 5, "empty": 0}, schedule, groups=groups)
