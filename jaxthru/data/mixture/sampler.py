"""The mixture sampler: which source gives each row of any step, and how many rows each has given before.

An entry of the schedule is followed by its own sources alone, in the order of their names: a mix that is
reordered, or gets more sources at a resume, leaves all steps before as they were.

What is asked of each source is a line over the rows of the run, straight between the places where weights
change or a source runs out. Rows are whole, so what is given follows it by rounding, found for any step by
bisection of the time: first what each source has given at the end, then at the half, and so on down to the
step. Each time lies between its two neighbours, so that no count falls; and what rounding down has left goes
to the sources whose next row is due soonest, and whose last was due longest ago.
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

VERSION = 2
"""Of which rows a schedule gives; a checkpoint keeps it. Version 1, which kept none, drew rows in blocks."""

HORIZON = 1 << 44
"""Rows after which no run goes on; there a float64 still knows 1/512 of a row."""

UNLIMITED = 1 << 48
"""Rows of a source that never runs out; of thousands of sources the sum is an int64."""

TOLERANCE = 1e-6
"""Of a row: what the rounding of floats may have added to a sum of whole rows."""


@dataclasses.dataclass(frozen=True)
class Supply:
    """What a source has in one epoch: rows, and the tokens and documents in them."""

    rows: int
    tokens: float
    documents: float


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Steps from `start` until before `stop` over which the same sources have a weight.

    at: float64 [points], rows since `start`, rising from 0. asked: float64 [points, sources], the rows asked
    of each source since the run began; between points it is a straight line. given: int64 [sources], rows
    given before `start`. most: int64 [sources], the rows that each can have given at `stop`. leaving: bool
    [sources], which have no weight in the stage that follows.
    """

    start: int
    stop: int
    at: np.ndarray
    asked: np.ndarray
    given: np.ndarray
    most: np.ndarray
    leaving: np.ndarray

    def asked_at(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns float64 [sources] twice, the rows asked of each since the run began, and the share of the
        next that is. rows: since `start`."""
        after = min(max(int(np.searchsorted(self.at, rows)), 1), len(self.at) - 1)
        share = (self.asked[after] - self.asked[after - 1]) / (self.at[after] - self.at[after - 1])
        return self.asked[after - 1] + share * (min(rows, self.at[after]) - self.at[after - 1]), share


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
        # The neighbours of a step, up to the ends of its stage: what the next step needs of them stays.
        self._counts = functools.lru_cache(maxsize=128)(self._rounded)
        self._stages: list[Stage] = []
        self._starts: list[int] = []
        for (start, mixture), until in itertools.zip_longest(schedule, steps[1:]):
            self.end = None
            for stage in self._follow(mixture, start):
                if until is not None and stage.start >= until:
                    break
                self._stages.append(stage)
                self._starts.append(stage.start)
            require(
                bool(self._stages),
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
        before = self._given(at, step)
        counts = self._given(at, step + 1) - before
        in_order = np.repeat(np.arange(len(counts)), counts)
        source = in_order[permutation(key_of(self.seed, "step", step), len(in_order))]
        number = np.empty_like(source)
        number[np.argsort(source, kind="stable")] = ranges(counts) + before[in_order]
        return self._place[source], number

    def taken(self, step: int) -> np.ndarray:
        """Returns int64 [sources], the rows that each has given after `step` updates."""
        return self._in_mix(self._given(self._at(step), step))

    def asked(self, step: int) -> np.ndarray:
        """Returns float64 [sources], the rows that weights and caps ask of each in `step` updates."""
        return self._in_mix(self._asked(step))

    def _asked(self, step: int) -> np.ndarray:
        stage = self._stages[self._at(step)]
        return stage.asked_at((min(step, stage.stop) - stage.start) * self.rows)[0]

    def _in_mix(self, values: np.ndarray) -> np.ndarray:
        found = np.empty_like(values)
        found[self._place] = values
        return found

    def _at(self, step: int) -> int:
        return bisect.bisect_right(self._starts, step) - 1

    def _given(self, at: int, step: int) -> np.ndarray:
        """Returns int64 [sources], the rows given after `step` updates, of which stage `at` has the last."""
        stage = self._stages[at]
        return self._counts(at, min(step, stage.stop) - stage.start)

    def _rounded(self, at: int, steps: int) -> np.ndarray:
        """Returns int64 [sources], the rows given after `steps` steps of a stage: between what is given at
        its two neighbours, the multiples of the next power of two."""
        stage = self._stages[at]
        if steps == 0:
            return stage.given
        half = steps & -steps
        last = stage.stop - stage.start
        if steps == last:
            return _given_at_stop(stage, self.rows)
        least, most = self._counts(at, steps - half), self._counts(at, min(steps + half, last))
        rows = steps * self.rows
        return _apportioned(*stage.asked_at(rows), int(stage.given.sum()) + rows, least, most)

    def _follow(self, mixture: Mixture, start: int) -> Iterator[Stage]:
        """Yields the stages of a mixture from step `start` on, and notes where they end the run."""
        mixture.check("the schedule: ")
        limit, stops, scale = self._terms(mixture)
        asked, given = np.zeros(len(self.names)), np.zeros(len(self.names), np.int64)
        if self._stages:  # what is owed is carried over
            asked, given = self._asked(start), self._given(self._at(start), start)
        pieces = (
            (first, last, np.array([weights.get(name, 0.0) for name in self.names]) / scale)
            for first, last, weights in stairs(mixture, start, self.tokens_per_step)
        )
        groups = (list(group) for _, group in itertools.groupby(pieces, lambda it: (it[2] > 0).tobytes()))
        for group, following in itertools.pairwise(itertools.chain(groups, [None])):
            weighted, begin, until = group[0][2] > 0, group[0][0], group[-1][1]
            most = np.where(weighted, np.maximum(limit, given), given)
            line = _Line(asked, np.where(given < limit, limit, 0), stops & weighted)
            for _, last, wanted in group:
                line.follow(wanted, HORIZON if last is None else min((last - begin) * self.rows, HORIZON))
            farthest = HORIZON // self.rows
            planned = farthest if until is None else min(until - begin, farthest)
            # A source that ends the run has given all at the end of a step.
            stopped = math.ceil((min(line.stopped, HORIZON) - TOLERANCE) / self.rows)
            steps = min(planned, stopped, int((most - given).sum()) // self.rows)
            if steps < planned:
                self.end, self.ended_by = begin + steps, self.names[line.ended_by(weighted)]
            if steps == 0:
                return
            going_on = steps == planned < farthest
            leaving = following[0][2] == 0 if going_on else np.zeros_like(weighted)
            course = np.array(line.at), np.array(line.asked)
            stage = Stage(begin, begin + steps, *course, given, most, leaving)
            yield stage
            if not going_on:
                return
            asked, given = stage.asked_at(steps * self.rows)[0], _given_at_stop(stage, self.rows)

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


class _Line:
    """What is asked over a stage, as `Stage` has it, while it is being made.

    limit: int64 [sources], the rows that each may be asked for since the run began. stops: bool [sources],
    whose end is the run's. stopped: rows after which the first of these has run out.
    """

    def __init__(self, asked: np.ndarray, limit: np.ndarray, stops: np.ndarray):
        self.at, self.asked = [0.0], [asked]
        self.stopped = math.inf
        self._limit, self._stops = limit, stops
        self._open = asked < limit
        self._close(~self._open)

    def follow(self, wanted: np.ndarray, until: int) -> None:
        """Goes on by these weights, float64 [sources], until so many rows. Once no source has any left, no
        more is asked."""
        while self.at[-1] < until:
            weights = np.where(self._open, wanted, 0.0)
            total = math.fsum(weights)  # the same whatever sources of no weight stand between
            share, asked = weights / (total or 1.0), self.asked[-1]
            room = np.full(len(share), math.inf)
            with np.errstate(over="ignore"):  # a share may be next to nothing
                np.divide(self._limit - asked, share, out=room, where=share > 0)
            left = until - self.at[-1]
            rows = min(float(room.min()), left)
            reached = room <= rows * (1 + 1e-12)
            at = float(until) if rows == left else self.at[-1] + rows
            if at == self.at[-1]:  # so near that it is one point
                self.at.pop(), self.asked.pop()
            self.at.append(at)
            self.asked.append(np.where(reached, self._limit, asked + share * rows))
            self._close(reached)

    def ended_by(self, weighted: np.ndarray) -> int:
        """Returns the source that ends the run, if it ends. weighted: bool [sources], what has a weight."""
        return self._stopper if self.stopped < math.inf else int(weighted.argmax())

    def _close(self, reached: np.ndarray) -> None:
        self._open &= ~reached
        if self.stopped == math.inf and (reached & self._stops).any():
            self.stopped, self._stopper = self.at[-1], int((reached & self._stops).argmax())


def _given_at_stop(stage: Stage, rows: int) -> np.ndarray:
    """Returns int64 [sources], the rows given when a stage stops. rows: of one step.

    Those that have no weight afterwards are rounded for themselves: what they are owed for long is in all
    half a row at most, and so is what the others have had too much.
    """
    total = (stage.stop - stage.start) * rows
    asked, share = stage.asked_at(total)
    total += int(stage.given.sum())
    least, most = stage.given, stage.most
    given = np.empty_like(least)
    there = int(least[stage.leaving].sum()), int(most[stage.leaving].sum())
    here = int(least[~stage.leaving].sum()), int(most[~stage.leaving].sum())
    part = round(math.fsum(asked[stage.leaving]))
    part = min(max(part, there[0], total - here[1]), there[1], total - here[0])
    for which, sum_of in ((stage.leaving, part), (~stage.leaving, total - part)):
        given[which] = _apportioned(asked[which], share[which], sum_of, least[which], most[which])
    return given


def _apportioned(
    asked: np.ndarray, share: np.ndarray, rows: int, least: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """Returns int64 [sources] that sum to `rows`: what is asked, rounded down or up.

    share: float64 [sources], by how much what is asked grows with each row. least, most: int64 [sources], the
    bounds of each count; together they leave room for `rows`.

    One rounded down must have its next row by the time that this is due, or it is a whole row behind; one
    rounded up must not have had it before its last was due. So the soonest due come first. By remainders
    alone, several frequent sources could be due together where too few rows are left.
    """
    counts = np.clip(np.floor(asked).astype(np.int64), least, most)
    while missing := rows - int(counts.sum()):
        sign = 1 if missing > 0 else -1
        able = np.flatnonzero(counts < most if sign > 0 else counts > least)
        owed = sign * (asked - counts)[able]
        if sign > 0:
            until, since = np.maximum(1 - owed, 1e-9), np.maximum(owed, 1e-9)  # × 1/share: in rows
            owed = share[able] * (1 / until - 1 / since)
        counts[able[np.argsort(-owed, kind="stable")[: abs(missing)]]] += sign
    return counts
