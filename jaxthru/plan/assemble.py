"""The step of a configuration, traced but not compiled: what `train` runs is what `plan` predicts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.config import RunConfig
from jaxthru.models.bind import bind
from jaxthru.models.ops import Ops
from jaxthru.optim.optimizer import Optimizer, make_schedule
from jaxthru.runtime.sharding import Layout
from jaxthru.training.layered import LayeredStep
from jaxthru.training.loss import Batch, Objective
from jaxthru.training.offload import OffloadConfig, placed
from jaxthru.training.parts import shardings
from jaxthru.training.programs import compiler_with
from jaxthru.training.state import State, abstract_state, matrices
from jaxthru.training.step import CompiledStep, Step, abstract_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """abstract, batch: shapes, dtypes and shardings of the state, where it will live, and of a batch."""

    step: Step
    offload: OffloadConfig
    abstract: State
    batch: Batch

    @property
    def jitted(self) -> jax.stages.Wrapped:
        """The whole step, (state, batch) -> (state, metrics), which takes over the state."""
        return jax.jit(self.step, donate_argnums=0, out_shardings=(shardings(self.abstract), None))

    def layered(self, compiler: Callable, put: Callable = jax.device_put) -> LayeredStep:
        """Returns the step as programs, compiled by `compiler`, with copies started by `put`."""
        return LayeredStep(self.step, self.offload, self.abstract, self.batch, compiler, put)

    def compile(self, options: dict[str, Any]) -> CompiledStep | LayeredStep:
        """Returns the step, compiled for the devices of its layout."""
        if self.offload.layered:
            return self.layered(compiler_with(options))
        program = self.jitted.lower(self.abstract, self.batch).compile(compiler_options=options)
        return CompiledStep(program, self.step.objective)


def assemble(
    config: RunConfig,
    layout: Layout,
    *,
    segments: int,
    sources: int,
    attention: str,
) -> Assembled:
    """Returns the step of a configuration on a layout.

    segments: most documents in a row. sources: of the mix. attention: implementation, or `auto`.
    """
    train, precision = config.train, config.precision
    ops = Ops(
        layout,
        jnp.dtype(precision.compute),
        attention,
        float8=precision.matmul == "fp8",
        collective_matmul_by=config.kernels.collective_matmul,
        copies=config.mesh.copies,
        keep_parameters=config.remat.keep_parameters,
    )
    model = bind(config.model, ops, config.remat.policy)
    schedule = make_schedule(config.optim, train.steps)
    adamw_8bit = "reference" if layout.mesh.size > 1 else None  # the reference is what XLA can partition
    optimizer = Optimizer(config.optim, matrices(model), adamw_8bit)
    objective = Objective(model, train.z_loss, segments, sources)
    groups = config.data.groups_of(train.rows)
    step = Step(objective, optimizer, schedule, train.microbatches, groups, train.seed)
    abstract = placed(abstract_state(model, optimizer, layout), config.offload)
    batch = abstract_batch(train.rows, config.data.sequence, layout.sharding(("batch", "sequence")))
    return Assembled(step, config.offload, abstract, batch)
