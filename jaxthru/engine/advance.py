"""What moves weights that have no gradient, by what their layers counted in a step: `Stage.advance`."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.engine.model import LAYERS, Model
from jaxthru.engine.terms import Terms
from jaxthru.models.stage import Stage

Tree = Any
Rows = int | np.ndarray


def by_stage(model: Model, terms: Terms) -> list[Callable[[Tree], Tree] | None]:
    """Returns what advances each tree of `split_stages`: params -> params, of stacked layers stacked ones;
    None where nothing does. terms: of a whole step."""
    return [
        _advance(stage, terms, rows, stacked=at >= LAYERS and model.loop != "unroll")
        for at, (stage, rows) in enumerate(rows_by_stage(model))
    ]


def rows_by_stage(model: Model) -> list[tuple[Stage, dict[str, Rows]]]:
    """Returns of each tree of `split_stages` its stage, and where its layer is in each of the metrics of
    `layers` that it has; of stacked layers where all of them are, [layers]."""
    chain, rows = model.chain, []
    seen: collections.Counter[str] = collections.Counter()
    for stage in (chain.embedding, *chain.layers, chain.head):
        rows.append({name: seen[name] for name in stage.by_layer})
        seen.update(stage.by_layer)
    embedding, *layers, head = rows

    def stack(rows: list[dict[str, int]]) -> dict[str, Rows]:
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    return model.by_tree(embedding, layers, head, stack)


def of_layer(stage: Stage, terms: Terms) -> Callable[[Tree], Tree] | None:
    """Returns what advances a layer's params. terms: of that layer alone, over the step."""
    return _advance(stage, terms, dict.fromkeys(stage.by_layer, 0))


def _advance(
    stage: Stage, terms: Terms, rows: dict[str, Rows], stacked: bool = False
) -> Callable[[Tree], Tree] | None:
    if stage.advance is None:
        return None
    counted = {name: terms[name][of] for name, of in rows.items()}
    advance = jax.vmap(stage.advance) if stacked else stage.advance
    return lambda params: advance(params, counted)


def where(used: jax.Array, advance: Callable[[Tree], Tree], params: Tree) -> Tree:
    """Returns params, advanced where `used`."""
    return jax.tree.map(
        lambda new, old: old if new is old else jnp.where(used, new, old).astype(old.dtype),
        advance(params),
        params,
    )


def updated(stage: Stage, infos: Tree) -> Tree:
    """Returns whether each of a stage's weights takes part in its update: what trains, and all that the stage
    may advance."""
    return jax.tree.map(lambda info: info.trains or stage.advance is not None, infos)
