"""Arrays that vary over different mesh axes, within `jax.shard_map`."""

import jax


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
