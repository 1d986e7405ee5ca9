"""Every instant of a device has one owner: of what runs, the first line of the ledger; else why nothing does.

A step's window goes from its first kernel to the next step's. Times are whole nanoseconds, so that sums are
exact. Where several things run at once, the one of the first line (`ledger.LINES`) has the instant, and of
those of one line the one that began first.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxthru.profile.account.attribution import Attribution, Work
from jaxthru.profile.account.ledger import LINES
from jaxthru.profile.read import hlo
from jaxthru.profile.read.xplane import Event, Span, Trace

RANK = {name: rank for rank, name in enumerate(LINES)}

BY_NAME = (
    ("exposed_communication", ("nccl", "AllReduce", "AllGather", "ReduceScatter")),
    ("attention", ("fmha", "sdpa", "flash")),
    ("matmul", ("gemm", "nvjet", "cutlass", "xmma", "gemv", "cublas")),
)
"""Line -> parts of names of kernels that libraries bring."""

HOST_COPIES = "to_device", "to_host"
COPIES = {
    "to_device": "exposed_host_copies",
    "to_host": "exposed_host_copies",
    "to_peer": "exposed_communication",
    "memset": "other_kernels",
}


class Interval(NamedTuple):
    """An interval of time and its line. owner: the index of what runs, None where nothing does."""

    start: int
    end: int
    line: str
    owner: int | None


class Idle(NamedTuple):
    """An interval for which a device runs nothing. next: the index of what it runs then, None at the end."""

    start: int
    end: int
    next: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Ran:
    """An event with what it was for. work: None where the step's HLO does not have it."""

    event: Event
    line: str
    work: Work | None


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """One step on one device. ran: all that the intervals are owned by."""

    device: str
    step: int
    start: int
    end: int
    intervals: list[Interval]
    ran: list[Ran]


def identify(event: Event, attribution: Attribution, learned: Mapping[str, str]) -> Ran | None:
    """Returns what an event was for; None for a loop, of which the parts have events of their own.

    learned: {kernel's name: line}, of a trace in which kernels are told by their instructions.
    """
    if event.kind in COPIES:
        return Ran(event, COPIES[event.kind], attribution.find(event.module, event.hlo))
    work = attribution.find(event.module, event.hlo)
    if work and work.instruction.opcode in hlo.CONTROL:
        if event.stream.startswith("Stream"):  # a CUDA graph: all of its kernels carry its name
            work = None
        else:
            return None
    work = work or attribution.of_kernel(event.name)
    if work:
        return Ran(event, work.line, work)
    named = (line for line, parts in BY_NAME if any(part in event.name for part in parts))
    unknown = "other_kernels" if event.kind == "on_device" else "unclassified"
    return Ran(event, learned.get(event.name) or next(named, unknown), None)


def windows(
    trace: Trace, attribution: Attribution, first_step: int, steps: int, learned: Mapping[str, str]
) -> list[Window]:
    """Returns the windows of steps on every device: each from its first kernel to the next step's.

    A step begins with the first of its modules. A trace that ends with its last step ends that one with its
    last kernel. learned: as for `identify`. Raises ValueError if the steps cannot be told apart.
    """
    found, program = [], next(iter(attribution.modules))
    for device in trace.devices:
        events = [event for event in trace.events if event.device == device]
        ran = [one for event in events if (one := identify(event, attribution, learned))]
        firsts = _firsts([one for one in ran if one.event.module == program], steps, device)
        starts = [event.start for event in firsts]
        spans = [(one.event.start, one.event.end, one.line) for one in ran]
        ends = [*starts[1:], max(event.end for event in events)][:steps]
        host = [span for span in trace.host if span.process == _process(device)]
        waits = [(span.start, span.end) for span in host if span.name == "data_wait"]
        called = _called(ran, firsts, host, first_step)
        for index, (start, end) in enumerate(zip(starts, ends, strict=False)):
            intervals, idle = assign_owners(spans, start, end)
            intervals = sorted([*intervals, *split_idle(idle, waits, called)])
            found.append(Window(device, first_step + index, start, end, intervals, ran))
    return found


LEAST = 0.98
"""Of the most kernels in a step, what another one has unless some are lost."""


def whole(found: Sequence[Window], modules: Container[str]) -> list[Window]:
    """Returns the windows of the steps in which as many kernels of the step's programs ran as in others, on
    all devices that have such steps: CUPTI can lose some. All, on a CPU. Raises ValueError where none is."""

    def kernels(window: Window) -> int:
        own = (one.event for one in window.ran if window.start <= one.event.start < window.end)
        own = (event for event in own if event.module in modules)
        return sum(event.kind == "kernel" and event.stream.startswith("Stream") for event in own)

    counts = [(window, kernels(window)) for window in found]
    least = LEAST * max((count for _, count in counts), default=0)
    devices = {window.device for window, count in counts if count >= least}
    lost = {window.step for window, count in counts if window.device in devices and count < least}
    kept = [window for window in found if window.device in devices and window.step not in lost]
    if found and not kept:
        raise ValueError("each step lacks kernels on some device")
    return kept


def _process(device: str) -> int:
    return int(device.partition("/")[0]) if "/" in device else 0


def _firsts(first: list[Ran], steps: int, device: str) -> list[Event]:
    """Returns what each step began with, and one more if the trace holds it: the first of those kernels that
    a step runs once. first: what ran of a step's first program."""
    runs: dict[tuple[str, str], list[Event]] = {}
    for one in first:
        runs.setdefault((one.event.hlo, one.event.name), []).append(one.event)
    once = [one for one in first if one.work and one.work.runs == 1] or first
    # The step with which the last one ends is in the trace, as a rule, and some of another one.
    for one in once:
        found = runs[one.event.hlo, one.event.name]
        if steps <= len(found) <= steps + 2:
            return found[: steps + 1]
    of = f"its trace of {len(first)} kernels"
    raise ValueError(f"device {device}: {steps} steps cannot be told apart in {of}")


def _called(ran: list[Ran], firsts: list[Event], host: list[Span], first_step: int) -> list[int | None]:
    """Returns when the host called for each event. Where the trace does not say, the first program of a step
    was called for when the step was dispatched. (Which of its kernels comes first may differ from step to
    step on a CPU.) A copy from or to the host, of which it never says, counts as called for with what runs
    next."""
    dispatched = {span.step: span.start for span in host if span.name == "dispatch"}
    steps = [(event, dispatched.get(first_step + index)) for index, event in enumerate(firsts)]
    by_run = {event.run: at for event, at in steps if event.run is not None}
    by_event = {id(event): at for event, at in steps}
    called: list[int | None] = []
    for one in reversed(ran):
        at = one.event.launched
        if at is None:
            at = by_run.get(one.event.run, by_event.get(id(one.event)))
        if at is None and one.event.kind in HOST_COPIES and called:
            at = called[-1]
        called.append(at)
    return called[::-1]


def assign_owners(
    spans: Sequence[tuple[int, int, str]], start: int, end: int
) -> tuple[list[Interval], list[Idle]]:
    """Returns the owners of the instants from `start` to `end`, in order, and what is left over.

    spans: (start, end, line), sorted by start.
    """
    starts, ends = np.array([span[:2] for span in spans], np.int64).reshape(-1, 2).T
    begun, over = np.clip(starts, start, end), np.clip(ends, start, end)
    edges = np.unique(np.concatenate([[start, end], begun, over]))
    first, last = np.searchsorted(edges, begun), np.searchsorted(edges, over)
    owners, upcoming = np.full(len(edges) - 1, -1), np.searchsorted(starts, edges)
    # Each span over those that come after it in the order.
    for index in sorted(np.flatnonzero(first < last), key=lambda at: (-RANK[spans[at][2]], -at)):
        owners[first[index] : last[index]] = index
    changes = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    intervals, idle = [], []
    for own, of in itertools.pairwise(changes if start < end else ()):
        begins, until, owner = int(edges[own]), int(edges[of]), int(owners[own])
        if owner >= 0:
            intervals.append(Interval(begins, until, spans[owner][2], owner))
        else:
            idle.append(Idle(begins, until, int(upcoming[of]) if upcoming[of] < len(spans) else None))
    return intervals, idle


def split_idle(
    idle: Iterable[Idle], waits: list[tuple[int, int]], launched: Sequence[int | None]
) -> list[Interval]:
    """Returns whose fault idle time is: `dependency` where the host had called for what runs next before the
    device ran out; else `data_wait` while the loop waits for data; else `host_gap`, or `dependency` where the
    trace does not say when the host called.

    waits: spans without overlap, in order. launched: when the host called for each thing that runs.
    """
    intervals = []
    for gap in idle:
        called = None if gap.next is None else launched[gap.next]
        if called is not None and called <= gap.start:  # the batch that the loop waits for is a later step's
            intervals.append(Interval(gap.start, gap.end, "dependency", None))
            continue
        within = [(*wait, "data_wait") for wait in waits if wait[0] < gap.end and wait[1] > gap.start]
        waited, left = assign_owners(within, gap.start, gap.end) if within else ([], [gap])
        rest = "dependency" if called is None else "host_gap"
        pieces = [*(piece[:3] for piece in waited), *((one.start, one.end, rest) for one in left)]
        intervals += [Interval(*piece, None) for piece in sorted(pieces)]
    return intervals


def totals(intervals: Iterable[Interval]) -> dict[str, int]:
    """Returns the nanoseconds of each line."""
    sums = dict.fromkeys(LINES, 0)
    for piece in intervals:
        sums[piece.line] += piece.end - piece.start
    return sums


def strip(intervals: Sequence[Interval], start: int, most: int) -> tuple[tuple[float, float, str], ...]:
    """Returns the spans of a timeline in seconds from `start`: neighbours of one line joined, and, to have at
    most `most`, the shortest given to a neighbour."""
    pieces = sorted(intervals)  # each begins where the one before ends
    spans = _joined((piece.start, piece.line) for piece in pieces)
    while (over := len(spans) - most) > 0:
        ends = [*(begun for begun, _ in spans[1:]), pieces[-1].end]
        shortest = set(sorted(range(len(spans)), key=lambda at: ends[at] - spans[at][0])[:over])
        (_, line), *kept = (span for at, span in enumerate(spans) if at not in shortest)
        spans = _joined([(spans[0][0], line), *kept])
    ends = [*spans[1:], (pieces[-1].end, "")]
    return tuple(
        ((begun - start) / 1e9, (end - start) / 1e9, line)
        for (begun, line), (end, _) in zip(spans, ends, strict=True)
    )


def _joined(spans: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Returns the first of each run of neighbours of one line."""
    return [next(alike) for _, alike in itertools.groupby(spans, key=lambda span: span[1])]
