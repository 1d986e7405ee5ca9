"""The planner: which rows of which sources each step takes. It sees counts and weights, never text.

A plan is a function of (seed, step, schedule, groups) and of nothing else, and any step can be asked for at
once. The mixture sampler says which source gives each row; a permutation of the source, a new one each epoch,
says which of its rows that is; the balance says where in the batch the row stands.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxthru.data.mixture.balance import balanced
from jaxthru.data.mixture.sampler import MixtureSampler, Supply
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.data.mixture.shuffle import key_of, places
from jaxthru.runtime.errors import require

EMPTY = -1
"""The row that is padding alone."""
TOGETHER = 8
"""Steps whose rows are looked up together, which costs little more than one step's."""


Cost = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(source, row), int64 [n] each -> int64 [n], what these rows cost, in one unit."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The rows of one step in the order of the batch: group after group.

    source: int64 [rows], index of the source; row: int64 [rows], a row of that source's training split.
    """

    source: np.ndarray
    row: np.ndarray


class Planner:
    """supplies: {source: Supply}, in the order of the mix. rows: of one step. sequence: tokens in a row.

    end: completed updates after which a source that is exhausted ends the run, or None. Raises InputError for
    a schedule that cannot be followed.
    """

    def __init__(
        self,
        supplies: dict[str, Supply],
        schedule: Schedule,
        *,
        seed: int,
        rows: int,
        groups: int,
        sequence: int,
    ):
        require(rows % groups == 0, f"data.groups = {groups}: must divide train.rows = {rows}")
        self.sampler = MixtureSampler(supplies, schedule, seed=seed, rows=rows, sequence=sequence)
        self.end, self.ended_by = self.sampler.end, self.sampler.ended_by
        self.available = np.array([supply.rows for supply in supplies.values()], np.int64)
        self.rows, self.groups = rows, groups
        # By name: a source keeps its order when the mix names others before it.
        self._keys = np.array([key_of(seed, "rows", name) for name in supplies], np.uint64)
        self._costs_of_block: Callable[[int], np.ndarray] | None = None
        self._plans_of_block = functools.lru_cache(maxsize=4)(self._unordered)

    def balanced_by(self, cost: Cost) -> "Planner":
        """Returns the same plan with the rows of each step in an order in which groups cost alike.

        cost: (source, row), int64 [n] each -> int64 [n], what these rows cost."""
        planner = copy.copy(self)

        def costs(block: int) -> np.ndarray:
            plans = self._plans_of_block(block)
            together = (np.concatenate([getattr(plan, name) for plan in plans]) for name in ("source", "row"))
            return cost(*together).reshape(-1, self.rows)

        planner._costs_of_block = functools.lru_cache(maxsize=4)(costs)
        return planner

    def epochs(self, steps: int) -> np.ndarray:
        """Returns float64 [sources], how often each is read in so many updates."""
        return self.sampler.taken(steps) / np.maximum(self.available, 1)

    def plan(self, step: int) -> StepPlan:
        """Returns the plan of update `step` + 1, for `step` completed updates."""
        block, at = divmod(step, TOGETHER)
        plan = self._plans_of_block(block)[at]
        if self._costs_of_block is None:
            return plan
        order = balanced(self._costs_of_block(block)[at], self.groups)
        return StepPlan(plan.source[order], plan.row[order])

    def _unordered(self, block: int) -> list[StepPlan]:
        """Returns the plans of a block of steps, up to the end of the run, rows as the sampler has them."""
        steps = range(block * TOGETHER, (block + 1) * TOGETHER)
        numbered = [self.sampler.rows_of(step) for step in steps if self.end is None or step < self.end]
        source, number = np.concatenate(numbered, axis=1)
        epoch, index = np.divmod(number, self.available[source])
        row = places(index, self.available[source], self._keys[source], epoch)
        by_step = (array.reshape(-1, self.rows) for array in (source, row))
        return [StepPlan(*pair) for pair in zip(*by_step, strict=True)]


def held_out_plan(available: np.ndarray, total: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (source, row) of each row of the held-out batches, int64 [batches, rows] both.

    available: int64 [sources], the held-out rows that each has. total: rows to take, spread evenly over the
    sources, and evenly over each source; fewer when there are fewer. The last batch is filled up with EMPTY.
    """
    quota = even_shares(available, total)
    source = np.repeat(np.arange(len(quota)), quota)
    row = [np.arange(count) * have // max(count, 1) for count, have in zip(quota, available, strict=True)]
    padding = -len(source) % rows
    source = np.concatenate([source, np.zeros(padding, np.int64)])
    row = np.concatenate([*row, np.full(padding, EMPTY)])
    return source.reshape(-1, rows), row.reshape(-1, rows)


def even_shares(available: np.ndarray, total: int) -> np.ndarray:
    """Returns int64 [sources], as equal as `available` allows, with the sum `total` if there is so much."""
    shares = np.zeros_like(available)
    left = min(total, int(available.sum()))
    while left:
        open_sources = np.flatnonzero(shares < available)
        each, rest = divmod(left, len(open_sources))
        wanted = np.full(len(open_sources), each)
        wanted[:rest] += 1
        given = np.minimum(wanted, (available - shares)[open_sources])
        shares[open_sources] += given
        left -= int(given.sum())
    return shares
