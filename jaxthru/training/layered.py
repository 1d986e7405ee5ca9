"""An update as a chain of programs, one a layer, that the host dispatches.

All layers share their programs, and what a layer needs can come from host memory while others compute. No
tree of gradients need ever exist: micro-batches are scanned within a layer's program, so that gradients add
up for one layer at a time, and may be used at once.

Shapes: M micro-batches, R rows of one, T tokens, N = R·T, D embed.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxthru.models.bind import from_parts, parts
from jaxthru.runtime.first_run import FirstAlone
from jaxthru.training.loss import Batch, Metrics
from jaxthru.training.offload import HOST, Fetched, OffloadConfig, Pace, Stores, hosted, move, on_device
from jaxthru.training.parts import (
    EMBEDDING,
    HEAD,
    LAYERS,
    counters_of,
    shardings,
    slots_by_name,
    slots_by_part,
)
from jaxthru.training.programs import Programs, placed
from jaxthru.training.state import State
from jaxthru.training.step import Step

Tree = Any


class Pending(NamedTuple):
    """An update whose gradients have got their norm, and whose parts wait for the next forward pass to come
    by: what then moves to and from the host does so beside the layers' compute.

    known: the last arguments of `Programs.update` but the index. slots, gradients: on their way, in the order
    of the forward pass.
    """

    known: tuple[State, jax.Array, jax.Array]
    slots: Fetched
    gradients: Fetched


class LayeredStep:
    """One update, dispatched as programs and transfers; called as the compiled `Step` is.

    The state that it is given is used up, as by a donated call.
    """

    def __init__(
        self,
        step: Step,
        config: OffloadConfig,
        abstract: State,
        batch: Batch,
        compiler: Callable,
        put: Callable = jax.device_put,
    ):
        """abstract, batch: what it will be called with, where it will lie. compiler: see `compiler_with`.
        put: starts copies, see `move`. With both replaced, the schedule is rehearsed (plan/rehearsal.py)."""
        self.step, self.config = step, config
        self._move, self._fetched = (functools.partial(function, put=put) for function in (move, Fetched))
        programs, layout = Programs(step), step.objective.model.ops.layout
        self.held, self.tied = programs.held, step.objective.model.config.tied_embeddings
        weights, slots = parts(abstract["params"]), slots_by_part(abstract["opt_state"]["slots"])
        self.weights_home, self.slots_home = shardings(weights), shardings(slots)
        self.weights_used, self.slots_used = (
            [on_device(tree) for tree in trees] for trees in (weights, slots)
        )
        weights, slots = placed(weights, self.weights_used), placed(slots, self.slots_used)
        counters = counters_of(abstract)
        self.order = [EMBEDDING, *range(LAYERS, len(weights)), HEAD]
        self.staging = round(config.staging_gib * 2**30)
        self.stores = Stores(self.staging)
        self.programs = []

        def compile_(*arguments, **settings):
            program, results = compiler(*arguments, **settings)
            self.programs.append(program)
            return program, results

        scalar, rows = layout.sharding(()), layout.sharding((None, "batch"))
        stream = layout.sharding((None, "tokens", None))
        self.inputs_used = stream
        self.inputs_home = stream if config.activations == "none" else stream.with_memory_kind(HOST)

        self.begin, (batch_MRT, context, weight) = compile_(
            "begin", programs.begin, (batch,), out_shardings=(rows, rows, scalar)
        )
        self.embed, x = compile_(
            "embed", programs.embed, (weights[EMBEDDING], batch_MRT, context), out_shardings=stream
        )
        self.forward, (_, kept, _) = compile_(
            "forward", programs.forward, (weights[LAYERS], x, context), out_shardings=(stream, None, scalar)
        )
        self.kept_used = self.kept_home = shardings(kept)
        if config.activations == "names":
            self.kept_home = [sharding.with_memory_kind(HOST) for sharding in self.kept_used]
        table = weights[EMBEDDING] if self.tied else None
        self.head, (sums, dx, d_head, d_table, squares) = compile_(
            "head",
            programs.head,
            (weights[HEAD], table, x, batch_MRT, weight),
            donate=(2,),
            out_shardings=(
                scalar,
                stream,
                self.weights_used[HEAD],
                table and self.weights_used[EMBEDDING],
                scalar,
            ),
        )
        self.backward, (_, d_layer, _) = compile_(
            "backward",
            programs.backward,
            (weights[LAYERS], x, kept, dx, context, squares),
            donate=(3,),
            out_shardings=(stream, self.weights_used[LAYERS], scalar),
        )
        self.embed_backward, (d_embedding, _) = compile_(
            "embed_backward",
            programs.embed_backward,
            (weights[EMBEDDING], batch_MRT, context, dx, d_table, squares),
            donate=(4,),
            out_shardings=(self.weights_used[EMBEDDING], scalar),
        )
        self.update = []
        matrices = parts(step.optimizer.matrices)
        for which, gradients in ((EMBEDDING, d_embedding), (HEAD, d_head), (LAYERS, d_layer)):
            name = {EMBEDDING: "update_embedding", HEAD: "update_head", LAYERS: "update_layer"}[which]
            known = counters, squares, sums["loss"], jax.ShapeDtypeStruct((), jnp.int32, sharding=scalar)
            update, _ = compile_(
                name,
                programs.update,
                (weights[which], slots[which], gradients, *known),
                donate=(0, 1),
                out_shardings=(self.weights_used[which], self.slots_used[which]),
                matrices=matrices[which],
            )
            self.update.append(update)
        self.finish, _ = compile_(
            "finish", programs.finish, (counters, batch, sums, squares, squares), out_shardings=scalar
        )
        self.indices = [jax.device_put(jnp.int32(index), scalar) for index in range(len(weights))]
        self.gradients_home = self.weights_used
        if config.level in ("gradients", "parameters"):
            self.gradients_home = shardings(hosted(weights, config))

        self._eval_embed, self._eval_layer, self._eval_head = (
            FirstAlone(jax.jit(function))
            for function in (programs.eval_embed, programs.eval_layer, programs.eval_head)
        )

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Returns the next state and this update's metrics, as `Step` does.

        With optim.clip_rule = exact the next state is one with a `Pending` update, see there.
        """
        weights, slots, pending = self._taken(state)
        counters, layers, pace = counters_of(state), self.order[1:-1], Pace()
        batch_MRT, context, weight = self.begin(batch)

        trees = self._renewed(weights, slots, pending)
        embedding = next(trees)
        x_MND = self.embed(embedding, batch_MRT, context)
        table = embedding if self.tied else None
        del embedding
        inputs, kept = [], []
        for _ in layers:
            y_MND, needed, there = self.forward(next(trees), x_MND, context)
            inputs.append(self._move(x_MND, self.inputs_home, donate=True))
            kept.append(self._move(needed, self.kept_home, donate=True))
            x_MND = y_MND
            del needed, y_MND
            pace(there)
        head = next(trees)

        # A transfer waits for all programs dispatched before it: those that follow come after.
        backward = [HEAD, *reversed(layers), EMBEDDING]
        coming = self._fetched_slots(slots, self.order if self.held else backward)
        coming.start()
        used_at_once = iter(()) if self.held else coming
        slot = next(used_at_once, None)
        sums, dx_MND, gradients, d_table, of_head = self.head(head, table, x_MND, batch_MRT, weight)
        squares = of_head
        del x_MND, table, trees
        held: dict[int, Tree] = {}

        def done(index: int, tree: Tree, slot: Tree, gradients: Tree) -> None:
            """Uses a part's gradients at once, or holds them until the norm of all is known."""
            if self.held:
                held[index] = self._move(gradients, self.gradients_home[index], donate=True)
                self.stores(held[index])
            else:
                known = counters, squares, sums["loss"]
                self._renew(index, tree, slot, gradients, known, weights, slots)
            pace(squares)

        done(HEAD, head, slot, gradients)
        del head, slot, gradients
        trees = self._fetched_weights(weights, backward[1:])
        inputs = self._fetched(((x_MND, self.inputs_used) for x_MND in _emptied(inputs)), donate=True)
        kept = self._fetched(((needed, self.kept_used) for needed in _emptied(kept)), donate=True)
        for index in reversed(layers):
            tree, slot = next(trees), next(used_at_once, None)
            dx_MND, gradients, squares = self.backward(
                tree, next(inputs), next(kept), dx_MND, context, squares
            )
            done(index, tree, slot, gradients)
            del tree, slot, gradients
        tree, slot = next(trees), next(used_at_once, None)
        gradients, squares = self.embed_backward(tree, batch_MRT, context, dx_MND, d_table, squares)
        done(EMBEDDING, tree, slot, gradients)
        del tree, slot, gradients, dx_MND

        following, metrics = self.finish(counters, batch, sums, of_head, squares)
        state = self._state(weights, slots, following, state)
        if self.held:
            gradients = ((held.pop(index), self.weights_used[index]) for index in self.order)
            gradients = self._fetched(gradients, donate=True)
            state["pending"] = Pending((counters, squares, sums["loss"]), coming, gradients)
        return state, metrics

    def settled(self, state: State) -> State:
        """Returns the state with its pending update made, as a checkpoint and an evaluation want it."""
        weights, slots, pending = self._taken(state)
        if pending is None:
            return state
        for _ in self._renewed(weights, slots, pending):
            pass
        return self._state(weights, slots, counters_of(state), state)

    def _renewed(self, weights: list[Tree], slots: list[Tree], pending: Pending | None) -> Iterator[Tree]:
        """Yields the weights of all parts on the device, in the order of the forward pass, each with its
        pending update made."""
        trees = self._fetched_weights(weights, self.order)
        for index in self.order:  # and no local name holds on to what is yielded
            if pending:
                columns = trees, pending.slots, pending.gradients
                yield self._renew(index, *map(next, columns), pending.known, weights, slots)
            else:
                yield next(trees)

    def _renew(
        self, index: int, tree: Tree, slot: Tree, gradients: Tree, known: tuple, weights: list, slots: list
    ) -> Tree:
        """Updates a part, of which all is on the device, and starts to store it where it lives. Returns its
        weights on the device. known: the last arguments of `Programs.update` but the index."""
        program = self.update[min(index, LAYERS)]
        tree, slot = program(tree, slot, gradients, *known, self.indices[index])
        _free_host((weights[index], slots[index]))
        weights[index] = self._move(tree, self.weights_home[index])
        slots[index] = self._move(slot, self.slots_home[index], donate=True)
        self.stores((weights[index], slots[index]))
        return tree

    def _taken(self, state: State) -> tuple[list[Tree], list[Tree], Pending | None]:
        weights, slots = parts(state["params"]), slots_by_part(state["opt_state"]["slots"])
        return weights, slots, state.get("pending")

    def _state(self, weights: list[Tree], slots: list[Tree], counters: State, before: State) -> State:
        params = from_parts(weights, before["params"])
        opt_state = {"count": counters["count"], "slots": slots_by_name(slots, params)}
        scalars = {name: leaf for name, leaf in counters.items() if name != "count"}
        return scalars | {"params": params, "opt_state": opt_state}

    def as_text(self) -> str:
        """Returns the compiled programs' HLO."""
        return "\n\n".join(program.as_text() for program in self.programs)

    def _fetched_weights(self, weights: list[Tree], order: list[int]) -> Fetched:
        return self._fetched((weights[index], self.weights_used[index]) for index in order)

    def _fetched_slots(self, slots: list[Tree], order: list[int]) -> Fetched:
        return self._fetched(((slots[index], self.slots_used[index]) for index in order), self.staging)

    def loss_sums(self, params: Tree, batch: Batch, weight: jax.Array) -> Metrics:
        """Returns the sums of cross-entropy of a batch of one micro-batch, see `Objective`.

        Compiled at its first use, for the shape of its batch, which all batches share.
        """
        weights = parts(params)
        trees = self._fetched_weights(weights, self.order)
        embedding = next(trees)
        x_ND, context = self._eval_embed(embedding, batch)
        table = embedding if self.tied else None
        del embedding
        pace = Pace()
        for _ in weights[LAYERS:]:
            x_ND, there = self._eval_layer(next(trees), x_ND, context)
            pace(there)
        return self._eval_head(next(trees), table, x_ND, batch, weight)


def _free_host(tree: Tree) -> None:
    """Frees what of a tree lies in host memory; the runtime waits for copies that still read it."""
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind == HOST:
            leaf.delete()


def _emptied(stack: list[Tree]) -> Iterator[Tree]:
    """Yields from the top of a list, and forgets what was yielded."""
    while stack:
        yield stack.pop()
