"""The load of a torus' links under a collective: rings along the dims that its groups fill."""

import math

import numpy as np

from jaxthru.plan.fabric import Fabric
from jaxthru.plan.network_links import BETWEEN_ALL, Links
from jaxthru.plan.network_traffic import Collective


def on_torus(one: Collective, fabric: Fabric) -> Links:
    """Returns the loads of a collective on the links of a torus: rings in both directions along each dim that
    a group fills; through its members in turn where it fills none."""
    dims = fabric.torus
    at = np.stack(np.unravel_index(one.groups, dims, order="F"), axis=-1)  # [groups, members, dims]
    varied = (at != at[:, :1]).any(axis=(0, 1))
    sizes = [len(np.unique(at[0, :, dim])) if varied[dim] else 1 for dim in range(len(dims))]
    filled = math.prod(sizes) == one.members and all(size in (1, dims[dim]) for dim, size in enumerate(sizes))
    members = one.members
    steps = sum(size // 2 if fabric.wrap else size - 1 for size in sizes if size > 1)
    if one.pairs is None and filled:
        ways = sum(2 if fabric.wrap and size > 2 else 1 for size in sizes if size > 1)
        share = (members - 1) / members / ways
        if (
            one.kind in BETWEEN_ALL
        ):  # each byte passes as many links as its ends are apart, a quarter of a ring
            share = max(size / (8 if fabric.wrap else 4) for size in sizes if size > 1)
        return Links(nvlink=share / fabric.link, busiest="a link of the torus", hops=(steps, 0))
    if one.pairs is not None:
        load = _routed(one.pairs, np.ones(len(one.pairs)), fabric)
        return Links(nvlink=load / fabric.link, busiest="a link of the torus", hops=(steps, 0))
    ring = np.stack([one.groups, np.roll(one.groups, -1, axis=1)], axis=-1).reshape(-1, 2)
    both = np.concatenate([ring, ring[:, ::-1]])
    load = _routed(both, np.full(len(both), (members - 1) / members / 2), fabric)
    return Links(nvlink=load / fabric.link, busiest="a link of the torus", hops=(members // 2, 0))


def _routed(pairs: np.ndarray, weights: np.ndarray, fabric: Fabric) -> float:
    """Returns the bytes of the busiest link where each pair's go along one dim after the other, the shorter
    way round."""
    dims, most = fabric.torus, 0.0
    here, there = (np.stack(np.unravel_index(end, dims, order="F")) for end in pairs.T)
    here = here.copy()
    for dim, size in enumerate(dims):
        apart = there[dim] - here[dim]
        if fabric.wrap:
            apart = (apart + size // 2) % size - size // 2
        for sign in (1, -1):
            loads = np.zeros(math.prod(dims))
            position = here.copy()
            left = np.maximum(apart * sign, 0)
            while left.any():
                going = left > 0
                flat = np.ravel_multi_index(position[:, going], dims, order="F")
                np.add.at(loads, flat, weights[going])
                position[dim, going] = (position[dim, going] + sign) % size
                left = left - going
            most = max(most, float(loads.max()))
        here[dim] = there[dim]
    return most
