"""A trace's planes as plain tables: what ran on each device, what the host did, and counters.

Reads what XLA's profiler writes, with `jax.profiler.ProfileData`. On a GPU: planes `/device:GPU:N`, lines
`Stream #...`, whose events carry `hlo_op`, `hlo_module`, `correlation_id` and, for copies, `memcpy_details`
(xla/backends/profiler/gpu/cupti_collector.cc). On a CPU instructions are events of host threads with
`hlo_op`, `hlo_module` and `device_ordinal`. Times are whole nanoseconds, so that sums are exact.
"""

import dataclasses
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

SPANS = ("data_wait", "dispatch", "checkpoint", "evaluate")
"""The loop's annotations: what the host does."""

COPIES = {
    "MemcpyH2D": "to_device",
    "MemcpyD2H": "to_host",
    "MemcpyP2P": "to_peer",
    "Memcpy": "on_device",  # MemcpyD2D, and what CUPTI calls by no direction
}


@dataclasses.dataclass(slots=True)
class Event:
    """Something that ran on a device. kind: "kernel", "memset" or a value of COPIES. hlo, module: the
    instruction that launched it, empty if that is not known. bytes: of a copy. launched: when the host called
    for it, if that is known. run: the run of a program that it is part of, on a CPU."""

    device: str
    stream: str
    name: str
    start: int
    end: int
    module: str = ""
    hlo: str = ""
    kind: str = "kernel"
    bytes: int = 0
    launched: int | None = None
    run: int | None = None


@dataclasses.dataclass(slots=True)
class Span:
    """What a host did. step: of the annotation "dispatch"."""

    process: int
    name: str
    start: int
    end: int
    step: int | None = None


@dataclasses.dataclass
class Trace:
    """counters: {device: {name: [(ns, value)]}}. begun: wall time in ns that times count from."""

    events: list[Event]
    host: list[Span]
    counters: dict[str, dict[str, list[tuple[int, float]]]]
    begun: int

    @property
    def devices(self) -> list[str]:
        return sorted({event.device for event in self.events}, key=natural)


def natural(device: str) -> list[int]:
    """Orders device names by their numbers."""
    return [int(number) for number in re.findall(r"\d+", device)]


def read(folder: Path) -> Trace:
    """Returns the trace of every process below a folder, `<process>/**/*.xplane.pb`, on one clock.

    Raises ValueError if there is none, or one that is damaged.
    """
    files = {}
    for path in sorted(folder.rglob("*.xplane.pb")):
        process = path.relative_to(folder).parts[0]
        files[int(process) if process.isdigit() else len(files)] = path
    if not files:
        raise ValueError(f"{folder}: holds no trace (*.xplane.pb)")
    alone = len(files) == 1
    parts = [
        table(_opened(path), process, "" if alone else f"{process}/")
        for process, path in sorted(files.items())
    ]
    return merge(parts)


def _opened(path: Path) -> ProfileData:
    try:
        return ProfileData.from_file(str(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: a damaged trace ({error})") from error


def stats(plane) -> dict[str, Any]:
    """Returns what a plane says of itself, but for what is no text: the profiler's own options are bytes,
    which JAX 0.11.2 takes for UTF-8. They are not where an option is a number above 127."""
    found, each = {}, iter(plane.stats)
    while True:
        try:
            name, value = next(each)
        except StopIteration:
            return found
        except UnicodeDecodeError:
            continue
        found[name] = value


def table(data: ProfileData, process: int = 0, prefix: str = "") -> Trace:
    """Returns one process's trace. prefix: goes before the numbers of its devices."""
    with warnings.catch_warnings():  # the iterators' types name no module; as an error that ends the process
        warnings.simplefilter("ignore", DeprecationWarning)
        return _table(data, process, prefix)


def _table(data: ProfileData, process: int, prefix: str) -> Trace:
    trace = Trace([], [], {}, 0)
    launches: dict[int, int] = {}
    correlated: list[tuple[int, Event]] = []
    on_host: list[Event] = []
    for plane in data.planes:
        if found := re.match(r"/device:GPU:(\d+)", plane.name):
            device = prefix + found[1]
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    _stream(line, device, trace, correlated)
                elif line.name == "_counters_":
                    _counters(line, trace.counters.setdefault(device, {}))
        elif plane.name.startswith("/host:"):
            ended: dict[Any, int] = {}
            begun: list[tuple[Any, Event]] = []
            for line in plane.lines:
                _host(line, process, prefix, trace, launches, begun, ended)
            for mark, event in begun:
                event.end = max(event.end, ended.get(mark, 0))
            _number([event for _, event in begun], prefix)
            on_host += [event for _, event in begun]
        elif plane.name == "Task Environment":
            trace.begun = int(stats(plane).get("profile_start_time", 0))
    # Beside a GPU the host may name an instruction too, as it launches it: that did not run there.
    trace.events += [] if trace.events else on_host
    for correlation, event in correlated:
        event.launched = launches.get(correlation)
    trace.events.sort(key=lambda event: (event.start, event.end))
    trace.host.sort(key=lambda span: span.start)
    if trace.events and trace.events[0].start > trace.begun > 0:
        trace.begun = 0  # times are wall times themselves
    return trace


def _stream(line, device: str, trace: Trace, correlated: list[tuple[int, Event]]) -> None:
    for event in line.events:
        stats = dict(event.stats)
        kind = next((kind for name, kind in COPIES.items() if name in event.name), "kernel")
        kind = "memset" if event.name.startswith("Memset") else kind
        size = re.search(r"\bsize:(\d+)", str(stats.get("memcpy_details", "")))
        found = Event(
            device,
            line.name,
            event.name,
            round(event.start_ns),
            round(event.end_ns),
            str(stats.get("hlo_module", "")),
            str(stats.get("hlo_op", "")),
            kind,
            int(size[1]) if size else 0,
        )
        trace.events.append(found)
        if "correlation_id" in stats:
            correlated.append((int(stats["correlation_id"]), found))


def _counters(line, into: dict[str, list[tuple[int, float]]]) -> None:
    for event in line.events:
        values = [value for value in dict(event.stats).values() if isinstance(value, int | float)]
        if values:
            into.setdefault(event.name, []).append((round(event.start_ns), float(values[0])))


def _host(
    line,
    process: int,
    prefix: str,
    trace: Trace,
    launches: dict[int, int],
    begun: list[tuple[Any, Event]],
    ended: dict[Any, int],
) -> None:
    """Reads a host thread: the loop's annotations, calls of the driver, and instructions run by the thread.

    A CPU's instruction may go on in other threads after its event ended: then an event "end: NAME" says when
    it was over, and the two carry the same number (`_p`, `_c`).
    """
    for event in line.events:
        name = event.name
        if name in SPANS:
            step = dict(event.stats).get("step_num")
            trace.host.append(
                Span(process, name, round(event.start_ns), round(event.end_ns), step and int(step))
            )
        elif name.startswith("cu") and "correlation_id" in (stats := dict(event.stats)):
            launches[int(stats["correlation_id"])] = round(event.start_ns)
        elif name.startswith("end: "):
            ended[dict(event.stats).get("_c")] = round(event.end_ns)
        elif not name.startswith(("$", "Threadpool")) and "hlo_op" in (stats := dict(event.stats)):
            device = f"{prefix}{stats.get('device_ordinal', 0)}"
            span = round(event.start_ns), round(event.end_ns)
            found = Event(device, line.name, name, *span, str(stats["hlo_module"]), str(stats["hlo_op"]))
            found.run = stats.get("run_id")
            begun.append((stats.get("_p"), found))


def _number(events: list[Event], prefix: str) -> None:
    """Numbers a process's CPU devices from 0: their ordinals leave room for other processes' devices."""
    ordinals = sorted({event.device for event in events}, key=natural)
    names = {device: f"{prefix}{index}" for index, device in enumerate(ordinals)}
    for event in events:
        event.device = names[event.device]


def merge(parts: list[Trace]) -> Trace:
    """Returns the traces of several processes as one, on the clock of the first.

    Clocks of different hosts differ by more than a kernel takes; but a collective ends on all devices at
    once. So each process is moved by the median difference between the ends of its collectives and of the
    first's, and where there are none by what the hosts' clocks say.
    """
    first = parts[0]
    ends = _ends(first)
    for part in parts[1:]:
        own = _ends(part)
        skews = [ends[key] - own[key] for key in ends.keys() & own.keys()]
        shift = round(statistics.median(skews)) if skews else part.begun - first.begun
        for item in (*part.events, *part.host):
            item.start, item.end = item.start + shift, item.end + shift
        for event in part.events:
            event.launched = None if event.launched is None else event.launched + shift
        for by_name in part.counters.values():
            for name, samples in by_name.items():
                by_name[name] = [(at + shift, value) for at, value in samples]
        first.events += part.events
        first.host += part.host
        first.counters |= part.counters
    first.events.sort(key=lambda event: (event.start, event.end))
    first.host.sort(key=lambda span: span.start)
    return first


COLLECTIVE = re.compile(r"all-|all_|reduce-scatter|reduce_scatter|collective|nccl", re.I)


def _ends(trace: Trace) -> dict[tuple[str, str, int], int]:
    """Returns when each run of each collective ended, on the process's first device that ran it."""
    ends: dict[tuple[str, str, int], int] = {}
    count: dict[tuple[str, str, str], int] = {}
    for event in trace.events:
        if COLLECTIVE.search(event.hlo) or COLLECTIVE.search(event.name):
            key = event.device, event.module, event.hlo
            count[key] = count.get(key, 0) + 1
            ends.setdefault((event.module, event.hlo, count[key]), event.end)
    return ends
