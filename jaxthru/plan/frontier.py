"""`plan limits --frontier`: the published limits of scale, reproduced from named presets.

Published are Epoch AI's post "Can AI scaling continue through 2030?" (August 2024) and the abstract of
arXiv:2411.01137. A figure is a test where its assumptions are all published, and a calibration where one of
them was chosen here so that it fits.
"""

import dataclasses
from typing import Any

import numpy as np
import rich.box
import rich.table

from jaxthru.plan import walls
from jaxthru.plan.walls import US, Machine
from jaxthru.training.plot import Panel, Picture

DURATIONS = {"3 months": 7.9e6, "9 months": 2.33e7}
"""Seconds of a run."""
BATCHES = {"fixed at 16 M": (1.6e7, 1.0, 0.0), "fixed at 60 M": (6e7, 1.0, 0.0)}
BATCHES |= {"fixed at 360 M": (3.6e8, 1.0, 0.0), "4 M at 70 B, growing by N^0.36": (4e6, 70e9, 0.36)}
"""Tokens of a batch: (at, parameters, exponent). The fixed ones are the post's 10th, 50th and 90th
percentile; the last is chosen within its range of exponents, 0.31 to 0.41."""
PODS = 16
ACROSS = 2 * (2.75 * 0.6 + 5 * np.log2(PODS))
LAYERS = {
    "one NVLink domain": 110 * US,
    "one NVLink domain, six matmuls": 82 * US,
    f"over {PODS} domains": 8 * (7.4 + ACROSS) * US,
    f"over {PODS} domains, by the footnote": 8 * (6.8 + 4.5 + ACROSS) * US,
}
"""The least time of a layer, forward and backward. The first is 8 × (4.5 µs of a kernel + 9.2 µs of an
all-reduce among 3 ranks); the third with tensor parallelism in two ways over so many domains, 2,000 devices,
with the 7.4 µs of the post's text; the fourth with the 6.8 + 4.5 µs of its footnote in their place."""
MACHINES = {
    "H100 in bfloat16": Machine(rate=1e15, item=2),
    "H100 in FP8": Machine(rate=2e15, item=1),
    "H100 in bfloat16, 72 in an NVLink domain": Machine(rate=1e15, item=2, domain=72),
    "H100 in FP8, 72 in an NVLink domain": Machine(rate=2e15, item=1, domain=72),
}
GROWING = "4 M at 70 B, growing by N^0.36"
TEST, CALIBRATION = "test", "calibration"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published number beside ours. kind: `test` or `calibration`, and then what was chosen to fit."""

    what: str
    presets: str
    published: float
    ours: float
    kind: str
    chosen: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.published


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a figure becomes where one assumption is another. unit: FLOP of a run."""

    what: str
    presets: str
    ours: float


def latency_wall(duration: str, batch: str, layer: str) -> float:
    """Returns the most parameters that presets of these names allow."""
    tokens, reference, exponent = BATCHES[batch]
    return walls.latency_wall(DURATIONS[duration], LAYERS[layer], tokens, reference, exponent)


def flops(parameters: float) -> float:
    """Returns the FLOP of a run that trains so many parameters on 20 tokens each."""
    return walls.FLOPS * parameters**2


def reaches(utilisation: float, machine: str, batch: str = GROWING, **how) -> float:
    """Returns the FLOP of the largest run of three months that uses a preset machine so well."""
    tokens, reference, exponent = BATCHES[batch]
    how |= {"seconds": DURATIONS["3 months"], "batch": tokens, "reference": reference, "exponent": exponent}
    return walls.reaches(utilisation, MACHINES[machine], **how)


def linear(machine: str, batch: str = "fixed at 60 M") -> float:
    """Returns the FLOP of a run of three months up to which devices are kept busy, by the closed formula."""
    at = MACHINES[machine]
    return walls.linear_compute(DURATIONS["3 months"], at.bandwidth, at.domain, BATCHES[batch][0], at.item)


def figures() -> list[Figure]:
    """Returns each published number beside ours."""
    fixed, one, over = "fixed at 60 M", "one NVLink domain", f"over {PODS} domains"
    fp8, bf16 = "H100 in FP8", "H100 in bfloat16"
    nine, three = "9 months", "3 months"
    precision = "the precision"
    rule = "the rule for the batch"
    search = f"{rule}, and both all-reduces as wide as the MLP"
    largest = latency_wall(nine, fixed, one)
    balance = walls.balance_tokens(MACHINES[fp8].rate, 1, 3e12)
    return [
        Figure("tokens a GPU needs to be busy", f"{fp8}, 3 TB/s", 330, balance, TEST),
        Figure("latency wall, parameters", _named(nine, fixed, one), 7e14, largest, TEST),
        Figure("latency wall, FLOP", _named(nine, fixed, one), 6e31, flops(largest), TEST),
        Figure(
            "latency wall, 2,000-way tensor parallelism, FLOP",
            _named(nine, fixed, over),
            7e30,
            flops(latency_wall(nine, fixed, over)),
            TEST,
        ),
        Figure(
            "infeasible beyond (abstract), FLOP",
            _named(three, fixed, one),
            1e31,
            flops(latency_wall(three, fixed, one)),
            TEST,
        ),
        Figure(
            "latency wall (post), FLOP",
            _named(three, GROWING, one),
            2e31,
            flops(latency_wall(three, GROWING, one)),
            CALIBRATION,
            rule,
        ),
        Figure(
            "utilisation falls beyond (abstract), FLOP",
            f"{bf16}, closed formula, batch {fixed}",
            1e28,
            linear(bf16),
            CALIBRATION,
            precision,
        ),
        Figure(
            "utilisation falls beyond (post), FLOP",
            f"{fp8}, closed formula, batch {fixed}",
            2e28,
            linear(fp8),
            TEST,
        ),
        Figure(
            "80 % utilisation (abstract), FLOP",
            f"{bf16}, search, batch {GROWING}",
            1e28,
            reaches(0.8, bf16),
            CALIBRATION,
            search,
        ),
        Figure(
            "80 % utilisation (post), FLOP",
            f"{fp8}, search, batch {GROWING}",
            2e28,
            reaches(0.8, fp8),
            CALIBRATION,
            search,
        ),
    ]


def sensitivity() -> list[Variant]:
    """Returns what the figures become under other assumptions, in FLOP of a run."""
    found = []
    for batch in BATCHES:
        for duration in DURATIONS:
            wall = flops(latency_wall(duration, batch, "one NVLink domain"))
            found.append(Variant("latency wall", f"{duration}, batch {batch}", wall))
    for layer, seconds in LAYERS.items():
        wall = flops(latency_wall("3 months", "fixed at 60 M", layer))
        found.append(Variant("latency wall", f"3 months, {seconds / US:.0f} µs a layer ({layer})", wall))
    for name in ("H100 in bfloat16", "H100 in FP8"):
        for share, said in ((0.5, "50 % utilisation"), (1e-9, "in time at all")):
            found.append(Variant(said, f"{name}, search, batch {GROWING}", reaches(share, name)))
        for batch in ("fixed at 16 M", "fixed at 60 M"):
            hidden = reaches(0.8, name, batch, exposed=False)
            found.append(Variant("80 % utilisation", f"{name}, batch {batch}, latency hidden", hidden))
        narrow = reaches(0.8, name, wide=False)
        said = f"{name}, batch {GROWING}, one all-reduce of d, one of 4 d"
        found.append(Variant("80 % utilisation", said, narrow))
        wider = f"{name}, 72 in an NVLink domain"
        found.append(Variant("80 % utilisation", f"{wider}, batch {GROWING}", reaches(0.8, wider)))
    return found


def tables(found: list[Figure], variants: list[Variant]) -> list[rich.table.Table]:
    """Returns the published numbers beside ours, and the sensitivity table."""
    published = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("figure", "presets"):
        published.add_column(column)
    for column in ("published", "ours", "ratio"):
        published.add_column(column, justify="right", no_wrap=True)
    published.add_column("kind")
    for row in found:
        chosen = f"{row.kind}: {row.chosen}" if row.chosen else row.kind
        numbers = f"{row.published:.3g}", f"{row.ours:.3g}", f"{row.ratio:.2f}"
        published.add_row(row.what, row.presets, *numbers, chosen)
    moved = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    moved.add_column("figure, FLOP")
    moved.add_column("under other assumptions")
    moved.add_column("ours", justify="right", no_wrap=True)
    for row in variants:
        moved.add_row(row.what, row.presets, f"{row.ours:.2g}")
    return [published, moved]


def picture() -> Picture:
    """Returns the best utilisation over the FLOP of a run of three months."""
    scales = np.arange(26.0, 31.5, 0.25)
    tokens, reference, exponent = BATCHES[GROWING]
    how = {"seconds": DURATIONS["3 months"], "batch": tokens, "reference": reference, "exponent": exponent}
    lines = {}
    for name, machine in MACHINES.items():
        best = [walls.search(10**scale, machine, **how).utilisation for scale in scales]
        lines[name.replace(", 72 in an NVLink domain", ", NVL72")] = (scales, np.array(best))
    return Picture((Panel("best utilisation of a run of three months, by log10 of its FLOP", lines),))


def as_json(found: list[Figure], variants: list[Variant]) -> dict[str, Any]:
    """Returns figures and variants as plain values."""
    rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in found]
    return {"figures": rows, "sensitivity": [dataclasses.asdict(row) for row in variants]}


def _named(duration: str, batch: str, layer: str) -> str:
    return f"{duration}, batch {batch}, {LAYERS[layer] / US:.0f} µs a layer"
