"""The dispatched executor: an update as a chain of programs, one a stage, that the host starts.

Equal stages share their programs, and what a stage needs can come from host memory while others compute. No
tree of gradients need ever exist: those of micro-batches add up within a stage's program, and may be used at
once.

Shapes: M micro-batches, R rows of one, T tokens, N = R·T, D embed.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxthru.engine.advance import updated
from jaxthru.engine.model import EMBEDDING, HEAD, LAYERS, Batch, split_stages
from jaxthru.engine.objectives.objective import Objective
from jaxthru.engine.offload import (
    HOST,
    Fetched,
    Homes,
    OffloadConfig,
    Pace,
    Pending,
    Stores,
    emptied,
    free_host,
    move,
    taken,
    trained,
    with_untrained,
)
from jaxthru.engine.programs import Programs, by_rows, evaluated, with_shardings
from jaxthru.engine.step import State, Step, counters_of, slots_by_stage, state_of
from jaxthru.engine.terms import Terms, counted
from jaxthru.models import scopes
from jaxthru.models.stage import distinct
from jaxthru.runtime.sharding import shardings

Tree = Any


class DispatchedStep:
    """One update, dispatched as programs and transfers; called as the compiled inline step, and uses up the
    state that it is given, as a donated call does."""

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
        put: starts copies, see `move`. With both replaced, the schedule is rehearsed (rehearsed.py)."""
        self.step, self.config, self._put = step, config, put
        self._move = functools.partial(move, put=put)
        self._fetched = functools.partial(Fetched, put=put, prefetch=config.prefetch)
        self.chain, layout = step.model.chain, step.model.ops.layout
        programs = Programs(step)
        self.held, self.tied = programs.held, self.chain.tied
        self.staging = round(config.staging_gib * 2**30) if config.prefetch else 0
        self.homes, self.stores = Homes.of(config, abstract), Stores(self.staging, config.prefetch)
        weights, slots = split_stages(abstract["params"]), slots_by_stage(abstract)
        self.order = [EMBEDDING, *range(LAYERS, len(weights)), HEAD]
        self.inputs_used = layout.sharding((None, "tokens", None))
        offloaded = config.activations != "none"
        self.inputs_home = self.inputs_used.with_memory_kind(HOST) if offloaded else self.inputs_used
        self.programs = []

        def compile_(*arguments, **settings):
            program, results = compiler(*arguments, **settings)
            self.programs.append(program)
            return program, results

        kinds = distinct(self.chain.layers)
        of_kind = [kinds.index(stage) for stage in self.chain.layers]
        self.kinds = {LAYERS + layer: kind for layer, kind in enumerate(of_kind)}
        first = [LAYERS + of_kind.index(kind) for kind in range(len(kinds))]
        self.stages = [self.chain.embedding, self.chain.head, *self.chain.layers]
        self.trains = list(map(updated, self.stages, split_stages(step.model.weights)))
        weights = with_shardings(weights, self.homes.weights_used)
        slots = with_shardings(slots, self.homes.slots_used)
        self._compile(compile_, programs, kinds, first, weights, slots, counters_of(abstract), batch)
        self.indices = self._numbers(len(weights))

    def _compile(self, compile_, programs, kinds, first, weights, slots, counters, batch) -> None:
        """Compiles every program for what the ones before it return. first: the first stage of each kind."""
        layout, used = self.step.model.ops.layout, self.homes.weights_used
        scalar, rows, stream = layout.sharding(()), layout.sharding((None, "batch")), self.inputs_used
        self.begin, (batch_MRT, context, weight) = compile_(
            scopes.BEGIN,
            programs.begin,
            (batch, counters["step"]),
            out_shardings=(rows, by_rows(programs, batch, rows, scalar), scalar),
        )
        self.embed, (x, terms) = compile_(
            scopes.EMBED,
            programs.embed,
            (weights[EMBEDDING], batch_MRT, context),
            out_shardings=(stream, scalar),
        )
        self.forward, self.backward, self.kept_used, self.kept_home, layers = [], [], [], [], []
        names = [stage.name if len(kinds) > 1 else "" for stage in kinds]
        names = [f"{name}{at}" if names.count(name) > 1 else name for at, name in enumerate(names)]
        for name, stage, at in zip(names, kinds, first, strict=True):
            forward, (_, kept, more, _) = compile_(
                scopes.program(scopes.FORWARD, name),
                programs.forward,
                (weights[at], x, context),
                out_shardings=(stream, None, scalar, scalar),
                stage=stage,
            )
            self.forward.append(forward)
            self.kept_used.append(shardings(kept))
            to_host = self.config.activations == "names"
            home = [each.with_memory_kind(HOST) if to_host else each for each in self.kept_used[-1]]
            self.kept_home.append(home)
            layers.append((kept, more))
        table = weights[EMBEDDING] if self.tied else None
        self.head, (of_head, dx, d_head, d_table, squares) = compile_(
            scopes.LOSS_HEAD,
            programs.head,
            (weights[HEAD], table, x, batch_MRT, weight, context),
            donate=(2,),
            out_shardings=(scalar, stream, used[HEAD], table and used[EMBEDDING], scalar),
        )
        gradients = {HEAD: d_head}
        for name, stage, at, (kept, _) in zip(names, kinds, first, layers, strict=True):
            backward, (_, gradients[at], _) = compile_(
                scopes.program(scopes.BACKWARD, name),
                programs.backward,
                (weights[at], x, kept, dx, context, squares),
                donate=(3,),
                out_shardings=(stream, used[at], scalar),
                stage=stage,
            )
            self.backward.append(backward)
        self.embed_backward, (gradients[EMBEDDING], _) = compile_(
            scopes.EMBED_BACKWARD,
            programs.embed_backward,
            (weights[EMBEDDING], batch_MRT, context, dx, d_table, squares),
            donate=(4,),
            out_shardings=(used[EMBEDDING], scalar),
        )
        self.update, infos = {}, split_stages(self.step.optimizer.infos)
        of_layers = [scopes.program(scopes.UPDATE_LAYER, name) for name in names]
        called = dict(zip(first, of_layers, strict=True))
        called |= {EMBEDDING: scopes.UPDATE_EMBEDDING, HEAD: scopes.UPDATE_HEAD}
        only = [functools.partial(trained, each) for each in self.trains]
        known = counters, squares, of_head["loss"], jax.ShapeDtypeStruct((), np.int32, sharding=scalar)
        of = {at: layers[kind][1] for kind, at in enumerate(first)} | {EMBEDDING: terms, HEAD: of_head}
        for at in (EMBEDDING, HEAD, *first):
            self.update[at], _ = compile_(
                called[at],
                programs.update,
                (only[at](weights[at]), slots[at], gradients[at], *known, counted(self.stages[at], of[at])),
                donate=(0, 1),
                out_shardings=(only[at](used[at]), self.homes.slots_used[at]),
                infos=only[at](infos[at]),
                stage=self.stages[at],
            )
        self.update |= {at: self.update[first[kind]] for at, kind in self.kinds.items()}
        terms = [terms, *(layers[kind][1] for kind in self.kinds.values()), of_head]
        self.finish, _ = compile_(
            scopes.FINISH, programs.finish, (counters, batch, terms, squares, squares), out_shardings=scalar
        )

    def at_home(self, config: OffloadConfig, abstract: State) -> "DispatchedStep":
        """Returns the step for a state that lives elsewhere, by the same programs. Its leaves need not be
        those of the programs': a rehearsal may have but two a stage."""
        fixed, ours = ((each.activations, each.staging_gib, each.prefetch) for each in (config, self.config))
        assert fixed == ours, "these are its programs' own"
        other = copy.copy(self)
        other.homes, other.stores = Homes.of(config, abstract), Stores(self.staging, config.prefetch)
        other.indices = other._numbers(len(self.indices))
        return other

    def _numbers(self, count: int) -> list[jax.Array]:
        """Returns the numbers of the stages, where updates read them."""
        return self._put(list(map(np.int32, range(count))), [self.step.model.ops.layout.sharding(())] * count)

    def __call__(self, state: State, batch: Batch) -> tuple[State, Terms]:
        """Returns the next state and this update's metrics, as `Step` does.

        With optim.clip_rule = exact the next state is one with a `Pending` update, see there.
        """
        weights, slots, pending = taken(state)
        counters, layers, pace = counters_of(state), self.order[1:-1], Pace(self.config.prefetch)
        batch_MRT, context, weight = self.begin(batch, counters["step"])

        trees = self._renewed(weights, slots, pending)
        embedding = next(trees)
        x_MND, of_embedding = self.embed(embedding, batch_MRT, context)
        table = embedding if self.tied else None
        del embedding
        inputs, kept, terms = [], [], {EMBEDDING: of_embedding}
        for index in layers:
            kind = self.kinds[index]
            y_MND, needed, more, there = self.forward[kind](next(trees), x_MND, context)
            inputs.append(self._move(x_MND, self.inputs_home, donate=True))
            kept.append((self._move(needed, self.kept_home[kind], donate=True), self.kept_used[kind]))
            terms[index] = more
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
        sums, dx_MND, gradients, d_table, of_head = self.head(head, table, x_MND, batch_MRT, weight, context)
        terms[HEAD] = sums
        squares = of_head
        del x_MND, table, trees
        held: dict[int, Tree] = {}

        def done(index: int, tree: Tree, slot: Tree, gradients: Tree) -> None:
            """Uses a stage's gradients at once, or holds them until the norm of all is known."""
            if self.held:
                held[index] = self._move(gradients, self.homes.gradients[index], donate=True)
                self.stores(held[index])
            else:
                known = counters, squares, sums["loss"], terms
                self._renew(index, tree, slot, gradients, known, weights, slots)
            pace(squares)

        done(HEAD, head, slot, gradients)
        del head, slot, gradients
        trees = self._fetched_weights(weights, backward[1:])
        inputs = self._fetched(((x_MND, self.inputs_used) for x_MND in emptied(inputs)), donate=True)
        kept = self._fetched(emptied(kept), donate=True)
        for index in reversed(layers):
            tree, slot = next(trees), next(used_at_once, None)
            dx_MND, gradients, squares = self.backward[self.kinds[index]](
                tree, next(inputs), next(kept), dx_MND, context, squares
            )
            done(index, tree, slot, gradients)
            del tree, slot, gradients
        tree, slot = next(trees), next(used_at_once, None)
        gradients, squares = self.embed_backward(tree, batch_MRT, context, dx_MND, d_table, squares)
        done(EMBEDDING, tree, slot, gradients)
        del tree, slot, gradients, dx_MND

        following, metrics = self.finish(counters, batch, [*terms.values()], of_head, squares)
        state = state_of(weights, slots, following, state["params"])
        if self.held:
            gradients = ((held.pop(index), self.homes.weights_used[index]) for index in self.order)
            gradients = self._fetched(gradients, donate=True)
            state["pending"] = Pending((counters, squares, sums["loss"], terms), coming, gradients)
        return state, metrics

    def settled(self, state: State) -> State:
        """Returns the state with its pending update made, as a checkpoint and an evaluation want it."""
        weights, slots, pending = taken(state)
        if pending is None:
            return state
        for _ in self._renewed(weights, slots, pending):
            pass
        return state_of(weights, slots, counters_of(state), state["params"])

    def _renewed(self, weights: list[Tree], slots: list[Tree], pending: Pending | None) -> Iterator[Tree]:
        """Yields the weights of all stages on the device, in the order of the forward pass, each with its
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
        """Updates a stage, of which all is on the device, and starts to store what has changed. Returns its
        weights on the device. known: see `Pending`."""
        only = functools.partial(trained, self.trains[index])
        (*known, terms), number = known, self.indices[index]
        mine = counted(self.stages[index], terms[index])
        new, slot = self.update[index](only(tree), slot, gradients, *known, number, mine)
        free_host((only(weights[index]), slots[index]))
        stored = self._move(new, only(self.homes.weights[index]))
        weights[index] = with_untrained(stored, weights[index])
        slots[index] = self._move(slot, self.homes.slots[index], donate=True)
        self.stores((stored, slots[index]))
        return with_untrained(new, tree)

    def as_text(self) -> str:
        """Returns the compiled programs' HLO."""
        return "\n\n".join(program.as_text() for program in self.programs)

    def _fetched_weights(self, weights: list[Tree], order: list[int]) -> Fetched:
        return self._fetched((weights[index], self.homes.weights_used[index]) for index in order)

    def _fetched_slots(self, slots: list[Tree], order: list[int]) -> Fetched:
        return self._fetched(((slots[index], self.homes.slots_used[index]) for index in order), self.staging)

    def terms_of(self, objective: Objective) -> Callable[[Tree, Batch, jax.Array], Terms]:
        """Returns (params, batch, weight) -> the terms of an objective, of a batch of one micro-batch, those
        of the head alone. Compiled at its first use, for the shape of its batch, which all batches share."""
        programs = Programs(dataclasses.replace(self.step, objective=objective)).evaluation()

        def terms(params: Tree, batch: Batch, weight: jax.Array) -> Terms:
            trees = self._fetched_weights(split_stages(params), self.order)
            return evaluated(programs, self.kinds.values(), trees, batch, weight, self.tied)

        return terms
