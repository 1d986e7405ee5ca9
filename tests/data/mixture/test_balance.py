import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.mixture.balance import EVEN, balanced, partition, row_costs
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing import pack
from jaxthru.data.mixture.planner import Planner
from jaxthru.data.mixture.sampler import Supply

LINEAR = 12 * 4096  # of a token, in units of the attention of a token², for a model of width 4096


def lengths(draw, tokens, sequence):
    """Returns heavy-tailed document lengths of about so many tokens, none longer than a row."""
    found = np.minimum(np.maximum(1, draw.lognormal(6, 2, tokens // 1000)), sequence).astype(np.int64)
    return found[: np.searchsorted(np.cumsum(found), tokens)]


@pytest.mark.parametrize(("sequence", "bar"), [(4096, 1.03), (8192, 1.03), (32_768, 1.03), (131_072, 1.08)])
def test_bars_of_balance(sequence, bar):
    """32 groups of 4 rows: the costliest group, padding charged, over the mean of what documents need."""
    draw = np.random.default_rng(0)
    steps, rows, groups = 8, 128, 32
    packing = pack(np.cumsum(lengths(draw, (steps + 1) * rows * sequence, sequence)), sequence, "best_fit")
    costs = row_costs(packing.spans, sequence, LINEAR, 1)
    padding = (sequence - packing.used) * LINEAR / (LINEAR * sequence + sequence**2) * 2**40
    order = draw.permutation(packing.rows)[: steps * rows].reshape(steps, rows)
    ratios = []
    for step in order:
        needed = (costs[step] - padding[step]).sum() / groups
        plain = costs[step].reshape(groups, -1).sum(1).max() / needed
        placed = costs[step][balanced(costs[step], groups)].reshape(groups, -1)
        ratios.append((plain, placed.sum(1).max() / needed))
        eight = placed.reshape(8, -1).sum(1)  # devices of four groups each
        assert eight.max() / eight.mean() < 1.005
    plain, ours = np.mean(ratios, axis=0)
    assert ours <= bar and ours < plain


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(1, 10**6), min_size=1, max_size=12).map(np.array),
    groups=st.integers(1, 12),
    size=st.integers(1, 4),
)
def test_the_order_is_a_permutation_and_groups_begin_with_their_costliest(costs, groups, size):
    costs = np.resize(costs, groups * size)
    order = balanced(costs, groups)
    assert sorted(order) == list(range(len(costs)))
    placed = costs[order].reshape(groups, size)
    assert (np.diff(placed, axis=1) <= 0).all()
    assert (balanced(costs, groups) == order).all()


def test_an_exchange_mends_what_greed_cannot():
    costs = np.array([8, 7, 6, 5, 4, 2])
    assert costs[partition(costs, 2)].sum(axis=1).tolist() == [16, 16]


def plainly_partitioned(costs, parts):
    """Returns what `partition` does, item by item and exchange by exchange, for three items in a part or
    more."""
    size = len(costs) // parts
    lightest, found = [(0, part) for part in range(parts)], [[] for _ in range(parts)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, part = heapq.heappop(lightest)
        found[part].append(item)
        if len(found[part]) < size:
            heapq.heappush(lightest, (total + costs[item], part))
    for _ in range(4 * parts):
        sums = costs[np.array(found)].sum(axis=1)
        worst = int(sums.argmax())
        if sums[worst] <= EVEN * sums.mean():
            break
        tried = []
        for mine, other, theirs in itertools.product(range(size), range(parts), range(size)):
            loss = costs[found[worst][mine]] - costs[found[other][theirs]]
            if other != worst:
                tried.append((max(sums[worst] - loss, sums[other] + loss), mine, other, theirs))
        least, mine, other, theirs = min(tried, default=(sums[worst], 0, 0, 0))
        if least >= sums[worst]:
            break
        given = found[worst][mine]
        found[worst][mine], found[other][theirs] = found[other][theirs], given
    return [sorted(part, key=lambda item: -costs[item]) for part in found]


COSTS = {
    "few": lambda draw, count: draw.integers(0, 4, count),
    "many": lambda draw, count: draw.integers(1, 10**6, count),
    "heavy": lambda draw, count: (2**20 * (1 + draw.pareto(0.7, count))).astype(np.int64).clip(max=2**40),
    "mostly one": lambda draw, count: np.where(draw.random(count) < 0.1, 10**6, draw.integers(1, 9, count)),
}


@pytest.mark.parametrize("kind", COSTS)
def test_what_is_done_at_once_is_what_is_done_one_by_one(kind):
    """Plans are a contract: a resumed run has to find its rows where they were."""
    draw = np.random.default_rng(0)
    for parts, size in ((1, 5), (2, 3), (20, 3), (40, 4), (17, 6)):
        costs = COSTS[kind](draw, parts * size)
        got = [costs[part].tolist() for part in partition(costs, parts)]
        wanted = plainly_partitioned(costs, parts)
        assert got == [costs[part].tolist() for part in wanted]
        assert sorted(partition(costs, parts).ravel()) == list(range(parts * size))


def test_rows_of_micro_batches_are_of_like_rank():
    costs = np.repeat([1000, 400, 200, 100], 8)
    placed = costs[balanced(costs, 8)].reshape(8, 4)
    assert (placed == [1000, 400, 200, 100]).all()


def test_a_plan_is_balanced_within_its_step():
    draw = np.random.default_rng(0)
    costs = draw.lognormal(20, 0.5, 1500).astype(np.int64)
    supplies = {name: Supply(500, 500, 500) for name in "abc"}
    schedule = ((0, Mixture.plain(dict.fromkeys("abc", 1))),)
    keys = {"seed": 0, "rows": 64, "groups": 16, "sequence": 1}
    plain = Planner(supplies, schedule, **keys)
    cost = lambda source, row: costs[500 * source + row]  # noqa: E731
    ours = plain.balanced_by(cost)
    for step in (0, 7, 10_000):
        before, after = plain.plan(step), ours.plan(step)
        pairs = [sorted(zip(p.source.tolist(), p.row.tolist(), strict=True)) for p in (before, after)]
        assert pairs[0] == pairs[1]
        loads = [cost(p.source, p.row).reshape(16, -1).sum(1) for p in (before, after)]
        assert loads[1].max() < 0.8 * loads[0].max()
        again = ours.plan(step)
        assert (again.source == after.source).all() and (again.row == after.row).all()


def test_costs_of_rows():
    packing = pack(np.array([3, 5, 8]), 8, "best_fit")
    assert row_costs(packing.spans, 8, 1.0, 0.0).tolist() == [2**40]
    assert row_costs(packing.spans, 8, 0.0, 1.0).tolist() == [round((9 + 4 + 9) / 64 * 2**40)]
    assert row_costs(np.zeros(0, np.int64), 8, 1, 1).tolist() == []
