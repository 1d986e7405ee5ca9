"""The step of a configuration, traced but not compiled: what `train` runs is what `plan` predicts."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxthru.config import RunConfig
from jaxthru.models.bind import bind
from jaxthru.models.ops import Ops
from jaxthru.optim.optimizer import make_optimizer, make_schedule
from jaxthru.runtime.sharding import Layout
from jaxthru.training.loss import Batch, Objective
from jaxthru.training.state import State, abstract_state, decayed
from jaxthru.training.step import Step, abstract_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """abstract, batch: shapes, dtypes and shardings of the state and of a batch. jitted: (state, batch) ->
    (state, metrics), which takes over the state."""

    step: Step
    abstract: State
    batch: Batch
    jitted: jax.stages.Wrapped


def assemble(config: RunConfig, layout: Layout, *, segments: int, sources: int, attention: str) -> Assembled:
    """Returns the step of a configuration on a layout.

    segments: most documents in a row. sources: of the mix. attention: implementation, or `auto`.
    """
    train, precision = config.train, config.precision
    ops = Ops(layout, jnp.dtype(precision.compute), attention, float8=precision.matmul == "fp8")
    model = bind(config.model, ops, config.remat.policy)
    schedule = make_schedule(config.optim, train.steps)
    optimizer = make_optimizer(config.optim, schedule, decayed(model))
    objective = Objective(model, train.z_loss, segments, sources)
    step = Step(objective, optimizer, schedule, train.microbatches, config.data.groups_of(train.rows))
    abstract = abstract_state(model, optimizer, layout)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    batch = abstract_batch(train.rows, config.data.sequence, layout.sharding(("batch", "sequence")))
    return Assembled(step, abstract, batch, jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)))
