"""The mapping of names: which published tensor is which weight, and what turns one into the other."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Tensor
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A published tensor and its weight: what the weight is, and the shapes of both.

    order: the weight's dims as they are published. merged: how many of these lie in each published dim.
    """

    tensor: Tensor
    info: WeightInfo
    shape: tuple[int, ...]

    @property
    def published(self) -> tuple[int, ...]:
        return self.tensor.shape(self.info, self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        dims = tuple(range(len(self.shape)))
        return self.info.outputs + self.info.inputs if self.tensor.transposed else dims

    @property
    def merged(self) -> tuple[int, ...]:
        if self.tensor.transposed:
            return len(self.info.outputs), len(self.info.inputs)
        return (1,) * len(self.shape) if self.info.inputs else (len(self.shape),)

    def sharding(self, like: Sharding) -> Sharding:
        """Returns how the published tensor lies where its weight is to lie as `like`, in device memory: what
        each device reads is what it keeps. Of merged dims only the first can be split."""
        like = like.with_memory_kind(next(iter(like.device_set)).default_memory().kind)
        if not isinstance(like, NamedSharding):
            return like
        axes = (*like.spec, *(None,) * (len(self.shape) - len(like.spec)))
        starts = [sum(self.merged[:dim]) for dim in range(len(self.merged))]
        # A published dim may be of no dims at all, if nothing but outputs is in a weight.
        spec = PartitionSpec(*(axes[self.order[at]] if self.order else None for at in starts))
        return NamedSharding(like.mesh, spec)

    def weight(self, dtype: jnp.dtype, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
        """Returns a jitted function: published tensor -> weight of this dtype, in device memory."""
        device = sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)
        return _weight(self.order, self.shape, dtype, device)

    def tensor_of(self, dtype: jnp.dtype) -> Callable[[jax.Array], jax.Array]:
        """Returns a jitted function: weight -> published tensor of this dtype."""
        return _tensor(self.order, self.published, dtype)


@functools.cache  # a jitted function keeps what it compiled
def _weight(order: tuple[int, ...], shape: tuple[int, ...], dtype, sharding) -> Callable:
    inverse = tuple(sorted(range(len(order)), key=order.__getitem__))

    def weight(x: jax.Array) -> jax.Array:
        x = x.reshape([shape[dim] for dim in order]).transpose(inverse).astype(dtype)
        # On a CPU what was put may be the mapped file itself: never hand that on.
        return jnp.array(x, copy=True)

    return jax.jit(weight, out_shardings=sharding)


@functools.cache
def _tensor(order: tuple[int, ...], published: tuple[int, ...], dtype) -> Callable:
    return jax.jit(lambda x: x.transpose(order).reshape(published).astype(dtype))


def mapped(config: FamilyConfig) -> dict[str, Mapped]:
    """Returns {published name: Mapped} of all weights, in the family's order. Raises InputError for a family
    without a table."""
    return {tensor.name: Mapped(tensor, *about) for tensor, *about in family.published_weights(config)}
