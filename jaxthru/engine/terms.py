"""What a step records: losses and metrics of stages, combined over micro-batches and stages."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.models.stage import Chain, Extras, Stage

Terms = dict[str, jax.Array]
CORE = ("loss", "source_loss", "source_tokens")
"""Sums of the cross-entropy, which the objective gives."""


def of_stage(chain: Chain, stage: Stage, extras: Extras, share: jax.Array) -> Terms:
    """Returns what a stage adds to the record of a step, of one micro-batch, float32.

    share: of the step's tokens. Raises ValueError for a metric that is not declared.
    """
    terms = {name: value.astype(jnp.float32) * share for name, value in extras.losses.items()}
    for name, value in extras.metrics.items():
        if name not in stage.metrics or name in CORE:
            raise ValueError(f"stage {stage.name!r} gives the metric {name!r}, which is not in its metrics")
        if stage.metrics[name].reduce == "mean":
            count = sum(name in other.metrics for other in (chain.embedding, *chain.layers, chain.head))
            value = value.astype(jnp.float32) * share / count
        terms[name] = value.astype(jnp.float32)
    return jax.lax.stop_gradient(terms)


def merged(chain: Chain, one: Terms, other: Terms) -> Terms:
    """Returns the terms of two stages or micro-batches as one's."""
    return one | {
        name: _combine(chain, name)(one[name], value) if name in one else value
        for name, value in other.items()
    }


def over_first(chain: Chain, terms: Any) -> Terms:
    """Returns terms [count, ...] of so many stages or micro-batches as one's."""
    return {
        name: jnp.max(value, 0) if _combine(chain, name) is jnp.maximum else jnp.sum(value, 0)
        for name, value in terms.items()
    }


def none_yet(chain: Chain, shapes: Terms) -> Terms:
    """Returns terms that change nothing when merged. shapes: abstract ones."""

    def neutral(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(shape.shape, -jnp.inf if _combine(chain, name) is jnp.maximum else 0, shape.dtype)

    return {name: neutral(name, shape) for name, shape in shapes.items()}


def _combine(chain: Chain, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    declared = (stage.metrics[name] for stage in chain.stages if name in stage.metrics)
    return jnp.maximum if any(metric.reduce == "max" for metric in declared) else jnp.add
