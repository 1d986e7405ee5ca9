"""Steps in a trace: when each began on each device, and what ran in them, by line."""

import dataclasses
from collections.abc import Mapping

from jaxthru.profile.account import paint
from jaxthru.profile.account.attribution import Attribution, Work
from jaxthru.profile.account.paint import Painted
from jaxthru.profile.read import hlo
from jaxthru.profile.read.xplane import Event, Span, Trace

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


@dataclasses.dataclass(frozen=True, eq=False)
class Ran:
    """An event with what it was for. work: None where the step's HLO does not have it."""

    event: Event
    line: str
    work: Work | None


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """One step on one device. ran: all that the painted pieces own."""

    device: str
    step: int
    start: int
    end: int
    painted: list[Painted]
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
    line = learned.get(event.name) or next(
        (line for line, parts in BY_NAME if any(part in event.name for part in parts)), None
    )
    if line is None and event.kind == "on_device":
        line = "other_kernels"
    return Ran(event, line or "unclassified", None)


def windows(
    trace: Trace,
    attribution: Attribution,
    program: str,
    first_step: int,
    steps: int,
    learned: Mapping[str, str] | None = None,
) -> list[Window]:
    """Returns the windows of steps on every device: each from its first kernel to the next step's.

    program: the module that a step begins with. A trace that ends with its last step ends that one with its
    last kernel. Raises ValueError if the steps cannot be told apart.
    """
    found = []
    for device in trace.devices:
        events = [event for event in trace.events if event.device == device]
        ran = [one for event in events if (one := identify(event, attribution, learned or {}))]
        firsts = _firsts([one for one in ran if one.event.module == program], steps, device)
        starts = [event.start for event in firsts]
        spans = [(one.event.start, one.event.end, one.line) for one in ran]
        ends = [*starts[1:], max(event.end for event in events)][:steps]
        host = [span for span in trace.host if span.process == _process(device)]
        waits = [(span.start, span.end) for span in host if span.name == "data_wait"]
        called = _called(ran, firsts, host, first_step)
        for index, (start, end) in enumerate(zip(starts, ends, strict=False)):
            painted, idle = paint.paint(spans, start, end)
            painted = sorted([*painted, *paint.split_idle(idle, waits, called)])
            found.append(Window(device, first_step + index, start, end, painted, ran))
    return found


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
    raise ValueError(
        f"device {device}: {steps} steps cannot be told apart in its trace of {len(first)} kernels"
    )


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
