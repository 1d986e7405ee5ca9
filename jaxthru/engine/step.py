"""The update, once gradients exist: gradient norm and clipping, finite check, skipping, and what is recorded.

Written once; every executor (inline.py, dispatched.py) calls it with gradients of its own.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxthru.data.loading.batch import BATCH_FIELDS
from jaxthru.engine import advance as advancing
from jaxthru.engine.model import Batch, Model, join_stages, split_stages
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.terms import Terms, shown
from jaxthru.optim.formats import rounding_key
from jaxthru.optim.optimizer import Optimizer
from jaxthru.runtime import exit_codes
from jaxthru.runtime.errors import require

Tree = Any
State = dict[str, Any]
"""`step`: updates tried, int32. `params`: the weights, and `opt_state`: {"count", "slots"}, as the optimizer
keeps them. `grad_norm`: of the last update that was made, float32, 0 before the first. `skipped`: updates
skipped for non-finite values, in all; `skipped_in_a_row`: since the last good one."""


LARGE_LOSS_CHUNK = 2 << 30
"""Bytes of a large chunk's logits, at most, with their gradient where that has memory of its own."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """steps: updates in the whole run. seed: decides the first parameters, the order of the
    data and stochastic rounding.
    rows: rows of each step, over all devices. microbatches: parts of a step, one after the other, whose
    gradients are added up; more of them take less memory. z_loss: weight of log(Z)^2 in the loss
    (arXiv:2204.02311); 0 is off.
    loss_chunk: the LM head's logits are made and used in chunks of tokens: `small` ones, which take 1 GiB or
    little more, or `large` ones of 2 GiB, which read and write the gradient of its matrix less often; `auto`
    takes those on NVIDIA GPUs with room for them, where loop, remat or offload are `auto`, too, and
    `deterministic` is not asked for. Where data says which tokens are trained on they are small, whatever
    this says: the last one is computed whole, however few it has.
    objective: what is minimised: `cross_entropy`, of the tokens that are trained on, or `dpo`, direct
    preference optimisation on a mix of pairs. dpo_beta: how strongly that keeps to the model it began with.
    deterministic: bit-exact repeats on a GPU too, at some cost in speed; each start compiles the step anew.
    skip_limit: this many updates in a row skipped for a non-finite loss or gradient stop the run.
    stopped_exit_code: of a run that SIGTERM has stopped, and that is to be started again; 0 is of one that
    has finished. Ctrl-C has always 130.
    """

    steps: int = 1000
    seed: int = 0
    rows: int = 8
    microbatches: int = 1
    z_loss: float = 0.0
    loss_chunk: Literal["auto", "small", "large"] = "auto"
    objective: Literal["cross_entropy", "dpo"] = "cross_entropy"
    dpo_beta: float = 0.1
    deterministic: bool = False
    skip_limit: int = 10
    stopped_exit_code: int = exit_codes.STOPPED

    def __post_init__(self):
        for name in ("steps", "rows", "microbatches", "skip_limit"):
            value = getattr(self, name)
            require(value >= 1, f"train.{name} = {value}: must be at least 1")
        require(self.steps < 2**31, f"train.steps = {self.steps}: must be below 2**31")
        require(0 <= self.seed < 2**63, f"train.seed = {self.seed}: must be at least 0, below 2**63")
        code, taken = self.stopped_exit_code, exit_codes.FIXED
        require(
            1 <= code <= 255 and code not in taken,
            f"train.stopped_exit_code = {code}: must be from 1 to 255, and none of "
            f"{', '.join(map(str, taken))}, which have other meanings",
        )
        require(self.z_loss >= 0, f"train.z_loss = {self.z_loss}: must be at least 0")
        require(self.dpo_beta > 0, f"train.dpo_beta = {self.dpo_beta}: must be above 0")
        require(
            self.objective == "cross_entropy" or self.z_loss == 0,
            f"train.z_loss = {self.z_loss}: train.objective = {self.objective!r} has none; choose 0",
        )
        require(
            self.rows % self.microbatches == 0,
            f"train.rows = {self.rows}: must be a multiple of train.microbatches = {self.microbatches}",
        )

    @property
    def loss_chunk_bytes(self) -> int | None:
        """What a chunk of the LM head may take, as of `Ops`."""
        return LARGE_LOSS_CHUNK if self.loss_chunk == "large" else None

    @property
    def rows_at_once(self) -> int:
        """The rows of a micro-batch, over all devices: what there is room for at once."""
        return self.rows // self.microbatches


def abstract_batch(
    rows: int,
    sequence: int,
    sharding: jax.sharding.Sharding,
    columns: Mapping[str, int] = types.MappingProxyType({}),
) -> Batch:
    """Returns the shapes, dtypes and sharding of a batch, to compile for. columns: of an objective."""
    shapes = {name: ((rows, sequence), dtype) for name, dtype in BATCH_FIELDS.items()}
    shapes |= {name: ((rows, width), np.dtype(np.float32)) for name, width in columns.items()}
    return {name: jax.ShapeDtypeStruct(*of, sharding=sharding) for name, of in shapes.items()}


def check_groups(train: TrainConfig, groups: int, shards: int) -> None:
    """Raises InputError unless each device can take its share of every micro-batch from its own rows.

    groups: canonical groups of rows. shards: devices that rows are split over.
    """
    blocks = microbatch_blocks(train.rows, groups, train.microbatches)
    require(
        train.microbatches == 1 or blocks % shards == 0,
        f"data.groups = {groups}: with train.rows = {train.rows} and train.microbatches = "
        f"{train.microbatches} it must be a multiple of mesh.data × mesh.fsdp × mesh.expert = {shards}",
    )


def microbatch_blocks(rows: int, groups: int, microbatches: int) -> int:
    """Returns into how many blocks of whole groups rows are laid so that each splits into micro-batches."""
    return math.gcd(groups, rows // microbatches)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One update. groups: canonical groups of rows; the batch's row order is group-major. seed: the run's."""

    objective: Objective
    optimizer: Optimizer
    schedule: optax.Schedule
    microbatches: int
    groups: int
    seed: int

    @property
    def model(self) -> Model:
        return self.objective.model

    def draws(self, tried: jax.Array) -> jax.Array | None:
        """Returns the number of each micro-batch in the run, int32 [microbatches]; None where stages draw
        nothing. tried: updates before this one."""
        if not self.model.chain.draws:
            return None
        return tried * self.microbatches + jnp.arange(self.microbatches, dtype=jnp.int32)

    def split(self, array_RT: jax.Array) -> jax.Array:
        """Returns the micro-batches [microbatches, rows / microbatches, T].

        Micro-batch k takes the k-th slice of every group, so that each device splits the rows that it
        holds. Groups of fewer rows than there are micro-batches are first joined with their neighbours.
        """
        rows, sequence = array_RT.shape
        blocks = microbatch_blocks(rows, self.groups, self.microbatches)
        pieces = array_RT.reshape(blocks, self.microbatches, -1, sequence)
        pieces = jnp.moveaxis(pieces, 1, 0).reshape(self.microbatches, -1, sequence)
        return self.model.ops.constrain(pieces, None, "batch", "sequence")

    def update(
        self,
        index: int | jax.Array,
        gradients: Tree,
        weights: Tree,
        slots: dict[str, Tree],
        *,
        infos: Tree,
        counters: State,
        norm: jax.Array,
        loss: jax.Array,
        advance: Callable[[Tree], Tree] | None = None,
    ) -> tuple[Tree, dict[str, Tree]]:
        """Returns the next weights and slots of one stage, so that stages updated one at a time, in any
        order, come out the same to the bit. A loss or norm that is not finite leaves them as they are.

        index: of the stage, see `model.split_stages`. infos: a WeightInfo for each of its weights. counters:
        see `counters_of`. norm: of the gradients, all or those known so far. advance: of `engine.advance`.
        """
        count, optimizer = counters["count"], self.optimizer
        clip_scale, usable = optimizer.clipping(norm, counters["grad_norm"])
        used = jnp.isfinite(loss) & jnp.isfinite(norm) & usable
        weights, slots = optimizer.update(
            gradients,
            weights,
            slots,
            count=count,
            learning_rate=self.schedule(count),
            clip_scale=clip_scale,
            finite=used,
            infos=infos,
            key=rounding_key(self.seed, count, index),
        )
        return weights if advance is None else advancing.where(used, advance, weights), slots

    def finish(self, counters: State, batch: Batch, terms: Terms, norm: jax.Array) -> tuple[State, Terms]:
        """Returns the next counters and this update's metrics. norm: of all gradients."""
        finite = jnp.isfinite(terms["loss"]) & jnp.isfinite(norm)
        used = finite & self.optimizer.clipping(norm, counters["grad_norm"])[1]
        missed = 1 - finite.astype(jnp.int32)
        following = {
            "step": counters["step"] + 1,
            "count": counters["count"] + used.astype(jnp.int32),
            "grad_norm": jnp.where(finite, norm, counters["grad_norm"]),
            "skipped": counters["skipped"] + missed,
            "skipped_in_a_row": (counters["skipped_in_a_row"] + 1) * missed,
        }
        metrics = {
            **shown(self.model.chain, terms),
            "grad_norm": norm,
            "learning_rate": self.schedule(counters["count"]),
            "skipped": following["skipped"],
            "skipped_in_a_row": following["skipped_in_a_row"],
            "partly_updated": jnp.asarray(False),
            # Σ length² over documents, of which each token adds 2 × position + 1.
            "attention_span": jnp.sum(
                jnp.where(batch["segment_ids"] > 0, 2 * batch["positions"] + 1, 0).astype(jnp.float32)
            ),
            "tokens": jnp.sum((batch["segment_ids"] > 0).astype(jnp.int32)),
        }
        return following, metrics


def counters_of(state: State) -> State:
    """Returns the scalars of a state, `count` of updates made among them."""
    trees = ("params", "opt_state", "pending")
    scalars = {name: leaf for name, leaf in state.items() if name not in trees}
    return scalars | {"count": state["opt_state"]["count"]}


def state_of(weights: list[Tree], slots: list[dict[str, Tree]], counters: State, like: Tree) -> State:
    """Returns a state of its stages and counters. like: params whose layers lie alike."""
    params = join_stages(weights, like)
    columns = {name: join_stages([slot[name] for slot in slots], params) for name in slots[0]}
    scalars = {name: leaf for name, leaf in counters.items() if name != "count"}
    return scalars | {"params": params, "opt_state": {"count": counters["count"], "slots": columns}}


def slots_by_stage(state: State) -> list[dict[str, Tree]]:
    """Returns the optimizer's slots of each stage."""
    columns = {name: split_stages(tree) for name, tree in state["opt_state"]["slots"].items()}
    return [dict(zip(columns, of, strict=True)) for of in zip(*columns.values(), strict=True)]


def first_state(params: Tree, opt_state: Tree) -> State:
    """Returns the state of these parameters before the first update."""
    zero = jnp.zeros((), jnp.int32)
    return {
        "step": zero,
        "params": params,
        "opt_state": opt_state,
        "grad_norm": jnp.zeros((), jnp.float32),
        "skipped": zero,
        "skipped_in_a_row": zero,
    }
