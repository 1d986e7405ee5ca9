"""Attention by cuDNN's packed ("ragged") kernels: documents cost the sum of their squares, not the row's.

JAX offers these kernels only behind a private interface, `jax._src.cudnn.fused_attention_stablehlo`. This
module is the one place that uses it, and refuses, naming the version, where the interface is not the one it
was written for. It binds the kernels below JAX's own custom_vjp, because that keeps the softmax statistics
out of reach of a rematerialisation policy, so that the backward pass runs the forward kernel again to get
them.

Determinism: nothing to do here. XLA asks cuDNN for the deterministic backward kernel whenever the module is
compiled with --xla_gpu_deterministic_ops or --xla_gpu_exclude_nondeterministic_ops (`RequireDeterminism` in
XLA's compiler pass for cuDNN custom calls); JAX passes no switch of its own.

Shapes: B rows, T tokens, H query heads, K key heads, C width of a head, M segments of a row; S = B·M segments
of all rows.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.segments import Segments
from pallas_kernels.dispatch import Unsupported, nvidia_compute_capability, require_nvidia
from pallas_kernels.varying import vary_alike

SUPPORTED_JAX = ">=0.11.2,<0.13"
MIN_CUDNN = 90800  # 9.8, the oldest that JAX 0.11 runs with
MAX_HEAD_DIM = 128  # wider heads have kernels too, on Hopper, but packed ones are untested

# fmt: off
_OPERANDS = ("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets",
             "page_table_k", "page_table_v")
_OPTIONS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
# fmt: on
SIGNATURES = {
    "_dot_product_attention_fwd_impl": (*_OPERANDS, *_OPTIONS, "is_training"),
    "_dot_product_attention_bwd_impl": (*_OPERANDS, "activation", "fwd_output", "grad_output", *_OPTIONS),
}


def attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    segments: Segments,
    *,
    window: int | None = None,
    platform: str,
) -> jax.Array:
    """Returns [B, T, H, C] of q's dtype; see `pallas_kernels.attention.attention`.

    Raises:
      Unsupported: not an NVIDIA GPU of compute capability 9.0 or later with cuDNN 9.8 or later; neither
        bfloat16 nor float16; a head wider than 128 or no multiple of 8; more elements than cuDNN's 32-bit
        offsets reach; or a JAX whose private interface differs.
    """
    _check_device(platform)
    _check_arrays(q_BTHC)
    _private()
    return _attention(*vary_alike(q_BTHC, k_BTKC, v_BTKC), segments, window)


def _check_device(platform: str) -> None:
    require_nvidia(platform, (9, 0))
    if nvidia_compute_capability() is None:
        return  # lowered for a GPU on a machine without one: what it will run on cannot be asked
    version = _cudnn_version()
    if version is None or version < MIN_CUDNN:
        raise Unsupported(f"needs cuDNN >= {MIN_CUDNN}, found {version}")


def _cudnn_version() -> int | None:
    """Returns the loaded cuDNN's version, 9.19.0 as 91900, or None without JAX's CUDA plugin."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def _check_arrays(q_BTHC: jax.Array) -> None:
    B, T, H, C = q_BTHC.shape
    if q_BTHC.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"needs bfloat16 or float16, got {q_BTHC.dtype}")
    if C > MAX_HEAD_DIM or C % 8:
        raise Unsupported(f"needs a head dim that is a multiple of 8, at most {MAX_HEAD_DIM}, got {C}")
    if B * T * H * C >= 2**31:
        raise Unsupported(
            f"needs fewer than 2**31 elements of q (cuDNN's offsets are int32), got {B * T * H * C}"
        )


def workspace_bytes(elements: int, max_segments: int) -> int:
    """Returns what the backward kernel needs: dq in float32, and dk and dv of every query head, are added up
    for each segment apart, as if each were T long. elements: of q."""
    return elements * max_segments * 8


@functools.cache
def _private():
    """Returns JAX's private module after checking what is used of it. Late, for it is of no use off a GPU."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        found = {name: tuple(inspect.signature(getattr(module, name)).parameters) for name in SIGNATURES}
        _ = module.MaskType.PADDING_CAUSAL, module.MaskType.CAUSAL, module.AttentionLayout.BTNH
        _ = jax.typeof(0.0).manual_axis_type.varying
        differing = [name for name, parameters in SIGNATURES.items() if found[name] != parameters]
    except (ImportError, AttributeError) as error:
        differing = [str(error)]
    if differing:
        raise Unsupported(
            f"needs the private cuDNN interface of jax {SUPPORTED_JAX}, and jax {jax.__version__} differs in:"
            f" {'; '.join(differing)}"
        )
    return module


def _operands(q_BTHC, segments: Segments) -> tuple:
    """Returns what follows q, k and v: bias, q_seqlen, kv_seqlen, q_offsets, kv_offsets, two page tables."""
    absent = jnp.zeros(0, q_BTHC.dtype)
    if segments.starts.shape[1] == 1:  # each row is one segment: the plain causal kernel
        return (absent,) * 7
    # cuDNN's offsets hold each segment's start. One entry more than there are segments is asked for, and it,
    # like every unused one, must be -1: the end of the last segment there gives NaN and wrong gradients
    # without an error.
    offsets_BM1 = jnp.pad(segments.starts, ((0, 0), (0, 1)), constant_values=-1)
    return absent, segments.lengths, segments.lengths, offsets_BM1, offsets_BM1, absent, absent


def _options(q_BTHC, segments: Segments, window: int | None) -> dict:
    private = _private()
    packed = segments.starts.shape[1] > 1
    return {
        "scale": q_BTHC.shape[-1] ** -0.5,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of one
        "mask_type": private.MaskType.PADDING_CAUSAL if packed else private.MaskType.CAUSAL,
        "layout": private.AttentionLayout.BTNH.value,
        "sliding_window_length": window,  # counts the query itself, and is by position in its segment
    }


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BTHC, k_BTKC, v_BTKC, segments: Segments, window):
    outputs = _private()._dot_product_attention_fwd_impl(
        q_BTHC,
        k_BTKC,
        v_BTKC,
        *_operands(q_BTHC, segments),
        **_options(q_BTHC, segments, window),
        is_training=False,
    )
    return checkpoint_name(outputs[0], "attention")


def _forward(q_BTHC, k_BTKC, v_BTKC, segments: Segments, window):
    o_BTHC, statistics_SHT = _private()._dot_product_attention_fwd_impl(
        q_BTHC,
        k_BTKC,
        v_BTKC,
        *_operands(q_BTHC, segments),
        **_options(q_BTHC, segments, window),
        is_training=True,
    )
    # The named arrays are the residuals: a policy that saves the names saves what the backward kernel reads.
    o_BTHC = checkpoint_name(o_BTHC, "attention")
    statistics_BHT = checkpoint_name(pack_statistics(statistics_SHT, segments), "attention_statistics")
    return o_BTHC, (q_BTHC, k_BTKC, v_BTKC, segments, o_BTHC, statistics_BHT)


def _backward(window, residuals, do_BTHC):
    q_BTHC, k_BTKC, v_BTKC, segments, o_BTHC, statistics_BHT = residuals
    dq_BTHC, dk_BTKC, dv_BTKC = _private()._dot_product_attention_bwd_impl(
        q_BTHC,
        k_BTKC,
        v_BTKC,
        *_operands(q_BTHC, segments),
        unpack_statistics(statistics_BHT, segments),
        o_BTHC,
        do_BTHC,
        **_options(q_BTHC, segments, window),
    )
    return dq_BTHC, dk_BTKC, dv_BTKC, None


_attention.defvjp(_forward, _backward)


# cuDNN keeps the statistics (each query's log-sum-exp) of every segment in a line of T entries of its own,
# numbered through the batch and counted from the segment's start, so M times the memory that they need: 64
# MiB a layer, not 2, for 2 rows of 8,192 tokens with 32 heads and M = 32. Between the passes they are kept by
# the tokens' own positions.


def pack_statistics(statistics_SHT: jax.Array, segments: Segments) -> jax.Array:
    """Returns [B, H, T]: the statistics by row and position, from cuDNN's lines by segment."""
    T = segments.ids.shape[1]
    M = segments.starts.shape[1]
    if M == 1:
        return statistics_SHT
    segment_BT = jnp.minimum(segments.ids, M - 1)
    line_BT = _first_line(segments)[:, None] + segment_BT
    start_BT = jnp.take_along_axis(segments.starts, segment_BT, axis=1)
    position_BT = jnp.arange(T, dtype=jnp.int32)[None, :] - start_BT
    packed_BTH = statistics_SHT.at[line_BT, :, position_BT].get(mode="clip")
    return packed_BTH.transpose(0, 2, 1)


def unpack_statistics(statistics_BHT: jax.Array, segments: Segments) -> jax.Array:
    """Returns [S, H, T]: cuDNN's lines by segment, the inverse of `pack_statistics`.

    Entries behind a segment's end belong to no token. They get a large finite value, so that the weight
    exp(score - statistic) which a kernel might form of one is 0, never NaN.
    """
    B, H, T = statistics_BHT.shape
    M = segments.starts.shape[1]
    if M == 1:
        return statistics_BHT
    line_S = jnp.arange(B * M, dtype=jnp.int32)
    first_B = _first_line(segments)
    row_S = jnp.sum(line_S[:, None] >= first_B[None, :], axis=1, dtype=jnp.int32) - 1
    segment_S = jnp.minimum(line_S - first_B[row_S], M - 1)  # lines behind the last segment hold nothing
    start_S = jnp.maximum(segments.starts[row_S, segment_S], 0)
    # Each line is one slice of a row. Reading slices needs one index a line and has one result; writing the
    # rows out to the lines would be a scatter, which is slow where determinism is asked for.
    padded_BHT2 = jnp.pad(statistics_BHT, ((0, 0), (0, 0), (0, T)))
    read = jax.vmap(lambda row, start: jax.lax.dynamic_slice(padded_BHT2, (row, 0, start), (1, H, T))[0])
    used_ST = jnp.arange(T, dtype=jnp.int32)[None, :] < segments.lengths[row_S, segment_S][:, None]
    return jnp.where(used_ST[:, None, :], read(row_S, start_S), 1e30)


def _first_line(segments: Segments) -> jax.Array:
    """Returns [B]: how many segments the rows before have, which is the line of each row's first one."""
    count_B = jnp.sum(segments.lengths > 0, axis=1, dtype=jnp.int32)
    return jnp.cumsum(count_B, dtype=jnp.int32) - count_B
