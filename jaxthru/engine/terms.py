"""What a step records: losses and metrics of stages, combined over micro-batches and stages."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxthru.models.stage import Chain, Extras, Metric, Stage
from jaxthru.runtime.errors import require

Terms = dict[str, jax.Array]

OF_A_STEP = (
    *("loss", "source_loss", "source_tokens", "grad_norm", "learning_rate", "skipped", "skipped_in_a_row"),
    *("partly_updated", "attention_span", "tokens", "trained_tokens"),
)
"""What every step counts on the device. Whatever else it returns is a further metric, under its own name."""

METRICS_FIELDS = (
    "step",
    "loss",
    "loss_by_source",
    "grad_norm",
    "learning_rate",
    "tokens",
    "trained_tokens",
    "masked_share",
    "packing_fill",
    "attention_span",
    "step_seconds",
    "tokens_per_second",
    "model_tflops",
    "mfu",
    "bf16_peak_tflops",
    "data_wait_seconds",
    "host_gap_seconds",
    "checkpoint_seconds",
    "skipped_updates",
    "partly_updated",
    "goodput",
    "hbm_peak_bytes",
    "joules",
    "joules_per_token",
    "dollars",
    "dollars_per_million_tokens",
)
"""What a row of metrics.jsonl has of every step."""


def of_stage(chain: Chain, stage: Stage, extras: Extras, share: jax.Array) -> Terms:
    """Returns what a stage adds to the record of a step, of one micro-batch, float32; its metrics by `layers`
    are [1, ...], and integers among them stay so.

    share: of the step's rows. Raises InputError for a metric that is not declared, or whose name another has.
    """
    _check_names(chain, stage, extras)
    terms = {name: value.astype(jnp.float32) * share for name, value in extras.losses.items()}
    for name, value in extras.metrics.items():
        how = stage.metrics[name].reduce
        if how == "layers":
            exact = jnp.issubdtype(value.dtype, jnp.integer)
            terms[name] = (value if exact else value.astype(jnp.float32))[None]
            continue
        if how == "mean":
            count = sum(name in other.metrics for other in (chain.embedding, *chain.layers, chain.head))
            value = value.astype(jnp.float32) * share / count
        terms[name] = value.astype(jnp.float32)
    return jax.lax.stop_gradient(terms)


def _check_names(chain: Chain, stage: Stage, extras: Extras) -> None:
    for name in (*extras.losses, *extras.metrics):
        said = f"metric {name!r} of stage {stage.name!r}"
        declared = {other.metrics[name].reduce for other in chain.stages if name in other.metrics}
        taken = name in OF_A_STEP or name in METRICS_FIELDS
        require(not taken, f"{said}: every step has one of this name; give it another")
        require(
            name in extras.losses or name in stage.metrics, f"{said}: is not in Stage.metrics; declare it"
        )
        require(name not in extras.losses or not declared, f"{said}: is a loss, too; give one another name")
        require(len(declared) <= 1, f"{said}: adds up as {' and '.join(sorted(declared))}; choose one")


def merged(chain: Chain, one: Terms, other: Terms) -> Terms:
    """Returns the terms of two stages, or of two runs of them, as one's. other: of the later ones."""

    def both(name: str, value: jax.Array) -> jax.Array:
        if _reduce(chain, name) == "layers":
            return jnp.concatenate([one[name], value])
        return _combine(chain, name)(one[name], value)

    return one | {name: both(name, value) if name in one else value for name, value in other.items()}


def with_micro_batch(chain: Chain, terms: Terms, more: Terms) -> Terms:
    """Returns the terms of some micro-batches with those of one more."""
    return {name: _combine(chain, name)(terms[name], value) for name, value in more.items()}


def over_micro_batches(chain: Chain, terms: Terms) -> Terms:
    """Returns terms [micro-batches, ...] as one's."""
    return {
        name: jnp.max(value, 0) if _reduce(chain, name) == "max" else jnp.sum(value, 0)
        for name, value in terms.items()
    }


def over_repetitions(chain: Chain, terms: Terms) -> Terms:
    """Returns terms [repetitions, ...] of a pattern of stages as those of all of them."""
    apart = [name for name in terms if _reduce(chain, name) == "layers"]
    added = over_micro_batches(chain, {name: terms[name] for name in terms if name not in apart})
    return added | {name: terms[name].reshape(-1, *terms[name].shape[2:]) for name in apart}


def counted(stage: Stage, terms: Terms) -> Terms:
    """Returns those of a layer's terms that it is advanced by."""
    return {name: terms[name] for name in stage.by_layer} if stage.advance else {}


def none_yet(chain: Chain, shapes: Terms) -> Terms:
    """Returns terms that change nothing when merged. shapes: abstract ones."""

    def neutral(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(shape.shape, -jnp.inf if _reduce(chain, name) == "max" else 0, shape.dtype)

    return {name: neutral(name, shape) for name, shape in shapes.items()}


def shown(chain: Chain, terms: Terms) -> Terms:
    """Returns the terms of a step as its record has them, see `Metric.shown`."""
    found: Terms = {}
    for name, value in terms.items():
        declared = _declared(chain, name)
        found |= declared.shown(value) if declared and declared.shown else {name: value}
    return found


def _combine(chain: Chain, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return jnp.maximum if _reduce(chain, name) == "max" else jnp.add


def _reduce(chain: Chain, name: str) -> str:
    """Returns how a term is reduced: those that no stage declares, as losses, are added up."""
    declared = _declared(chain, name)
    return declared.reduce if declared else "sum"


def _declared(chain: Chain, name: str) -> Metric | None:
    return next((stage.metrics[name] for stage in chain.stages if name in stage.metrics), None)
