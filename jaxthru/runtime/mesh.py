"""The device mesh: named axes over all devices of all processes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxthru.runtime import hardware
from jaxthru.runtime.errors import require

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """One axis may be -1: whatever devices remain.

    data: replicas that hold whole parameters and average gradients.
    fsdp: shards of parameters, gradients and optimizer state; rows are split as over `data`.
    tensor: shards of heads, MLP width and vocabulary, and between blocks of the tokens of each row.
    transfers: `collectives` move parameters and their gradients over `fsdp`, or `copies`, which GPUs of one
    process make with their copy engines (`runtime.copies`), as they then do for `ring`. `auto` takes
    collectives.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    transfers: Literal["auto", "collectives", "copies"] = "auto"

    def __post_init__(self):
        for axis, size in self._wanted.items():
            require(size == -1 or size >= 1, f"mesh.{axis} = {size}: must be -1 (the rest) or at least 1")
        sizes = [*self._wanted.values()]
        require(sizes.count(-1) <= 1, f"mesh = {sizes}: at most one axis may be -1")

    @property
    def _wanted(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def copies(self) -> bool:
        """Whether permutes between GPUs are to be copies."""
        return self.transfers == "copies"

    def shape(self, devices: int) -> dict[str, int]:
        """Returns the size of each of AXES on this many devices. Raises InputError if they cannot fill it."""
        fixed = math.prod(size for size in self._wanted.values() if size != -1)
        rest = -1 in self._wanted.values()
        wanted = ", ".join(f"{axis}={size}" for axis, size in self._wanted.items())
        require(
            devices % fixed == 0 and (rest or fixed == devices),
            f"mesh.{wanted}: needs {'a multiple of ' if rest else ''}{fixed} devices, found {devices}",
        )
        return {axis: devices // fixed if size == -1 else size for axis, size in self._wanted.items()}


def shape_of(values: Mapping[str, Any], devices: int) -> dict[str, int]:
    """Returns what `shape` does of a MeshConfig's plain values, of which a newer one may lack some."""
    return MeshConfig(**{axis: size for axis, size in values.items() if axis in AXES}).shape(devices)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with axes `AXES`; devices of one host are neighbours along `tensor`, then `fsdp`."""
    devices = hardware.devices() if devices is None else devices
    shape = config.shape(len(devices))
    grid = np.asarray(devices).reshape([*shape.values()])
    return Mesh(grid, (*shape,), axis_types=(AxisType.Auto,) * len(shape))
