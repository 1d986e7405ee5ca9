"""Published figures beside what the simulator of `plan network` says, each a calibration or a test.

A calibration's free choice was made to fit it; a test has none left. Sources: docs/network.md.
"""

import dataclasses
from typing import Literal

import numpy as np
import rich.box
import rich.table

from jaxthru.plan import fabric, network, network_advice
from jaxthru.plan.network_flows import Timed, simulate, slowdown
from jaxthru.plan.network_traffic import Collective


@dataclasses.dataclass(frozen=True)
class Figure:
    """published, ours: in the same unit. label: `calibration`, or `test`. choice: what was chosen to fit, or
    of a test what it stands on."""

    name: str
    published: float
    ours: float
    unit: str
    label: Literal["calibration", "test"]
    choice: str


LAYERS, LAYER, TABLE = 48, 224.1e6, 262_144 * 3840
"""Gemma 3 12B: layers, parameters of each, and of the table that embedding and head share."""

ETHERNET, INFINIBAND = 39.8, 4.4
"""Seconds of a step of two hosts of 8 H100s, over 10 Gbit/s Ethernet and over 8 × 400 Gbit/s InfiniBand."""

SCATTER = 0.258
"""Seconds of a layer's first reduce-scatter over that Ethernet."""


def fsdp_of_12b(devices: int = 16) -> list[Collective]:
    """Returns what FSDP of Gemma 3 12B moves a step: each layer's weights gathered twice, its gradients
    scattered once, in bfloat16, and so the table's."""
    everyone = np.arange(devices)[None]
    return [
        Collective(f"{kind} {what}", kind, 2.0 * parameters, everyone, runs, "bf16", what, axes=("fsdp",))
        for what, parameters, layers in (("layer", LAYER, LAYERS), ("table", TABLE, 1))
        for kind, runs in (("all-gather", 2.0 * layers), ("reduce-scatter", 1.0 * layers))
    ]


def table_iii(name: str) -> network.Forecast:
    """Returns the step of that row of Table III, `ethernet_pair` or `infiniband_400g`."""
    shape = {"data": 1, "fsdp": 16, "tensor": 1}
    measured = {"ethernet_pair": ETHERNET, "infiniband_400g": INFINIBAND}[name]
    return network.timed(fsdp_of_12b(), fabric.load(name), shape, measured=measured)


TWO_H200 = {64: 201.0, 256: 235.0, 1024: 269.0}
"""MiB of an all-gather's result -> GB/s of the bus that two H200s measured (docs/lab/parallelism.md)."""

TWO_H200_BESIDE_PRODUCTS = {
    "all-gather of 64 MiB alone": (64, 167.4),
    "all-gather of 128 MiB alone": (128, 306.0),
}
"""(MiB, µs) of other collectives there, in bursts (overlap_h200x2.json: qkv_forward, gate_up_forward)."""


def figures() -> list[Figure]:
    """Returns every published figure with ours."""
    ethernet, infiniband = table_iii("ethernet_pair"), table_iii("infiniband_400g")
    scatter = next(one.seconds for one in ethernet.collectives if one.collective.kind == "reduce-scatter")
    beside = INFINIBAND - infiniband.links  # what is not the links' there is so here too
    step = max(ethernet.links, beside)
    found = [
        Figure(
            "reduce-scatter of a layer, 10 GbE",
            SCATTER,
            scatter,
            "s",
            "calibration",
            "two_level, efficiency 0.7",
        ),
        Figure("Table III, 10 GbE row", ETHERNET, step, "s", "test", "the reduce-scatter × count"),
        Figure(
            "Table III, ratio of its rows",
            ETHERNET / INFINIBAND,
            step / INFINIBAND,
            "×",
            "test",
            "the row above",
        ),
        *_meta(),
    ]
    for size, rate in TWO_H200.items():
        ours = size * 2**20 / 2 / _pair(size).seconds / 1e9
        found.append(
            Figure(
                f"two H200s, all-gather of {size} MiB", rate, ours, "GB/s", "calibration", "275 GB/s, 50 µs"
            )
        )
    for name, (size, microseconds) in TWO_H200_BESIDE_PRODUCTS.items():
        ours = _pair(size).seconds * 1e6
        found.append(Figure(f"two H200s, {name}", microseconds, ours, "µs", "test", "the rows above"))
    return found


def _pair(size: int) -> Timed:
    two = fabric.load("infiniband_400g")
    return simulate([Collective("gather", "all-gather", size * 2.0**20, np.arange(2)[None])], two, 2)[0]


def _meta() -> list[Figure]:
    few, many = (slowdown(2, 16, 16, flows)[0] for flows in (4, 16))
    _, worst = slowdown(64, 16, 16, 32, 300)
    packed, _ = slowdown(8, 8, 18, 4)
    return [
        Figure(
            "E-ECMP over ECMP, all-reduce", 1.4, few / many, "×", "calibration", "4 flows before, 16 after"
        ),
        Figure(
            "4 queue pairs, over the roofline",
            1.4,
            packed,
            "×",
            "calibration",
            "8 of 16 NICs of 8 leaves, 18 uplinks",
        ),
        Figure("32 queue pairs, worst, of the roofline", 52, 100 / worst, "%", "test", "64 full leaves, 1:1"),
    ]


def table(found: list[Figure]) -> rich.table.Table:
    """Returns the figures as a table."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("figure", no_wrap=True)
    for column in ("published", "ours"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for one in found:
        values = (f"{value:,.3g} {one.unit}" for value in (one.published, one.ours))
        table.add_row(f"{one.name}\n  {one.choice}", *values, one.label)
    return table


def lines() -> list[str]:
    """Returns what binds each row of Table III."""
    rows = {"10 GbE": "ethernet_pair", "InfiniBand": "infiniband_400g"}
    return [f"Table III, {row}: {network_advice.binds(table_iii(name))}" for row, name in rows.items()]
