"""Stand-ins for GPU attention, compiled but never run, to plan memory on a machine without a GPU.

cuDNN's and Triton's kernels cannot be lowered without the GPU that they are for. To ask how much memory a
step needs, it is enough that calls of the same operands, results and workspace stand in their places; the
rest of each implementation (names for rematerialisation, statistics by segment, sums) stays as it is.

Shapes: B rows, T tokens, H query heads, K key heads, C width of a head, S segments of all rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import cudnn_packed
from pallas_kernels.attention.segments import Segments

SUFFIX = "_stand_in"


def attention(
    kernel: str,
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    segments: Segments,
    *,
    window: int | None = None,
) -> jax.Array:
    """Returns [B, T, H, C] in the place of "cudnn_packed" or "triton"; a program that runs it fails.

    window: is of no account, for a kernel needs the same memory with one.
    """
    return _attention(kernel, q_BTHC, k_BTKC, v_BTKC, segments)


def _call(name: str, outputs: tuple, *arrays) -> list[jax.Array]:
    return jax.ffi.ffi_call(f"jaxthru_stand_in_{name}", outputs, vmap_method="sequential")(*arrays)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(kernel, q_BTHC, k_BTKC, v_BTKC, segments):
    return _forward(kernel, q_BTHC, k_BTKC, v_BTKC, segments)[0]


def _forward(kernel, q_BTHC, k_BTKC, v_BTKC, segments):
    B, T, H, _ = q_BTHC.shape
    lines = B * segments.starts.shape[1] if kernel == "cudnn_packed" else B
    statistics = jax.ShapeDtypeStruct((lines, H, T), jnp.float32)
    o_BTHC, statistics_SHT = _call("forward", (_like(q_BTHC), statistics), q_BTHC, k_BTKC, v_BTKC)
    statistics_BHT = statistics_SHT
    if kernel == "cudnn_packed":
        statistics_BHT = cudnn_packed.pack_statistics(statistics_SHT, segments)
    o_BTHC = checkpoint_name(o_BTHC, "attention")
    statistics_BHT = checkpoint_name(statistics_BHT, "attention_statistics")
    return o_BTHC, (q_BTHC, k_BTKC, v_BTKC, segments, o_BTHC, statistics_BHT)


def _backward(kernel, residuals, do_BTHC):
    q_BTHC, k_BTKC, v_BTKC, segments, o_BTHC, statistics_BHT = residuals
    gradients = _like(q_BTHC), _like(k_BTKC), _like(v_BTKC)
    if kernel == "triton":
        products = o_BTHC.astype(jnp.float32) * do_BTHC.astype(jnp.float32)
        delta_BHT = jnp.sum(products, axis=-1).transpose(0, 2, 1)
        arrays = q_BTHC, k_BTKC, v_BTKC, do_BTHC, statistics_BHT, delta_BHT
        (dq_BTHC,) = _call("backward_q", gradients[:1], *arrays)
        dk_BTKC, dv_BTKC = _call("backward_kv", gradients[1:], *arrays)
        return dq_BTHC, dk_BTKC, dv_BTKC, None
    size = cudnn_packed.workspace_bytes(q_BTHC.size, segments.starts.shape[1])
    workspace = jax.ShapeDtypeStruct((size,), jnp.uint8)
    statistics_SHT = cudnn_packed.unpack_statistics(statistics_BHT, segments)
    arrays = q_BTHC, k_BTKC, v_BTKC, statistics_SHT, o_BTHC, do_BTHC
    dq_BTHC, dk_BTKC, dv_BTKC, _ = _call("backward", (*gradients, workspace), *arrays)
    return dq_BTHC, dk_BTKC, dv_BTKC, None


_attention.defvjp(_forward, _backward)
