"""What binds a step on a fabric, in a line, and what would make it faster, each with its seconds."""

import dataclasses
import math
from collections import Counter

import numpy as np

from jaxthru.plan.fabric import Fabric
from jaxthru.plan.network import Forecast
from jaxthru.plan.network_flows import simulate
from jaxthru.plan.network_traffic import Collective, along

FREE = 0.05
"""A step that waits for links for less than this share of itself is not bound by them."""

WORTH = 0.05
"""Advice saves at least this share of the links' seconds."""

SAYS = {
    "hash": "flows that the hash puts on the same uplink",
    "uplinks": "uplinks: leaves have fewer than their NICs send",
    "nic": "the NICs' rate",
    "nvlink": "NVLink's rate",
    "ici": "the rate of the torus' links",
    "latency": "the latency of many steps over many devices, not bytes",
}

MESSAGE = 512 << 10
"""Bytes of a message: a slice of NCCL's buffer (NCCL_BUFFSIZE 4 MiB in 8 steps), which one queue pair takes
whole unless NCCL_IB_SPLIT_DATA_ON_QPS=1."""


def binds(found: Forecast) -> str:
    """Returns what binds a step, in a line."""
    step = found.measured or (found.schedule.step if found.schedule else 0.0)
    if not found.collectives:
        return "not bound by links: the step has no collectives"
    if found.measured:
        least = max(found.links, found.schedule.compute if found.schedule else 0.0)
        if found.links < 0.5 * found.measured:
            other = max(0.0, found.measured - least)
            return (
                f"not bound by links: they need {_s(found.links)} of the {_s(found.measured)} measured; "
                f"other: {_s(other)} are neither links nor computation (skew, host, kernels)"
            )
    elif found.schedule and found.exposed < FREE * step:
        return (
            f"not bound by links: the schedule hides all but {_s(found.exposed)} of their {_s(found.links)}, "
            f"{found.exposed / step:.1%} of the step"
        )
    waits: Counter[str] = Counter()
    for one in found.collectives:
        waits[one.binds] += found.waits(one)
    name, most = waits.most_common(1)[0]
    worst = max(found.collectives, key=lambda one: found.waits(one) if one.binds == name else -1.0)
    share = f", {min(found.exposed, step) / step:.0%} of the step" if step else ""
    link = "" if name == "latency" else f"; busiest link: {worst.busiest}"
    return (
        f"bound by {SAYS[name]}: {_s(most)} of {_s(found.exposed)} exposed{share}; most in "
        f"{worst.collective.kind} of {worst.collective.layer}{link}"
    )


def advice(found: Forecast, **draws: int) -> list[str]:
    """Returns what to change, the most seconds first, each a line. draws: of `simulate`."""
    fabric = found.fabric
    if fabric.torus or not found.collectives:
        lines = []
    else:
        lines = [*_queue_pairs(found, **draws), *_placement(found, **draws)]
    lines += _mesh(found, **draws)
    ordered = sorted((one for one in lines if one is not None), key=lambda pair: -pair[0])
    return [line for _, line in ordered] or [
        "nothing: no queue pairs, placement or mesh tried was 5 % faster"
    ]


def _queue_pairs(found: Forecast, **draws: int) -> list[tuple[float, str]]:
    """Returns advice on queue pairs and on the hash."""
    fabric, curve = found.fabric, {point.qps: point for point in found.curve}
    if fabric.spreads or fabric.leaves == 1 or found.links <= 0:
        return []
    if fabric.hash == "five_tuple":
        hashed = dataclasses.replace(fabric, hash="dest_qp", qps=16)
        links = _links(found, hashed, **draws)
        said = (
            "the switches' hash sees no queue pairs (five_tuple): hash the destination queue pair too "
            f"(E-ECMP) and set NCCL_IB_QPS_PER_CONNECTION=16: links take {_s(links)} in place of "
            f"{_s(found.links)}"
        )
        return [(found.links - links, said)] if links < (1 - WORTH) * found.links else []
    least = min(point.links for point in found.curve)
    enough = next(qps for qps, point in curve.items() if point.links <= 1.02 * least)
    now, then = found.links, curve[enough].links
    if then >= (1 - WORTH) * now:
        return []
    said = (
        f"NCCL_IB_QPS_PER_CONNECTION={enough} ({fabric.qps} now): links take {_s(then)} in place of "
        f"{_s(now)}, max/mean of uplinks {curve[enough].mmr:.2f}; {_split(found, enough)}"
    )
    return [(now - then, said)]


def _split(found: Forecast, qps: int) -> str:
    """Returns how messages go over queue pairs: in turn where each has several, else in parts."""
    largest = max(found.collectives, key=lambda one: one.collective.bytes * one.collective.runs).collective
    nics = found.fabric.nics_per_host * found.fabric.channels
    messages = largest.bytes / nics / MESSAGE
    if messages >= 4 * qps:
        return f"NCCL_IB_SPLIT_DATA_ON_QPS=0: {messages:,.0f} messages a NIC take them in turn"
    return f"NCCL_IB_SPLIT_DATA_ON_QPS=1: {messages:,.0f} messages a NIC are too few to take them in turn"


def _placement(found: Forecast, **draws: int) -> list[tuple[float, str]]:
    fabric = found.fabric
    if fabric.placement == "packed" or fabric.leaves == 1:
        return []
    links = _links(found, dataclasses.replace(fabric, placement="packed"), **draws)
    said = f"placement: hosts that are neighbours: links take {_s(links)} in place of {_s(found.links)}"
    return [(found.links - links, said)] if links < (1 - WORTH) * found.links else []


def _links(found: Forecast, fabric: Fabric, **draws: int) -> float:
    """Returns the seconds of a step's collectives on another fabric."""
    ones = simulate([one.collective for one in found.collectives], fabric, found.devices, **draws)
    return sum(one.seconds * one.collective.runs for one in ones)


def _mesh(found: Forecast, **draws: int) -> list[tuple[float, str]]:
    """Returns advice to shard within an NVLink domain and to sum gradients over the rest."""
    fabric, shape = found.fabric, found.shape
    domain = fabric.gpus_per_host * fabric.nvlink_hosts
    if found.devices <= domain and not fabric.torus:
        return []
    if fabric.torus or shape["tensor"] > domain:
        wide = shape["tensor"] > domain and not fabric.torus
        said = f"mesh.tensor={shape['tensor']} spans NVLink domains of {domain}: choose {domain} at most"
        return [(found.links, said)] if wide else []
    within = shape.get("expert", 1) * shape["tensor"]
    inside = math.gcd(shape["fsdp"], domain // within)
    if inside in (1, shape["fsdp"]):
        return []
    other = shape | {"data": shape["data"] * shape["fsdp"] // inside, "fsdp": inside}
    ones = simulate(resharded(found, other), fabric, found.devices, **draws)
    links = sum(one.seconds * one.collective.runs for one in ones)
    over = inside * within
    said = (
        f"mesh.fsdp={inside} mesh.data={other['data']}: parameters gathered over NVLink alone, gradients "
        f"summed over hosts: links take about {_s(links)} in place of {_s(found.links)}, if the state fits "
        f"over {over} devices (plan memory --devices {over}); what of it is hidden, a plan of that mesh says"
    )
    return [(found.links - links, said)] if links < (1 - WORTH) * found.links else []


def resharded(found: Forecast, other: dict[str, int]) -> list[Collective]:
    """Returns the collectives of a step whose `fsdp` is smaller and whose `data` is larger by as much: what
    is scattered over `fsdp` is summed over `data` too, a shard each."""
    changed = []
    for one in (timed.collective for timed in found.collectives):
        axes = one.axes
        if axes == ("fsdp",) and one.kind in ("all-gather", "reduce-scatter") and one.phase != "other":
            changed.append(dataclasses.replace(one, groups=along(axes, other)))
            if one.kind == "reduce-scatter" and found.shape["data"] == 1:
                share = one.bytes / other["fsdp"]
                over = along(("data",), other)
                changed.append(
                    dataclasses.replace(one, kind="all-reduce", bytes=share, groups=over, axes=("data",))
                )
        elif axes == ("data",):  # sums of shards, which are larger ones then
            share = one.bytes * found.shape["fsdp"] / other["fsdp"]
            changed.append(dataclasses.replace(one, bytes=share, groups=along(axes, other)))
        elif "fsdp" in axes and one.kind == "all-reduce":
            both = tuple(name for name in other if name in (*axes, "data"))
            changed.append(dataclasses.replace(one, groups=along(both, other), axes=both))
        elif one.pairs is None and axes:
            changed.append(dataclasses.replace(one, groups=along(axes, other)))
        else:
            changed.append(one)
    return changed


def _s(seconds: float) -> str:
    """Returns seconds as text."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{np.round(seconds * 1e3, 2):,g} ms"
