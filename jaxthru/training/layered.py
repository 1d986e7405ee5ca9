"""An update as a chain of programs, one a layer, that the host dispatches.

All layers share their programs, and what a layer needs can come from host memory while others compute. No
tree of gradients need ever exist: micro-batches are scanned within a layer's program, so that gradients add
up for one layer at a time, and may be used at once.

Shapes: M micro-batches, R rows of one, T tokens, D embed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.models.bind import Model, Substituted, from_parts, parts, wide_stand_in, widened
from jaxthru.optim.formats import rounding_key
from jaxthru.optim.optimizer import Optimizer
from jaxthru.training.loss import Batch, Metrics
from jaxthru.training.offload import HOST, OffloadConfig, Pace, fetched, hosted, move, on_device
from jaxthru.training.state import State, first_state
from jaxthru.training.step import Step, token_weight

Tree = Any
EMBEDDING, HEAD, LAYERS = 0, 1, 2
"""Where `parts` has the embedding, the head and the first layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The functions that a step is made of, each to be compiled."""

    step: Step

    @property
    def model(self):
        return self.step.objective.model

    def begin(self, batch: Batch) -> tuple[Batch, Any, jax.Array]:
        """Returns the batch in micro-batches [M, R, T], what layers need of each, and one token's weight."""
        batch_MRT = jax.tree.map(self.step.split, batch)
        most = self.step.objective.max_segments
        return (
            batch_MRT,
            jax.lax.map(lambda part: self.model.context(part, most), batch_MRT),
            token_weight(batch),
        )

    def embed(self, tree: Tree, batch_MRT: Batch, context: Any) -> jax.Array:
        """Returns the first layer's input [M, R, T, D]."""
        one = lambda each: self.model.embed(tree, each[0], each[1])  # noqa: E731
        return jax.lax.map(one, (batch_MRT["tokens"], context))

    def forward(self, tree: Tree, x_MRTD: jax.Array, context: Any) -> tuple[jax.Array, list, jax.Array]:
        """Returns a layer's output, what its backward pass needs beside its input, and a scalar that is there
        when they are."""

        def one(each):
            y_RTD, pullback = self._layer(tree, *each)
            return y_RTD, _residuals(pullback, (tree, *each))

        y_MRTD, kept = jax.lax.map(one, (x_MRTD, context))
        return y_MRTD, kept, y_MRTD[0, 0, 0, 0]

    def backward(
        self, tree: Tree, x_MRTD: jax.Array, kept: list, dy_MRTD: jax.Array, context: Any, squares: jax.Array
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """Returns the gradient of a layer's input, those of its parameters, and the sum of squares so far."""

        def one(each):
            *inputs, kept, dy_RTD = each
            # What the forward pass kept takes the place of what computing it again would give, which is then
            # dead code.
            _, pullback = self._layer(tree, *inputs)
            gradients, dx_RTD = _with_residuals(pullback, kept, (tree, *inputs))(dy_RTD)
            return gradients, dx_RTD

        gradients, dx_MRTD = _accumulated(one, (x_MRTD, context, kept, dy_MRTD))
        if self.held:
            gradients = jax.tree.map(
                lambda sum_, like: sum_.astype(like.dtype), gradients, self.model.layer_stand_ins(tree)
            )
        return dx_MRTD, gradients, squares + _squares(gradients)

    def head(
        self, tree: Tree, table: Tree, x_MRTD: jax.Array, batch_MRT: Batch, weight: jax.Array
    ) -> tuple[Metrics, jax.Array, Tree, Tree, jax.Array]:
        """Returns the sums for the record, the gradients of the last layer's output, of the head and of the
        embedding's table, and the sum of the head's squares. table: None unless it is the output matrix."""
        trees = {"head": tree} | ({} if table is None else {"embedding": table})
        stand_ins = jax.tree.map(wide_stand_in, trees)

        def one(each):
            x_RTD, batch = each

            def loss(stand_ins, x_RTD):
                params = widened(trees, stand_ins)
                hidden_RTD = self.model.head.apply(params["head"], x_RTD)
                return self.step.objective.of_hidden(params, hidden_RTD, batch, weight)

            (_, sums), (gradients, dx_RTD) = jax.value_and_grad(loss, (0, 1), has_aux=True)(stand_ins, x_RTD)
            return (sums, gradients), dx_RTD

        (sums, gradients), dx_MRTD = _accumulated(one, (x_MRTD, batch_MRT))
        d_head = gradients["head"]
        return sums, dx_MRTD, d_head, gradients.get("embedding"), _squares(d_head)

    def embed_backward(
        self,
        tree: Tree,
        batch_MRT: Batch,
        context: Any,
        dx_MRTD: jax.Array,
        d_table: Tree,
        squares: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """Returns the embedding's gradients, to which d_table is added, and the sum of squares of all."""

        def one(each):
            tokens_RT, context, dx_RTD = each
            embed = lambda stand_ins: self.model.embed(widened(tree, stand_ins), tokens_RT, context)  # noqa: E731
            return jax.vjp(embed, jax.tree.map(wide_stand_in, tree))[1](dx_RTD)[0], None

        gradients, _ = _accumulated(one, (batch_MRT["tokens"], context, dx_MRTD))
        if d_table is not None:
            gradients = jax.tree.map(jnp.add, gradients, d_table)
        return gradients, squares + _squares(gradients)

    def update(
        self,
        weights: Tree,
        slots: Tree,
        gradients: Tree,
        counters: State,
        squares: jax.Array,
        loss: jax.Array,
        index: jax.Array,
        *,
        matrices: Tree,
    ) -> tuple[Tree, Tree]:
        """Returns the next weights and slots of one part. squares: of the gradients that are known. index: of
        the part."""
        optimizer, count, previous = self.step.optimizer, counters["count"], counters["grad_norm"]
        norm = jnp.sqrt(squares)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        if optimizer.config.clip_rule == "previous":
            norm = jnp.where(previous > 0, previous, norm)
        return optimizer.update(
            gradients,
            weights,
            slots,
            count=count,
            learning_rate=self.step.schedule(count),
            clip_scale=optimizer.clip_scale(norm),
            finite=finite,
            matrices=matrices,
            key=rounding_key(count, index),
        )

    def finish(
        self, counters: State, batch: Batch, sums: Metrics, squares: jax.Array
    ) -> tuple[State, Metrics]:
        """Returns the next counters and this update's metrics."""
        count, norm = counters["count"], jnp.sqrt(squares)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        rate = self.step.schedule(count)
        following, metrics = self.step.finish(counters, batch, sums, norm, rate, finite)
        return following | {"count": count + finite.astype(jnp.int32)}, metrics

    @property
    def held(self) -> bool:
        """Says whether all gradients wait for their norm."""
        return self.step.optimizer.config.clip_rule == "exact"

    def _layer(self, tree: Tree, x_RTD: jax.Array, context: Any) -> tuple[jax.Array, Callable]:
        """Returns a layer's output and the function from its gradient to (gradients, dx)."""

        def layer(stand_ins, x_RTD):
            return self.model.one_layer(jax.tree.map(Substituted, tree, stand_ins), x_RTD, context)

        return jax.vjp(layer, self.model.layer_stand_ins(tree), x_RTD)


class LayeredStep:
    """One update, dispatched as programs and transfers; called as the compiled `Step` is.

    The state that it is given is used up, as by a donated call.
    """

    def __init__(self, step: Step, config: OffloadConfig, abstract: State, batch: Batch, compiler: Callable):
        """abstract, batch: what it will be called with, where it will lie. compiler: see `compiler_with`."""
        self.step, self.config = step, config
        programs, layout = Programs(step), step.objective.model.ops.layout
        self.held, self.tied = programs.held, step.objective.model.config.tied_embeddings
        weights, slots = parts(abstract["params"]), _slots_by_part(abstract["opt_state"]["slots"])
        self.weights_home, self.slots_home = _shardings(weights), _shardings(slots)
        self.weights_used, self.slots_used = (
            [on_device(tree) for tree in trees] for trees in (weights, slots)
        )
        weights, slots = _placed(weights, self.weights_used), _placed(slots, self.slots_used)
        counters = _counters(abstract)
        self.programs = []

        def compile_(*arguments, **settings):
            program, results = compiler(*arguments, **settings)
            self.programs.append(program)
            return program, results

        scalar, rows = layout.sharding(()), layout.sharding((None, "batch"))
        stream = layout.sharding((None, "batch", "sequence", None))
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
        self.kept_used = self.kept_home = _shardings(kept)
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
            "finish", programs.finish, (counters, batch, sums, squares), out_shardings=scalar
        )
        self.indices = [jax.device_put(jnp.int32(index), scalar) for index in range(len(weights))]
        self.gradients_home = self.weights_used
        if config.level in ("gradients", "parameters"):
            self.gradients_home = _shardings(hosted(weights, config))

        objective = step.objective
        model, most = objective.model, objective.max_segments

        def eval_embed(tree, batch):
            context = model.context(batch, most)
            return model.embed(tree, batch["tokens"], context), context

        def eval_layer(tree, x_BTD, context):
            y_BTD = model.one_layer(tree, x_BTD, context)
            return y_BTD, y_BTD[0, 0, 0]

        def eval_head(tree, table, x_BTD, batch, weight):
            params = {"head": tree, "embedding": table}
            return objective.of_hidden(params, model.head.apply(tree, x_BTD), batch, weight)[1]

        self._eval_embed, self._eval_layer, self._eval_head = map(
            jax.jit, (eval_embed, eval_layer, eval_head)
        )

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Returns the next state and this update's metrics, as `Step` does."""
        weights, slots = parts(state["params"]), _slots_by_part(state["opt_state"]["slots"])
        counters, layers, pace = _counters(state), range(LAYERS, len(weights)), Pace()
        batch_MRT, context, weight = self.begin(batch)

        trees = self._weights(weights, [EMBEDDING, *layers, HEAD])
        embedding = next(trees)
        x_MRTD = self.embed(embedding, batch_MRT, context)
        table = embedding if self.tied else None
        del embedding
        inputs, kept = [], []
        for _ in layers:
            y_MRTD, needed, there = self.forward(next(trees), x_MRTD, context)
            inputs.append(move(x_MRTD, self.inputs_home, donate=True))
            kept.append(move(needed, self.kept_home, donate=True))
            x_MRTD = y_MRTD
            del needed, y_MRTD
            pace(there)
        head = next(trees)
        sums, dx_MRTD, gradients, d_table, squares = self.head(head, table, x_MRTD, batch_MRT, weight)
        del x_MRTD, table, trees

        def renew(index: int, tree: Tree, slot: Tree, gradients: Tree) -> None:
            program = self.update[min(index, LAYERS)]
            tree, slot = program(tree, slot, gradients, counters, squares, sums["loss"], self.indices[index])
            _free_host((weights[index], slots[index]))
            weights[index] = move(tree, self.weights_home[index], donate=True)
            slots[index] = move(slot, self.slots_home[index], donate=True)
            pace((weights[index], slots[index]))

        held: dict[int, Tree] = {}
        following = [HEAD, *reversed(layers), EMBEDDING]
        coming = self._slots(slots, [] if self.held else following)

        def done(index: int, tree: Tree, gradients: Tree) -> None:
            """Uses a part's gradients at once, or holds them until the norm of all is known."""
            if self.held:
                held[index] = move(gradients, self.gradients_home[index], donate=True)
                pace(squares)
            else:
                renew(index, tree, next(coming), gradients)

        done(HEAD, head, gradients)
        del head, gradients
        trees = self._weights(weights, following[1:])
        inputs = fetched((x_MRTD, self.inputs_used) for x_MRTD in _emptied(inputs))
        kept = fetched((needed, self.kept_used) for needed in _emptied(kept))
        for index in reversed(layers):
            tree = next(trees)
            dx_MRTD, gradients, squares = self.backward(
                tree, next(inputs), next(kept), dx_MRTD, context, squares
            )
            done(index, tree, gradients)
            del tree, gradients
        tree = next(trees)
        gradients, squares = self.embed_backward(tree, batch_MRT, context, dx_MRTD, d_table, squares)
        done(EMBEDDING, tree, gradients)
        del tree, gradients, dx_MRTD

        if self.held:
            pace = Pace()
            order = [EMBEDDING, *layers, HEAD]  # as the next forward pass wants them
            columns = self._weights(weights, order), self._slots(slots, order)
            gradients = fetched((held.pop(index), self.weights_used[index]) for index in order)
            for each in zip(order, *columns, gradients, strict=True):
                renew(*each)
        counters, metrics = self.finish(counters, batch, sums, squares)
        params = from_parts(weights, state["params"])
        opt_state = {"count": counters.pop("count"), "slots": _slots_by_name(slots, params)}
        return counters | {"params": params, "opt_state": opt_state}, metrics

    def as_text(self) -> str:
        """Returns the compiled programs' HLO."""
        return "\n\n".join(program.as_text() for program in self.programs)

    def _weights(self, weights: list[Tree], order: list[int]) -> Iterator[Tree]:
        """Yields the weights of parts on the device."""
        return fetched((weights[index], self.weights_used[index]) for index in order)

    def _slots(self, slots: list[Tree], order: list[int]) -> Iterator[Tree]:
        """Yields the slots of parts on the device."""
        return fetched((slots[index], self.slots_used[index]) for index in order)

    def loss_sums(self, params: Tree, batch: Batch, weight: jax.Array) -> Metrics:
        """Returns the sums of cross-entropy of a batch of one micro-batch, see `Objective`.

        Compiled at its first use, for the shape of its batch.
        """
        weights = parts(params)
        trees = self._weights(weights, [EMBEDDING, *range(LAYERS, len(weights)), HEAD])
        embedding = next(trees)
        x_BTD, context = self._eval_embed(embedding, batch)
        table = embedding if self.tied else None
        del embedding
        pace = Pace()
        for _ in weights[LAYERS:]:
            x_BTD, there = self._eval_layer(next(trees), x_BTD, context)
            pace(there)
        return self._eval_head(next(trees), table, x_BTD, batch, weight)


def init_by_parts(model: Model, optimizer: Optimizer, abstract: State, seed: int) -> State:
    """Returns the first state, part after part made where it is to live: no more than a few of them are ever
    on the device in float32.

    abstract: shapes, dtypes and shardings of the state; layers are unrolled.
    """
    homes = list(zip(parts(abstract["params"]), _slots_by_part(abstract["opt_state"]["slots"]), strict=True))
    matrices, pace = parts(optimizer.matrices), Pace()

    @functools.cache
    def program(kind: int) -> Callable:
        init = {EMBEDDING: model.embedding, HEAD: model.head, LAYERS: model.layer}[kind].init
        make = lambda key: optimizer.init_part(init(key), matrices[kind])  # noqa: E731
        return jax.jit(make, out_shardings=on_device(homes[kind]))

    made = []
    for index, key in enumerate(model.part_keys(jax.random.key(seed))):
        made.append(move(program(min(index, LAYERS))(key), _shardings(homes[index]), donate=True))
        pace(made[-1])
    weights, slots = map(list, zip(*made, strict=True))
    params = from_parts(weights, abstract["params"])
    scalar = abstract["opt_state"]["count"].sharding
    count = jax.device_put(jnp.zeros((), jnp.int32), scalar)
    state = first_state(params, {"count": count, "slots": _slots_by_name(slots, params)})
    counters = {name: leaf for name, leaf in state.items() if name not in ("params", "opt_state")}
    return state | jax.device_put(counters, scalar)


def compiler_with(options: dict[str, Any]) -> Callable:
    """Returns the function that LayeredStep compiles its programs with: (name, function, arguments, donate,
    out_shardings, statics) -> (compiled, what it returns: shapes, dtypes and shardings)."""

    def compile_(name, function, arguments, donate=(), out_shardings=None, **statics):
        lowered = lower(name, function, arguments, donate, out_shardings, **statics)
        compiled = lowered.compile(compiler_options=options)
        return compiled, _placed(lowered.out_info, compiled.output_shardings)

    return compile_


def lower(name, function, arguments, donate, out_shardings, platform: str | None = None, **statics):
    """Returns one of the programs, traced for abstract arguments. name: what traces call it."""
    function = functools.partial(function, **statics)
    function.__name__ = name
    traced = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,) if platform else None)


def _counters(state: State) -> State:
    """Returns the scalars of a state."""
    scalars = {name: leaf for name, leaf in state.items() if name not in ("params", "opt_state")}
    return scalars | {"count": state["opt_state"]["count"]}


def _slots_by_part(slots: dict[str, Tree]) -> list[dict[str, Tree]]:
    columns = {name: parts(tree) for name, tree in slots.items()}
    return [dict(zip(columns, of, strict=True)) for of in zip(*columns.values(), strict=True)]


def _slots_by_name(slots: list[dict[str, Tree]], params: Tree) -> dict[str, Tree]:
    """Returns what `_slots_by_part` took apart."""
    return {name: from_parts([slot[name] for slot in slots], params) for name in slots[0]}


def _placed(tree: Tree, shardings: Tree) -> Tree:
    """Returns abstract arrays with these shardings."""
    place = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    return jax.tree.map(place, tree, shardings)


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _free_host(tree: Tree) -> None:
    """Frees what of a tree lies in host memory; the runtime waits for copies that still read it."""
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind == HOST:
            leaf.delete()


def _emptied(stack: list[Tree]) -> Iterator[Tree]:
    """Yields from the top of a list, and forgets what was yielded."""
    while stack:
        yield stack.pop()


def _residuals(pullback: Callable, given: Tree) -> list[jax.Array]:
    """Returns what a function of `jax.vjp` holds beside what it was made from."""
    known = {id(leaf) for leaf in jax.tree.leaves(given)}
    return [leaf for leaf in jax.tree.leaves(pullback) if id(leaf) not in known]


def _with_residuals(pullback: Callable, kept: list[jax.Array], given: Tree) -> Callable:
    """Returns a function of `jax.vjp` with its residuals replaced by those that `_residuals` found."""
    leaves, structure = jax.tree.flatten(pullback)
    known, rest = {id(leaf) for leaf in jax.tree.leaves(given)}, iter(kept)
    return jax.tree.unflatten(structure, [leaf if id(leaf) in known else next(rest) for leaf in leaves])


def _accumulated(function: Callable, pieces: Tree) -> tuple[Tree, Tree]:
    """Returns the first result of `function` summed over the micro-batches [M, ...] of `pieces`, in float32
    where there are several, and its second for each."""
    count = len(jax.tree.leaves(pieces)[0])
    if count == 1:
        total, each = function(jax.tree.map(lambda piece: piece[0], pieces))
        return total, jax.tree.map(lambda leaf: leaf[None], each)
    shapes = jax.eval_shape(function, jax.tree.map(lambda piece: piece[0], pieces))[0]

    def add(total, piece):
        term, each = function(piece)
        return jax.tree.map(lambda sum_, term: sum_ + term.astype(jnp.float32), total, term), each

    return jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes), pieces)


def _squares(gradients: Tree) -> jax.Array:
    """Returns the sum of the squares of all gradients, float32."""
    return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients))
