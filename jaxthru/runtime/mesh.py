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

AXES = ("data", "fsdp", "expert", "tensor")

MOST_EXPERT = 8
"""Devices along `expert` at most. Each gathers the tokens of all of them, which for eight experts a token
moves no more bytes than an all-to-all up to eight devices, and from there on ever more."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """One axis may be -1: whatever devices remain.

    data: replicas that hold whole parameters and average gradients.
    fsdp: shards of parameters, gradients and optimizer state; rows are split as over `data`.
    tensor: shards of heads, MLP width and vocabulary, and between blocks of the tokens of each row.
    expert: shards of the experts of a mixture-of-experts model, 8 at most; to all other layers it is `data`.
    expert_chunks: parts in which a layer's tokens move over `expert` and back: while one is multiplied, the
    next one is on its way. Fewer parts have more rows for each expert's product. None is 1 for
    mesh.expert = 2 with mesh.tensor = 1, where that was measured to be faster, else 2.
    place_experts_every: steps between two looks at how many tokens the experts of each device are given;
    where devices differ, experts change places (`engine.expert_placement`). The first looks are closer
    together: after step 1, every 8, and from 64 on four times each time that the steps double; 0 is never.
    transfers: `collectives` move parameters and their gradients over `fsdp`, or `copies`, which GPUs of one
    process make with their copy engines (`runtime.copies`), as they then do for tokens of experts and for
    `ring`. `auto` takes copies where they were measured to be as fast or faster, and fit
    (build/transfers_choice.py): over two H200s of one process.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    expert: int = 1
    expert_chunks: int | None = None
    place_experts_every: int = 100
    transfers: Literal["auto", "collectives", "copies"] = "auto"

    def __post_init__(self):
        for axis, size in self._wanted.items():
            require(size == -1 or size >= 1, f"mesh.{axis} = {size}: must be -1 (the rest) or at least 1")
        sizes = [*self._wanted.values()]
        require(sizes.count(-1) <= 1, f"mesh = {sizes}: at most one axis may be -1")
        self._check_expert(self.expert)
        chunks = self.expert_chunks
        require(chunks is None or chunks >= 1, f"mesh.expert_chunks = {chunks}: must be at least 1, or None")
        every = self.place_experts_every
        require(every >= 0, f"mesh.place_experts_every = {every}: must be at least 0, which is never")

    @property
    def _wanted(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def copies(self) -> bool:
        """Whether permutes between GPUs are to be copies."""
        return self.transfers == "copies"

    def chunks(self, expert: int, tensor: int) -> int:
        """Returns `expert_chunks` of layers whose experts lie over so many devices of these axes."""
        return self.expert_chunks or usual_chunks(expert, tensor)

    def shape(self, devices: int) -> dict[str, int]:
        """Returns the size of each of AXES on this many devices. Raises InputError if they cannot fill it."""
        fixed = math.prod(size for size in self._wanted.values() if size != -1)
        rest = -1 in self._wanted.values()
        wanted = ", ".join(f"{axis}={size}" for axis, size in self._wanted.items())
        require(
            devices % fixed == 0 and (rest or fixed == devices),
            f"mesh.{wanted}: needs {'a multiple of ' if rest else ''}{fixed} devices, found {devices}",
        )
        found = {axis: devices // fixed if size == -1 else size for axis, size in self._wanted.items()}
        self._check_expert(found["expert"])
        return found

    def _check_expert(self, size: int) -> None:
        require(
            size <= MOST_EXPERT,
            f"mesh.expert = {size}: must be at most {MOST_EXPERT}, each of which gathers the tokens of all; "
            "give the other devices to mesh.fsdp",
        )


def usual_chunks(expert: int | np.ndarray, tensor: int | np.ndarray) -> int | np.ndarray:
    """Returns in how many parts tokens move to experts over so many devices, where nothing is said."""
    return 2 - ((expert == 2) & (tensor == 1))


def shape_of(values: Mapping[str, Any], devices: int) -> dict[str, int]:
    """Returns what `shape` does of a MeshConfig's plain values, of which a newer one may lack some."""
    return MeshConfig(**{axis: size for axis, size in values.items() if axis in AXES}).shape(devices)


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with axes `AXES`; devices of one host are neighbours along `tensor`, then `expert`, then
    `fsdp`."""
    devices = hardware.devices() if devices is None else devices
    shape = config.shape(len(devices))
    grid = np.asarray(devices).reshape([*shape.values()])
    return Mesh(grid, (*shape,), axis_types=(AxisType.Auto,) * len(shape))
