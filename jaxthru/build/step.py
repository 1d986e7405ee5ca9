"""The step of a configuration, traced but not compiled: what `train` runs is what `plan` predicts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.build.defaults import float8_setting, plain
from jaxthru.config import RunConfig
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.inline import CompiledStep, InlineStep
from jaxthru.engine.model import Batch, Model
from jaxthru.engine.objectives.cross_entropy import CrossEntropy
from jaxthru.engine.objectives.dpo import DPO
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.offload import OffloadConfig, offloaded_state
from jaxthru.engine.programs import compiler_with
from jaxthru.engine.rehearsed import Analysis, Rehearsal, Rehearsals
from jaxthru.engine.step import State, Step, TrainConfig, abstract_batch
from jaxthru.models import facts, family, lora
from jaxthru.models.family import FamilyConfig
from jaxthru.models.ops import Ops
from jaxthru.models.stage import Chain
from jaxthru.optim.optimizer import Optimizer
from jaxthru.optim.schedules import make_schedule
from jaxthru.profile.read.facts import Facts
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout, shardings
from jaxthru.training.state import abstract_state
from pallas_kernels.adamw_8bit import PARTITIONED

OBJECTIVES: dict[str, tuple[type[Objective], dict[str, str]]] = {
    "cross_entropy": (CrossEntropy, {"z_loss": "z_loss"}),
    "dpo": (DPO, {"beta": "dpo_beta"}),
}
"""What `train.objective` names: its class, and {field: key of `train`}."""


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
        # Metrics are whole on every device, so that each process can read them.
        outputs = shardings(self.abstract), self.step.model.ops.layout.sharding(())
        return jax.jit(InlineStep(self.step), donate_argnums=0, out_shardings=outputs)

    @property
    def in_stages(self) -> "Assembled":
        """The step with its stages walked once: a reference's answers come with the batch."""
        step = dataclasses.replace(self.step, objective=self.step.objective.kept)
        tokens = self.batch["tokens"]
        batch = abstract_batch(*tokens.shape, tokens.sharding, step.objective.columns)
        return dataclasses.replace(self, step=step, batch=batch)

    def dispatched(self, compiler: Callable, put: Callable = jax.device_put) -> DispatchedStep:
        """Returns the step as programs, compiled by `compiler`, with copies started by `put`."""
        of = self.in_stages
        return DispatchedStep(of.step, self.offload, self.abstract, of.batch, compiler, put)

    def rehearsals(self, analysis: Analysis) -> Rehearsals:
        """Returns the dispatched step as it is rehearsed, with any offload of these `activations`."""
        layout = self.step.model.ops.layout
        return Rehearsals(self.dispatched, self.abstract, self.in_stages.batch, layout, analysis)

    def rehearsed(self, analysis: Analysis, memory: int = 0) -> Rehearsal:
        """Returns what dispatched steps need. memory: see `Rehearsals`."""
        return self.rehearsals(analysis)(self.offload, memory)

    def compile(self, options: dict[str, Any]) -> CompiledStep | DispatchedStep:
        """Returns the step, compiled for the devices of its layout."""
        if self.offload.layered:
            return self.dispatched(compiler_with(options))
        program = self.jitted.lower(self.abstract, self.batch).compile(compiler_options=options)
        return CompiledStep(program)


def bound(
    config: RunConfig,
    layout: Layout,
    attention: str,
    norm: str | None = None,
    experts: tuple[str | None, str | None] | None = None,
    cast: str | tuple[str, ...] | None = None,
) -> Model:
    """Returns the model of a configuration on a layout. attention: implementation, or `auto`. norm, experts,
    cast: in the place of the configuration's; of experts the grouped matmul and their activation. Those of
    experts are given by plans, which are for GPUs."""
    config = plain(config)
    product, activation = experts or map(config.kernels.named, ("grouped_matmul", "weighted_swiglu"))
    ops = Ops(
        layout,
        jnp.dtype(config.precision.compute),
        attention,
        float8=bool(float8_setting(config)),
        float8_experts=config.precision.float8_experts,
        collective_matmul_by=config.kernels.collective_matmul,
        linear_cross_entropy_by=config.kernels.named("linear_cross_entropy"),
        rms_norm_by=norm or config.kernels.named("rms_norm"),
        grouped_matmul_by=product,
        routing_by=config.kernels.named("routing"),
        weighted_swiglu_by=activation,
        cast_transpose_by=cast or config.kernels.named("cast_transpose"),
        copies=config.mesh.copies,
        expert_chunks=config.mesh.chunks(layout.size("experts"), layout.size("mlp")),
        keep_parameters=config.remat.keep_parameters,
        loss_chunk_bytes=config.train.loss_chunk_bytes,
        for_gpu=experts is not None,
    )
    return Model(chain_of(config), ops, config.remat.policy, config.model.loop)


def chain_of(config: RunConfig) -> Chain:
    """Returns the chain of stages that a configuration trains: of the model, or with adapters beside it.
    Raises InputError for adapters that it has no place for."""
    chain = family.chain(config.model)
    if not config.lora.on:
        return chain
    return lora.adapted(chain, config.lora, jnp.dtype(config.precision.compute), names_in_block(config.model))


def needed_flops(config: RunConfig) -> Callable[[float, float], float]:
    """Returns (tokens, attention_span) -> the floating-point operations that an update of them needs."""
    of_model = functools.partial(family.module_of(config.model).train_flops, config.model)
    if not config.lora.on:
        return of_model
    return functools.partial(lora.needed_flops, of_model, lora.adapter_parameters(chain_of(config)))


def update_flops(config: RunConfig, objective: Objective) -> tuple[Callable[[float, float], float], float]:
    """Returns (tokens, attention_span) -> the floating-point operations that an update by an objective needs,
    and of those the ones that a token does not need which is not trained on: the LM head's.

    A reference that is asked in the step is a forward pass more.
    """
    needed, passes, model = needed_flops(config), 4 if config.lora.on else 6, objective.model
    if objective.reference is not None:
        once = functools.partial(family.module_of(config.model).train_flops, config.model)
        of_update, passes = needed, passes + 2
        needed = lambda tokens, span: of_update(tokens, span) + once(tokens, span) / 3  # noqa: E731
    matrix, _ = model.lm_head({"embedding": model.chain.embedding.shapes, "head": model.chain.head.shapes})
    return needed, passes * matrix.size if objective.masked else 0.0


def facts_of(config: RunConfig) -> Facts:
    """Returns the facts of what a configuration trains, see `models.facts`."""
    known, needed = facts.facts(config.model, config.precision.compute), needed_flops(config)
    return dataclasses.replace(known, matmul_flops_per_token=needed(1, 0), attention_flops=needed(0, 1))


def names_in_block(model: FamilyConfig) -> dict[tuple[str, ...], str]:
    """Returns {a linear layer's place in its block: its published name there}, as "self_attn.q_proj"; of a
    family that is not published, or of a shape that no model type has, nothing."""
    if not family.is_published(model):
        return {}
    try:
        tensors = list(family.published(model).tensors(model))
    except InputError:
        return {}
    found = {}
    for tensor in tensors:
        if tensor.path[0] == "layers" and tensor.transposed and not tensor.part:
            module = tensor.name.removesuffix(".weight")
            found[tensor.path[2:]] = module.rpartition(f".{tensor.path[1]}.")[2]
    return found


def base_of(config: RunConfig, model: Model) -> Model | None:
    """Returns the model that training of adapters begins with, of the same parameters: the one without them.
    None without adapters, and where they are not nothing at first."""
    begins = config.lora.on and config.lora.adapter is None
    return dataclasses.replace(model, chain=lora.off(model.chain)) if begins else None


def objective_of(
    train: TrainConfig,
    model: Model,
    segments: int,
    sources: int,
    masked: bool = False,
    base: Model | None = None,
) -> Objective:
    """Returns the objective that `train` names. base: what an objective that measures against a reference
    asks in each step. The rest: as of `assemble`."""
    make, settings = OBJECTIVES[train.objective]
    given = {field: getattr(train, key) for field, key in settings.items()}
    given |= {"masked": True} if masked else {}
    given |= {"base": base} if base and make is DPO else {}
    return make(model=model, max_segments=segments, sources=sources, **given)


def _adamw_8bit(config: RunConfig, ops: Ops) -> tuple[str | None, Layout | None]:
    """Returns the implementation, and the layout if each of several devices is to run it by itself."""
    by = config.kernels.named("adamw_8bit") or (PARTITIONED if ops.partitioned else None)
    return by, ops.layout if ops.layout.mesh.size > 1 and by != PARTITIONED else None


def assemble(
    config: RunConfig,
    layout: Layout,
    *,
    segments: int,
    sources: int,
    attention: str,
    norm: str | None = None,
    experts: tuple[str | None, str | None] | None = None,
    cast: str | tuple[str, ...] | None = None,
    masked: bool = False,
) -> Assembled:
    """Returns the step of a configuration on a layout.

    segments: most documents in a row. sources: of the mix. attention: implementation, or `auto`. norm,
    experts, cast: see `bound`. masked: whether the mix says which tokens are trained on.
    """
    config = plain(config)
    train, model = config.train, bound(config, layout, attention, norm, experts, cast)
    schedule = make_schedule(config.optim, train.steps)
    optimizer = Optimizer(config.optim, model.weights, *_adamw_8bit(config, model.ops))
    objective = objective_of(train, model, segments, sources, masked, base_of(config, model))
    if config.offload.layered:
        objective = objective.kept
    groups = config.data.groups_of(train.rows)
    step = Step(objective, optimizer, schedule, train.microbatches, groups, train.seed)
    abstract = offloaded_state(abstract_state(model, optimizer, layout), config.offload)
    batch = abstract_batch(
        train.rows, config.data.sequence, layout.sharding(("batch", "sequence")), objective.columns
    )
    return Assembled(step, config.offload, abstract, batch)
