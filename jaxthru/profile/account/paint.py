"""Assigns each instant of a device's time to one line of the ledger, so that seconds add up.

Times are whole nanoseconds. Where several things run at once, the one of the first line (`ledger.LINES`) has
the instant, and of those of one line the one that began first.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxthru.profile.account.ledger import LINES

RANK = {name: rank for rank, name in enumerate(LINES)}


class Painted(NamedTuple):
    """A stretch of time and its line. owner: the index of what runs, None where nothing does."""

    start: int
    end: int
    line: str
    owner: int | None


class Idle(NamedTuple):
    """A stretch for which a device runs nothing. next: the index of what it runs then, None at the end."""

    start: int
    end: int
    next: int | None


def paint(spans: Sequence[tuple[int, int, str]], start: int, end: int) -> tuple[list[Painted], list[Idle]]:
    """Returns the owners of the instants from `start` to `end`, in order, and what is left over.

    spans: (start, end, line), sorted by start.
    """
    painted: list[Painted] = []
    idle: list[Idle] = []
    active: list[tuple[int, int, int]] = []  # (rank, index, end), the owner first
    at, following = start, 0
    while at < end:
        while following < len(spans) and spans[following][0] <= at:
            begun, over, line = spans[following]
            if over > at and over > begun:
                heapq.heappush(active, (RANK[line], following, over))
            following += 1
        while active and active[0][2] <= at:
            heapq.heappop(active)
        until = min(spans[following][0], end) if following < len(spans) else end
        if active:
            _, owner, over = active[0]
            until = min(until, over)
            line = spans[owner][2]
            if painted and painted[-1].owner == owner and painted[-1].end == at:
                painted[-1] = painted[-1]._replace(end=until)
            else:
                painted.append(Painted(at, until, line, owner))
        elif idle and idle[-1].end == at:
            idle[-1] = Idle(idle[-1].start, until, following if following < len(spans) else None)
        else:
            idle.append(Idle(at, until, following if following < len(spans) else None))
        at = until
    return painted, idle


def split_idle(
    idle: Iterable[Idle], waits: list[tuple[int, int]], launched: Sequence[int | None]
) -> list[Painted]:
    """Returns whose fault idle time is: `dependency` where the host had called for what runs next before the
    device ran out; else `data_wait` while the loop waits for data; else `host_gap`, or `dependency` where the
    trace does not say when the host called.

    waits: spans without overlap, in order. launched: when the host called for each thing that runs.
    """
    painted = []
    for gap in idle:
        called = None if gap.next is None else launched[gap.next]
        if called is not None and called <= gap.start:  # the batch that the loop waits for is a later step's
            painted.append(Painted(gap.start, gap.end, "dependency", None))
            continue
        rest = "dependency" if called is None else "host_gap"
        at = gap.start
        for begun, over in waits:
            begun, over = max(begun, at), min(over, gap.end)
            if begun < over:
                if at < begun:
                    painted.append(Painted(at, begun, rest, None))
                painted.append(Painted(begun, over, "data_wait", None))
                at = over
        if at < gap.end:
            painted.append(Painted(at, gap.end, rest, None))
    return painted


def totals(painted: Iterable[Painted]) -> dict[str, int]:
    """Returns the nanoseconds of each line."""
    sums = dict.fromkeys(LINES, 0)
    for piece in painted:
        sums[piece.line] += piece.end - piece.start
    return sums


def strip(painted: Sequence[Painted], start: int, most: int) -> tuple[tuple[float, float, str], ...]:
    """Returns the spans of a timeline in seconds from `start`: neighbours of one line joined, and, to have at
    most `most`, the shortest given to a neighbour."""
    spans = _joined([[piece.start, piece.end, piece.line] for piece in sorted(painted)])
    while (over := len(spans) - most) > 0:
        shortest = set(sorted(range(len(spans)), key=lambda at: spans[at][1] - spans[at][0])[:over])
        kept = [span for at, span in enumerate(spans) if at not in shortest]
        ends = [*(following[0] for following in kept[1:]), spans[-1][1]]
        kept[0][0] = spans[0][0]
        spans = _joined([[begun, end, line] for (begun, _, line), end in zip(kept, ends, strict=True)])
    return tuple(((begun - start) / 1e9, (end - start) / 1e9, line) for begun, end, line in spans)


def _joined(spans: list[list]) -> list[list]:
    joined: list[list] = []
    for begun, end, line in spans:
        if joined and joined[-1][2] == line and joined[-1][1] == begun:
            joined[-1][1] = end
        else:
            joined.append([begun, end, line])
    return joined
