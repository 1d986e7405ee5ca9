"""Load balance, against stragglers: orders the rows of a step so that equal parts of the batch cost alike.

Devices take their parts of a batch at the same time, so the costliest part is what all wait for. Rows only
change places within their step; what is in them stays.
"""

import heapq

import numpy as np

EVEN = 1.001
"""Parts whose costliest is so near to their mean are not improved further."""
AT_ONCE = 16
"""Items put into parts together, at least; fewer go one by one."""


def row_costs(span: np.ndarray, sequence: int, linear: float, attention: float) -> np.ndarray:
    """Returns int64 [rows], what rows cost: linear × tokens + attention × Σ document length².

    span: int64 [rows], the Σ document length² of each. Padding is charged like tokens: a matmul takes the
    whole row. Costs are integers, of which a row of one document has 2⁴⁰, so that their sums and their order
    are the same on every machine.
    """
    most = linear * sequence + attention * sequence**2
    return np.round((linear * sequence + attention * span) / most * 2**40).astype(np.int64)


def balanced(costs: np.ndarray, groups: int) -> np.ndarray:
    """Returns int64 [rows], which row is to stand at each place of the batch, group after group.

    costs: int64 [rows]. The groups cost alike, and so do neighbouring groups together, for a device may
    hold several. In a group the costliest row comes first: micro-batch k takes the k-th slice of every
    group, so that rows which run at the same time are of like rank.
    """
    members = partition(costs, groups)
    order, sums = np.arange(groups)[:, None], costs[members].sum(axis=1)
    for factor in _prime_factors(groups):
        joined = partition(sums, len(order) // factor)
        order, sums = order[joined].reshape(len(joined), -1), sums[joined].sum(axis=1)
    return members[order[0]].ravel()


def partition(costs: np.ndarray, parts: int) -> np.ndarray:
    """Returns int64 [parts, len(costs) / parts], each item in one part, the costliest of a part first.

    Longest processing time first (Graham 1969), among parts that are not full; then exchanges of two items
    between the costliest part and another, while one lowers the costlier of the two and it is worth it.
    """
    size = len(costs) // parts
    ranked = np.argsort(-costs, kind="stable")
    if size == 1:
        return ranked[:, None]
    if size == 2:  # the costliest with the cheapest, and so on: no other pairs have a cheaper costliest
        return np.stack([ranked[:parts], ranked[parts:][::-1]], axis=1)
    return _exchanged(costs, _longest_first(costs, ranked, parts))


def _longest_first(costs: np.ndarray, ranked: np.ndarray, parts: int) -> np.ndarray:
    """Returns int64 [parts, size], each item put into the lightest part that is not full, in this order.

    ranked: int64 [items], the costliest first. The lightest parts take one item each at once, up to the first
    that is no lighter than one of those before it has become.
    """
    size, last = len(ranked) // parts, np.iinfo(np.int64).max
    found = np.empty((parts, size), np.int64)
    totals, filled, done = np.zeros(parts, np.int64), np.zeros(parts, np.int64), 0
    taking = ranked[:parts]  # all are empty
    while len(taking) >= AT_ONCE:
        lightest = np.argsort(totals, kind="stable")[: len(taking)]
        after = totals[lightest] + costs[taking]
        becomes = np.where(filled[lightest] + 1 < size, after, last)
        heavier = np.minimum.accumulate(becomes[:-1]) <= totals[lightest[1:]]
        count = 1 + int(heavier.argmax()) if heavier.any() else len(taking)
        chosen = lightest[:count]
        found[chosen, filled[chosen]] = taking[:count]
        totals[chosen], filled[chosen], done = becomes[:count], filled[chosen] + 1, done + count
        taking = ranked[done : done + np.count_nonzero(filled < size)] if count >= AT_ONCE else ranked[:0]
    able = np.flatnonzero(filled < size)
    heap = list(zip(totals[able].tolist(), able.tolist(), filled[able].tolist(), strict=True))
    heapq.heapify(heap)
    for item, cost in zip(ranked[done:].tolist(), costs[ranked[done:]].tolist(), strict=True):
        total, part, count = heap[0]
        found[part, count] = item
        if count + 1 < size:
            heapq.heapreplace(heap, (total + cost, part, count + 1))
        else:
            heapq.heappop(heap)
    return found


def _exchanged(costs: np.ndarray, parts: np.ndarray) -> np.ndarray:
    parts, cost = parts.copy(), costs[parts]
    sums = cost.sum(axis=1)
    beside = sums[:, None] - cost  # of each item, what its part has without it
    after, other = np.empty_like(cost), np.empty_like(cost)
    for _ in range(4 * len(parts)):
        worst = int(sums.argmax())
        most = best = int(sums[worst])
        if most <= EVEN * sums.mean():
            break
        beside[worst] = np.iinfo(np.int64).max // 2  # no exchange with itself
        for item, given in enumerate(cost[worst].tolist()):
            # What the costlier of both parts has after it, of each item that may be taken for this one.
            np.add(cost, most - given, out=after)
            np.maximum(after, np.add(beside, given, out=other), out=after)
            place = int(after.argmin())
            if after.flat[place] < best:
                best, mine, theirs = int(after.flat[place]), (worst, item), divmod(place, cost.shape[1])
        if best == most:
            break
        for array in (parts, cost):
            array[mine], array[theirs] = array[theirs], array[mine]
        for part in (worst, theirs[0]):
            sums[part] = cost[part].sum()
            beside[part] = sums[part] - cost[part]
    return np.take_along_axis(parts, np.argsort(-cost, axis=1, kind="stable"), axis=1)


def _prime_factors(number: int) -> list[int]:
    factors = []
    for factor in range(2, number + 1):
        while number % factor == 0:
            factors.append(factor)
            number //= factor
    return factors
