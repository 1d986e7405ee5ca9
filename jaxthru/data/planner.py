"""The planner: which rows of which sources each step takes. It sees counts and weights, never text.

A plan is a function of (seed, step, schedule, groups) and of nothing else, and any step can be asked for at
once. The weights hold exactly in blocks of rows: the block decides how many rows each source gives, a
permutation of the block decides where they stand, and a permutation of the source, a new one each epoch,
decides which rows they are.
"""

import dataclasses
import functools
import hashlib
import itertools

import numpy as np

from jaxthru.runtime.errors import did_you_mean, require

Schedule = tuple[tuple[int, dict[str, float]], ...]
"""Append-only: (completed updates after which it holds, {source: share of the tokens})."""

UNIT = 1 << 24
"""Weights are rounded to multiples of 1/UNIT, so that counts are integers at any distance."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The rows of one step in the order of the batch: group after group.

    source: int64 [rows], index of the source; row: int64 [rows], a row of that source's training split.
    """

    source: np.ndarray
    row: np.ndarray


class Planner:
    """available: {source: rows of its training split}, in the order of the mix. rows: of one step.

    Raises InputError for a schedule that cannot be followed.
    """

    def __init__(self, available: dict[str, int], schedule: Schedule, *, seed: int, rows: int, groups: int):
        require(rows % groups == 0, f"data.groups = {groups}: must divide train.rows = {rows}")
        require(len(schedule) > 0 and schedule[0][0] == 0, "the schedule must begin at step 0")
        steps = [step for step, _ in schedule]
        require(steps == sorted(set(steps)), f"the schedule's steps must increase: {steps}")
        self.names = tuple(available)
        self.available = np.array(list(available.values()), np.int64)
        self.seed, self.rows, self.groups = seed, rows, groups
        self._from = np.array(steps, np.int64)
        self._units = [self._integer_weights(weights) for _, weights in schedule]
        # Balanced counts need a block of at least (number of sources)² rows: see `_counts`.
        self._block = 1 << max(10, (len(self.names) ** 2 - 1).bit_length())
        self._sources_of_block = functools.lru_cache(maxsize=4)(self._mixed_block)
        self._before = [np.zeros(len(self.names), np.int64)]
        for entry, (start, end) in enumerate(itertools.pairwise(steps)):
            self._before.append(self._before[-1] + self._taken(entry, (end - start) * rows))

    def plan(self, step: int) -> StepPlan:
        """Returns the plan of update `step` + 1, for `step` completed updates."""
        entry = int(np.searchsorted(self._from, step, side="right")) - 1
        at = (step - int(self._from[entry])) * self.rows
        block, offset = divmod(at, self._block)
        blocks = range(block, (at + self.rows - 1) // self._block + 1)
        sources = np.concatenate([self._sources_of_block(entry, number) for number in blocks])
        source = sources[offset : offset + self.rows]
        taken = self._before[entry] + self._taken(entry, at)
        # The rows of each source, numbered in the order in which the step meets them.
        by_source = np.argsort(source, kind="stable")
        counts = np.bincount(source, minlength=len(self.names))
        number = np.empty(self.rows, np.int64)
        number[by_source] = np.arange(self.rows) - np.repeat(np.cumsum(counts) - counts, counts)
        number += taken[source]
        row = np.array([self._shuffled(*pair) for pair in zip(source.tolist(), number.tolist(), strict=True)])
        return StepPlan(source, row)

    def epochs(self, step: int) -> dict[str, float]:
        """Returns how often each source has been gone through after `step` updates."""
        entry = int(np.searchsorted(self._from, step, side="right")) - 1
        taken = self._before[entry] + self._taken(entry, (step - int(self._from[entry])) * self.rows)
        return dict(zip(self.names, (taken / self.available).tolist(), strict=True))

    def _integer_weights(self, weights: dict[str, float]) -> np.ndarray:
        for name, weight in weights.items():
            require(name in self.names, f"the schedule names source {name!r}{did_you_mean(name, self.names)}")
            require(weight >= 0, f"the schedule gives source {name} the weight {weight}")
        values = np.array([weights.get(name, 0.0) for name in self.names])
        require(values.sum() > 0, "the schedule's weights sum to 0")
        units = np.round(values / values.sum() * UNIT).astype(np.int64)
        for name, unit, rows in zip(self.names, units, self.available, strict=True):
            require(unit == 0 or rows > 0, f"source {name} has a weight but not one row")
        units[units.argmax()] += UNIT - units.sum()
        return units

    def _counts(self, entry: int, total: int) -> np.ndarray:
        """Returns int64 [sources], how many of the first `total` rows (whole blocks) each source gives.

        Every count is its share to the nearest integer, but for the heaviest source, which takes what
        rounding leaves. So nothing drifts at any distance, and no count ever falls: in a block of at least
        (number of sources)² rows the heaviest gains more than the others' rounding can take from it.
        """
        units = self._units[entry]
        counts = (units * total + UNIT // 2) // UNIT
        counts[units.argmax()] += total - counts.sum()
        return counts

    def _taken(self, entry: int, rows: int) -> np.ndarray:
        """Returns int64 [sources], how many of the first `rows` rows under a schedule entry each gives."""
        block, rest = divmod(rows, self._block)
        counts = self._counts(entry, block * self._block)
        if rest:
            part = self._sources_of_block(entry, block)[:rest]
            counts = counts + np.bincount(part, minlength=len(self.names))
        return counts

    def _mixed_block(self, entry: int, block: int) -> np.ndarray:
        """Returns int64 [block], the source of each row of one block."""
        start = block * self._block
        counts = self._counts(entry, start + self._block) - self._counts(entry, start)
        sources = np.repeat(np.arange(len(self.names)), counts)
        key = _seed(self.seed, "block", int(self._from[entry]), block)
        return sources[_permutation(key, self._block)]

    def _shuffled(self, source: int, number: int) -> int:
        """Returns the row that a source gives as its `number`-th since the run began."""
        rows = int(self.available[source])
        epoch, index = divmod(number, rows)
        # By name: a source keeps its order when the mix names others before it.
        key = _seed(self.seed, "rows", self.names[source], epoch)
        if rows <= 1024:  # index_shuffle walks a cycle of 2¹⁶: slow where few of them count
            return int(_permutation(key, rows)[index])
        from grain.experimental import index_shuffle  # here, for it loads JAX

        return index_shuffle(index, max_index=rows - 1, seed=key % 2**32, rounds=4)


@functools.lru_cache(maxsize=4096)
def _seed(*parts: int | str) -> int:
    """Returns a 64-bit key made of all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


@functools.lru_cache(maxsize=1024)
def _permutation(key: int, size: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key)).permutation(size)
