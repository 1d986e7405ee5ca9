"""From what was collected of a few steps to their ledger."""

import dataclasses
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from jaxthru.models import flops
from jaxthru.models.llama import ModelConfig, RopeScaling
from jaxthru.profile import clocks, events, hlo, ledger, lint, paint
from jaxthru.profile.attribution import Attribution
from jaxthru.profile.footprint import footprint
from jaxthru.profile.ledger import LINES, Ledger
from jaxthru.profile.windows import Window, windows
from jaxthru.runtime.mesh import AXES, MeshConfig

KERNELS = 50
STRIP = 2000
WARM_UP = 3
"""Steps that the loop's own median leaves out at the start, and after a trace."""


def build(folder: Path) -> Ledger:
    """Returns the ledger of `runs/.../profile/<step>/`, without advice. Raises ValueError if what was
    collected is incomplete."""
    run = folder.parent.parent
    collected = _json(folder / "collected.json")
    config, environment = _json(run / "config.json"), _json(run / "environment.json")
    sizes = MeshConfig(**config["mesh"]).shape(collected["devices"])
    config["mesh"] = dict(zip(AXES, sizes, strict=True))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.strip()]
    taken = collected["passes"]
    production = Measured(folder, "production", "step.hlo.txt", taken["production"])
    named = production
    if "attribution" in taken:
        named = Measured(folder, "attribution", "attribution.hlo.txt", taken["attribution"])
        learned = {one.event.name: one.line for window in named.windows for one in window.ran if one.work}
        production = Measured(folder, "production", "step.hlo.txt", taken["production"], learned)
    # A line's seconds are those of the steps as they are trained; what it is made of, of those with names.
    scale = {
        line: production.seconds[line] / named.seconds[line] if named.seconds[line] else 0.0 for line in LINES
    }
    clock = production.clock(clocks.read(folder / "production"))
    steps = range(production.first, production.first + production.steps)
    tokens, span = _tokens(rows, steps, ModelConfig(**_shape(config["model"])))
    needed = 6.0 * flops.matmul_parameters(ModelConfig(**_shape(config["model"]))) * tokens
    about = ledger.Run(
        config=run.parent.name if run.name.isdecimal() else run.name,
        device_kind=collected["device_kind"],
        devices=collected["devices"],
        processes=collected["processes"],
        platform=collected["platform"],
        versions=environment["versions"],
        tokens_per_step=tokens,
        attention_span_per_token=span / tokens if tokens else 0.0,
    )
    total = production.step_seconds
    return Ledger(
        run=about,
        window=_window(production, named, rows, taken),
        lines=tuple(
            ledger.Line(line, seconds, seconds / total) for line, seconds in production.seconds.items()
        ),
        matmul=matmul(named, production.seconds["matmul"], needed, collected, clock),
        scopes=named.scopes(scale),
        kernels=named.kernels(scale)[:KERNELS],
        collectives=named.collectives(),
        devices=production.devices(),
        clock=clock,
        memory=footprint(
            folder / "dump", named.attribution, collected["peak_bytes"], collected["host_pinned_bytes"]
        ),
        lint=lint.lint(named.attribution, named.spent(scale), config, named.runs),
    )


class Measured:
    """One pass: its trace, its HLO, and its steps on every device. Seconds are means per step and device."""

    def __init__(
        self, folder: Path, name: str, text: str, taken: dict[str, int], learned: dict[str, str] | None = None
    ):
        modules = hlo.modules((folder / text).read_text())
        self.attribution = Attribution(modules)
        self.trace = events.read(folder / name)
        self.first, self.steps = taken["first_step"], taken["steps"]
        self.windows = windows(
            self.trace, self.attribution, next(iter(modules)), self.first, self.steps, learned
        )
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
            waits, last = 0, Counter()
            if len({len(ones) for ones in by_device.values()}) == 1:
                for together in zip(*by_device.values(), strict=True):
                    spent = [one.event.end - one.event.start for one in together]
                    waits += sum(spent) - min(spent) * len(spent)
                    last[max(together, key=lambda one: one.event.start).event.device] += 1
            work = of[0].work
            found.append(
                ledger.Collective(
                    name=name,
                    kind=kind,
                    bytes=float(work.bytes) if work else None,
                    count=len(of) / self.count,
                    seconds=sum(one.event.end - one.event.start for one in of) / 1e9 / self.count,
                    exposed_seconds=sum(exposed[id(one)] for one in of) / 1e9 / self.count,
                    wait_seconds=waits / 1e9 / self.count,
                    last=last.most_common(1)[0][0] if last and len(by_device) > 1 else None,
                )
            )
        return tuple(sorted(found, key=lambda collective: -collective.exposed_seconds))

    def devices(self) -> tuple[ledger.Device, ...]:
        """Returns each device's steps, and the timeline of the one in the middle."""
        begun = min(window.start for window in self.windows)
        found = []
        for device in self.trace.devices:
            own = [window for window in self.windows if window.device == device]
            shown = own[len(own) // 2]
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
        start, end = self.windows[0].start, self.windows[-1].end
        first = [window for window in self.windows if window.device == self.windows[0].device]
        busy = [
            (piece.start, piece.end) for window in first for piece in window.painted if piece.line == "matmul"
        ]
        return clocks.clock(self.trace, samples, start, end, busy)


def _inside(window: Window):
    """Yields what began within a window."""
    return (one for one in window.ran if window.start <= one.event.start < window.end)


def matmul(
    measured: Measured, seconds: float, needed: float, collected: dict[str, Any], clock: ledger.Clock
) -> ledger.Matmul:
    """Returns the line "matmul" taken apart. seconds: the line. needed: FLOPs of a step over all devices."""
    devices, peak = collected["devices"], collected["peak_flops"]
    done = measured.attribution.flops("matmul", measured.runs) * devices
    reference, most = clocks.reference(collected["device_kind"])
    if peak is None:
        return ledger.Matmul(done, needed, reference_mhz=reference, maximum_mhz=most)
    speed = _speed(measured.attribution)
    ideal = needed / devices / (peak * speed)
    recomputation = (done - needed) / devices / (peak * speed)
    frequency = None
    if clock.mean_mhz and reference:
        frequency = seconds * (1 - clock.mean_mhz / reference)
    return ledger.Matmul(
        flops=done,
        model_flops=needed,
        ideal_seconds=ideal,
        recomputation_seconds=recomputation,
        frequency_seconds=frequency,
        inefficiency_seconds=seconds - ideal - recomputation - (frequency or 0.0),
        reference_mhz=reference,
        maximum_mhz=most,
        headroom_seconds=ideal * (1 - reference / most) if reference and most else None,
        peak_flops=peak,
    )


def _speed(attribution: Attribution) -> float:
    """Returns how much faster than bf16 the products' operands could be multiplied: float8 twice."""
    total = narrow = 0.0
    for work in attribution.all():
        if work.line == "matmul" and work.flops:
            of = attribution.modules[work.module]
            total += work.flops * work.runs
            inner = [shape for found, _ in of.inner(work.instruction) for shape in of.operand_shapes(found)]
            narrow += work.flops * work.runs * any(dtype.startswith("f8") for dtype, _ in inner)
    return 1 / (1 - narrow / total / 2) if total else 1.0


def _window(production: Measured, named: Measured, rows: list, taken: dict) -> ledger.Window:
    """Returns the profiled steps beside the others, by the loop's own clock."""
    traced = set()
    for one in taken.values():
        first, last = one["first_step"], one["first_step"] + one["steps"]
        traced |= set(range(first, last + 1 + WARM_UP))
    own = [row["step_seconds"] for row in rows if row["step"] > WARM_UP and row["step"] not in traced]
    loop = statistics.median(own) if len(own) >= 3 else None
    quarters = statistics.quantiles(own, n=4) if loop else (0.0, 0.0, 0.0)
    return ledger.Window(
        first_step=production.first,
        steps=production.steps,
        step_seconds=production.step_seconds,
        loop_seconds=loop,
        closure=production.step_seconds / loop - 1 if loop else None,
        noise=(quarters[2] - quarters[0]) / loop if loop else 0.0,
        attribution_seconds=None if named is production else named.step_seconds,
    )


def _tokens(rows: list, steps: range, shape: ModelConfig) -> tuple[float, float]:
    """Returns a step's mean tokens and Σ document length². The second follows from the FLOPs recorded."""
    own = [row for row in rows if row["step"] in steps]
    if not own:
        return 0.0, 0.0
    tokens = statistics.fmean(row["tokens"] for row in own)
    done = statistics.fmean((row["model_tflops"] or 0.0) * 1e12 * row["step_seconds"] for row in own)
    by_span = flops.train_flops(shape, 0, 1)
    return tokens, max(done - flops.train_flops(shape, tokens, 0), 0.0) / by_span


def _shape(model: dict[str, Any]) -> dict[str, Any]:
    scaling = model.get("rope_scaling")
    return model | {"rope_scaling": RopeScaling(**scaling) if scaling else None}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: not there; was the run profiled (profile.at) and did it come so far?")
    return json.loads(path.read_text())


def advised(found: Ledger, advice: tuple[ledger.Advice, ...]) -> Ledger:
    """Returns the ledger with advice."""
    return dataclasses.replace(found, advice=advice)
