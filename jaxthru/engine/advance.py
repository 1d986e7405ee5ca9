"""What moves weights that have no gradient, by what their layers counted in a step: `Stage.advance`."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.engine.model import Model
from jaxthru.engine.terms import Terms
from jaxthru.models.stage import Stage

Tree = Any


def by_stage(model: Model, terms: Terms) -> list[Callable[[Tree], Tree] | None]:
    """Returns what advances each tree of `split_stages`: params -> params, of stacked layers stacked ones;
    None where nothing does. terms: of a whole step."""
    chain, rows = model.chain, []
    seen: collections.Counter[str] = collections.Counter()
    for stage in (chain.embedding, *chain.layers, chain.head):
        rows.append({name: seen[name] for name in stage.by_layer})
        seen.update(stage.by_layer)
    first, *of_layers, last = rows
    found = [_of_one(chain.embedding, terms, first), _of_one(chain.head, terms, last)]
    for group in chain.groups:
        layers, count = group.blocks * group.repetitions, len(group.blocks)
        own, of_layers = of_layers[: len(layers)], of_layers[len(layers) :]
        if model.loop == "unroll":
            found += [_of_one(stage, terms, row) for stage, row in zip(layers, own, strict=True)]
        else:
            found += [_of_several(stage, terms, own[at::count]) for at, stage in enumerate(group.blocks)]
    return found


def of_layer(stage: Stage, terms: Terms) -> Callable[[Tree], Tree] | None:
    """Returns what advances a layer's params. terms: of that layer alone, over the step."""
    return _of_one(stage, terms, dict.fromkeys(stage.by_layer, 0))


def where(used: jax.Array, advance: Callable[[Tree], Tree], params: Tree) -> Tree:
    """Returns params, advanced where `used`."""
    return jax.tree.map(
        lambda new, old: old if new is old else jnp.where(used, new, old).astype(old.dtype),
        advance(params),
        params,
    )


def _of_one(stage: Stage, terms: Terms, rows: dict[str, int]) -> Callable[[Tree], Tree] | None:
    if stage.advance is None:
        return None
    counted = {name: terms[name][row] for name, row in rows.items()}
    return lambda params: stage.advance(params, counted)


def _of_several(stage: Stage, terms: Terms, rows: list[dict[str, int]]) -> Callable[[Tree], Tree] | None:
    if stage.advance is None:
        return None
    counted = {name: terms[name][np.array([row[name] for row in rows])] for name in stage.by_layer}
    return lambda params: jax.vmap(stage.advance)(params, counted)


def updated(stage: Stage, infos: Tree) -> Tree:
    """Returns whether each of a stage's weights takes part in its update: what trains, and all that the stage
    may advance."""
    return jax.tree.map(lambda info: info.trains or stage.advance is not None, infos)
