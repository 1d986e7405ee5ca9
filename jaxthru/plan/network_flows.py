"""What the collectives of a step take on a fabric, all groups of an instruction at once."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxthru.plan.fabric import Fabric, placed
from jaxthru.plan.network_links import BETWEEN_ALL, Links, switched
from jaxthru.plan.network_torus import on_torus
from jaxthru.plan.network_traffic import Collective
from jaxthru.runtime.errors import require

TRIALS = 20
"""Draws of the hash; a collective's seconds are their mean."""

ROUND = {"all-reduce": 2.0}
"""How often an array goes round a ring; once where not given."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """A collective on a fabric. seconds: of one run, the mean over draws of the hash; worst: of the slowest.
    perfect: with a perfect spread. latency: seconds of it that do not grow with bytes. binds: `nvlink`,
    `nic`, `uplinks`, `hash`, `ici` or `latency`: what it would be faster without."""

    collective: Collective
    links: Links
    seconds: float
    worst: float
    perfect: float
    latency: float
    binds: str

    @property
    def busiest(self) -> str:
        """The link that is done last, in words."""
        named = {"nvlink": "a GPU's NVLink", "nic": "a NIC", "ici": "a link of the torus"}
        return named.get(self.binds) or self.links.busiest or "a GPU's NVLink"

    @property
    def slowdown(self) -> float:
        """Seconds over those with a perfect spread."""
        return self.seconds / self.perfect


PROTOCOLS = (
    (1.0, 1.0, 1.0, 4.0 / 3.4, 1.0),  # Simple
    (0.92, 1.9 / 3.4, 4.0 / 14.0, 1.25 / 3.4, 8.5 / 14.0),  # LL128
    (0.5, 0.6 / 3.4, 2.7 / 14.0, 0.6 / 3.4, 5.0 / 14.0),  # LL
)
"""NCCL's protocols: share of a link's rate that each gets, and its hops over those of Simple in a ring: over
NVLink and over the network, in a ring and in a tree (NCCL's src/graph/tuning.cc)."""


def simulate(
    collectives: Sequence[Collective], fabric: Fabric, devices: int, *, trials: int = TRIALS, seed: int = 0
) -> list[Timed]:
    """Returns what each collective of a step takes on a fabric, one after the other, in the order given.

    devices: of the job; those of a collective's groups are numbered below it, host by host. seed: of the hash
    and of random placement. Raises InputError where the fabric does not hold the devices.
    """
    if fabric.torus:
        require(
            devices == fabric.devices,
            f"--devices {devices}: the torus {'×'.join(map(str, fabric.torus))} of {fabric.name} has "
            f"{fabric.devices}",
        )
    place = None if fabric.torus else placed(fabric, devices, seed)
    known: dict[tuple, Links] = {}
    found = []
    for one in collectives:
        pairs = b"" if one.pairs is None else one.pairs.tobytes()
        key = one.kind in BETWEEN_ALL, one.groups.shape, one.groups.tobytes(), pairs
        if key not in known:
            if place is None:
                known[key] = on_torus(one, fabric)
            else:
                known[key] = switched(one, fabric, place, trials, seed)
        found.append(_timed(one, known[key], fabric))
    return found


def _timed(one: Collective, links: Links, fabric: Fabric) -> Timed:
    rounds = ROUND.get(one.kind, 1.0)
    moved, times = one.bytes * rounds, [links.seconds(each) for each in links.network]
    mean, worst, perfect = float(np.mean(times)), max(times), links.seconds(links.perfect)
    latency, share = min(_ways(one, links, fabric), key=lambda way: way[0] + mean * moved / way[1])
    parts = {
        "ici" if fabric.torus else "nvlink": links.nvlink,
        "nic": links.nic,
        "uplinks": links.spread,
        "hash": float(links.network.mean()),
    }
    binds = max(parts, key=parts.get)
    if binds == "hash" and parts["hash"] <= 1.02 * links.perfect:
        binds = "uplinks" if links.spread > links.nic else "nic"
    if latency > mean * moved / share:
        binds = "latency"
    total = [latency + each * moved / share for each in (mean, worst, perfect)]
    return Timed(one, links, *total, latency, binds)


def _ways(one: Collective, links: Links, fabric: Fabric) -> list[tuple[float, float]]:
    """Returns (latency, share of the rate) of each protocol and algorithm that NCCL would choose from."""
    rounds, found = ROUND.get(one.kind, 1.0), []
    for share, nvlink, network, tree_nvlink, tree_network in PROTOCOLS:
        inside, over = (links.hops[at] * rounds for at in (0, 1))
        ways = [inside * nvlink * fabric.nvlink_hop_us + over * network * fabric.network_hop_us]
        if one.kind == "all-reduce" and any(links.tree):
            inside, over = links.tree
            hops = tree_nvlink * fabric.nvlink_hop_us, tree_network * fabric.network_hop_us
            ways.append(inside * hops[0] + over * hops[1])
        found.append(((fabric.launch_us + min(ways)) * 1e-6, share))
        if fabric.torus:
            break
    return found


def over_queue_pairs(
    collectives: Sequence[Collective],
    fabric: Fabric,
    devices: int,
    counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    **draws: int,
) -> dict[int, list[Timed]]:
    """Returns {queue pairs: what `simulate` returns with so many}."""
    return {
        count: simulate(collectives, dataclasses.replace(fabric, qps=count), devices, **draws)
        for count in counts
    }


@functools.cache
def slowdown(
    leaves: int, crossing: int, uplinks: int, flows: int, trials: int = 400, seed: int = 0
) -> tuple[float, float]:
    """Returns the mean and the worst slowdown, against a perfect spread, of leaves in a ring: `crossing` NICs
    of each send to the next one over as many `uplinks`, each as so many flows. ports: NICs of a leaf, by
    default those that cross."""
    fabric = Fabric(
        **{"name": "ring", "hosts": leaves, "gpus_per_host": crossing, "nics_per_host": crossing},
        **{"leaves": leaves, "ports_per_leaf": crossing, "uplinks_per_leaf": uplinks, "qps": flows},
    )
    groups = np.arange(leaves * crossing).reshape(1, -1)
    place = placed(fabric, groups.size)
    links = switched(Collective("ring", "all-gather", 1.0, groups), fabric, place, trials, seed)
    ratio = links.network / links.perfect
    return float(ratio.mean()), float(ratio.max())
