"""One pass over the steps that were profiled: what ran in them, by line, layer, kernel and collective."""

import itertools
import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator
from pathlib import Path

from jaxthru.profile.account import frequency, ledger, paint
from jaxthru.profile.account.attribution import Attribution, Work
from jaxthru.profile.account.ledger import LINES
from jaxthru.profile.account.windows import Ran, Window, windows
from jaxthru.profile.collect import clocks
from jaxthru.profile.read import hlo, xplane

STRIP = 2000
LEAST = 0.98
"""Of the most kernels in a step, what another one has unless some are lost."""

log = logging.getLogger("jaxthru")


class Measured:
    """One pass: its trace, its HLO, and its steps on every device. Seconds are means per step and device."""

    def __init__(
        self,
        folder: Path,
        name: str,
        text: str,
        taken: dict[str, int],
        learned: dict[str, str] | None = None,
        skip: int = 0,
        kinds: Collection[str] = (),
    ):
        """text: the file of the HLO. learned: as for `windows`. skip: steps to leave out at the start. kinds:
        as of `Attribution`."""
        modules = hlo.modules((folder / text).read_text())
        self.attribution = Attribution(modules, kinds)
        self.trace = xplane.read(folder / name)
        first, steps = taken["first_step"], taken["steps"]
        found = windows(self.trace, self.attribution, next(iter(modules)), first, steps, learned)
        self.windows = whole([one for one in found if one.step >= first + skip], modules)
        self.kept = sorted({window.step for window in self.windows})
        if lost := len(found) - len(self.windows) - skip * len(self.trace.devices):
            log.warning("%s: %d of %d steps lack kernels, and are left out", folder / name, lost, len(found))
        self.count = len(self.windows)
        if not self.count:
            raise ValueError(f"{folder / name}: the trace has nothing that ran on a device")
        self.step_seconds = sum(window.end - window.start for window in self.windows) / 1e9 / self.count
        totals = [paint.totals(window.painted) for window in self.windows]
        self.seconds = {line: sum(of[line] for of in totals) / 1e9 / self.count for line in LINES}
        self.inside = [list(_inside(window)) for window in self.windows]
        self.runs = self._runs()

    def _runs(self) -> dict[str, float]:
        """Returns how often each program runs in a step, from how often its instructions do."""
        seen: dict[tuple[str, str], int] = Counter(
            (one.event.module, one.event.hlo) for inside in self.inside for one in inside if one.work
        )
        ratios = defaultdict(list)
        for (module, name), count in seen.items():
            work = self.attribution.find(module, name)
            if work and work.runs:
                ratios[module].append(count / work.runs / self.count)
        found = {module: statistics.median(of) for module, of in ratios.items()}
        return {module: found.get(module, 0.0) for module in self.attribution.modules} if found else {}

    def scopes(self, scale: dict[str, float]) -> tuple[ledger.Scope, ...]:
        """Returns the painted time by layer, phase and line, the largest first."""
        sums: dict[tuple[str, str, str], float] = defaultdict(float)
        for window in self.windows:
            for piece in window.painted:
                if piece.owner is None:
                    continue
                work = window.ran[piece.owner].work
                key = (work.layer, work.phase, piece.line) if work else ("other", "other", piece.line)
                sums[key] += (piece.end - piece.start) / 1e9 / self.count * scale[piece.line]
        found = [ledger.Scope(*key, seconds) for key, seconds in sums.items()]
        return tuple(sorted(found, key=lambda scope: -scope.seconds))

    def spent(self, scale: dict[str, float]) -> dict[tuple[str, str], float]:
        """Returns the seconds of each instruction, by (module, name)."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for inside in self.inside:
            for one in inside:
                if one.work:
                    key = one.work.module, one.work.instruction.name
                    sums[key] += (one.event.end - one.event.start) / 1e9 / self.count * scale[one.line]
        return dict(sums)

    def kernels(self, scale: dict[str, float]) -> tuple[ledger.Kernel, ...]:
        """Returns what ran, by instruction, the longest first."""
        groups = defaultdict(list)
        for inside in self.inside:
            for one in inside:
                groups[one.event.name, one.event.hlo, one.event.module, one.line].append(one)
        found = []
        for (name, instruction, _, line), of in groups.items():
            work = of[0].work
            own = sum(one.event.end - one.event.start for one in of) / 1e9
            each = own / len(of) * scale[line]
            done = work.flops if work and work.flops else None
            found.append(
                ledger.Kernel(
                    name=name,
                    hlo=instruction,
                    line=line,
                    scope=work.op_name if work else "",
                    source=work.source if work else None,
                    count=len(of) / self.count,
                    seconds=each * len(of) / self.count,
                    flops=done,
                    bytes=float(work.bytes) if work else float(of[0].event.bytes) or None,
                    flops_per_second=done / each if done and each else None,
                )
            )
        return tuple(sorted(found, key=lambda kernel: -kernel.seconds))

    def collectives(self) -> tuple[ledger.Collective, ...]:
        """Returns the collectives, those with the most exposed time first. Of a run of one, the device that
        came last has the shortest time, for it waits for nobody."""
        exposed: dict[int, int] = Counter()
        runs = defaultdict(lambda: defaultdict(list))
        for window, inside in zip(self.windows, self.inside, strict=True):
            for piece in window.painted:
                if piece.line == "exposed_communication" and piece.owner is not None:
                    exposed[id(window.ran[piece.owner])] += piece.end - piece.start
            for one in inside:
                if one.line == "exposed_communication":
                    kind = one.work.collective if one.work and one.work.collective else one.event.name
                    key = one.event.hlo or one.event.name, one.event.module, kind
                    runs[key][window.device].append(one)
        found = []
        for (name, _, kind), by_device in runs.items():
            of = [one for ones in by_device.values() for one in ones]
            work = of[0].work
            waits, last = 0, Counter()
            if len({len(ones) for ones in by_device.values()}) == 1:
                for group in self._groups(work, by_device):
                    for together in zip(*(by_device[device] for device in group), strict=True):
                        spent = [one.event.end - one.event.start for one in together]
                        waits += sum(spent) - min(spent) * len(spent)
                        last[max(together, key=lambda one: one.event.start).event.device] += 1
            found.append(
                ledger.Collective(
                    name=name,
                    kind=kind,
                    bytes=float(work.bytes) if work else None,
                    count=len(of) / self.count,
                    seconds=sum(one.event.end - one.event.start for one in of) / 1e9 / self.count,
                    exposed_seconds=sum(exposed[id(one)] for one in of) / 1e9 / self.count,
                    wait_seconds=waits / 1e9 / self.count,
                    last=last.most_common(1)[0][0] if last else None,
                )
            )
        return tuple(sorted(found, key=lambda collective: -collective.exposed_seconds))

    def _groups(self, work: Work | None, devices: Container[str]) -> list[list[str]]:
        """Returns the devices that wait for one another in a collective: all, where its HLO does not say."""
        names = self.trace.devices
        inner = self.attribution.modules[work.module].inner(work.instruction) if work else ()
        places = next((found.groups for found, _ in inner if found.groups), [])
        if sorted(itertools.chain(*places)) != list(range(len(names))):
            places = [range(len(names))]
        groups = ([names[place] for place in group if names[place] in devices] for group in places)
        return [group for group in groups if len(group) > 1]

    def devices(self) -> tuple[ledger.Device, ...]:
        """Returns each device's steps, and the timeline of the one that is closest to the mean."""
        begun = min(window.start for window in self.windows)
        found = []
        for device in dict.fromkeys(window.device for window in self.windows):
            own = [window for window in self.windows if window.device == device]
            shown = min(own, key=lambda window: abs((window.end - window.start) / 1e9 - self.step_seconds))
            steps = tuple(
                ledger.DeviceStep(
                    window.step,
                    (window.start - begun) / 1e9,
                    (window.end - window.start) / 1e9,
                    {line: time / 1e9 for line, time in paint.totals(window.painted).items()},
                )
                for window in own
            )
            found.append(ledger.Device(device, steps, paint.strip(shown.painted, shown.start, STRIP)))
        return tuple(found)

    def clock(self, samples: clocks.Samples) -> ledger.Clock:
        """Returns the clock while the steps ran."""
        first = self.windows[0]
        busy = [
            (piece.start, piece.end)
            for window in self.windows
            for piece in window.painted
            if window.device == first.device and piece.line == "matmul"
        ]
        return frequency.clock(self.trace, samples, first.start, self.windows[-1].end, busy)


def whole(found: list[Window], modules: Container[str]) -> list[Window]:
    """Returns the windows of the steps in which as many kernels of the step's programs ran as in others, on
    all devices that have such steps: CUPTI can lose some. All, on a CPU. Raises ValueError where none is."""

    def kernels(window: Window) -> int:
        own = (one.event for one in _inside(window) if one.event.module in modules)
        return sum(event.kind == "kernel" and event.stream.startswith("Stream") for event in own)

    counts = [(window, kernels(window)) for window in found]
    least = LEAST * max((count for _, count in counts), default=0)
    devices = {window.device for window, count in counts if count >= least}
    lost = {window.step for window, count in counts if window.device in devices and count < least}
    kept = [window for window in found if window.device in devices and window.step not in lost]
    if found and not kept:
        raise ValueError("each step lacks kernels on some device")
    return kept


def _inside(window: Window) -> Iterator[Ran]:
    """Yields what began within a window."""
    return (one for one in window.ran if window.start <= one.event.start < window.end)
