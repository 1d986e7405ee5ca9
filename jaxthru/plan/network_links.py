"""The load of links under a collective's flows: NVLink, NICs, uplinks of leaves as a hash picks them.

Flows that are equal and begin together end, under max-min fairness, exactly when the busiest link is done:
its share is the least, and its flows keep it to the end. So a count of bytes per link is the simulator.
"""

import dataclasses
import math

import numpy as np

from jaxthru.plan.fabric import Fabric, Placement
from jaxthru.plan.network_traffic import Collective

DRAWN = 4_000_000
"""Flows that are drawn at most, of all trials; of an all-to-all with more the uplinks are taken as even."""

BETWEEN_ALL = ("all-to-all", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Links:
    """How a pattern of flows loads links, for one byte of the collective's array.

    nvlink, nic, spread: seconds that the busiest GPU's NVLink, NIC, and uplink, were all uplinks of a leaf
    even, take. hashed: [trials], seconds of the busiest uplink or downlink as flows are hashed; empty where
    nothing leaves a leaf. mmr, jain: of these links, the most over the mean, and (Σx)² ÷ (n Σx²), means over
    trials. busiest: the link that is done last, in words. even: [links], sorted loads over their mean, of the
    first trial. hops: (over NVLink, over the network) one after the other. tree: the same of a tree, there
    and back; (0, 0) where there is none.
    """

    nvlink: float = 0.0
    nic: float = 0.0
    spread: float = 0.0
    hashed: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    mmr: float = 1.0
    jain: float = 1.0
    busiest: str = ""
    even: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    hops: tuple[int, int] = (0, 0)
    tree: tuple[int, int] = (0, 0)
    both: bool = False
    """Whether NVLink and network follow each other (`two_level`); else they work at once."""

    @property
    def perfect(self) -> float:
        """Seconds of the network with a perfect spread over the uplinks."""
        return max(self.nic, self.spread)

    @property
    def network(self) -> np.ndarray:
        """Seconds of the network, [trials]."""
        return np.maximum(self.perfect, self.hashed) if self.hashed.size else np.array([self.perfect])

    def seconds(self, network: float) -> float:
        """Returns what NVLink and this much of network take together."""
        return self.nvlink + network if self.both else max(self.nvlink, network)


def switched(one: Collective, fabric: Fabric, place: Placement, trials: int, seed: int) -> Links:
    """Returns the loads of a collective's flows on NVLink, NICs and uplinks."""
    if one.pairs is not None:
        return _of_pairs(one.pairs, 1.0, fabric, place, trials, seed)
    members = one.members
    if one.kind in BETWEEN_ALL and one.groups.size * members > DRAWN:
        return _between_many(one.groups, fabric, place)
    if one.kind in BETWEEN_ALL:
        apart = place.domain[one.groups[:, :, None]] != place.domain[one.groups[:, None, :]]
        group, source, target = np.nonzero(apart)
        pairs = np.stack([one.groups[group, source], one.groups[group, target]], axis=1)
        inside = (members - apart.sum(axis=2).min() - 1) / members
        links = _of_pairs(pairs, 1 / members, fabric, place, trials, seed)
        return dataclasses.replace(
            links, nvlink=inside / fabric.nvlink, hops=(0, 1) if len(pairs) else (1, 0)
        )
    return _ring(one.groups, fabric, place, trials, seed)


def _between_many(groups: np.ndarray, fabric: Fabric, place: Placement) -> Links:
    """Returns the loads of all-to-alls of so many flows that uplinks carry alike, whatever the hash."""
    members = groups.shape[1]

    def elsewhere(where: np.ndarray) -> np.ndarray:
        """Returns of each device of each group the share of its bytes that is for elsewhere, flat."""
        key = np.arange(len(groups))[:, None] * (int(where.max()) + 1) + where[groups]
        _, inverse, counts = np.unique(key.ravel(), return_inverse=True, return_counts=True)
        return 1 - counts[inverse] / members

    devices, out = groups.ravel(), elsewhere(place.domain)
    nic = _most(place.nic[devices], out) / fabric.nic
    leaf = place.leaf // fabric.nics_per_host if fabric.rails else place.leaf  # a pod's, by NVLink first
    uplinks = max(1, fabric.uplinks_per_leaf) * (fabric.nics_per_host if fabric.rails else 1)
    spread = _most(leaf[devices], elsewhere(leaf)) / uplinks / fabric.uplink if fabric.leaves > 1 else 0.0
    inside = (1 - out).max() / fabric.nvlink
    return Links(inside, nic, spread, busiest="an uplink" if spread > nic else "a NIC", hops=(0, 1))


def _ring(groups: np.ndarray, fabric: Fabric, place: Placement, trials: int, seed: int) -> Links:
    """Returns the loads of rings through the members of each group, NVLink domain after domain: member i that
    a group has in a domain sends to member i that it has in the next."""
    members = groups.shape[1]
    cells = _Cells(groups, place.domain)
    two_level = fabric.algorithm == "two_level"
    if cells.most == 1:  # each group within one domain
        hops = members - 1, 0
        return Links(nvlink=(members - 1) / members / fabric.nvlink, hops=hops, tree=(2 * hops[0], 0))
    around = 1 - 1 / (cells.count if two_level else np.full(len(groups), members))  # [groups]
    source, target = cells.neighbours()
    weights = (around[:, None] / cells.sizes)[cells.group_of, cells.place_of]
    links = _of_pairs(np.stack([source, target], axis=1), weights, fabric, place, trials, seed)
    inside = int(cells.sizes.max())
    local = (inside - 1) / inside if two_level else (members - 1) / members * (inside > 1)
    hops = inside - 1 if two_level else members - cells.most
    tree = 2 * (inside - 1), 2 * math.ceil(math.log2(cells.most))
    hops = hops, cells.most - 1
    return dataclasses.replace(links, nvlink=local / fabric.nvlink, hops=hops, tree=tree, both=two_level)


class _Cells:
    """What groups have in each domain. count: [groups], of domains that each group is in. sizes: [groups,
    most], members there, in the order of their first ones, 1 where there is no such cell."""

    def __init__(self, groups: np.ndarray, domain: np.ndarray):
        rows, members = groups.shape
        at = domain[groups]
        key = (np.arange(rows)[:, None] * (int(domain.max()) + 1) + at).ravel()
        _, first, inverse, sizes = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(first)  # cells by their first members: group after group
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        cell, sizes, row = rank[inverse], sizes[order], first[order] // members
        self.count = np.bincount(row, minlength=rows)
        self.most = int(self.count.max())
        self._start = np.concatenate([[0], np.cumsum(self.count)[:-1]])
        self.sizes = np.ones((rows, self.most), np.int64)
        self.sizes[row, np.arange(len(row)) - self._start[row]] = sizes
        self.group_of = np.repeat(np.arange(rows), members)
        self.place_of = cell - self._start[self.group_of]
        # Members, cell after cell, and which of its cell each is.
        self._by_cell = np.argsort(cell, kind="stable")
        self._begins = np.concatenate([[0], np.cumsum(sizes)])
        self._cell, self._sizes, self._flat = cell, sizes, groups.ravel()
        self._within = np.empty(len(cell), np.int64)
        self._within[self._by_cell] = np.arange(len(cell)) - self._begins[cell[self._by_cell]]

    def neighbours(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the devices in turn, and to which each sends: its like in the group's next domain."""
        following = (self.place_of + 1) % self.count[self.group_of]
        cell = self._start[self.group_of] + following
        place = self._begins[cell] + self._within % self._sizes[cell]
        return self._flat, self._flat[self._by_cell[place]]


def _of_pairs(
    pairs: np.ndarray,
    weights: np.ndarray | float,
    fabric: Fabric,
    place: Placement,
    trials: int,
    seed: int,
) -> Links:
    """Returns the loads of flows between pairs of devices, [pairs, 2]. weights: bytes of each."""
    weights = np.broadcast_to(np.asarray(weights, float), len(pairs))
    source, target = pairs.T
    far = place.domain[source] != place.domain[target]
    nvlink = _most(source[~far], weights[~far]) / fabric.nvlink
    source, target, weights = source[far], target[far], weights[far]
    if not len(source):
        return Links(nvlink=nvlink, hops=(1, 0))
    sent, received = place.nic[source], place.nic[target]
    leaves = place.leaf[source], place.leaf[target]
    if fabric.rails and fabric.leaves > 1:
        # Bytes for another rail pass over NVLink first, and leave by the NIC on it.
        sent = sent // fabric.nics_per_host * fabric.nics_per_host + received % fabric.nics_per_host
        pod = leaves[0] // fabric.nics_per_host * fabric.nics_per_host
        leaves = pod + received % fabric.nics_per_host, leaves[1]
    nic = max(_most(sent, weights), _most(received, weights)) / fabric.nic
    crosses = leaves[0] != leaves[1]
    if not crosses.any():
        return Links(nvlink=nvlink, nic=nic, busiest="a NIC", hops=(0, 1))
    leaves, weights = (leaves[0][crosses], leaves[1][crosses]), weights[crosses]
    loads = _Uplinks(fabric, *leaves, weights)
    spread = loads.even() / fabric.uplink
    drawn = len(weights) * fabric.flows
    if fabric.spreads or drawn > DRAWN:
        slow = "an uplink" if spread > nic else "a NIC"
        return Links(nvlink, nic, spread, busiest=f"{slow}, all uplinks of a leaf alike", hops=(0, 1))
    draws = [loads.hashed(seed + trial) for trial in range(max(3, min(trials, DRAWN // drawn)))]
    hashed = np.array([draw.max() for draw in draws]) / fabric.uplink
    busiest = loads.named(draws[int(hashed.argmax())]) if hashed.max() > max(nic, spread) else "a NIC"
    mmr, jain = (
        float(np.mean([measure(draw) for draw in draws])) for measure in (max_mean_ratio, jain_index)
    )
    even = np.sort(draws[0])[::-1] / draws[0].mean()
    return Links(nvlink, nic, spread, hashed, mmr, jain, busiest, even, hops=(0, 1))


def _most(where: np.ndarray, weights: np.ndarray) -> float:
    return float(np.bincount(where, weights).max()) if len(where) else 0.0


class _Uplinks:
    """The uplinks and downlinks of the leaves that flows leave and reach."""

    def __init__(self, fabric: Fabric, source: np.ndarray, target: np.ndarray, weights: np.ndarray):
        self.names, numbers = np.unique(np.concatenate([source, target]), return_inverse=True)
        self.source, self.target = np.split(numbers, 2)
        self.weights, self.flows, self.links = weights, fabric.flows, fabric.uplinks_per_leaf

    def even(self) -> float:
        """Returns the bytes of the busiest link if each leaf spread its own over all."""
        return max(_most(self.source, self.weights), _most(self.target, self.weights)) / self.links

    def spines(self, seed: int) -> np.ndarray:
        """Returns the spine that each flow takes, [pairs, flows of each]."""
        rng = np.random.default_rng(seed)
        return rng.integers(self.links, size=(len(self.weights), self.flows), dtype=np.int32)

    def hashed(self, seed: int) -> np.ndarray:
        """Returns the bytes of each link, uplinks and then downlinks of leaf after leaf, as flows are hashed:
        each takes any spine, and so do both its links."""
        spine = self.spines(seed)
        each = self.weights / self.flows
        alike = bool((each == each[0]).all())
        weights = None if alike else np.repeat(each, self.flows)
        count = len(self.names) * self.links
        loads = [
            np.bincount((leaf[:, None] * self.links + spine).ravel(), weights, minlength=count)
            for leaf in (self.source, self.target)
        ]
        return np.concatenate(loads) * (each[0] if alike else 1.0)

    def named(self, loads: np.ndarray) -> str:
        """Returns the busiest link in words."""
        down, at = divmod(int(loads.argmax()), len(loads) // 2)
        leaf, spine = divmod(at, self.links)
        ends = f"leaf {self.names[leaf]}", f"spine {spine}"
        return " to ".join(ends[::-1] if down else ends)


def max_mean_ratio(loads: np.ndarray) -> float:
    """Returns MMR of the loads of links (the IETF's benchmarking drafts for AI fabrics): 1 is even."""
    return float(loads.max() / loads.mean())


def jain_index(loads: np.ndarray) -> float:
    """Returns Jain's fairness index of the loads of links, (Σx)² ÷ (n Σx²): 1 is even, 1/n one link alone."""
    return float(loads.sum() ** 2 / (len(loads) * (loads**2).sum()))
