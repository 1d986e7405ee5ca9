"""Load balance, against stragglers: orders the rows of a step so that equal parts of the batch cost alike.

Devices take their parts of a batch at the same time, so the costliest part is what all wait for. Rows only
change places within their step; what is in them stays.
"""

import heapq

import numpy as np

EVEN = 1.001
"""Parts whose costliest is so near to their mean are not improved further."""


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
    found = np.empty((parts, size), np.int64)
    lightest = [(0, part, 0) for part in range(parts)]
    costs_list = costs.tolist()
    for item in ranked.tolist():
        total, part, filled = heapq.heappop(lightest)
        found[part, filled] = item
        if filled + 1 < size:
            heapq.heappush(lightest, (total + costs_list[item], part, filled + 1))
    return _exchanged(costs, found)


def _exchanged(costs: np.ndarray, parts: np.ndarray) -> np.ndarray:
    parts, sums = parts.copy(), costs[parts].sum(axis=1)
    for _ in range(4 * len(parts)):
        worst = int(sums.argmax())
        if sums[worst] <= EVEN * sums.mean():
            break
        # [size, parts, size]: what the costliest part loses by giving one item for one of another part.
        loss = costs[parts[worst]][:, None, None] - costs[parts][None]
        after = np.maximum(sums[worst] - loss, sums[None, :, None] + loss)
        after[:, worst] = np.iinfo(np.int64).max
        mine, other, theirs = np.unravel_index(after.argmin(), after.shape)
        if after[mine, other, theirs] >= sums[worst]:
            break
        parts[worst, mine], parts[other, theirs] = parts[other, theirs], parts[worst, mine]
        sums = costs[parts].sum(axis=1)
    rank = np.argsort(-costs[parts], axis=1, kind="stable")
    return np.take_along_axis(parts, rank, axis=1)


def _prime_factors(number: int) -> list[int]:
    factors = []
    for factor in range(2, number + 1):
        while number % factor == 0:
            factors.append(factor)
            number //= factor
    return factors
