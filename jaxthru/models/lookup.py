"""Looking up an embedding whose table lies on several devices.

Shapes: B rows, T tokens, N = B·T, D embed, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp


def look_up(ops: Any, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns the rows of the table at `tokens_BT`, [N, D] in the compute dtype, sharded over tokens.

    Each device looks up what it holds, a part of the vocabulary over `tensor` and of `embed` over `fsdp`,
    for the tokens of all devices that hold other parts; then tokens and parts change places. That moves
    D numbers a token, where gathering the table would move V·D, and as many for its gradient. Each
    device's sums over tokens are float32. The collectives are written out because the partitioner turns
    the gradient's scatter into an all-to-all.
    """
    axes = ("vocab", "embed")
    vocab_axis, embed_axis = stored = ops.layout.spec(axes)

    def local(table_VD, tokens_BT):
        if ops.replicas(axes):  # over which gradients are summed in the compute dtype
            table_VD = ops.replicated(table_VD.astype(ops.compute), axes)
        table_VD = table_VD.astype(jnp.float32)
        tokens_N = tokens_BT.reshape(-1)
        if embed_axis is not None:
            tokens_N = jax.lax.all_gather(tokens_N, embed_axis, tiled=True)
        if vocab_axis is None:
            x_ND = table_VD[tokens_N]
        else:
            first = jax.lax.axis_index(vocab_axis) * table_VD.shape[0]
            inside = (tokens_N >= first) & (tokens_N < first + table_VD.shape[0])
            x_ND = jnp.where(inside[:, None], table_VD[jnp.where(inside, tokens_N - first, 0)], 0)
        x_ND = x_ND.astype(ops.compute)
        if embed_axis is not None:
            x_ND = jax.lax.all_to_all(x_ND, embed_axis, split_axis=0, concat_axis=1, tiled=True)
        return x_ND if vocab_axis is None else jax.lax.psum_scatter(x_ND, vocab_axis, tiled=True)

    if ops.layout.mesh.size == 1:
        return local(table_VD, tokens_BT)
    in_specs = stored, ops.layout.spec(("batch", "sequence"))
    out_specs = ops.layout.spec(("tokens", None))
    return ops.layout.shard_map(local, in_specs, out_specs, check_vma=True)(table_VD, tokens_BT)
