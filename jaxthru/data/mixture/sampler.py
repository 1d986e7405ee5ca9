"""The mixture sampler: which source gives each row of any step, and how many rows each has given before.

An entry of the schedule is followed by its own sources alone, in the order of their names: a mix that is
reordered, or gets more sources at a resume, leaves all steps before as they were.

It is made of phases of constant weights: one for each stair of the schedule, cut where a capped source runs
out. Within a phase, weights hold exactly in blocks of rows; the block decides how many rows each source
gives, a permutation of the block decides where they stand. So every step is found at once.
"""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.packing import ranges
from jaxthru.data.mixture.schedule import Schedule, stairs
from jaxthru.data.mixture.shuffle import key_of, permutation
from jaxthru.runtime.errors import did_you_mean, require

UNIT = 1 << 24
"""Weights are rounded to multiples of 1/UNIT, so that counts are integers at any distance."""

UNLIMITED = 1 << 38
"""Rows of a source that never runs out; × UNIT it still is an int64."""


@dataclasses.dataclass(frozen=True)
class Supply:
    """What a source has in one epoch: rows, and the tokens and documents in them."""

    rows: int
    tokens: float
    documents: float


@dataclasses.dataclass(frozen=True, eq=False)
class Phase:
    """Steps of constant weights, from `start` until before `stop` (None: for ever).

    units: int64 [sources], weights × UNIT. block: rows that a block has. before: int64 [sources], rows given
    before `start`. tail: int64 [sources], what the last block gives where it is not a whole one.
    """

    start: int
    stop: int | None
    units: np.ndarray
    block: int
    before: np.ndarray
    tail: np.ndarray


class MixtureSampler:
    """supplies: {source: Supply}, in the order of the mix. rows: of one step. sequence: tokens in a row.

    end: completed updates after which the run must end, None if it can go on for ever. ended_by: the source
    that ends it. Raises InputError for a schedule that cannot be followed.
    """

    def __init__(
        self, supplies: dict[str, Supply], schedule: Schedule, *, seed: int, rows: int, sequence: int
    ):
        require(len(schedule) > 0 and schedule[0][0] == 0, "the schedule must begin at step 0")
        steps = [step for step, _ in schedule]
        require(steps == sorted(set(steps)), f"the schedule's steps must increase: {steps}")
        self.names = tuple(sorted(supplies))  # the order of all within; callers have that of the mix
        self._place = np.argsort(list(supplies), kind="stable")  # in the mix, of each of these
        self.supplies = {name: supplies[name] for name in self.names}
        self.seed, self.rows, self.tokens_per_step = seed, rows, rows * sequence
        self.end: int | None = None
        self.ended_by = ""
        self._rows_of_block = functools.lru_cache(maxsize=4)(self._mixed_block)
        self._phases: list[Phase] = []
        self._starts: list[int] = []
        for (start, mixture), until in itertools.zip_longest(schedule, steps[1:]):
            before = self._taken(start) if self._phases else np.zeros(len(self.names), np.int64)
            self.end = None
            for phase in self._follow(mixture, start, before):
                if until is not None and phase.start >= until:
                    break
                self._phases.append(phase)
                self._starts.append(phase.start)
            require(
                bool(self._phases),
                f"source {self.ended_by} is exhausted before one step has its train.rows = {rows}",
            )

    def sources(self, step: int) -> np.ndarray:
        """Returns int64 [rows], the source of each row of update `step` + 1."""
        return self.rows_of(step)[0]

    def rows_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, number) of each row of update `step` + 1, int64 [rows] both: it is the source's
        `number`-th row since the run began, counted from 0.
        """
        at = self._at(step)
        phase = self._phases[at]
        begin = (step - phase.start) * self.rows
        pieces = []
        for block in range(begin // phase.block, (begin + self.rows - 1) // phase.block + 1):
            offset = begin - block * phase.block
            pieces.append(self._rows_of_block(at, block)[:, max(offset, 0) : offset + self.rows])
        source, number = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
        return self._place[source], number

    def taken(self, step: int) -> np.ndarray:
        """Returns int64 [sources], the rows that each has given after `step` updates."""
        counts = np.empty(len(self.names), np.int64)
        counts[self._place] = self._taken(step)
        return counts

    def _taken(self, step: int) -> np.ndarray:
        at = self._at(step)
        phase = self._phases[at]
        step = step if phase.stop is None else min(step, phase.stop)
        block, rest = divmod((step - phase.start) * self.rows, phase.block)
        counts = phase.before + _balanced(phase.units, block * phase.block)
        if rest:
            source = self._rows_of_block(at, block)[0, :rest]
            counts += np.bincount(source, minlength=len(self.names))
        return counts

    def _at(self, step: int) -> int:
        return bisect.bisect_right(self._starts, step) - 1

    def _mixed_block(self, at: int, block: int) -> np.ndarray:
        """Returns int64 [2, rows], of each row of one block of a phase its source, and which row of it."""
        phase = self._phases[at]
        start, stop = block * phase.block, (block + 1) * phase.block
        given = _balanced(phase.units, start)
        if phase.stop is not None and stop > (phase.stop - phase.start) * self.rows:
            counts = phase.tail
        else:
            counts = _balanced(phase.units, stop) - given
        key = key_of(self.seed, "block", phase.start, block)
        narrow = np.uint16 if len(self.names) < 1 << 16 else np.int64  # which sorts faster
        in_order = np.repeat(np.arange(len(self.names), dtype=narrow), counts)
        source = in_order[permutation(key, len(in_order))]
        found = np.empty((2, len(in_order)), np.int64)
        found[0] = source
        found[1, np.argsort(source, kind="stable")] = ranges(counts)
        found[1] += (phase.before + given)[found[0]]
        return found

    def _follow(self, mixture: Mixture, start: int, given: np.ndarray) -> Iterator[Phase]:
        """Yields the phases of a mixture from step `start` on, up to its end if it has one, which it notes.

        given: int64 [sources], rows given before. What a source is owed (int64 [sources], rows × UNIT) goes
        from phase to phase, so that nothing drifts over many short ones.
        """
        mixture.check("the schedule: ")
        limit, stops, scale = self._terms(mixture)
        # Balanced counts need a block of at least (number of sources)² rows: see `_balanced`.
        block = 1 << max(10, (len(mixture.shares) ** 2 - 1).bit_length())
        owed = np.zeros(len(self.names), np.int64)
        at = start
        for _, last, weights in stairs(mixture, start, self.tokens_per_step):
            wanted = np.array([weights.get(name, 0.0) for name in self.names]) / scale
            while last is None or at < last:
                left = limit - given
                over = np.flatnonzero(stops & (left <= 0) & (wanted > 0))
                units = _units(np.where(left > 0, wanted, 0.0))
                if len(over) or not units.any():
                    self._end(at, over[0] if len(over) else int((wanted > 0).argmax()))
                    return
                # What is owed to sources that give no more goes to the others.
                rest = owed[units == 0].sum() / UNIT
                owed = np.where(units > 0, owed + (units * rest).astype(np.int64), 0)
                steps = None if last is None else last - at
                safe = self._safe_steps(units, left, owed, len(mixture.shares))
                ending = safe < 1
                if ending.any():
                    steps = self._closing_steps(units, left, ending, block)
                    if steps < 1:
                        self._end(at, int(ending.argmax()))
                        return
                elif (safe < UNLIMITED).any():
                    steps = min(int(safe.min()), steps or UNLIMITED)
                if steps is not None and (at + steps) * self.rows > UNLIMITED // 2:
                    steps = None  # further than counts reach, or a run
                phase, owed = self._phase(at, steps, units, given, owed, left, ending, block)
                yield phase
                if steps is None:
                    return
                at += steps
                given = given + _balanced(units, steps * self.rows // phase.block * phase.block) + phase.tail

    def _terms(self, mixture: Mixture) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns, of each source, the rows it has in all, whether its end is the run's, and how much of
        what weights count its rows hold."""
        for name in mixture.shares:
            require(
                name in self.supplies,
                lambda name=name: f"the schedule names source {name!r}{did_you_mean(name, self.names)}",
            )
        limit = np.full(len(self.names), UNLIMITED)
        for number, (name, supply) in enumerate(self.supplies.items()):
            share = mixture.shares.get(name)
            if share is None or all(weight == 0 for _, weight in share.points):
                continue
            require(supply.rows > 0, f"source {name} has a weight but not one row")
            for key, cap, each in (
                ("max_epochs", share.max_epochs, 1),
                ("max_tokens", share.max_tokens, supply.tokens),
            ):
                if cap is not None:
                    rows = int(cap * supply.rows / each + 1e-6)
                    require(rows > 0, f"sources.{name}.{key} = {cap:g}: less than one row of {supply.rows}")
                    limit[number] = min(limit[number], rows)
        shares = [mixture.shares.get(name) for name in self.names]
        stops = np.array([share is not None and share.exhausted == "stop" for share in shares])
        counted = np.array([getattr(supply, mixture.count) for supply in self.supplies.values()], float)
        rows = np.array([supply.rows for supply in self.supplies.values()])
        return limit, stops, np.where(rows > 0, counted, 1.0) / np.maximum(rows, 1)

    def _safe_steps(self, units: np.ndarray, left: np.ndarray, owed: np.ndarray, sources: int) -> np.ndarray:
        """Returns int64 [sources], for how many steps at least each has rows left."""
        slack = np.full(len(units), 2)
        slack[units.argmax()] += sources  # `_balanced` gives it what rounding leaves
        limited = (units > 0) & (left < UNLIMITED // 2)
        steps = np.full(len(units), UNLIMITED)
        owed = np.maximum(owed, 0)  # one that has had too much has its share of whole blocks all the same
        steps[limited] = ((left - slack) * UNIT - owed)[limited] // (units * self.rows)[limited]
        return steps

    def _closing_steps(self, units: np.ndarray, left: np.ndarray, ending: np.ndarray, block: int) -> int:
        """Returns how many steps are to take all that the ending sources have left; 0 if it fills none."""
        needed = -(-int(left[ending].sum()) // self.rows)
        natural = int((-(-left[ending] * UNIT // (units[ending] * self.rows))).max())
        steps = max(needed, min(natural, block // self.rows))
        return min(steps, int(left[units > 0].sum()) // self.rows)

    def _phase(
        self,
        start: int,
        steps: int | None,
        units: np.ndarray,
        before: np.ndarray,
        owed: np.ndarray,
        left: np.ndarray,
        ending: np.ndarray,
        block: int,
    ) -> tuple[Phase, np.ndarray]:
        """Returns a phase and what is owed after it."""
        if steps is None:
            return Phase(start, None, units, block, before, np.zeros_like(units)), owed
        total = steps * self.rows
        # Sources that end have their last rows in one block, which is no whole one.
        block = max(block, total + 1) if ending.any() else block
        given = _balanced(units, total // block * block)
        wanted = owed + units * total - given * UNIT
        most = np.where(units > 0, left - given, 0)
        least, others = np.where(ending, most, 0), np.where(ending, 0, units)
        if least.sum() > total or not others.any():
            least = np.zeros_like(most)
        elif ending.any():  # they give all, and the others what is missing or too much, by their weights
            rest = (wanted - least * UNIT)[ending].sum() / others.sum()
            wanted = np.where(ending, least * UNIT, wanted + (others * rest).astype(np.int64))
        tail = _apportioned(wanted, total % block, least, most)
        return Phase(start, start + steps, units, block, before, tail), wanted - tail * UNIT

    def _end(self, step: int, source: int) -> None:
        self.end, self.ended_by = step, self.names[source]


def _units(weights: np.ndarray) -> np.ndarray:
    """Returns int64 [sources], the weights as parts of UNIT, or zeros."""
    total = math.fsum(weights)  # the same whatever sources of no weight stand between
    if total == 0:
        return np.zeros(len(weights), np.int64)
    units = np.round(weights / total * UNIT).astype(np.int64)
    units[units.argmax()] += UNIT - units.sum()
    return units


def _balanced(units: np.ndarray, total: int) -> np.ndarray:
    """Returns int64 [sources], how many of the first `total` rows (whole blocks) of a phase each gives.

    Every count is its share to the nearest integer, but for the heaviest source, which takes what rounding
    leaves. So nothing drifts at any distance, and no count ever falls: in a block of at least (number of
    sources)² rows the heaviest gains more than the others' rounding can take from it.
    """
    counts = (units * total + UNIT // 2) // UNIT
    counts[units.argmax()] += total - counts.sum()
    return counts


def _apportioned(wanted: np.ndarray, rows: int, least: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Returns int64 [sources] that sum to `rows`: what is wanted (rows × UNIT), by largest remainders.

    least, most: int64 [sources], the bounds of each count; together they leave room for `rows`.
    """
    wanted = np.clip(wanted, least * UNIT, most * UNIT)
    counts = wanted // UNIT
    while missing := rows - int(counts.sum()):
        sign = 1 if missing > 0 else -1
        able = np.flatnonzero(counts < most if sign > 0 else counts > least)
        owed = sign * (wanted - counts * UNIT)[able]
        counts[able[np.argsort(-owed, kind="stable")[: abs(missing)]]] += sign
    return counts
