"""The training state: its shapes and shardings, and its first values."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxthru.engine.model import Model, init, split_stages
from jaxthru.engine.offload import Pace, move, on_device, with_untrained
from jaxthru.engine.step import State, counters_of, first_state, slots_by_stage, state_of
from jaxthru.models.stage import Stage, by_kind
from jaxthru.optim.optimizer import Optimizer
from jaxthru.runtime import xla
from jaxthru.runtime.sharding import Axes, Layout
from jaxthru.runtime.weights import WeightInfo
from jaxthru.training import layout as on_disk

Tree = Any


def _kinds(model: Model, optimizer: Optimizer) -> Iterator[tuple[Stage, Tree, jax.ShapeDtypeStruct]]:
    """Yields each stage, a WeightInfo for each of its weights, and the shape of its keys: stages
    of which these are equal are made alike. No backend is asked for a key."""
    stages: list[Stage] = []

    def keys_of_stages() -> list[jax.Array]:
        of_stages = model.stage_keys(jax.random.key(0))
        stages[:] = [stage for stage, _ in of_stages]
        return [keys for _, keys in of_stages]

    keys = jax.eval_shape(keys_of_stages)
    return zip(stages, split_stages(optimizer.infos), keys, strict=True)


def _made(optimizer: Optimizer, stage: Stage, infos: Tree) -> Callable[[jax.Array], tuple[Tree, dict]]:
    """Returns keys -> the weights and slots of such a stage."""
    return lambda keys: optimizer.init_stage(init(stage, keys), infos)


def _shapes(model: Model, optimizer: Optimizer) -> State:
    """Returns the shapes and dtypes of the state; a kind of stage is traced once."""

    def shapes_of(kind: tuple) -> tuple[Tree, dict[str, Tree]]:
        stage, infos, keys = kind
        return jax.eval_shape(_made(optimizer, stage, infos), keys)

    weights, slots = map(list, zip(*by_kind(_kinds(model, optimizer), shapes_of), strict=True))
    return state_of(weights, slots, jax.eval_shape(_first_counters), model.weights)


def _first_counters() -> State:
    return counters_of(first_state(None, {"count": jnp.zeros((), jnp.int32)}))


def abstract_state(model: Model, optimizer: Optimizer, layout: Layout) -> State:
    """Returns the state's shapes, dtypes and shardings, without making it.

    A slot of the optimizer is laid out as its parameter.
    """
    shapes = _shapes(model, optimizer)

    def sharded(axes: Axes, tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: _sharded(leaf, layout, axes), tree)

    def like_params(tree: Tree) -> Tree:
        return jax.tree.map(lambda info, leaf: sharded(info.axes, leaf), model.weights, tree)

    params, opt_state = shapes.pop("params"), shapes.pop("opt_state")
    slots = {name: like_params(tree) for name, tree in opt_state["slots"].items()}
    opt_state = {"count": sharded((), opt_state["count"]), "slots": slots}
    return sharded((), shapes) | {"params": like_params(params), "opt_state": opt_state}


def _sharded(leaf: jax.ShapeDtypeStruct, layout: Layout, axes: Axes) -> jax.ShapeDtypeStruct:
    sharding = layout.sharding(axes)
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError:
        # Fewer scales of 8-bit blocks than devices along the last dim: they are whole on each device.
        sharding = layout.sharding((*axes[:-1], None))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


class FirstState:
    """Makes the first state, stage after stage where it is to live, by one small program for each kind of
    stage: a layer is compiled once, no more than a few stages are ever on the device in float32, and they
    leave no holes in its memory.

    `compile` may run ahead, on another thread.
    """

    def __init__(self, model: Model, optimizer: Optimizer, abstract: State):
        """abstract: shapes, dtypes and shardings of the state, as from `abstract_state`."""
        self.model, self.optimizer, self.abstract = model, optimizer, abstract
        self._homes = list(zip(split_stages(abstract["params"]), slots_by_stage(abstract), strict=True))
        self._programs: list[jax.stages.Compiled] = []

    def compile(self) -> "FirstState":
        """Compiles what is not yet compiled. Returns self."""
        if not self._programs:
            homes = map(on_device, self._homes)
            kinds = zip(_kinds(self.model, self.optimizer), homes, strict=True)
            self._programs = by_kind(kinds, self._compiled)
        return self

    def _compiled(self, kind: tuple) -> jax.stages.Compiled:
        (stage, infos, keys), home = kind
        options = xla.untuned(jax.default_backend())
        made = jax.jit(_made(self.optimizer, stage, infos), out_shardings=home)
        return made.lower(keys).compile(compiler_options=options)

    def makes(self, abstract: State) -> bool:
        """Says whether it makes a state of these shapes, dtypes and shardings."""
        return abstract == self.abstract

    def __call__(self, seed: int) -> State:
        """Returns the first state of a seed."""
        self.compile()
        made, pace = [], Pace()
        keys = self.model.stage_keys(jax.random.key(seed))
        for program, (_, of_stage), home in zip(self._programs, keys, self._homes, strict=True):
            made.append(move(program(of_stage), _shardings(home), donate=True))
            pace(made[-1])
        return _first_state_of(made, self.abstract)


def sharded_init(model: Model, optimizer: Optimizer, abstract: State, seed: int) -> State:
    """Returns the first state, see `FirstState`."""
    return FirstState(model, optimizer, abstract)(seed)


def state_of_weights(optimizer: Optimizer, abstract: State, read: on_disk.Read) -> State:
    """Returns the first state with weights that are there, stage after stage, each made where it is to live.

    abstract: shapes, dtypes and shardings of the state. read: gives each weight, asked for on the devices in
    float32, or of a frozen base as it is kept, see `training.layout.assembled`.
    """
    params, pace = abstract["params"], Pace()

    def wanted(info: WeightInfo, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = jnp.float32 if info.trains else leaf.dtype
        return leaf.update(dtype=dtype, sharding=on_disk.device_sharding(leaf))

    asked = jax.tree.map(wanted, optimizer.infos, params)
    entries = jax.tree.unflatten(jax.tree.structure(params), list(on_disk.entries(asked)))

    @functools.cache  # layers that are alike share a program
    def program(infos: tuple, tree: Any, home: tuple) -> Callable:
        keep = lambda weights: optimizer.init_stage(weights, jax.tree.unflatten(tree, infos))  # noqa: E731
        return jax.jit(keep, donate_argnums=0, out_shardings=jax.tree.unflatten(*reversed(home)))

    made = []
    homes = zip(split_stages(params), slots_by_stage(abstract), strict=True)
    for stage, infos, home in zip(split_stages(entries), split_stages(optimizer.infos), homes, strict=True):
        weights = jax.tree.map(lambda entry: on_disk.assembled_leaf(entry, read), stage)
        leaves, tree = jax.tree.flatten(infos)
        places, home_tree = jax.tree.flatten(jax.tree.map(on_disk.device_sharding, home))
        keep = program(tuple(leaves), tree, (tuple(places), home_tree))
        made.append(move(keep(weights), _shardings(home), donate=True))
        pace(made[-1])
    return _first_state_of(made, abstract)


def without_base(state: State, infos: Tree) -> State:
    """Returns a state, or an abstract one, as a checkpoint holds it: without the base that adapters are
    trained beside. infos: a WeightInfo for each parameter."""
    own = jax.tree.map(lambda info, leaf: None if info.in_base else leaf, infos, state["params"])
    return state | {"params": own}


def with_base(own: State, whole: State) -> State:
    """Returns a state from `without_base`, with the base of another one."""
    return own | {"params": with_untrained(own["params"], whole["params"])}


def _shardings(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _first_state_of(made: list[tuple[Tree, dict[str, Tree]]], abstract: State) -> State:
    """Returns the first state. made: the weights and slots of each stage."""
    weights, slots = map(list, zip(*made, strict=True))
    # By a program: a step takes each of them over, so each has to have memory of its own.
    make = jax.jit(_first_counters, out_shardings=abstract["opt_state"]["count"].sharding)
    return state_of(weights, slots, make(), abstract["params"])
