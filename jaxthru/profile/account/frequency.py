"""A GPU's clock and power while steps ran, and the reasons for a low clock.

By CUPTI's samples within the trace, or else by NVML's (see `collect.clocks`). Without either the ledger says
"none".
"""

import re
import statistics
from bisect import bisect_right

from jaxthru.profile.account.ledger import Clock
from jaxthru.profile.collect.clocks import COUNTER, Samples
from jaxthru.profile.read.xplane import Trace, natural

REFERENCE_MHZ = {r"h200 nvl": (1545, 1785), r"(g?h200|h100(?! (nvl|pcie)))": (1830, 1980)}
"""Device kind -> the SM clock of its data sheet's dense bf16 FLOP/s, and its highest clock, MHz. The first is
the data sheet's rate over 4,096 FLOPs per SM and cycle, with 132 SMs."""

REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons. Idle and the application's own settings are none."""

MOST = 500


def reference(kind: str) -> tuple[float | None, float | None]:
    """Returns the reference clock and the highest of a device kind, MHz, None where they are not known."""
    found = (pair for words, pair in REFERENCE_MHZ.items() if re.search(rf"\b{words}\b", kind.lower()))
    return next(found, (None, None))


def clock(trace: Trace, samples: Samples, start: int, end: int, busy: list[tuple[int, int]]) -> Clock:
    """Returns the clock between two moments of a trace. busy: when matmuls ran on the first device,
    in order; the mean is taken over it, where samples fall into it, for it is these that the clock slows."""
    traced, asked = {}, {}
    for device, by_name in trace.counters.items():
        if sampled := [row for name, rows in by_name.items() if is_clock(name) for row in rows]:
            traced[device] = [(at, hertz / 1e6) for at, hertz in sampled]
    for device, rows in samples.devices.items():
        shifted = ((at - trace.begun, *rest) for at, *rest in rows)
        asked[device] = [row for row in shifted if start <= row[0] <= end]
    source = "cupti" if traced else "nvml" if any(asked.values()) else "none"
    rows = traced or {device: [row[:2] for row in rows] for device, rows in asked.items()}
    first = min(rows, key=natural, default=None)  # as `busy` is: planes stand in any order
    if source == "none" or first is None:
        return Clock()
    shown = [(at, mhz) for at, mhz in rows[first] if start <= at <= end and mhz > 0]
    during = [mhz for at, mhz in shown if inside(at, busy)] or [mhz for _, mhz in shown]
    known = asked.get(first, [])
    reasons = {
        name: sum(bool(row[3] & bit) for row in known) / len(known) for bit, name in REASONS.items() if known
    }
    return Clock(
        source,
        statistics.fmean(during) if during else None,
        _thinned([((at - start) / 1e9, mhz) for at, mhz in shown]),
        _thinned([((row[0] - start) / 1e9, row[2]) for row in known]),
        {name: share for name, share in reasons.items() if share},
    )


def is_clock(name: str) -> bool:
    """Says whether a counter of a trace is the SM clock in Hz; CUPTI shows it by a name of its own."""
    return name == COUNTER or name.startswith("GPC Clock Frequency")


def inside(at: int, spans: list[tuple[int, int]]) -> bool:
    """Says whether a moment lies in one of these spans, which are in order."""
    place = bisect_right(spans, (at, at)) - 1
    return place >= 0 and at < spans[place][1]


def _thinned(rows: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple(rows[:: -(-len(rows) // MOST) or 1])
