"""The operations of a model under FSDP, tensor parallel and sequence parallel, per shard and across shards.

Between its blocks a model's activation is [N, D], the tokens of all rows one after the other, sharded over
every mesh axis: over `tensor` too, so that norms and residual sums are made, and kept for the backward pass,
once and not by each device of that axis (arXiv:2205.05198). A block gathers the tokens before its first
linear layer and scatters the sums of its last one. With rows flattened, a shard of them is a run of tokens,
and a gather over `tensor` puts them in order with no transposition, however few rows a device has.

Shapes: B rows, T tokens of one, N = B·T, D embed, I input and O output of a linear layer, H heads, K kv
heads, C head_dim, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxthru.models import fp8, quantised
from jaxthru.models.fan_out import fan_out
from jaxthru.models.lookup import look_up
from jaxthru.models.quantised import Quantised
from jaxthru.models.remat import PARAMETERS
from jaxthru.models.scopes import ATTENTION_KERNEL
from jaxthru.runtime import copies
from jaxthru.runtime.sharding import Axes, Layout
from pallas_kernels.attention import Segments, attention
from pallas_kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.dispatch import resolve_platform
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.rms_norm import PARTITIONED


@dataclasses.dataclass(frozen=True)
class Ops:
    """compute: the dtype of activations and matmul operands. attention_by: an implementation of
    `pallas_kernels.attention`, or `auto`. float8: multiply linear layers in float8; float8_experts: experts
    too. collective_matmul_by: an implementation of `pallas_kernels.collective_matmul`, `auto`, or `none`, see
    `collective`. Other fields in `_by`: an implementation, None takes the first that can run, see `norm_by`.
    expert_chunks: see `MeshConfig`. policy: of rematerialisation, see `Model`. copies: gather parameters over
    `fsdp`, and scatter their gradients, by `runtime.copies`, and move tokens of experts so. keep_parameters:
    have them kept for the backward pass, see `RematConfig`. for_gpu: planned for GPUs that are not here.
    adapters: `lora.Adapters` of a block. loss_chunk_bytes: `chunk_bytes` of `linear_cross_entropy`."""

    layout: Layout
    compute: jnp.dtype
    attention_by: str = "auto"
    float8: bool = False
    float8_experts: bool = False
    collective_matmul_by: str = "auto"
    linear_cross_entropy_by: str | None = None
    rms_norm_by: str | None = None
    grouped_matmul_by: str | None = None
    routing_by: str | None = None
    weighted_swiglu_by: str | None = None
    cast_transpose_by: str | tuple[str, ...] | None = None
    expert_chunks: int = 1
    policy: str = "none"
    copies: bool = False
    keep_parameters: bool = False
    loss_chunk_bytes: int | None = None
    for_gpu: bool = False
    adapters: Any = None

    @property
    def collective(self) -> bool:
        """Whether linear layers move tokens by `pallas_kernels.collective_matmul`: where tokens are split
        further than rows are. Otherwise, and for float8 and by `none`, XLA's partitioner puts what
        collectives the layouts ask for around plain matmuls."""
        split = self.layout.spec(("tokens",)) != self.layout.spec(("batch",))
        return split and not self.float8 and self.collective_matmul_by != "none"

    @property
    def norm_by(self) -> str | None:
        """What norms take as `implementation`."""
        return self.rms_norm_by or (PARTITIONED if self.partitioned else None)

    @property
    def partitioned(self) -> bool:
        """Whether XLA's partitioner splits what each of several GPUs has a kernel for."""
        return self.layout.mesh.size > 1 and not self.for_gpu and resolve_platform() != "gpu"

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
            return layout.gathered(parameter.astype(dtype), axes)

        def backward(_, gradient):
            return (layout.constrain(gradient, axes).astype(stored),)

        gathered.defvjp(lambda parameter: (gathered(parameter), None), backward)
        return self.kept(gathered(parameter))

    def kept(self, parameter: jax.Array) -> jax.Array:
        """Returns a parameter as matmuls take it, by the name that keeps it, if it is to be kept."""
        return checkpoint_name(parameter, PARAMETERS) if self.keep_parameters else parameter

    def column_parallel(self, x_ND: jax.Array, *weights) -> list[jax.Array]:
        """Returns `x_ND` times each weight [D, *out]: [N, *out] each, in the compute dtype, accumulated in
        float32. `x_ND` is sharded over tokens, the results over rows and the weight's output dims.

        The weights share one gather of the tokens. Each is a matmul of its own: as one, gate and up were
        1.9 % of a step slower on an H200, and query, key and value 0.4 %.
        """
        matrices, axes = zip(*map(self._matrix, weights), strict=True)
        x_ND, adapted = self._adapters_of(x_ND, weights, by_rows=True)
        if self.collective or self.copies:
            ys = self._by_shard(all_gather_matmul, x_ND, matrices, axes, ("tokens", "batch"))
        else:
            ys = self._products(x_ND, matrices, axes)
        return [
            self.constrain(y.reshape(-1, *weight.shape[1:]), "batch", *weight.info.axes[1:])
            for y, weight in zip(adapted(ys), weights, strict=True)
        ]

    def row_parallel(self, y: jax.Array, weight) -> jax.Array:
        """Returns `y` [N, *in], sharded as `column_parallel` gives it, times a weight [*in, D]: [N, D] in the
        compute dtype, accumulated in float32, sharded over tokens."""
        matrix_ID, axes = self._matrix(weight)
        y_NI = y.reshape(-1, math.prod(weight.shape[: len(weight.info.inputs)]))
        y_NI, adapted = self._adapters_of(y_NI, (weight,), by_rows=False)
        if self.collective or self.copies:
            (x_ND,) = self._by_shard(_matmul_reduce_scatter, y_NI, (matrix_ID,), (axes,), ("batch", "tokens"))
        else:
            (x_ND,) = self._products(y_NI, (matrix_ID,), (axes,))
        (x_ND,) = adapted([x_ND])
        return self.constrain(x_ND, "tokens", None)

    def _matrix(self, weight) -> tuple[jax.Array | Quantised, Axes]:
        """Returns `matrix_of` a weight, with its scale if it is quantised."""
        matrix, axes = matrix_of(weight)
        scale = self.adapters.scale(weight) if self.adapters else None
        return matrix if scale is None else Quantised(matrix, scale), axes

    def _adapters_of(self, x_NI: jax.Array, weights: Sequence, by_rows: bool):
        """Returns `lora.Adapters.started`, without adapters what does nothing."""
        return self.adapters.started(self, x_NI, weights, by_rows) if self.adapters else (x_NI, lambda ys: ys)

    def _products(self, x_NI: jax.Array, matrices: Sequence[jax.Array | Quantised], axes: Sequence[Axes]):
        """Returns `x_NI` times each matrix [I, O], left to the partitioner. axes: of each matrix."""
        if self.float8:
            return fp8.project(self.layout, x_NI, matrices, axes, self.cast_transpose_by)
        x_NI = self.constrain(x_NI, "batch", axes[0][0])
        each = fan_out(x_NI, len(matrices))
        weights = zip(each, matrices, axes, strict=True)
        return [
            quantised.product(self.layout, x_NI, matrix, of)
            if isinstance(matrix, Quantised)
            else x_NI @ self.gather(matrix, of)
            for x_NI, matrix, of in weights
        ]

    def _by_shard(
        self,
        product: Callable,
        x_NI: jax.Array,
        matrices: Sequence[jax.Array],
        axes: Sequence[Axes],
        tokens: tuple[str, str],
    ) -> tuple[jax.Array, ...]:
        """Returns `x_NI` times each matrix [I, O].

        product: an operation of `pallas_kernels.collective_matmul`, for where tokens are split further than
        rows are. axes: of each matrix. tokens: the logical axis of N before and after.

        The matrices are gathered over `fsdp` within, where the transpose of a gather is a reduce-scatter.
        """
        before, after = tokens
        stored = tuple(self.layout.spec(of) for of in axes)
        how = {
            "axis_name": stored[0][1 - axes[0].index("embed")],
            "implementation": None if self.collective_matmul_by == "auto" else self.collective_matmul_by,
        }

        def local(x_NI, matrices):
            matrices = tuple(self.kept(self._whole(*pair)) for pair in zip(matrices, axes, strict=True))
            if self.collective:
                return product(x_NI, matrices, **how)
            each = fan_out(x_NI, len(matrices))
            return tuple(x_NI @ matrix for x_NI, matrix in zip(each, matrices, strict=True))

        in_specs = self.layout.spec((before, axes[0][0])), stored
        out_specs = tuple(self.layout.spec((after, of[1])) for of in axes)
        sharded = self.layout.shard_map(local, in_specs, out_specs, check_vma=True)
        return sharded(x_NI, tuple(quantised.plain(matrix, self.compute) for matrix in matrices))

    def _whole(self, shard: jax.Array, axes: Axes) -> jax.Array:
        return self.gathered(self.replicated(shard, axes), axes)

    def gathered(self, shard: jax.Array, axes: Axes) -> jax.Array:
        """Returns a shard of a parameter of these axes, within a shard_map, gathered along `embed`."""
        dim = axes.index("embed")
        over = self.layout.spec(axes)[dim]
        if over is None:
            return shard
        if self.copies:
            return copies.all_gather(shard, over, dim)
        return jax.lax.all_gather(shard, over, axis=dim, tiled=True)

    def replicas(self, axes: Axes) -> tuple[str, ...]:
        """Returns the mesh axes that rows are split over but a parameter of these logical axes is not."""
        own = jax.tree.leaves(tuple(self.layout.spec(axes)))
        return tuple(axis for axis in jax.tree.leaves(self.layout.spec(("batch",))[0]) if axis not in own)

    def replicated(self, shard: jax.Array, axes: Axes) -> jax.Array:
        """Returns a shard of such a parameter, within a shard_map, marked as a copy that each device of
        `replicas` has: its gradient then is reduced to the stored shards before it is summed over them."""
        replicas = self.replicas(axes)
        return jax.lax.pcast(shard, replicas, to="varying") if replicas else shard

    def attention(self, q_BTHC, k_BTKC, v_BTKC, segments: Segments, window: int | None = None) -> jax.Array:
        """Returns attention within documents; each shard sees its own rows and heads. window: see
        `pallas_kernels.attention.attention`."""

        named = None if self.attention_by == "auto" else self.attention_by
        local = functools.partial(attention, window=window, implementation=named)

        local = jax.named_scope(ATTENTION_KERNEL)(local)  # what the ledger calls attention
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
        """Returns the rows of the table at `tokens_BT`, [N, D] in the compute dtype, sharded over tokens."""
        return look_up(self, table_VD, tokens_BT)

    def linear_cross_entropy(
        self,
        hidden_ND: jax.Array,
        matrix: jax.Array,
        axes: Axes,
        targets_BT: jax.Array,
        weights_BT: jax.Array,
        z_loss: float,
        weighted_only: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the objective and each token's cross-entropy and log(Z), as the kernel of this name does.

        hidden_ND: sharded over tokens. matrix: as stored, in float32. axes: its logical axes, ("embed",
        "vocab") or ("vocab", "embed"). weighted_only: compute nothing for tokens whose weight is 0. How many
        others there are is each device's own, but for those that share its rows.

        Each `tensor` shard holds a part of the vocabulary, and so needs all tokens of its rows. They are
        gathered here, behind the last norm: later than any of a model's work that is done token by token, and
        at the one place whose transpose adds up the shards' gradients of hidden, which then is a
        reduce-scatter.

        On one device the matrix's gradient is float32 from the first sum to the last. On several it is
        rounded to the compute dtype before it is summed over devices, as those of all other matrices are; and
        it is reduced to the stored shards before it is summed over `data`.
        """
        layout = "DV" if axes == ("embed", "vocab") else "VD"

        def kernel(hidden_ND, matrix, targets_BT, weights_BT, axis_name=None):
            hidden_BTD = hidden_ND.reshape(*targets_BT.shape, -1)
            return linear_cross_entropy(
                *(hidden_BTD, matrix, targets_BT, weights_BT),
                **{"z_loss": z_loss, "layout": layout, "axis_name": axis_name},
                weighted_only=weighted_only,
                # Of few tokens the last chunk is far from full, and is computed whole.
                chunk_bytes=None if weighted_only else self.loss_chunk_bytes,
                implementation=self.linear_cross_entropy_by,
            )

        if self.layout.mesh.size == 1:
            return kernel(hidden_ND, matrix, targets_BT, weights_BT)
        stored, batch = self.layout.spec(axes), self.layout.spec(("batch", "sequence"))
        vocab_axis = stored[axes.index("vocab")]
        row_axes = tuple(jax.tree.leaves(batch[0]))

        def local(hidden_ND, matrix, targets_BT, weights_BT):
            matrix = self._whole(matrix.astype(self.compute), axes)
            if vocab_axis is not None:
                hidden_ND = jax.lax.all_gather(hidden_ND, vocab_axis, tiled=True)
            objective, *by_token = kernel(hidden_ND, matrix, targets_BT, weights_BT, vocab_axis)
            return jax.lax.psum(objective, row_axes) if row_axes else objective, *by_token

        in_specs = (self.layout.spec(("tokens", None)), stored, batch, batch)
        out_specs = (PartitionSpec(), batch, batch)
        sharded = self.layout.shard_map(local, in_specs, out_specs, check_vma=True)
        return sharded(hidden_ND, matrix, targets_BT, weights_BT)


def matrix_of(weight) -> tuple[jax.Array, Axes]:
    """Returns a linear layer's weight [*in, *out] as a matrix [I, O], and the axes of that. Raises
    ValueError."""
    info, inputs = weight.info, len(weight.info.inputs)
    if info.inputs != (*range(inputs),) or info.stack:
        raise ValueError(f"{info}: is no weight of a linear layer [*in, *out]")
    # A dim made of several is sharded as the first of them is.
    axes = info.axes[0], info.axes[inputs]
    return weight[...].reshape(math.prod(weight.shape[:inputs]), -1), axes


def _matmul_reduce_scatter(y_NI: jax.Array, weights: tuple[jax.Array], **how) -> tuple[jax.Array]:
    (weight_ID,) = weights
    return (matmul_reduce_scatter(y_NI, weight_ID, **how),)
