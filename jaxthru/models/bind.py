"""NNX modules to plain trees, once: what is compiled afterwards walks no module graph.

`params` is {"embedding": tree, "layers": trees, "head": tree}; "layers" is a tuple of one tree a layer
(`model.loop = "unroll"`) or one tree with a leading layer dim (`"scan"`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxthru.models.layers import rotary_angles
from jaxthru.models.llama import Block, Embedding, Head
from jaxthru.models.llama import Config as ModelConfig
from jaxthru.models.ops import Ops
from jaxthru.models.remat import remat
from jaxthru.runtime.sharding import Axes
from pallas_kernels.attention import Segments, find_segments

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One module as pure functions over a plain tree of its parameters."""

    init: Callable[[jax.Array], Tree]
    apply: Callable[..., jax.Array]
    axes: Tree
    """The logical axes of each parameter, in the tree's structure."""


def _part(module: type[nnx.Module], config: ModelConfig) -> Part:
    abstract = nnx.eval_shape(lambda: module(config, nnx.Rngs(params=0)))
    graph, state = nnx.split(abstract)

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(module(config, nnx.Rngs(params=key))))

    def apply(tree: Tree, *arguments) -> jax.Array:
        return nnx.merge(graph, tree)(*arguments)

    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    axes = jax.tree.map(lambda variable: variable.logical_axes, state, is_leaf=is_variable)
    return Part(init, apply, nnx.to_pure_dict(axes))


class Substituted(NamedTuple):
    """A parameter, and an array of its shape that takes its place when gradients are taken."""

    value: jax.Array
    stand_in: jax.Array


def _value(leaf: jax.Array | Substituted) -> jax.Array:
    """Returns the parameter. Its gradient is that of the stand-in, in its dtype."""
    if not isinstance(leaf, Substituted):
        return leaf
    dtype = leaf.stand_in.dtype
    # A bfloat16 weight is widened to what its gradient is to be; a wider one is left as it is.
    used = max(leaf.value.dtype, dtype, key=lambda dtype: dtype.itemsize)

    @jax.custom_vjp
    def value(leaf: Substituted) -> jax.Array:
        return leaf.value.astype(used)

    value.defvjp(
        lambda leaf: (leaf.value.astype(used), None),
        lambda _, gradient: (Substituted(None, gradient.astype(dtype)),),
    )
    return value(leaf)


def wide_stand_in(leaf: jax.Array) -> jax.Array:
    """Returns a float32 stand-in for a parameter that is kept narrower, and other parameters themselves."""
    return leaf if leaf.dtype == jnp.float32 else jnp.zeros(leaf.shape, jnp.float32)


def widened(tree: Tree, stand_ins: Tree) -> Tree:
    """Returns parameters whose gradients are those of their wide stand-ins."""

    def wide(leaf: jax.Array, stand_in: jax.Array) -> jax.Array:
        return stand_in if leaf.dtype == stand_in.dtype else _value(Substituted(leaf, stand_in))

    return jax.tree.map(wide, tree, stand_ins)


class Summing(NamedTuple):
    """A layer's parameters with stand-ins, and the sums to which the gradients of these are to be added."""

    tree: Tree
    stand_ins: Tree
    sums: Tree


@jax.custom_vjp
def _summing(stand_ins: Tree, sums: Tree) -> Tree:
    """Returns the stand-ins. The gradient of `sums` is `sums` with the gradients of the stand-ins added."""
    return stand_ins


def _added(sums: Tree, gradients: Tree) -> tuple[None, Tree]:
    with jax.named_scope("gradients"):
        return None, jax.tree.map(lambda sum_, term: sum_ + term.astype(sum_.dtype), sums, gradients)


_summing.defvjp(lambda stand_ins, sums: (stand_ins, sums), _added)


@jax.custom_vjp
def _in_turn(x_ND: jax.Array, sums: Tree) -> tuple[jax.Array, Tree]:
    """Returns a layer's input, and sums for `_summing`. The backward pass goes on to the layer before only
    when these are made: left to itself, XLA puts off products that nothing waits for, and keeps their
    operands, or the gradients, of all layers."""
    return x_ND, sums


_in_turn.defvjp(
    lambda x_ND, sums: ((x_ND, sums), None), lambda _, made: tuple(jax.lax.optimization_barrier(made))
)


class Context(NamedTuple):
    """What every layer needs of a batch, in the order in which it takes them."""

    rotary: tuple[jax.Array, jax.Array]
    segments: Segments


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A bound model: pure functions over `params`."""

    config: ModelConfig
    ops: Ops
    policy: str
    embedding: Part
    layer: Part
    head: Part

    @property
    def axes(self) -> Tree:
        """The logical axes of every parameter, in the structure of `params`."""
        layer = self.layer.axes
        if self.config.loop == "scan":
            layers = jax.tree.map(lambda axes: ("layers", *axes), layer, is_leaf=is_axes)
        else:
            layers = (layer,) * self.config.layers
        return {"embedding": self.embedding.axes, "layers": layers, "head": self.head.axes}

    def init(self, key: jax.Array) -> Tree:
        """Returns fresh parameters, all float32; the same values for `scan` and `unroll`, on any mesh."""
        first, last, *keys = self.part_keys(key)
        if self.config.loop == "scan":
            trees = jax.vmap(self.layer.init)(jnp.stack(keys))
        else:
            trees = tuple(self.layer.init(key) for key in keys)
        return {"embedding": self.embedding.init(first), "layers": trees, "head": self.head.init(last)}

    def part_keys(self, key: jax.Array) -> list[jax.Array]:
        """Returns the keys that embedding, head and each layer are made from, of the key of them all."""
        first, layers, last = jax.random.split(key, 3)
        return [first, last, *jax.random.split(layers, self.config.layers)]

    def stand_ins(self, params: Tree) -> Tree:
        """Returns what gradients are to be taken of, in the structure of `params`: a stand-in of the compute
        dtype for each of the layers' matrices, and of float32 for whatever else is not kept so; all other
        parameters themselves. See `substituted`."""
        layers = jax.tree.map(self._layer_stand_in, self.axes["layers"], params["layers"], is_leaf=is_axes)
        return jax.tree.map(wide_stand_in, params | {"layers": ()}) | {"layers": layers}

    def layer_stand_ins(self, tree: Tree) -> Tree:
        """Returns the stand-ins of one unrolled layer's parameters."""
        return jax.tree.map(self._layer_stand_in, self.layer.axes, tree, is_leaf=is_axes)

    def _layer_stand_in(self, axes: Axes, leaf: jax.Array) -> jax.Array:
        return jnp.zeros(leaf.shape, self.ops.compute if is_matrix(axes) else leaf.dtype)

    def substituted(self, params: Tree, stand_ins: Tree) -> Tree:
        """Returns parameters for `hidden` whose gradients are those of `stand_ins`.

        A layer's gradients come out of its matrix products in the compute dtype. Handed on in the
        parameters' own, as JAX does, they would fill the memory of a second copy of all parameters wherever
        layers are scanned. The gradients of a bfloat16 embedding and output matrix, in turn, stay float32:
        they are few and sums over all tokens. The values are the same.
        """
        layers = jax.tree.map(Substituted, params["layers"], stand_ins["layers"])
        rest = widened(params | {"layers": ()}, stand_ins | {"layers": ()})
        return rest | {"layers": layers}

    def summing(self, params: Tree, sums: Tree) -> Tree:
        """Returns parameters for `hidden`, `substituted`, so that the gradient of `sums`, float32 in the
        structure of `params`, is `sums` with the parameters' gradients added."""
        stand_ins = self.stand_ins(params)
        if self.config.loop == "scan":
            return self.substituted(params, _summing(stand_ins, sums))
        layers = map(Summing, *(tree["layers"] for tree in (params, stand_ins, sums)))
        rest, stand_ins, sums = (tree | {"layers": ()} for tree in (params, stand_ins, sums))
        return widened(rest, _summing(stand_ins, sums)) | {"layers": tuple(layers)}

    def hidden(self, params: Tree, batch: dict[str, jax.Array], max_segments: int) -> jax.Array:
        """Returns the normed output of the last layer, [B·T, D] in the compute dtype, sharded over tokens.

        batch: `tokens`, `positions` and `segment_ids`, each int32 [B, T]. A row with more than
        `max_segments` segments comes out as NaN, so that no step is ever made from it.
        """
        context = self.context(batch, max_segments)
        x_ND = self.embed(params["embedding"], batch["tokens"], context)
        if self.config.loop == "scan":
            layer = lambda x_ND, tree: (self.one_layer(tree, x_ND, context), None)  # noqa: E731
            x_ND, _ = jax.lax.scan(layer, x_ND, params["layers"])
        else:
            trees = list(params["layers"])
            # On several devices a layer later: meanwhile gradients are on their way between them.
            later = int(self.ops.layout.mesh.size > 1)
            for index, tree in enumerate(trees):
                if isinstance(tree, Summing):
                    if index + later < len(trees):
                        other = trees[index + later]
                        x_ND, sums = _in_turn(x_ND, other.sums)
                        trees[index + later] = other._replace(sums=sums)
                    stand_ins = _summing(tree.stand_ins, trees[index].sums)
                    tree = jax.tree.map(Substituted, tree.tree, stand_ins)
                x_ND = self.one_layer(tree, x_ND, context)
        return self.head.apply(params["head"], x_ND)

    def context(self, batch: dict[str, jax.Array], max_segments: int) -> Context:
        """Returns what all layers need of a batch; each of its arrays has rows as its first dim."""
        return Context(
            rotary_angles(batch["positions"], self.config), find_segments(batch["segment_ids"], max_segments)
        )

    @jax.named_scope("embedding")
    def embed(self, tree: Tree, tokens_BT: jax.Array, context: Context) -> jax.Array:
        """Returns the first layer's input [B·T, D]. tree: of the embedding."""
        x_ND = self.embedding.apply(tree, self.ops, tokens_BT)
        # Said of rows, or the partitioner would split them as it does tokens, and gather what they came from.
        overflow_B = self.ops.constrain(context.segments.overflow, "batch")
        overflow_N = jnp.repeat(overflow_B, tokens_BT.shape[1])
        return jnp.where(overflow_N[:, None], jnp.nan, x_ND).astype(x_ND.dtype)

    def one_layer(self, tree: Tree, x_ND: jax.Array, context: Context) -> jax.Array:
        """Returns the output [B·T, D] of one layer, which is rematerialised as the policy says.

        tree: its parameters, or `Substituted` ones.
        """

        def layer(x_ND, tree):
            tree = jax.tree.map(_value, tree, is_leaf=lambda node: isinstance(node, Substituted))
            return self.layer.apply(tree, self.ops, x_ND, *context)

        return remat(layer, self.policy)(x_ND, tree)

    def output_matrix(self, params: Tree) -> tuple[jax.Array, Axes]:
        """Returns the matrix that turns hidden vectors into logits, as it is stored, and its axes."""
        if self.config.tied_embeddings:
            return params["embedding"]["table"], ("vocab", "embed")
        return params["head"]["matrix"], ("embed", "vocab")


def parts(tree: Tree) -> list[Tree]:
    """Returns what a tree in the structure of `params` is updated by: embedding, head, each layer (or, with
    scanned layers, all of them as one)."""
    layers = tree["layers"]
    return [tree["embedding"], tree["head"], *(layers if isinstance(layers, tuple) else (layers,))]


def from_parts(parts: list[Tree], like: Tree) -> Tree:
    """Returns the tree that `parts` took apart. like: a tree whose layers are tuple or stacked alike."""
    embedding, head, *layers = parts
    whole = tuple(layers) if isinstance(like["layers"], tuple) else layers[0]
    return {"embedding": embedding, "layers": whole, "head": head}


def is_axes(node: Any) -> bool:
    """Says whether a node of `Model.axes` is one parameter's axes."""
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def is_matrix(axes: Axes) -> bool:
    """Says whether a parameter with these axes is a matrix, not a norm's scale or a bias."""
    return len(set(axes) - {"layers"}) > 1


def bind(config: ModelConfig, ops: Ops, policy: str) -> Model:
    """Returns the model for a shape, a layout and a rematerialisation policy."""
    part = functools.partial(_part, config=config)
    return Model(config, ops, policy, part(Embedding), part(Block), part(Head))
