"""The facts about a family's model that the profiler uses; it knows nothing else of the family."""

import itertools
import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.remat import KEPT, kept_bytes, recomputed
from jaxthru.models.stage import Stage, distinct
from jaxthru.profile.read.facts import Facts
from jaxthru.runtime.sharding import LOGICAL_AXIS_RULES
from jaxthru.runtime.weights import WeightInfo

POLICIES = (*KEPT, "none")


def facts(config: FamilyConfig, compute: str) -> Facts:
    """Returns the facts of a model of this shape. compute: the dtype of activations."""
    train_flops, chain = family.module_of(config).train_flops, family.chain(config)
    item = jnp.dtype(compute).itemsize
    blocks = [(stage, chain.layers.count(stage)) for stage in distinct(chain.layers)]
    ends = _matrices(chain.embedding) + _matrices(chain.head)
    matrices = [(_matrices(stage), count) for stage, count in blocks]
    dims = dict(_dims(itertools.chain(ends, *(each for each, _ in matrices))))
    named = {key: axis for axis, size in dims.items() if (key := config.field(axis, size))}
    return Facts(
        matmul_flops_per_token=train_flops(config, 1, 0),
        attention_flops=train_flops(config, 0, 1),
        layers=len(chain.layers),
        layer_parameters=sum(count * math.prod(shape) for each, count in matrices for _, shape in each),
        widths={key: dims[axis] for key, axis in named.items()},
        split_widths=tuple(key for key, axis in named.items() if "tensor" in LOGICAL_AXIS_RULES[axis]),
        kept={
            one: sum(count * kept_bytes(stage.kept, one, item) for stage, count in blocks) for one in POLICIES
        },
        recomputed={
            one: sum(count * recomputed(stage.matmul_flops, one) for stage, count in blocks)
            for one in POLICIES
        },
        scopes=tuple({scope: None for stage in chain.stages for scope in stage.scopes}),
        exchanges=dict(item for stage in chain.stages for item in stage.exchanges.items()),
    )


def _matrices(stage: Stage) -> list[tuple[WeightInfo, tuple[int, ...]]]:
    """Returns what each matrix or table of a stage is, and its shape."""
    pairs = zip(jax.tree.leaves(stage.weights), jax.tree.leaves(stage.shapes), strict=True)
    return [(info, leaf.shape) for info, leaf in pairs if info.role in ("matrix", "table")]


def _dims(matrices: Iterable[tuple[WeightInfo, tuple[int, ...]]]) -> Iterator[tuple[str, int]]:
    """Yields logical axis and size of the dims that are a matrix's whole width."""
    for info, shape in matrices:
        for side in (info.inputs, info.outputs):
            if len(side) == 1 and info.axes[side[0]]:
                yield info.axes[side[0]], shape[side[0]]
