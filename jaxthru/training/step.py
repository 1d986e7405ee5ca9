"""One optimizer step: a pure function from (state, batch) to (state, metrics)."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxthru.data.batch import BATCH_FIELDS
from jaxthru.models.bind import from_parts, is_axes, parts
from jaxthru.optim.formats import rounding_key
from jaxthru.optim.optimizer import Optimizer
from jaxthru.runtime.errors import require
from jaxthru.runtime.first_run import FirstAlone
from jaxthru.training.loss import Batch, Metrics, Objective
from jaxthru.training.parts import slots_by_name, slots_by_part
from jaxthru.training.state import State


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """steps: updates in the whole run. rows: per step, over all devices. microbatches: parts of a step
    whose gradients are added up. z_loss: weight of log(Z)^2 (arXiv:2204.02311), 0 is off.
    deterministic: bit-exact repeats on a GPU too, at some cost in speed; each start compiles the step anew.
    skip_limit: this many updates in a row skipped for a non-finite loss or gradient stop the run.
    """

    steps: int = 1000
    seed: int = 0
    rows: int = 8
    microbatches: int = 1
    z_loss: float = 0.0
    deterministic: bool = False
    skip_limit: int = 10

    def __post_init__(self):
        for name in ("steps", "rows", "microbatches", "skip_limit"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name} = {value}: must be at least 1")
        require(self.steps < 2**31, f"train.steps = {self.steps}: must be below 2**31")
        require(0 <= self.seed < 2**63, f"train.seed = {self.seed}: must be at least 0, below 2**63")
        require(self.z_loss >= 0, f"train.z_loss = {self.z_loss}: must be at least 0")
        require(
            self.rows % self.microbatches == 0,
            f"train.rows = {self.rows}: must be a multiple of train.microbatches = {self.microbatches}",
        )


def abstract_batch(rows: int, sequence: int, sharding: jax.sharding.Sharding) -> Batch:
    """Returns the shapes, dtypes and sharding of a batch, to compile for."""
    return {
        name: jax.ShapeDtypeStruct((rows, sequence), dtype, sharding=sharding)
        for name, dtype in BATCH_FIELDS.items()
    }


def check_groups(train: TrainConfig, groups: int, shards: int) -> None:
    """Raises InputError unless each device can take its share of every micro-batch from its own rows.

    groups: canonical groups of rows. shards: devices that rows are split over.
    """
    blocks = microbatch_blocks(train.rows, groups, train.microbatches)
    require(
        train.microbatches == 1 or blocks % shards == 0,
        f"data.groups = {groups}: with train.rows = {train.rows} and train.microbatches = "
        f"{train.microbatches} it must be a multiple of mesh.data × mesh.fsdp = {shards}",
    )


def microbatch_blocks(rows: int, groups: int, microbatches: int) -> int:
    """Returns into how many blocks of whole groups rows are laid so that each splits into micro-batches."""
    return math.gcd(groups, rows // microbatches)


def token_weight(batch: Batch) -> jax.Array:
    """Returns one over the tokens of a whole batch that count."""
    return 1.0 / jnp.maximum(jnp.sum(batch["loss_mask"]), 1.0)


def stored_order(gradients: Any) -> Any:
    """Returns the gradients with their elements in memory in the order of the parameters'.

    A reduce-scatter along another dim than the first gives them with that dim first. XLA would put them in
    order within the update, whose results could then not take the place of its inputs: each of the state's
    arrays would be copied, at a third of the speed. The barrier keeps it from that; the norm waits for all
    gradients anyway.
    """
    ordered = jax.tree.map(
        lambda leaf: with_layout_constraint(leaf, Layout(tuple(range(leaf.ndim)))), gradients
    )
    return jax.lax.optimization_barrier(ordered)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One update. groups: canonical groups of rows; the batch's row order is group-major. seed: the run's."""

    __name__ = "train_step"  # what traces call the compiled program

    objective: Objective
    optimizer: Optimizer
    schedule: optax.Schedule
    microbatches: int
    groups: int
    seed: int

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Returns the next state and this update's metrics, all on the device.

        A non-finite loss or gradient norm leaves parameters and optimizer as they were and is counted.
        """
        sums, gradients = self.gradients(state["params"], batch)
        learning_rate = self.schedule(state["opt_state"]["count"])
        with jax.named_scope("optimizer"):
            if self.objective.model.ops.layout.mesh.size > 1:
                gradients = stored_order(gradients)
            norm = optax.tree.norm(jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients))
            finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
            params, opt_state = self.update(gradients, state, norm, learning_rate, finite)
        counters, metrics = self.finish(state, batch, sums, norm, learning_rate, finite)
        return {"params": params, "opt_state": opt_state} | counters, metrics

    def finish(
        self,
        state: State,
        batch: Batch,
        sums: Metrics,
        norm: jax.Array,
        learning_rate: jax.Array,
        finite: jax.Array,
    ) -> tuple[State, Metrics]:
        """Returns the next state but for params and opt_state, and this update's metrics."""
        missed = 1 - finite.astype(jnp.int32)
        counters = {
            "step": state["step"] + 1,
            "grad_norm": jnp.where(finite, norm, state["grad_norm"]),
            "skipped": state["skipped"] + missed,
            "skipped_in_a_row": (state["skipped_in_a_row"] + 1) * missed,
        }
        metrics = {
            **sums,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped": counters["skipped"],
            "skipped_in_a_row": counters["skipped_in_a_row"],
            "partly_updated": jnp.asarray(False),
            # Σ length² over documents, of which each token adds 2 × position + 1.
            "attention_span": jnp.sum(
                jnp.where(batch["segment_ids"] > 0, 2 * batch["positions"] + 1, 0).astype(jnp.float32)
            ),
            "tokens": jnp.sum((batch["segment_ids"] > 0).astype(jnp.int32)),
        }
        return counters, metrics

    def update(
        self, gradients: Any, state: State, norm: jax.Array, learning_rate: jax.Array, finite: jax.Array
    ) -> tuple[Any, Any]:
        """Returns the next params and opt_state, part by part, so that layers updated one at a time come out
        the same to the bit. norm: of all gradients. finite: False leaves everything as it was."""
        optimizer = self.optimizer
        clip_scale, usable = optimizer.clipping(norm, state["grad_norm"])
        used = finite & usable
        count, slots = state["opt_state"]["count"], state["opt_state"]["slots"]
        weights, matrices = parts(state["params"]), parts(optimizer.matrices)
        columns = parts(gradients), weights, slots_by_part(slots), matrices
        updated = [
            optimizer.update(
                *part,
                count=count,
                learning_rate=learning_rate,
                clip_scale=clip_scale,
                finite=used,
                matrices=matrices,
                key=rounding_key(self.seed, count, index),
            )
            for index, (*part, matrices) in enumerate(zip(*columns, strict=True))
        ]
        weights, slots = zip(*updated, strict=True)
        params = from_parts(weights, state["params"])
        return params, {"count": count + used.astype(jnp.int32), "slots": slots_by_name(slots, params)}

    def gradients(self, params: Any, batch: Batch) -> tuple[Metrics, Any]:
        """Returns the sums over the batch and the gradients, micro-batch after micro-batch.

        The gradients are in the dtypes of `Model.stand_ins`, or, added up over micro-batches, in float32.

        Every token's loss is divided by the whole batch's count of tokens, so that micro-batches with
        unequal loss masks add up to exactly the full batch's mean.
        """
        weight = token_weight(batch)
        model = self.objective.model
        if self.microbatches == 1:
            return self._differentiated(model.substituted, params, model.stand_ins(params), batch, weight)
        parts = jax.tree.map(self.split, batch)
        zeros = jax.tree.map(
            lambda axes, leaf: model.ops.layout.constrain(jnp.zeros(leaf.shape, jnp.float32), axes),
            *(model.axes, params),
            is_leaf=is_axes,
        )

        def add(total, part):
            sums, gradients = total
            terms, gradients = self._differentiated(model.summing, params, gradients, part, weight)
            return (jax.tree.map(jnp.add, sums, terms), gradients), None

        first = jax.tree.map(lambda part: part[0], parts)
        shapes = jax.eval_shape(lambda: self.objective(params, first, weight)[1])
        return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, shapes), zeros), parts)[0]

    def _differentiated(self, using, params: Any, by: Any, batch: Batch, weight: jax.Array):
        """Returns the sums over a batch, and the gradients of `by`. using: makes parameters of both."""
        loss = lambda by: self.objective(using(params, by), batch, weight)  # noqa: E731
        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(by)
        return sums, gradients

    def split(self, array_RT: jax.Array) -> jax.Array:
        """Returns the micro-batches [microbatches, rows / microbatches, T].

        Micro-batch k takes the k-th slice of every group, so that each device splits the rows that it
        holds. Groups of fewer rows than there are micro-batches are first joined with their neighbours.
        """
        rows, sequence = array_RT.shape
        blocks = microbatch_blocks(rows, self.groups, self.microbatches)
        parts = array_RT.reshape(blocks, self.microbatches, -1, sequence)
        parts = jnp.moveaxis(parts, 1, 0).reshape(self.microbatches, -1, sequence)
        return self.objective.model.ops.constrain(parts, None, "batch", "sequence")


class CompiledStep:
    """A step as one program. `training.layered.LayeredStep` is called alike.

    loss_sums: (params, batch, one token's weight) -> the sums of `Objective`, compiled at its first use.
    """

    def __init__(self, program: jax.stages.Compiled, objective: Objective):
        self.program, self._run = program, FirstAlone(program)
        self.loss_sums = FirstAlone(
            jax.jit(lambda params, batch, weight: objective(params, batch, weight)[1])
        )

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Returns the next state and the update's metrics; takes over the state."""
        return self._run(state, batch)

    def as_text(self) -> str:
        """Returns the compiled program's HLO."""
        return self._run.as_text()

    def settled(self, state: State) -> State:
        """Returns the state: all of its updates are made."""
        return state
