"""The device mesh: three named axes over all devices of all processes."""

import dataclasses
import math
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxthru.runtime import hardware
from jaxthru.runtime.errors import require

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis. One axis may be -1: whatever devices remain.

    data: replicas that hold whole parameters and average gradients.
    fsdp: parameters, gradients and optimizer state are sharded; rows are split as over `data`.
    tensor: heads, MLP width and vocabulary are sharded, and between blocks the tokens of each row.
    transfers: `collectives` move parameters and their gradients over `fsdp`, or `copies`, which GPUs of one
    process make with their copy engines (`runtime.copies`), as they then do for `ring`. `auto` takes
    collectives.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    transfers: Literal["auto", "collectives", "copies"] = "auto"

    def __post_init__(self):
        sizes = [getattr(self, axis) for axis in AXES]
        for axis, size in zip(AXES, sizes, strict=True):
            require(size == -1 or size >= 1, f"mesh.{axis} = {size}: must be -1 (the rest) or at least 1")
        require(sizes.count(-1) <= 1, f"mesh = {sizes}: at most one axis may be -1")

    @property
    def copies(self) -> bool:
        """Whether permutes between GPUs are to be copies."""
        return self.transfers == "copies"

    def shape(self, devices: int) -> tuple[int, int, int]:
        """Returns (data, fsdp, tensor) for this many devices. Raises InputError if they cannot fill it."""
        sizes = [getattr(self, axis) for axis in AXES]
        fixed = math.prod(size for size in sizes if size != -1)
        wanted = f"mesh.data={sizes[0]}, fsdp={sizes[1]}, tensor={sizes[2]}"
        require(
            devices % fixed == 0 and (-1 in sizes or fixed == devices),
            f"{wanted}: needs {'a multiple of ' if -1 in sizes else ''}{fixed} devices, found {devices}",
        )
        return tuple(devices // fixed if size == -1 else size for size in sizes)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with axes `AXES`; devices of one host are neighbours along `tensor`, then `fsdp`."""
    devices = hardware.devices() if devices is None else devices
    shape = config.shape(len(devices))
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
