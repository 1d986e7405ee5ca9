"""Operations as a sharded model sees them: how parameters are gathered, what runs per shard.

Shapes: B rows, T tokens, D embed, H heads, K kv heads, C head_dim, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxthru.models import fp8
from jaxthru.runtime.sharding import Axes, Layout
from pallas_kernels.attention import Segments, attention
from pallas_kernels.linear_cross_entropy import linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Ops:
    """compute: the dtype of activations and matmul operands. attention_by: an implementation of
    `pallas_kernels.attention`, or `auto`. float8: multiply linear layers in float8."""

    layout: Layout
    compute: jnp.dtype
    attention_by: str = "auto"
    float8: bool = False

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Lays an activation out as its logical axes say."""
        return self.layout.constrain(x, axes)

    def gather(self, parameter: jax.Array, axes: Axes) -> jax.Array:
        """Returns a parameter in the compute dtype, whole over `fsdp`.

        Cast first, so that the all-gather moves the narrower type. The gradient is laid out as the
        parameter is stored: a reduce-scatter, where the transpose of the gather alone would be a whole
        all-reduce.
        """
        layout, stored, dtype = self.layout, parameter.dtype, self.compute

        @jax.custom_vjp
        def gathered(parameter):
            return layout.constrain(parameter.astype(dtype), axes, without=("fsdp",))

        def backward(_, gradient):
            return (layout.constrain(gradient, axes).astype(stored),)

        gathered.defvjp(lambda parameter: (gathered(parameter), None), backward)
        return gathered(parameter)

    def matmul(self, x: jax.Array, weight) -> jax.Array:
        """Returns `x` [B, T, *in] times a weight [*in, *out]: [B, T, *out]."""
        return self.project(x, weight)[0]

    def project(self, x: jax.Array, *weights) -> list[jax.Array]:
        """Returns `x` [B, T, *in] times each weight [*in, *out]: [B, T, *out] each, in the compute dtype,
        accumulated in float32, sharded over rows and over the weight's output axes.

        Each is a matmul of its own: as one, gate and up were 1.9 % of a step slower on an H200, and query,
        key and value 0.4 %.
        """
        rows, length, *inputs = x.shape
        x_BTI = x.reshape(rows, length, -1)
        matrices = [weight[...].reshape(x_BTI.shape[-1], -1) for weight in weights]
        # A dim made of several is sharded as the first of them is.
        axes = [(weight.logical_axes[0], weight.logical_axes[len(inputs)]) for weight in weights]
        if self.float8:
            ys = fp8.project(self.layout, x_BTI.reshape(rows * length, -1), matrices, axes)
        else:
            gathered = (self.gather(*pair) for pair in zip(matrices, axes, strict=True))
            ys = [jnp.einsum("bti,io->bto", x_BTI, matrix_IO) for matrix_IO in gathered]
        outputs = []
        for y, weight in zip(ys, weights, strict=True):
            y = y.reshape(rows, length, *weight.shape[len(inputs) :])
            outputs.append(self.constrain(y, "batch", "sequence", *weight.logical_axes[len(inputs) :]))
        return outputs

    def attention(self, q_BTHC, k_BTKC, v_BTKC, segments: Segments) -> jax.Array:
        """Returns attention within documents; each shard sees its own rows and heads."""

        named = None if self.attention_by == "auto" else self.attention_by
        local = functools.partial(attention, implementation=named)

        local = jax.named_scope("dot_product_attention")(local)  # what the ledger calls attention
        if self.layout.mesh.size == 1:
            return local(q_BTHC, k_BTKC, v_BTKC, segments)
        rows = self.layout.spec(("batch",))
        heads = self.layout.spec(("batch", "sequence", "heads", "head_dim"))
        kv_heads = self.layout.spec(("batch", "sequence", "kv_heads", "head_dim"))
        by_rows = jax.tree.map(lambda leaf: PartitionSpec(*rows, *([None] * (leaf.ndim - 1))), segments)
        # Kernels are custom calls, which carry no varying-axes types to check.
        sharded = self.layout.shard_map(local, (heads, kv_heads, kv_heads, by_rows), heads, check_vma=False)
        return sharded(q_BTHC, k_BTKC, v_BTKC, segments)

    def embed(self, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """Returns the rows of the table at `tokens_BT`, in the compute dtype.

        Each `tensor` shard looks up the part of the vocabulary that it holds; the parts are summed. The
        collectives are written out because the partitioner turns the gradient's scatter into an all-to-all.
        """
        vocab_axis, embed_axis = self.layout.spec(("vocab", "embed"))

        def local(table_VD, tokens_BT):
            table_VD = table_VD.astype(self.compute)
            if embed_axis is not None:
                table_VD = jax.lax.all_gather(table_VD, embed_axis, axis=1, tiled=True)
            if vocab_axis is None:
                return table_VD[tokens_BT]
            first = jax.lax.axis_index(vocab_axis) * table_VD.shape[0]
            inside = (tokens_BT >= first) & (tokens_BT < first + table_VD.shape[0])
            x_BTD = table_VD[jnp.where(inside, tokens_BT - first, 0)]
            return jax.lax.psum(jnp.where(inside[..., None], x_BTD, 0), vocab_axis)

        if self.layout.mesh.size == 1:
            return local(table_VD, tokens_BT)
        in_specs = (PartitionSpec(vocab_axis, embed_axis), self.layout.spec(("batch", "sequence")))
        out_specs = self.layout.spec(("batch", "sequence", "embed"))
        return self.layout.shard_map(local, in_specs, out_specs, check_vma=True)(table_VD, tokens_BT)

    def linear_cross_entropy(
        self, hidden_BTD: jax.Array, matrix: jax.Array, axes: Axes, targets_BT, weights_BT, z_loss: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the objective and each token's cross-entropy and log(Z), as the kernel of this name does.

        matrix: as stored, in float32. axes: its logical axes, ("embed", "vocab") or ("vocab", "embed").

        On one device the matrix's gradient is float32 from the first sum to the last. On several it is
        rounded to the compute dtype before it is summed over devices, as those of all other matrices are; and
        it is reduced to the stored shards before it is summed over `data`.
        """
        layout = "DV" if axes == ("embed", "vocab") else "VD"
        kernel = functools.partial(linear_cross_entropy, z_loss=z_loss, layout=layout)
        if self.layout.mesh.size == 1:
            return kernel(hidden_BTD, matrix, targets_BT, weights_BT)
        stored, batch = self.layout.spec(axes), self.layout.spec(("batch", "sequence"))
        embed_axis, vocab_axis = (stored[axes.index(name)] for name in ("embed", "vocab"))
        row_axes = tuple(jax.tree.leaves(batch[0]))

        def local(hidden_BTD, matrix, targets_BT, weights_BT):
            matrix = matrix.astype(self.compute)
            copied = tuple(axis for axis in row_axes if axis != embed_axis)
            if copied:
                matrix = jax.lax.pcast(matrix, copied, to="varying")
            if embed_axis is not None:
                matrix = jax.lax.all_gather(matrix, embed_axis, axis=axes.index("embed"), tiled=True)
            objective, *by_token = kernel(hidden_BTD, matrix, targets_BT, weights_BT, axis_name=vocab_axis)
            return jax.lax.psum(objective, row_axes) if row_axes else objective, *by_token

        in_specs = (self.layout.spec(("batch", "sequence", None)), stored, batch, batch)
        out_specs = (PartitionSpec(), batch, batch)
        sharded = self.layout.shard_map(local, in_specs, out_specs, check_vma=True)
        return sharded(hidden_BTD, matrix, targets_BT, weights_BT)
