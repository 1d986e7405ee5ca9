"""Linear layers multiplied in float8 (arXiv:2209.05433): e4m3 forward, e5m2 gradients.

Each tensor has one scale, made from its own largest magnitude when it is quantised ("current" scaling), so
that there is no history to train, shard and checkpoint. `lax.dot_general` is given float8 operands and its
result is multiplied by one scalar, which is the form that XLA turns into a cuBLASLt float8 matmul with the
scale inside. Flax's `fp8_ops` multiplies operands that were quantised and widened again, which XLA may undo,
and needs a history; qwix quantises each gradient twice and an input once for every weight it meets.

Shapes: R rows × tokens, I input and O output of a linear layer, E experts.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxthru.models.fan_out import added
from jaxthru.models.quantised import Quantised
from jaxthru.models.remat import FLOAT8
from jaxthru.runtime.sharding import Axes, Layout
from pallas_kernels.cast_transpose import OPERATION as CAST_TRANSPOSE
from pallas_kernels.cast_transpose import cast_transpose
from pallas_kernels.dispatch import Unsupported, log_once
from pallas_kernels.grouped_matmul import grouped_outer
from pallas_kernels.grouped_matmul.float8 import grouped_matmul_float8

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
FORWARD_SUMS, BACKWARD_SUMS = lax.Precision.DEFAULT, lax.Precision.HIGHEST
"""Hopper's tensor cores add up float8 matmuls with about 14 bits. HIGHEST has cuBLASLt move the sums to
float32 as they grow; DEFAULT does not ("fast accumulation"). With the backward pass short of those bits,
losses were 2 % higher after 100 steps; in the forward pass it made no difference
(scripts/bench/measure/fp8_loss.py).
"""
SMALLEST = 2.0**-100
"""Tensors below this everywhere are not scaled up further, so that no scale overflows."""
KEPT_NAME = FLOAT8
"""What rematerialisation policies call quantised inputs, and the magnitudes that weights are scaled by."""


class WithTransposed(NamedTuple):
    """A quantised matrix [A, B] and its transpose [B, A], which a product that contracts over A takes.
    values: None where no other product is left."""

    values: jax.Array | None
    transposed: jax.Array
    scale: jax.Array


def quantise(x: jax.Array, dtype: jnp.dtype, rows: jax.Array | None = None) -> Quantised:
    """Returns a tensor in a float8 dtype under one scale. rows: see `scales`."""
    up, scale = scales(x, dtype, rows)
    return Quantised((x.astype(jnp.float32) * up).astype(dtype), scale)


def quantise_both(
    layout: Layout, x: jax.Array, axes: Axes, dtype: jnp.dtype, cast_by: str | Sequence[str] | None
) -> Quantised | WithTransposed:
    """Returns a matrix and its transpose in a float8 dtype under one scale, each device its own part; without
    the transpose where XLA is to make it, be it that what was not named refuses.

    axes: logical, of the matrix as it lies. cast_by: see `project`. Raises Unsupported where one was named.
    """
    kernels = tuple(itertools.takewhile(lambda name: name != "xla", CAST_TRANSPOSE.tried(cast_by, None)))
    if not kernels:
        return quantise(x, dtype)
    up, scale = scales(x, dtype)
    cast = functools.partial(cast_transpose, dtype=dtype, implementation=kernels)
    if layout.mesh.size > 1:
        spec = layout.spec(axes)
        both = spec, PartitionSpec(*reversed(spec))
        cast = layout.shard_map(cast, (spec, PartitionSpec()), both, check_vma=False)
    try:
        return WithTransposed(*cast(x, up), scale)
    except Unsupported as refusal:
        if isinstance(cast_by, str):
            raise
        if not CAST_TRANSPOSE.planned(kernels):
            log_once(CAST_TRANSPOSE.name, "xla", refusal.reasons)
        return quantise(x, dtype)


def scales(x: jax.Array, dtype: jnp.dtype, rows: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns what a tensor is multiplied by to be cast to a float8 dtype, and what undoes that. rows: how
    many of the first make the scale, where others may hold anything; None is all.

    The scale is a power of two: multiplying by it is exact in any float type, so only the cast rounds.
    Nothing that is not finite gets lost in a saturating cast: an infinity makes the scale NaN, and a NaN,
    which a device's maximum may pass over, is still one in float8.
    """
    magnitudes = jnp.abs(x)
    if rows is not None:
        counts_R = jnp.arange(len(x), dtype=jnp.int32) < rows
        magnitudes = jnp.where(counts_R[:, None], magnitudes, 0)
    amax = checkpoint_name(jnp.max(magnitudes).astype(jnp.float32), KEPT_NAME)
    largest = float(jnp.finfo(dtype).max) / jnp.maximum(amax, SMALLEST)
    # Clearing the mantissa rounds down to a power of two; an exp2 is not exact on every device.
    bits = lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    up = lax.bitcast_convert_type(bits, jnp.float32)
    return up, jnp.where(jnp.isfinite(amax), 1 / up, jnp.nan)


def dot(
    a: Quantised | WithTransposed,
    b: Quantised | WithTransposed,
    contract: tuple[int, int],
    dtype: jnp.dtype,
    precision: lax.Precision,
    constrain: Callable[[jax.Array], jax.Array] = lambda product: product,
) -> jax.Array:
    """Returns the product of two matrices, contracted over these dims. precision: of its sums, see
    BACKWARD_SUMS. constrain: gives it its sharding, before it is scaled: parts of sums are then scattered,
    not summed whole."""
    (of_a, dim_a), (of_b, dim_b) = map(_operand, (a, b), contract)
    dims = (((dim_a,), (dim_b,)), ((), ()))
    product = constrain(lax.dot_general(of_a, of_b, dims, precision, preferred_element_type=dtype))
    # A power of two in `dtype` is exact too: the same numbers, whether or not XLA scales before it rounds.
    return product * (a.scale * b.scale).astype(dtype)


def _operand(matrix: Quantised | WithTransposed, contract: int) -> tuple[jax.Array, int]:
    """Returns what a product contracts over a dim of a matrix, and over which of its own."""
    both = isinstance(matrix, WithTransposed)
    return (matrix.transposed, 1) if both and contract == 0 else (matrix.values, contract)


def _named(x8: Quantised | WithTransposed) -> Quantised | WithTransposed:
    """Names what the backward pass takes of an input. Kept as bits: `jax.checkpoint` rounds floats that it
    keeps to IEEE's e4m3, which ends at 240."""
    field = "transposed" if isinstance(x8, WithTransposed) else "values"
    kept = getattr(x8, field)
    bits = checkpoint_name(lax.bitcast_convert_type(kept, jnp.uint8), KEPT_NAME)
    return x8._replace(**{field: lax.bitcast_convert_type(bits, kept.dtype)})


def _for_backward(x8: Quantised | WithTransposed) -> Quantised | WithTransposed:
    """Returns what the backward pass takes of an input, and no more: a loop stacks all that it is given."""
    return x8._replace(values=None) if isinstance(x8, WithTransposed) else x8


def project(
    layout: Layout,
    x_RI: jax.Array,
    weights: Sequence[jax.Array | Quantised],
    axes: Sequence[Axes],
    cast_by: str | Sequence[str] | None = None,
) -> list[jax.Array]:
    """Returns `x_RI` times each weight, [R, O] in its dtype, by float8 matmuls forward and backward.

    The input is quantised once; its float8 form is what the backward pass keeps. Weights are quantised as
    they are stored and gathered over `fsdp` in float8; their gradients are laid out as they are stored. The
    tokens of the input and of the gradients are gathered over `tensor` in float8 too.

    Args:
      layout: where weights and gradients lie.
      weights: [I, O] each; their gradients are in their dtypes. One that is quantised never changes: it is
        taken as it is, and has no gradient.
      axes: the two logical axes of each weight.
      cast_by: what `cast_transpose` takes as `implementation`, to make both of what two products take, one
        of them transposed. By `xla` there is no array of both, which a loop over layers would stack, and
        transpose, whole: XLA transposes where a product does. So it does what moves between its cast and its
        product, tokens over `tensor` and weights over `fsdp`, and what a kernel refuses that was not named.
    """
    dtype, frozen = x_RI.dtype, [isinstance(weight_IO, Quantised) for weight_IO in weights]
    stored = [None if still else each.dtype for still, each in zip(frozen, weights, strict=True)]
    # The stream of activations is sharded over tokens, what linear layers make of it over rows.
    by_token = lambda of: "tokens" if of == "embed" else "batch"  # noqa: E731
    lay_out = lambda of: lambda x: layout.constrain(x, (by_token(of), of))  # noqa: E731

    def rows(x8: Quantised | WithTransposed, of: str) -> Quantised | WithTransposed:
        # First as it was quantised: else the partitioner would gather what it is quantised from.
        return x8._replace(values=layout.constrain(lay_out(of)(x8.values), ("batch", of)))

    def quantised(matrix: jax.Array, axes: Axes, dtype: jnp.dtype, both: bool) -> Quantised | WithTransposed:
        """both: whether a product takes the matrix transposed, too, as it lies."""
        return quantise_both(layout, matrix, axes, dtype, cast_by) if both else quantise(matrix, dtype)

    def of_rows(matrix: jax.Array, of: str, dtype: jnp.dtype, both: bool) -> Quantised | WithTransposed:
        lies, taken = (by_token(of), of), ("batch", of)
        return quantised(matrix, lies, dtype, both and layout.spec(lies) == layout.spec(taken))

    def forward(x_RI, weights, again=True):
        """again: whether the backward pass takes the input."""
        x8 = _named(of_rows(x_RI, axes[0][0], FORWARD, again and not all(frozen)))
        x8 = rows(x8, axes[0][0])
        weights8 = []
        for weight_IO, where in zip(weights, axes, strict=True):
            still = isinstance(weight_IO, Quantised)
            stays = layout.spec(where) == layout.spec(where, without=("fsdp",))
            weight8 = weight_IO if still else quantised(weight_IO, where, FORWARD, stays)
            whole = layout.gathered(weight8.values, where)
            weights8.append(weight8._replace(values=whole))
        ys = [
            dot(x8, weight8, (1, 0), dtype, FORWARD_SUMS, lay_out(where[1]))
            for weight8, where in zip(weights8, axes, strict=True)
        ]
        kept8 = [Quantised(weight8.values, weight8.scale) for weight8 in weights8]
        return ys, (None if all(frozen) else _for_backward(x8), kept8)

    def backward(kept, gradients):
        x8, weights8 = kept
        parts_RI, dweights = [], []
        for gradient_RO, weight8, where, kept_in in zip(gradients, weights8, axes, stored, strict=True):
            gradient8 = rows(of_rows(gradient_RO, where[1], BACKWARD, kept_in is not None), where[1])
            parts_RI.append(dot(gradient8, weight8, (1, 1), dtype, BACKWARD_SUMS, lay_out(where[0])))
            if kept_in is None:
                dweights.append(None)
                continue
            sum_IO = dot(x8, gradient8, (0, 0), dtype, BACKWARD_SUMS)
            dweights.append(layout.constrain(sum_IO, where).astype(kept_in))
        return added(parts_RI), dweights

    @jax.custom_vjp
    def run(x_RI, weights):
        return forward(x_RI, weights, again=False)[0]

    run.defvjp(forward, backward)
    return run(x_RI, list(weights))


def grouped(x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, implementation: str | None) -> jax.Array:
    """Returns each row times the matrix of its group, as `grouped_matmul` does: [R, O] in x's dtype, by
    float8 products forward and for the gradient of the rows.

    Rows and their gradients have one scale, each matrix has its own. Arrays are as they lie on one device, so
    that scales are of its own rows. The gradient of the matrices is made of what was not quantised: it
    contracts rows, of which Hopper's tensor cores would need transposed copies. So x is kept as it is, and in
    eight bits are the matrices.

    Args:
      w_EIO: of x's dtype. sizes_E: rows of each group.
      implementation: of `pallas_kernels.grouped_matmul`; None takes the first that can run.

    Raises:
      dispatch.Unsupported: no kernel can multiply these in float8 here.
    """
    how = {"implementation": implementation}

    def forward(x_RI, w_EIO, sizes_E):
        x8 = quantise(x_RI, FORWARD, jnp.sum(sizes_E))
        w8 = jax.vmap(lambda matrix_IO: quantise(matrix_IO, FORWARD))(w_EIO)
        turned_EOI, scales_E = w8.values.swapaxes(1, 2), x8.scale * w8.scale
        y_RO = grouped_matmul_float8(x8.values, turned_EOI, scales_E, sizes_E, x_RI.dtype, exact=False, **how)
        return y_RO, (x_RI, w8, sizes_E)

    def backward(kept, dy_RO):
        x_RI, w8, sizes_E = kept
        dy8 = quantise(dy_RO, BACKWARD, jnp.sum(sizes_E))
        operands = dy8.values, w8.values, dy8.scale * w8.scale, sizes_E
        dx_RI = grouped_matmul_float8(*operands, x_RI.dtype, exact=True, **how)
        return dx_RI, grouped_outer(x_RI, dy_RO, sizes_E, **how), None

    @jax.custom_vjp
    def run(x_RI, w_EIO, sizes_E):
        return forward(x_RI, w_EIO, sizes_E)[0]

    run.defvjp(forward, backward)
    return run(x_RI, w_EIO, sizes_E)
