"""From a profiled run to the figures that its bars are about; profiled_run.py prints them.

Each planted cause's size is measured beside the ledger: by the host's clock within the run (what the device
waited), by the loop's clock in the steps of both runs that were not profiled, or from counted cycles.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from jaxthru.profile.account import frequency
from jaxthru.profile.account.attribution import Attribution
from jaxthru.profile.account.build import unprofiled
from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.account.timeline import BY_NAME
from jaxthru.profile.collect import clocks
from jaxthru.profile.explain import compare
from jaxthru.profile.read import hlo, xplane
from jaxthru.profile.show import publish

BARS = {
    "unclassified": 0.01,
    "other_idle": 0.02,
    "same_steps": 0.02,
    "closure": 0.02,
    "matmul_flops": 0.01,
    "attention_flops": 0.01,
    "peak_memory": 0.03,
    "parse_seconds": 20.0,
    "parse_gib": 2.0,
    "factors": 0.03,
    "planted": 0.20,
}
"""The most of each: shares, but for the parser's."""

EXPECTED = {
    "loader": ("data_wait", None),
    "sync": ("host_gap", None),
    "float32": ("matmul", "float32_matmuls"),
    "gather": ("exposed_communication", None),
    "remat": ("recomputation", "attention_again"),
    "zeros": ("frequency", None),
}
"""Cause -> the part of the step that must have changed most, and the lint rule that must say so."""

NOT_MULTIPLIED_AGAIN = ("none", "projections")
"""Policies of remat under which no matrix product is computed twice."""

BLOCK = 10
"""Turns whose median is one value of many: a turn shares neighbors with the next, and machines drift."""


def judged(name: str, found: float | None, why: str = "") -> dict[str, Any]:
    """Returns a figure beside its bar; met is None where it could not be measured, which `why` explains."""
    line = {"bar": BARS[name], "found": found, "met": None if found is None else abs(found) <= BARS[name]}
    return line | ({"why": why} if found is None else {})


@dataclasses.dataclass
class Run:
    """A run that has ended. notes: of planted.py. samples: NVML's while it ran, by device."""

    path: Path
    notes: dict[str, Any]
    samples: clocks.Samples

    def __post_init__(self):
        self.folder = publish.profiled(self.path)
        self.config = publish.config(self.path)
        self.ledger: Ledger = publish.opened(self.path)
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        self.loop = {row["step"]: row["step_seconds"] for row in rows}
        self.taken = json.loads((self.folder / "collected.json").read_text())["passes"]
        self.steps = [row["step"] for row in unprofiled(rows, self.taken)]

    def both_clocks(self) -> list[tuple[float, float]]:
        """Returns the profiled steps' seconds by the ledger and by the loop's clock, but for the first's: the
        start of the trace is in that one."""
        by_device = [{one.step: one.seconds for one in device.steps} for device in self.ledger.devices]
        steps = sorted(set.intersection(*map(set, by_device)) - {self.taken["production"]["first_step"]})
        return [(fmean(of[step] for of in by_device), self.loop[step]) for step in steps]

    def slowed(self) -> list[float]:
        """Returns by which share traced steps were longer than others, by the loop's clock: of each turn, its
        median beside its neighbors' (see `planted.Turns`); without turns, the profile's median beside
        that of all steps that were not profiled."""
        turns = [one for name, one in self.taken.items() if name.startswith("turn")]
        pairs = [(self._turn(one), self._turn(one, -1) + self._turn(one, 1)) for one in turns]
        profile = [loop for _, loop in self.both_clocks()]
        return [median(of) / median(others) - 1 for of, others in pairs or [(profile, self._unprofiled())]]

    def _turn(self, of: dict[str, int], beside: int = 0) -> list[float]:
        """Returns a turn's steps, or those of the next one or the one before, but for the first."""
        first = of["first_step"] + beside * of["steps"]
        return [self.loop[step] for step in range(first + 1, first + of["steps"])]

    def _unprofiled(self) -> list[float]:
        return [self.loop[step] for step in self.steps]

    def idle(self) -> float:
        """Returns the median seconds that the cause kept the device idle for, in a step not profiled."""
        return median(self.notes["idle"][step - 1] for step in self.steps)

    def clock(self) -> dict[str, Any]:
        """Returns NVML's clock and power in the steps that were not profiled, and what held the clock."""
        begun = self.notes["dispatched"]
        spans = [(begun[step - 1], begun[step]) for step in self.steps if step < len(begun)]
        rows = next(iter(self.samples.devices.values()), [])
        return capped([row for row in rows if any(start <= row[0] < end for start, end in spans)])


def opened(path: Path) -> Run:
    """Returns a run that has ended, with the notes that profiled_run.py left in its folder."""
    kept = json.loads((path / "notes.json").read_text())
    samples = {device: [tuple(row) for row in rows] for device, rows in kept["samples"].items()}
    return Run(path, kept["notes"], clocks.Samples(samples))


def capped(rows: list[tuple[int, float, float, int]]) -> dict[str, Any]:
    """Returns the means of NVML's samples, and for which share of them each reason held the clock down."""
    if not rows:
        return {"mhz": None, "watts": None, "cap_reasons": {}}
    shares = {name: fmean(bool(row[3] & bit) for row in rows) for bit, name in frequency.REASONS.items()}
    return {
        "mhz": fmean(row[1] for row in rows),
        "watts": fmean(row[2] for row in rows),
        "cap_reasons": {name: share for name, share in shares.items() if share},
    }


def closure(run: Run) -> dict[str, Any]:
    """Returns whether the ledger accounts for the run's step, and what reading its traces cost.

    The ledger's wall time is held against the loop's clock in the same steps, where both see whatever
    disturbs the machine, and traced steps against others by that one clock. The product compares the ledger
    with steps that were not profiled. It and the first factor both have a bar, lest one error hide another.
    """
    ledger = run.ledger
    step, window = ledger.window.step_seconds, ledger.window
    ledgers, loops = zip(*run.both_clocks(), strict=True)
    same = sum(ledgers) / sum(loops)
    slowed = run.slowed() if window.loop_seconds else []
    blocks = [median(slowed[at : at + BLOCK]) for at in range(0, len(slowed), BLOCK)]
    against = same * (1 + median(slowed)) - 1 if slowed else None
    return {
        "step_seconds": step,
        "loop_seconds": window.loop_seconds,
        "profiled_loop_seconds": median(loops),
        "noise": window.noise,
        "as_reported": window.closure,
        "slowed_by_tracing": slowed,
        "standard_error": stdev(blocks) / math.sqrt(len(blocks)) if len(blocks) > 1 else None,
        "attribution_seconds": window.attribution_seconds,
        "lines": {line.name: line.share for line in ledger.lines},
        "clock_source": ledger.clock.source,
        "bars": {
            "unclassified": judged("unclassified", ledger.seconds("unclassified") / step),
            "other_idle": judged("other_idle", ledger.seconds("dependency") / step),
            "same_steps": judged("same_steps", same - 1),
            "closure": judged("closure", against, "fewer than three steps were not profiled"),
            **counted(run),
            "peak_memory": peak_memory(run),
            **parse_cost(run.path, window.steps),
        },
    }


def counted(run: Run) -> dict[str, Any]:
    """Returns the FLOPs counted in the HLO over those needed, less one."""
    ledger, config = run.ledger, run.config
    again = f"remat.policy = {config['remat']['policy']} multiplies again"
    once = config["remat"]["policy"] in NOT_MULTIPLIED_AGAIN
    share = ledger.matmul.flops / ledger.matmul.model_flops - 1 if once else None
    named = run.folder / "attribution.hlo.txt"
    modules = hlo.modules((named if named.is_file() else run.folder / "step.hlo.txt").read_text())
    attention, why = None, "only kernels say what they need, and this attention is none"
    if len(modules) > 1:
        why = "the step is several programs"
    elif ledger.run.platform == "gpu" and once:
        tokens = config["train"]["rows"] * config["data"]["sequence"]
        needed = ledger.model.flops(0, tokens * config["data"]["sequence"])  # of one document a row
        attention = Attribution(modules).flops("attention") * ledger.run.devices / needed - 1
    return {
        "matmul_flops": judged("matmul_flops", share, again),
        "attention_flops": judged("attention_flops", attention, why),
    }


def peak_memory(run: Run) -> dict[str, Any]:
    """Returns what the categories lack of the runtime's own peak, or have beyond it, as a share of it."""
    memory = run.ledger.memory
    if memory is None or not memory.peak_bytes:
        return judged("peak_memory", None, "the runtime counts no peak here")
    if "beside" in memory.categories:
        return judged("peak_memory", None, "the dump knows one of the step's programs at a time")
    own = sum(size for name, size in memory.categories.items() if name != "fragmentation")
    return judged("peak_memory", own / memory.peak_bytes - 1)


def parse_cost(path: Path, steps: int) -> dict[str, Any]:
    """Returns what `python -m jaxthru.profile` takes on two cores: seconds, and GiB of memory."""
    cores = os.sched_getaffinity(0)
    command = [sys.executable, "-c", PEAK, sys.executable, "-m", "jaxthru.profile", str(path)]
    began = time.perf_counter()
    os.sched_setaffinity(0, sorted(cores)[:2])  # of this thread; a process inherits it
    try:
        said = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | CPU, check=True).stdout
    finally:
        os.sched_setaffinity(0, cores)
    took, (code, kibibytes) = time.perf_counter() - began, map(int, said.split())
    if code:
        return {name: judged(name, None, f"exit code {code}") for name in ("parse_seconds", "parse_gib")}
    return {
        "parse_seconds": judged("parse_seconds", took) | {"steps": steps},
        "parse_gib": judged("parse_gib", kibibytes / 2**20),
    }


CPU = {"JAX_PLATFORMS": "cpu"}
PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Runs a command; prints its exit code and the most memory that it had, in KiB. In a process of its own: to
Linux the peak of whoever starts a command is the command's too, and the benchmark itself reads traces."""


def split(run: Run) -> dict[str, Any]:
    """Returns the rate of the step's needed matrix products, in steps that were not profiled, and as the peak
    times factors that the ledger counts in others. NVML's clock stands beside them: it does not see what a
    power cap takes."""
    ledger, clock = run.ledger, run.clock()
    matmul, step = ledger.matmul, ledger.window.step_seconds
    found = {
        "clock": clock,
        "ledger_mhz": ledger.clock.mean_mhz,
        "ledger_cap_reasons": ledger.clock.cap_reasons,
    }
    seconds = ledger.seconds("matmul")
    mhz = ledger.clock.mean_mhz
    if not (matmul.ideal_seconds and mhz and ledger.window.loop_seconds):
        return found | {"factors": judged("factors", None, "no data sheet, or no clock")}
    at_peak = matmul.ideal_seconds + matmul.recomputation_seconds
    factors = {
        "needed": matmul.ideal_seconds / at_peak,
        "frequency": mhz / matmul.reference_mhz,
        "cycles": at_peak * matmul.reference_mhz / (seconds * mhz),
        "share_of_step": seconds / step,
    }
    observed = matmul.ideal_seconds / ledger.window.loop_seconds
    lost = {
        name: getattr(matmul, f"{name}_seconds") for name in ("frequency", "inefficiency", "recomputation")
    }
    return found | {
        "share_of_peak": {"observed": observed, "of_factors": factors},
        "seconds_lost": lost,
        "factors": judged("factors", math.prod(factors.values()) / observed - 1),
    }


def gemm_clock(trace: xplane.Trace, between: tuple[int, int] | None = None) -> dict[str, Any]:
    """Returns how many matrix products ran on a trace's first device, their seconds, those from the first to
    the last, and the clock while they ran and from the first to the last, by CUPTI; None without it. Products
    are told by kernels' names. between: two moments of the trace, in place of all of it."""
    parts, first = dict(BY_NAME)["matmul"], trace.devices[0]
    products = [event for event in trace.events if event.device == first]
    if between:
        products = [event for event in products if between[0] <= event.start and event.end <= between[1]]
    products = [event for event in products if any(part in event.name for part in parts)]
    spans = [(event.start, event.end) for event in products]
    begun, ended = min((start for start, _ in spans), default=0), max((end for _, end in spans), default=0)
    counters = trace.counters.get(first, {}).items()
    samples = [row for name, rows in counters if frequency.is_clock(name) for row in rows]
    samples = [(at, hertz / 1e6) for at, hertz in samples if begun <= at < ended and hertz > 0]
    within = [mhz for at, mhz in samples if frequency.inside(at, spans)]
    return {
        "kernels": len(spans),
        "seconds": sum(end - start for start, end in spans) / 1e9,
        "span": (ended - begun) / 1e9,
        "mhz": fmean(within) if within else None,
        "whole_mhz": fmean(mhz for _, mhz in samples) if samples else None,
    }


def cause(name: str, clean: Run, planted: Run, gemms: dict[str, dict]) -> dict[str, Any]:
    """Returns what the comparison names, and its size beside the planted one's.

    gemms: `gemm_clock` of the two runs, "clean" and "planted".
    """
    found = compare.compare(clean.ledger, planted.ledger, clean.config, planted.config)
    part, rule = EXPECTED[name]
    top = found.top
    loops = planted.ledger.window.loop_seconds, clean.ledger.window.loop_seconds
    by_loop = loops[0] - loops[1] if None not in loops else None
    size, how = by_loop, "the loop's clock in unprofiled steps, planted less clean"
    if name in ("loader", "sync"):
        size, how = planted.idle(), "the device's wait in unprofiled steps, by the host's clock"
    elif name == "zeros":
        before, after = gemms["clean"]["mhz"], gemms["planted"]["mhz"]
        seconds = clean.ledger.seconds("matmul")
        size = seconds * (before / after - 1) if before and after else None
        how = "the clean run's products at the planted run's clock, cycles counted by CUPTI"
    right = top is not None and top.name == part and (rule is None or top.rule == rule)
    error = top.seconds / size - 1 if right and size else None
    return {
        "top": None if top is None else {"name": top.name, "seconds": top.seconds, "cause": top.cause},
        "rule": top.rule if top else None,
        "expected": part,
        "named": right,
        "planted_seconds": size,
        "planted_by": how,
        "alone_seconds": planted.notes["isolated"],
        "loop_seconds": by_loop,
        "noise_seconds": found.noise,
        "others": {each.name: each.seconds for each in found.changes[1:5]},
        "clocks": {"clean": clean.clock(), "planted": planted.clock(), "of_products": gemms},
        "size": judged("planted", error, "not named, or not measured") | ({} if right else {"met": False}),
        "met": bool(right and error is not None and abs(error) <= BARS["planted"]),
    }
