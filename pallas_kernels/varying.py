"""Arrays that vary over different mesh axes, within `jax.shard_map`."""

import jax
import jax.extend
from jax.interpreters import mlir


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Marks each array as varying over every mesh axis that any of them varies over.

    An operand may be the same on all devices of an axis that splits another one: a key head where the query
    heads are split, the LM head where the tokens are. Its gradient then is a sum over that axis, which
    JAX adds where the mark was made; without it, one device's part would pass for the whole. The sum is in
    the operand's dtype. Outside a shard_map, nothing happens.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [tuple(sorted(frozenset.union(*varying) - axes)) for axes in varying]
    return tuple(
        jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)
    )


# Within a kernel, warps that take roles of their own cannot refer to arrays that are marked as varying over a
# mesh axis (JAX 0.11.2). This takes the mark off an operand, and changes nothing else.
_unmarked_p = jax.extend.core.Primitive("unmarked")
_unmarked_p.def_impl(lambda x: x)
_unmarked_p.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_unmarked_p, lambda context, x: [x])


def unmark(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the operands of a kernel without their marks."""
    return tuple(_unmarked_p.bind(x) for x in arrays)


def mark(results: tuple[jax.Array, ...], *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Returns a kernel's results marked as varying over the axes that any of its operands varies over."""
    axes = frozenset.union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    return tuple(jax.lax.pcast(y, tuple(sorted(axes)), to="varying") if axes else y for y in results)
