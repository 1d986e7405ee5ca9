"""One pass over the steps that were profiled: what ran in them, by line, layer, kernel and collective."""

import itertools
import logging
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Mapping
from pathlib import Path

import numpy as np

from jaxthru.profile.account import frequency, ledger, timeline
from jaxthru.profile.account.attribution import Attribution, Work
from jaxthru.profile.account.ledger import LINES
from jaxthru.profile.account.operations import Operations
from jaxthru.profile.collect import clocks
from jaxthru.profile.read import hlo, xplane

STRIP = 2000
log = logging.getLogger("jaxthru")


class Measured:
    """One pass: its trace, its HLO, and its steps on every device. Seconds are means per step and device.
    operations: all that ran, as a table."""

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
        found = timeline.windows(self.trace, self.attribution, first, steps, learned or {})
        self.windows = timeline.whole([one for one in found if one.step >= first + skip], modules)
        self.kept = sorted({window.step for window in self.windows})
        if lost := len(found) - len(self.windows) - skip * len(self.trace.devices):
            log.warning("%s: %d of %d steps lack kernels, and are left out", folder / name, lost, len(found))
        self.count = len(self.windows)
        if not self.count:
            raise ValueError(f"{folder / name}: the trace has nothing that ran on a device")
        self.operations = Operations(self.windows)
        self.step_seconds = sum(window.end - window.start for window in self.windows) / 1e9 / self.count
        totals = [timeline.totals(window.intervals) for window in self.windows]
        self.seconds = {line: sum(of[line] for of in totals) / 1e9 / self.count for line in LINES}
        self.runs = self._runs()

    def _runs(self) -> dict[str, float]:
        """Returns how often each program runs in a step, from how often its instructions do."""
        table, ratios = self.operations, defaultdict(list)
        known = table.began & [work is not None for work in table.works]
        for (module, name), rows in table.grouped(table.by("module", "instruction"), known).items():
            work = self.attribution.find(module, name)
            if work and work.runs:
                ratios[module].append(len(rows) / work.runs / self.count)
        found = {module: statistics.median(of) for module, of in ratios.items()}
        return {module: found.get(module, 0.0) for module in self.attribution.modules} if found else {}

    def scopes(self, scale: Mapping[str, float]) -> tuple[ledger.Scope, ...]:
        """Returns the time that each layer, phase and line owns, the largest first."""
        table = self.operations
        owning = (table["exposed"] > 0) & (table["layer"] != "")  # and not idle
        found = [
            ledger.Scope(*key, float(table["exposed"][rows].sum()) / 1e9 / self.count * scale[key[-1]])
            for key, rows in table.grouped(table.by("layer", "phase", "line"), owning).items()
        ]
        return tuple(sorted(found, key=lambda scope: -scope.seconds))

    def spent(self, scale: Mapping[str, float]) -> dict[tuple[str, str], float]:
        """Returns the seconds of each instruction, by (module, name)."""
        table = self.operations
        keys = [(work.module, work.instruction.name) if work else None for work in table.works]
        seconds = table.seconds * [scale[line] for line in table["line"]] / self.count
        found = table.grouped(keys, table.began & [key is not None for key in keys])
        return {key: float(seconds[rows].sum()) for key, rows in found.items()}

    def kernels(self, scale: Mapping[str, float]) -> tuple[ledger.Kernel, ...]:
        """Returns what ran, by instruction, the longest first."""
        table, found = self.operations, []
        keys = table.by("name", "instruction", "module", "line")
        for (name, instruction, _, line), rows in table.grouped(keys, table.began).items():
            work = table.works[rows[0]]
            each = float(table.seconds[rows].mean()) * scale[line]
            done, size = (_known(table[column][rows[0]]) for column in ("flops", "bytes"))
            scope, source = (work.op_name, work.source) if work else ("", None)
            count, rate = len(rows) / self.count, done / each if done and each else None
            own = name, instruction, line, scope, source, count, each * count, done, size, rate
            found.append(ledger.Kernel(*own))
        return tuple(sorted(found, key=lambda kernel: -kernel.seconds))

    def collectives(self) -> tuple[ledger.Collective, ...]:
        """Returns the collectives, those with the most exposed time first."""
        table, found = self.operations, []
        kinds = [work and work.collective for work in table.works]
        rows = zip(table.by("instruction", "name", "module"), kinds, strict=True)
        keys = [(hlo or name, module, kind or name) for (hlo, name, module), kind in rows]
        wanted = table.began & (table["line"] == "exposed_communication")
        mean = lambda column, rows: float(column[rows].sum()) / self.count  # noqa: E731
        for (name, _, kind), rows in table.grouped(keys, wanted).items():
            work = table.works[rows[0]]
            waited, last = self._waited(work, rows)
            size, count = float(work.bytes) if work else None, len(rows) / self.count
            seconds = mean(table.seconds, rows), mean(table["exposed"] / 1e9, rows), waited / self.count
            found.append(ledger.Collective(name, kind, size, count, *seconds, last))
        return tuple(sorted(found, key=lambda collective: -collective.exposed_seconds))

    def _waited(self, work: Work | None, rows: np.ndarray) -> tuple[float, str | None]:
        """Returns for how long devices waited in a collective for one another, seconds of all together, and
        the straggler: who came last most often. Of one run of it, the device that came last has the shortest
        time, for it waits for nobody. rows: of it."""
        table, waited, last = self.operations, 0.0, Counter()
        on = {
            device: rows[table["device"][rows] == device] for device in dict.fromkeys(table["device"][rows])
        }
        if len({len(own) for own in on.values()}) == 1:
            for group in self._groups(work, on):
                together = np.stack([on[device] for device in group])  # [devices, runs]
                spent = table.seconds[together]
                waited += float((spent - spent.min(axis=0)).sum())
                last.update(group[late] for late in table["start"][together].argmax(axis=0))
        return waited, last.most_common(1)[0][0] if last else None

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
            steps = []
            for window in own:
                lines = {line: time / 1e9 for line, time in timeline.totals(window.intervals).items()}
                begins, takes = window.start - begun, window.end - window.start
                steps.append(ledger.DeviceStep(window.step, begins / 1e9, takes / 1e9, lines))
            strip = timeline.strip(shown.intervals, shown.start, STRIP)
            found.append(ledger.Device(device, tuple(steps), strip))
        return tuple(found)

    def clock(self, samples: clocks.Samples) -> ledger.Clock:
        """Returns the clock while the steps ran."""
        first = self.windows[0]
        busy = [
            (piece.start, piece.end)
            for window in self.windows
            for piece in window.intervals
            if window.device == first.device and piece.line == "matmul"
        ]
        return frequency.clock(self.trace, samples, first.start, self.windows[-1].end, busy)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
