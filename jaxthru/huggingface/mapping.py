"""The mapping of names: which published tensor is which weight, and what turns one into the other."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Tensor
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A published tensor and its weight: what the weight is, and its shape.

    order: the dims of what the tensor is of the weight as they are published. merged: how many of these lie
    in each published dim.
    """

    tensor: Tensor
    info: WeightInfo
    shape: tuple[int, ...]

    @property
    def published(self) -> tuple[int, ...]:
        """The published shape."""
        return self.tensor.shape(self.info, self.shape)

    @property
    def own(self) -> tuple[WeightInfo, tuple[int, ...]]:
        """What the tensor is of the weight, and that one's shape."""
        return self.tensor.own(self.info, self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        info, shape = self.own
        return info.stack + info.outputs + info.inputs if self.tensor.transposed else tuple(range(len(shape)))

    @property
    def merged(self) -> tuple[int, ...]:
        info, shape = self.own
        if self.tensor.transposed:
            apart = len(info.stack[:1])
            return (1,) * apart + (len(info.stack) - apart + len(info.outputs), len(info.inputs))
        return (1,) * len(shape) if info.inputs else (len(shape),)

    def sharding(self, like: Sharding) -> Sharding:
        """Returns how the published tensor lies where its weight is to lie as `like`, in device memory: what
        each device reads is what it keeps. Of merged dims only the first can be split."""
        like = like.with_memory_kind(next(iter(like.device_set)).default_memory().kind)
        if not isinstance(like, NamedSharding):
            return like
        axes = (*like.spec, *(None,) * (len(self.shape) - len(like.spec)))
        axes = [axis for dim, axis in enumerate(axes) if dim not in dict(self.tensor.part)]
        starts = [sum(self.merged[:dim]) for dim in range(len(self.merged))]
        # A published dim may be of no dims at all, if nothing but outputs is in a weight.
        spec = PartitionSpec(*(axes[self.order[at]] if self.order else None for at in starts))
        return NamedSharding(like.mesh, spec)

    def weight(self, dtype: jnp.dtype, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
        """Returns a jitted function: published tensor -> weight of this dtype, in device memory."""
        device = sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)
        return _weight(self.order, self.shape, dtype, device)

    def joined(self, pieces: Sequence[jax.Array], shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Returns what a device keeps of a weight, made there of the parts of its tensors that it has, in the
        order of their places. shape: of that."""
        return _joined(self.order, tuple(dim for dim, _ in self.tensor.part), shape, dtype)(list(pieces))

    def tensor_of(self, dtype: jnp.dtype) -> Callable[[jax.Array], jax.Array]:
        """Returns a function: weight -> published tensor of this dtype."""
        dims, places = tuple(dim for dim, _ in self.tensor.part), [place for _, place in self.tensor.part]
        tensor = _tensor(self.order, self.published, dtype, dims)
        return lambda weight: tensor(weight, places)


@functools.cache  # a jitted function keeps what it compiled
def _weight(order: tuple[int, ...], shape: tuple[int, ...], dtype, sharding) -> Callable:
    def weight(x: jax.Array) -> jax.Array:
        x = _in_own_order(x, order, shape).astype(dtype)
        # On a CPU what was put may be the mapped file itself: never hand that on.
        return jnp.array(x, copy=True)

    return jax.jit(weight, out_shardings=sharding)


@functools.cache
def _joined(order: tuple[int, ...], dims: tuple[int, ...], shape: tuple[int, ...], dtype) -> Callable:
    own = tuple(size for dim, size in enumerate(shape) if dim not in dims)
    counts = [shape[dim] for dim in dims]

    def joined(pieces: list[jax.Array]) -> jax.Array:
        stack = jnp.stack([_in_own_order(piece, order, own).astype(dtype) for piece in pieces])
        return jnp.moveaxis(stack.reshape(*counts, *own), range(len(dims)), dims)

    return jax.jit(joined)


def _in_own_order(x: jax.Array, order: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
    return x.reshape([shape[dim] for dim in order]).transpose(inverse)


@functools.cache
def _tensor(order: tuple[int, ...], published: tuple[int, ...], dtype, dims: tuple[int, ...]) -> Callable:
    def tensor(x: jax.Array, places: list[int]) -> jax.Array:
        for dim, place in sorted(zip(dims, places, strict=True), key=lambda pair: -pair[0]):
            x = jax.lax.dynamic_index_in_dim(x, place, dim, keepdims=False)
        return x.transpose(order).reshape(published).astype(dtype)

    return jax.jit(tensor)


def mapped(config: FamilyConfig, names: Collection[str] = ()) -> dict[str, Mapped]:
    """Returns {published name: Mapped} of all weights, in the family's order. names: of a folder's tensors,
    by which the table is chosen where the family has several. Raises InputError for a family without one."""
    published = family.published(config)
    table = max((published.tensors, *published.others), key=lambda each: _known(each(config), names))
    rows = family.published_weights(config, table)
    return {tensor.name: Mapped(tensor, *about) for tensor, *about in rows}


def _known(tensors, names: Collection[str]) -> int:
    return sum(tensor.name in names for tensor in tensors)
