"""The collectives of a compiled step: what they move between which devices, and the same on more devices."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from jaxthru.profile.account.attribution import Attribution
from jaxthru.profile.read import hlo
from jaxthru.runtime.errors import require
from jaxthru.runtime.mesh import AXES


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """One collective of a step. kind: as HLO names it. bytes: of the whole array that is gathered, scattered
    or summed; of an all-to-all or a permute, what a device sends. groups: int64 [groups, members], devices by
    their number in the mesh. pairs: int64 [pairs, 2], (from, to) of a permute. runs: a step. axes: of the
    mesh that the groups lie along, empty where they lie along none."""

    name: str
    kind: str
    bytes: float
    groups: np.ndarray
    runs: float = 1.0
    dtype: str = "bf16"
    layer: str = "other"
    phase: str = "other"
    pairs: np.ndarray | None = None
    axes: tuple[str, ...] = ()

    @property
    def members(self) -> int:
        """The devices of a group."""
        return self.groups.shape[1]


def read(module: hlo.Module, shape: dict[str, int], kinds: Collection[str] = ()) -> list[Collective]:
    """Returns the collectives of a step's program, each spelling of them once.

    shape: size of each axis of the mesh it was compiled for, in the mesh's order. kinds: name scopes of the
    model's own. Raises InputError where the program is for other devices.
    """
    devices, found = math.prod(shape.values()), []
    for work in Attribution({module.name: module}, kinds).all():
        instruction = work.instruction
        if work.collective is None or instruction.opcode.endswith("-done"):
            continue
        spoken = _speaks(module, instruction)
        groups = spoken.groups or [[*range(devices)]]
        require(
            len({len(group) for group in groups}) == 1 and max(map(max, groups)) < devices,
            f"{instruction.name}: its groups are not of {devices} devices in equal parts; is --devices that "
            "of the program?",
        )
        if len(groups[0]) == 1:
            continue
        array = np.array(groups)
        dtype = next((kind for kind, _ in module.operand_shapes(instruction)), "")
        pairs = np.array(spoken.pairs) if spoken.pairs else None
        lies = axes_of(array, shape) if pairs is None else axes_between(pairs, shape)
        found.append(
            Collective(
                *(instruction.name, work.collective, float(work.bytes), array, work.runs, dtype),
                *(work.layer, work.phase, pairs, lies),
            )
        )
    return found


def _speaks(module: hlo.Module, instruction: hlo.Instruction) -> hlo.Instruction:
    """Returns the instruction that names the groups: what an `async-start` wraps."""
    inner = (found for found, _ in module.inner(instruction))
    return next((one for one in inner if one.groups), instruction)


def axes_of(groups: np.ndarray, shape: dict[str, int]) -> tuple[str, ...]:
    """Returns the axes of the mesh along which groups lie whole, none where they are not of that kind."""
    places = np.stack(np.unravel_index(groups, [*shape.values()]))  # [axes, groups, members]
    varies = [bool((place != place[:, :1]).any()) for place in places]
    along = tuple(name for name, varied in zip(shape, varies, strict=True) if varied)
    whole = math.prod(shape[name] for name in along) == groups.shape[1]
    return along if whole and groups.size == math.prod(shape.values()) else ()


def axes_between(pairs: np.ndarray, shape: dict[str, int]) -> tuple[str, ...]:
    """Returns the axes of the mesh along which a permute's devices lie apart."""
    places = np.stack(np.unravel_index(pairs, [*shape.values()]))  # [axes, pairs, 2]
    return tuple(
        name for name, place in zip(shape, places, strict=True) if (place[:, 0] != place[:, 1]).any()
    )


def along(axes: Sequence[str], shape: dict[str, int]) -> np.ndarray:
    """Returns the groups, int64 [groups, members], that lie along these axes of a mesh."""
    order = [name for name in shape if name not in axes] + [name for name in shape if name in axes]
    numbers = np.arange(math.prod(shape.values())).reshape([*shape.values()])
    members = math.prod(shape[name] for name in axes)
    return numbers.transpose([[*shape].index(name) for name in order]).reshape(-1, members)


SUMS = (("data",), ("expert",), ("data", "expert"))
"""Axes along which gradients are summed, of which a device has its shard over `fsdp`. What else moves along
`expert` are tokens."""

COMPILED_AT = 32
"""Devices that a step is compiled for at most, unless `expert` and `tensor` ask for more: enough to show
which axes each collective lies along, and few enough that any model's arrays divide."""


def compiled_shape(shape: dict[str, int], most: int = COMPILED_AT) -> dict[str, int]:
    """Returns the mesh that stands for a larger one of this shape. See `scaled` for the rule.

    `expert` and `tensor` stay, `data` becomes 2 at most, and `fsdp` the largest of its divisors that leaves
    `most` devices, but no less than 2.
    """
    small = dict(shape)
    if math.prod(shape.values()) <= most:
        return small
    small["data"] = min(shape["data"], 2)
    beside = math.prod(size for name, size in small.items() if name != "fsdp")
    fits = [size for size in range(1, shape["fsdp"] + 1) if shape["fsdp"] % size == 0]
    least = min((size for size in fits if size > 1), default=1)
    small["fsdp"] = max((size for size in fits if size * beside <= most), default=1)
    return small | {"fsdp": max(small["fsdp"], least)}


def scaled(found: Sequence[Collective], small: dict[str, int], shape: dict[str, int]) -> list[Collective]:
    """Returns the collectives of a step on a mesh of `shape`, from those compiled for a smaller one.

    The rule: rows are scaled with the devices, so that each device has as many; then each collective lies
    along the same axes and runs as often. Its array is as large, but where it is a shard over `fsdp`: what
    is summed along `data` and `expert` alone, and what a permute along `fsdp` passes on in as many more runs.
    Raises InputError for groups that lie along no axes.
    """
    if small == shape:
        return [*found]
    share = small["fsdp"] / shape["fsdp"]
    larger = []
    for one in found:
        require(bool(one.axes), f"{one.name}: its groups lie along no axes of the mesh, so none are larger")
        groups, size, runs, pairs = along(one.axes, shape), one.bytes, one.runs, None
        if one.axes == ("data",) or (one.kind == "all-reduce" and one.axes in SUMS):
            size *= share
        if one.pairs is not None:
            pairs = _shifted(one, small, groups)
            steps = shape["fsdp"] - 1, small["fsdp"] - 1
            if "fsdp" in one.axes and min(steps) > 0:
                size, runs = size * share, runs * steps[0] / steps[1]
        larger.append(dataclasses.replace(one, groups=groups, bytes=size, runs=runs, pairs=pairs))
    return larger


def _shifted(one: Collective, small: dict[str, int], groups: np.ndarray) -> np.ndarray:
    """Returns the pairs of a permute by as many places in larger groups: its most frequent shift."""
    own = along(one.axes, small)
    members, place = own.shape[1], np.empty(own.size, np.int64)
    place[own.ravel()] = np.tile(np.arange(members), len(own))
    shifts = (place[one.pairs[:, 1]] - place[one.pairs[:, 0]]) % members
    shift = int(np.bincount(shifts).argmax())
    shift -= members * (shift > members // 2)
    return np.stack([groups, np.roll(groups, -shift, axis=1)], axis=-1).reshape(-1, 2)


def shape_of(mesh_shape: dict[str, int]) -> dict[str, int]:
    """Returns a mesh's shape with every axis of `runtime.mesh.AXES`, in that order."""
    return {name: mesh_shape.get(name, 1) for name in AXES}
