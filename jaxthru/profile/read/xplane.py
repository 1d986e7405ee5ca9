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
from collections import Counter
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

SPANS = ("data_wait", "dispatch", "checkpoint", "evaluate", "place_experts")
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

    def sort(self) -> None:
        self.events.sort(key=lambda event: (event.start, event.end))
        self.host.sort(key=lambda span: span.start)

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
    prefix = "" if len(files) == 1 else "{}/"
    return merge([table(_opened(path), each, prefix.format(each)) for each, path in sorted(files.items())])


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
    reader = _Process(process, prefix)
    with warnings.catch_warnings():  # the iterators' types name no module; as an error that ends the process
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            reader.read(plane)
    return reader.finished()


class _Process:
    """The planes of one process, as they are read. launches: when the host called for a number's event."""

    def __init__(self, number: int, prefix: str):
        self.number, self.prefix, self.trace = number, prefix, Trace([], [], {}, 0)
        self.launches: dict[int, int] = {}
        self.correlated: list[tuple[int, Event]] = []
        self.on_host: list[Event] = []

    def read(self, plane) -> None:
        if found := re.match(r"/device:GPU:(\d+)", plane.name):
            device = self.prefix + found[1]
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    self.stream(line, device)
                elif line.name == "_counters_":
                    _counters(line, self.trace.counters.setdefault(device, {}))
        elif plane.name.startswith("/host:"):
            begun, ended = [], {}
            for line in plane.lines:
                self.host(line, begun, ended)
            for mark, event in begun:
                event.end = max(event.end, ended.get(mark, 0))
            # Ordinals of CPU devices leave room for other processes' devices.
            ordinals = sorted({event.device for _, event in begun}, key=natural)
            names = {device: f"{self.prefix}{index}" for index, device in enumerate(ordinals)}
            for _, event in begun:
                event.device = names[event.device]
            self.on_host += [event for _, event in begun]
        elif plane.name == "Task Environment":
            self.trace.begun = int(stats(plane).get("profile_start_time", 0))

    def stream(self, line, device: str) -> None:
        """Reads what ran on a stream of a GPU."""
        for event in line.events:
            said, span = dict(event.stats), (round(event.start_ns), round(event.end_ns))
            kind = next((kind for name, kind in COPIES.items() if name in event.name), "kernel")
            kind = "memset" if event.name.startswith("Memset") else kind
            size = re.search(r"\bsize:(\d+)", str(said.get("memcpy_details", "")))
            own = str(said.get("hlo_module", "")), str(said.get("hlo_op", ""))
            held = int(size[1]) if size else 0
            found = Event(device, line.name, event.name, *span, *own, kind, held)
            self.trace.events.append(found)
            if "correlation_id" in said:
                self.correlated.append((int(said["correlation_id"]), found))

    def host(self, line, begun: list[tuple[Any, Event]], ended: dict[Any, int]) -> None:
        """Reads a host thread: the loop's annotations, calls of the driver, and instructions that it ran.

        A CPU's instruction may go on in other threads after its event ended: then an event "end: NAME" says
        when it was over, and the two carry the same number (`_p`, `_c`).
        """
        for event in line.events:
            name, span = event.name, (round(event.start_ns), round(event.end_ns))
            if name in SPANS:
                step = dict(event.stats).get("step_num")
                self.trace.host.append(Span(self.number, name, *span, step and int(step)))
            elif name.startswith("cu") and "correlation_id" in (said := dict(event.stats)):
                self.launches[int(said["correlation_id"])] = span[0]
            elif name.startswith("end: "):
                ended[dict(event.stats).get("_c")] = span[1]
            elif not name.startswith(("$", "Threadpool")) and "hlo_op" in (said := dict(event.stats)):
                device, module = str(said.get("device_ordinal", 0)), str(said["hlo_module"])
                found = Event(device, line.name, name, *span, module, str(said["hlo_op"]))
                found.run = said.get("run_id")
                begun.append((said.get("_p"), found))

    def finished(self) -> Trace:
        trace = self.trace
        # Beside a GPU the host may name an instruction too, as it launches it: that did not run there.
        trace.events += [] if trace.events else self.on_host
        for correlation, event in self.correlated:
            event.launched = self.launches.get(correlation)
        trace.sort()
        if trace.events and trace.events[0].start > trace.begun > 0:
            trace.begun = 0  # times are wall times themselves
        return trace


def _counters(line, into: dict[str, list[tuple[int, float]]]) -> None:
    for event in line.events:
        values = [value for value in dict(event.stats).values() if isinstance(value, int | float)]
        if values:
            into.setdefault(event.name, []).append((round(event.start_ns), float(values[0])))


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
    first.sort()
    return first


COLLECTIVE = re.compile(r"all-|all_|reduce-scatter|reduce_scatter|collective|nccl", re.I)


def _ends(trace: Trace) -> dict[tuple[str, str, int], int]:
    """Returns when each run of each collective ended, on the process's first device that ran it."""
    ends: dict[tuple[str, str, int], int] = {}
    count: Counter[tuple[str, str, str]] = Counter()
    for event in trace.events:
        if COLLECTIVE.search(event.hlo) or COLLECTIVE.search(event.name):
            key = event.device, event.module, event.hlo
            count[key] += 1
            ends.setdefault((event.module, event.hlo, count[key]), event.end)
    return ends
