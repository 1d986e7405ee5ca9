"""The load of a torus' links under a collective: rings along the dims of the boxes that its groups are."""

import functools
import math

import numpy as np

from jaxthru.plan.fabric import Fabric
from jaxthru.plan.network_links import BETWEEN_ALL, Links
from jaxthru.plan.network_traffic import Collective

LINK = "a link of the torus"


@functools.cache
def coordinates(dims: tuple[int, ...]) -> np.ndarray:
    """Returns where each device of a slice is, int64 [devices, dims], as JAX numbers them: host after host,
    each 2 × 2 chips where the dims are even, and the first dim's first."""
    block = [2 if size % 2 == 0 and at < 2 else 1 for at, size in enumerate(dims)]
    number = np.arange(math.prod(dims))
    grid = [size // side for size, side in zip(dims, block, strict=True)]
    host, within = np.divmod(number, math.prod(block))
    corner, inside = (
        np.stack(np.unravel_index(*of, order="F"), -1) for of in ((host, grid), (within, block))
    )
    return corner * block + inside


def on_torus(one: Collective, fabric: Fabric) -> Links:
    """Returns the loads of a collective on the links of a torus: rings in both directions along each dim that
    a group fills, or lines within it where groups are boxes; else through a group's members in turn."""
    dims, members = fabric.torus, one.members
    if one.pairs is not None:
        load = _routed(one.pairs, np.ones(len(one.pairs)), fabric)
        return Links(nvlink=load / fabric.link, busiest=LINK, hops=(1, 0))
    at = coordinates(dims)[one.groups]  # [groups, members, dims]
    extents = at.max(axis=1) - at.min(axis=1) + 1
    boxes = bool((extents.prod(axis=1) == members).all() and (extents == extents[0]).all())
    if not boxes:
        ring = np.stack([one.groups, np.roll(one.groups, -1, axis=1)], axis=-1).reshape(-1, 2)
        both = np.concatenate([ring, ring[:, ::-1]])
        load = _routed(both, np.full(len(both), (members - 1) / members / 2), fabric)
        return Links(nvlink=load / fabric.link, busiest=LINK, hops=(members // 2, 0))
    sides = [
        (int(extent), fabric.wrap and extent == size > 2)
        for extent, size in zip(extents[0], dims, strict=True)
    ]
    sides = [(extent, ring) for extent, ring in sides if extent > 1]
    steps = sum(extent // 2 if ring else extent - 1 for extent, ring in sides)
    if one.kind in BETWEEN_ALL:  # each byte passes as many links as its ends lie apart
        share = max(extent / (8 if ring else 4) for extent, ring in sides)
    else:
        share = (members - 1) / members / sum(2 if ring else 1 for _, ring in sides)
    return Links(nvlink=share / fabric.link, busiest=LINK, hops=(steps, 0))


def _routed(pairs: np.ndarray, weights: np.ndarray, fabric: Fabric) -> float:
    """Returns the bytes of the busiest link where each pair's go along one dim after the other, the shorter
    way round."""
    dims, most = fabric.torus, 0.0
    here, there = (coordinates(dims)[end].T.copy() for end in pairs.T)
    for dim, size in enumerate(dims):
        apart = there[dim] - here[dim]
        if fabric.wrap:
            apart = (apart + size // 2) % size - size // 2
        for sign in (1, -1):
            loads = np.zeros(math.prod(dims))
            position, left = here.copy(), np.maximum(apart * sign, 0)
            while left.any():
                going = left > 0
                np.add.at(loads, np.ravel_multi_index(position[:, going], dims), weights[going])
                position[dim, going] = (position[dim, going] + sign) % size
                left = left - going
            most = max(most, float(loads.max()))
        here[dim] = there[dim]
    return most
