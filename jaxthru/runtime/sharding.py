"""Logical axis rules: one table, logical axis -> mesh axes. Models and the step name logical axes alone."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthru.runtime.errors import require

LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "tokens": ("data", "fsdp", "expert", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "sequence": (),
    "head_dim": (),
    "layers": (),
    "experts": ("expert",),
    "routed": (),
}
"""A mesh axis serves one dim of an array. Where two ask for it, the one higher in this table gets it: an
activation's `batch` takes `fsdp` and `expert`, so that only in parameters `embed` and `experts` are sharded
over them. Parameters without `experts` are whole along `expert`, as they are along `data`. `routed` counts
experts too, in routers, which each device has whole.

`tokens` is rows × positions in one dim: between a model's blocks `tensor` splits the tokens of each shard of
`batch`, in order (sequence parallelism), so that gathering them over `tensor` is all that it takes to have
whole rows again."""

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and how logical axes lie on it."""

    mesh: Mesh

    @property
    def live_axes(self) -> tuple[str, ...]:
        """The mesh axes with more than one device. No spec names another: a collective over one device
        would still cost a kernel."""
        return tuple(name for name in self.mesh.axis_names if self.mesh.shape[name] > 1)

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any, check_vma: bool) -> Callable:
        """Returns `function` run once a shard.

        With check_vma all axes can be named within, as kernels need that address other devices. Without, the
        gradient of what no spec splits would be summed over axes of one device too; those then stay out.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.mesh.axis_names if check_vma else self.live_axes),
            check_vma=check_vma,
        )

    def size(self, axis: str) -> int:
        """Returns over how many devices a logical axis is split when nothing else competes for them."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in LOGICAL_AXIS_RULES[axis])

    def spec(self, axes: Axes, without: tuple[str, ...] = ()) -> PartitionSpec:
        """Returns the spec of an array whose dims carry these logical axes (None is unsharded).

        without: mesh axes to leave out, e.g. `fsdp` for parameters gathered for use.
        """
        order = list(LOGICAL_AXIS_RULES)
        taken: dict[str, int] = {}
        for dim in sorted(range(len(axes)), key=lambda d: order.index(axes[d]) if axes[d] else len(order)):
            for mesh_axis in LOGICAL_AXIS_RULES[axes[dim]] if axes[dim] else ():
                if mesh_axis not in without and mesh_axis not in taken:
                    taken[mesh_axis] = dim
        entries = []
        for dim in range(len(axes)):
            names = tuple(name for name in self.live_axes if taken.get(name) == dim)
            entries.append(names[0] if len(names) == 1 else names or None)
        return PartitionSpec(*entries)

    def sharding(self, axes: Axes, without: tuple[str, ...] = ()) -> NamedSharding:
        """Returns the sharding of an array whose dims carry these logical axes."""
        return NamedSharding(self.mesh, self.spec(axes, without))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Returns `x`, laid out within a compiled program as its logical axes say."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def gathered(self, parameter: jax.Array, axes: Axes) -> jax.Array:
        """Returns a parameter of these logical axes, cast to what is to move, whole over `fsdp`.

        First it is laid out as it is stored. Else the partitioner gathers what it was cast from, where that
        comes from behind a barrier, as all does of which `jax.checkpoint` makes something again.
        """
        cast = self.constrain(parameter, axes)
        return jax.lax.with_sharding_constraint(cast, self.sharding(axes, without=("fsdp",)))


def check_divisible(layout: Layout, sizes: dict[str, tuple[str, int]]) -> None:
    """Raises InputError unless each size divides over its logical axis.

    sizes: {configuration key: (logical axis, size)}.
    """
    for key, (axis, size) in sizes.items():
        parts = layout.size(axis)
        names = [name for name in LOGICAL_AXIS_RULES[axis] if name in layout.live_axes]
        over = " × ".join(f"mesh.{name}" for name in names)
        require(size % parts == 0, f"{key} = {size}: must be a multiple of {over} = {parts}")


def shardings(tree: Any) -> Any:
    """Returns the shardings of a tree of arrays, or of abstract ones."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
