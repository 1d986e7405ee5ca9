"""A two-layer model, its step and its batches, small enough to compile in seconds."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from batches import ROWS, SEQUENCE, SOURCES, VOCABULARY, batch

from jaxthru.build.step import names_in_block, objective_of
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.inline import InlineStep, loss
from jaxthru.engine.model import Model
from jaxthru.engine.offload import OffloadConfig, offloaded_state
from jaxthru.engine.programs import trace
from jaxthru.engine.step import Step, TrainConfig, abstract_batch
from jaxthru.models import family, lora
from jaxthru.models.llama import Config as ModelConfig
from jaxthru.models.lora import LoraConfig
from jaxthru.models.ops import Ops
from jaxthru.optim.optimizer import OptimConfig, Optimizer
from jaxthru.optim.schedules import make_schedule
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.training.state import FirstState, _made, abstract_state

SHAPE = ModelConfig(vocabulary=VOCABULARY, layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128)
OPTIM = OptimConfig(learning_rate=1e-2)
NO_ADAPTERS = LoraConfig()


class Data:
    """What compiling a step asks of its data."""

    vocabulary, segments, names, tokenizer = VOCABULARY, 4, ("a",), None
    units, masked = {}, False


@dataclasses.dataclass(frozen=True)
class Tiny:
    layout: Layout
    step: Step
    abstract: dict
    shape: ModelConfig
    adapters: LoraConfig = NO_ADAPTERS

    @functools.cached_property
    def state(self) -> dict:
        return self.fresh()

    @functools.cached_property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows = self.layout.sharding(("batch", "sequence"))
        return abstract_batch(ROWS, SEQUENCE, rows, self.step.objective.columns)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        jitted = jax.jit(InlineStep(self.step), donate_argnums=0, out_shardings=(shardings, None))
        return jitted.lower(self.abstract, self.inputs).compile()

    @functools.cached_property
    def gradients(self):
        """The step's gradients alone: (params, batch) -> (sums, gradients)."""
        return jax.jit(InlineStep(self.step).gradients)

    def batch(self, index: int) -> dict[str, jax.Array]:
        return self.put(batch(index))

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns a batch on the devices."""
        sharding = self.layout.sharding(("batch", "sequence"))
        return {name: jax.device_put(value, sharding) for name, value in arrays.items()}

    def fresh(self) -> dict:
        """Returns a first state that a step may take over."""
        optim = self.step.optimizer.config
        kept = OptimConfig(name=optim.name, state=optim.state)  # all that a first state depends on
        state = first_state(self.shape, kept, self.adapters, str(self.step.model.ops.compute))
        copied = lambda leaf, to: jax.device_put(np.array(leaf), to.sharding)  # noqa: E731
        return jax.tree.map(copied, state, self.abstract)

    def loss(self, params, batch, weight):
        """Returns what the step minimises, and its terms."""
        return loss(self.step.objective, params, batch, weight)

    def losses(self, steps: int) -> list[float]:
        state, losses = self.fresh(), []
        for index in range(steps):
            state, metrics = self.compiled(state, self.batch(index))
            losses.append(float(metrics["loss"]))
        return losses


def bind(shape: ModelConfig, ops: Ops, policy: str, adapters: LoraConfig = NO_ADAPTERS) -> Model:
    """Returns the model of a shape on a layout."""
    chain = family.chain(shape)
    if adapters.on:
        chain = lora.adapted(chain, adapters, ops.compute, names_in_block(shape))
    return Model(chain, ops, policy, shape.loop)


def layers(params: dict) -> tuple:
    """Returns the unrolled layers of a model with one kind of block; scanned, the stacked one."""
    ((block,),) = params["layers"]
    return block


@functools.cache
def make(
    mesh: tuple[int, ...] = (1, 1, 1),
    *,
    microbatches: int = 1,
    remat: str = "none",
    groups: int = ROWS,
    z_loss: float = 0.0,
    masked: bool = False,
    objective: str = "cross_entropy",
    float8: bool = False,
    collective_matmul: str = "auto",
    compute: str = "float32",
    optim: OptimConfig = OPTIM,
    ops: tuple[str, ...] = (),
    rms_norm: str | None = None,
    attention: str = "auto",
    adapters: LoraConfig = NO_ADAPTERS,
    of: family.FamilyConfig | None = None,
    **shape,
) -> Tiny:
    """Returns the step. mesh: sizes of data, fsdp, tensor and perhaps expert. of: in place of SHAPE;
    `shape` changes it. ops: fields of `Ops` that are to be True. rms_norm, attention: an implementation.
    adapters: that are trained in the model's place."""
    layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))]))
    dtype = jnp.dtype(compute)
    using = Ops(layout, dtype, float8=float8, collective_matmul_by=collective_matmul)
    using = dataclasses.replace(
        using, **dict.fromkeys(ops, True), rms_norm_by=rms_norm, attention_by=attention
    )
    shape = dataclasses.replace(of or SHAPE, **shape)
    model = bind(shape, using, remat, adapters)
    schedule = make_schedule(optim, 20)
    optimizer = Optimizer(optim, model.weights)
    train = TrainConfig(z_loss=z_loss, objective=objective)
    objective = objective_of(train, model, 8, SOURCES, masked)
    step = Step(objective, optimizer, schedule, microbatches, groups, seed=0)
    return Tiny(layout, step, abstract_state(model, optimizer, layout), shape, adapters)


@functools.cache
def first_state(
    shape: ModelConfig,
    optim: OptimConfig,
    adapters: LoraConfig = NO_ADAPTERS,
    compute: str = "float32",
) -> dict:
    """Returns the first state on one device, compiled once for all meshes, policies and micro-batches."""
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    compute = jnp.dtype(compute if adapters.on else "float32")  # a frozen base is kept in it
    model = bind(shape, Ops(layout, compute), "none", adapters)
    optimizer = Optimizer(optim, model.weights)
    return First(model, optimizer, abstract_state(model, optimizer, layout))(0)


class First(FirstState):
    """What makes one device's first state. What shapes have in common, as embeddings, is compiled once."""

    programs: ClassVar[dict[str, jax.stages.Compiled]] = {}

    def _compiled(self, kind: tuple) -> jax.stages.Compiled:
        (stage, infos, keys), home = kind
        lowered = jax.jit(_made(self.optimizer, stage, infos), out_shardings=home).lower(keys)
        key = f"{lowered.as_text()} {keys} {lowered.out_tree}"  # keys may go unused
        if key not in self.programs:
            self.programs[key] = lowered.compile()
        return self.programs[key]


def dispatched(
    whole: Tiny, config: OffloadConfig, options: dict | None = None
) -> tuple[DispatchedStep, dict]:
    """Returns the dispatched step that does what a whole one does, and its first state, where it is to be.
    options: see `compile_once`."""
    abstract = offloaded_state(whole.abstract, config)
    compile_ = functools.partial(compile_once, options=options)
    compiled = DispatchedStep(whole.step, config, abstract, whole.inputs, compile_)
    return compiled, jax.device_put(whole.fresh(), jax.tree.map(lambda leaf: leaf.sharding, abstract))


_compiled: dict = {}


def compile_once(name, function, arguments, donate=(), out_shardings=None, options=None, **statics):
    """Compiles for DispatchedStep. What two levels have in common, which is nearly all, is compiled once.
    options: of XLA's; by default those of tests."""
    lowered = trace(name, function, arguments, donate, out_shardings, **statics).lower()
    meshes = {leaf.sharding.mesh for leaf in jax.tree.leaves(arguments)}
    types = str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), arguments))  # of those not used, too
    key = lowered.as_text(), types, str(lowered.out_tree), str(meshes), str(options)
    if key not in _compiled:
        # Tests compile much and compute little: on a GPU nothing is timed.
        untimed = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        options = options or (untimed if jax.default_backend() == "gpu" else None)
        _compiled[key] = lowered.compile(compiler_options=options)
    compiled = _compiled[key]
    describe = lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)  # noqa: E731
    return compiled, jax.tree.map(describe, lowered.out_info, compiled.output_shardings)
