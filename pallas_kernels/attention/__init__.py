"""Causal attention within the documents of packed rows: grouped-query (GQA), and sliding-window if asked."""

from collections.abc import Sequence

import jax

from pallas_kernels import dispatch
from pallas_kernels.attention import cudnn_packed, stand_in
from pallas_kernels.attention.segments import Segments, find_segments
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["OPERATION", "STAND_IN", "Segments", "attention", "automatic", "find_segments"]

STAND_IN = {name: name + stand_in.SUFFIX for name in ("cudnn_packed", "triton")}
"""Implementations that only their GPU can lower -> what has their memory and is lowered anywhere."""

CUDNN_WORKSPACE = 20 << 30  # bytes; two rows of 8,192 tokens and 32 segments, 32 heads of 128, take 16 GiB


def automatic(
    elements: int, max_segments: int, platform: str | None = None, *, width: int = 0
) -> tuple[str, ...]:
    """Returns the implementations that are tried where none is named, the first first.

    On an NVIDIA GPU that is cudnn_packed, or triton where cuDNN's workspace would be above CUDNN_WORKSPACE or
    heads are wider than it takes, or an error: the other two cost T² whatever the documents and run there
    only when named. The reference does so everywhere. Who knows how long documents are asks `measured` first.

    elements: of q on one device. max_segments: that `segments` have room for. platform: as for `attention`.
    width: of a head; 0 is any that each of them takes.
    """
    small = cudnn_packed.workspace_bytes(elements, max_segments) <= CUDNN_WORKSPACE
    small &= width <= cudnn_packed.MAX_HEAD_DIM
    packed = ("cudnn_packed", "triton") if small else ("triton", "cudnn_packed")
    return packed if dispatch.on_nvidia(platform) else (*packed, "xla")


OPERATION = Operation(
    __name__,
    {
        "cudnn_packed": Implementation(takes=("platform",)),
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    automatic,
)


def attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKC: jax.Array,
    segments: Segments,
    *,
    window: int | None = None,
    implementation: str | Sequence[str] | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Each token attends to the tokens of its own segment up to itself, with the scale C**-0.5.

    The softmax is in float32. The output is named "attention" by `jax.ad_checkpoint.checkpoint_name`, and
    what else a backward pass needs of the kernel, where it is more than q, k and v, "attention_statistics"
    ([B, H, T] float32): a rematerialisation policy that saves both names (and q, k and v, named by the
    caller) runs no kernel twice.

    The arrays are taken as they lie on one device: a sharded model calls this within `jax.shard_map` over
    batch and heads. A row with more segments than `segments` has room for gets undefined values; see
    `segments.overflow`.

    Args:
      q_BTHC: [B, T, H, C] queries.
      k_BTKC: [B, T, K, C] keys of q's dtype; K divides H and query head h uses key head h // (H // K).
      v_BTKC: [B, T, K, C] values of q's dtype.
      segments: of `find_segments`, for the same B and T.
      window: each token attends to no more than so many tokens, the last of which is itself: the token at t
        to keys s with t - window < s <= t. None, like a window of T or more, is all of its segment.
      implementation: one of `OPERATION.names`, or several, of which the first that can run is taken; None is
        those of `automatic`. "cudnn_packed_stand_in" and "triton_stand_in" have the memory of those, for
        programs that are compiled and not run.
      platform: "cpu", "gpu" or "tpu", where the computation will run; None is JAX's default backend.

    Returns:
      [B, T, H, C] of q's dtype, finite at every position of finite inputs, padding included.

    Raises:
      ValueError: the shapes or dtypes do not fit together, a window is below 1, or no implementation has the
        name.
      dispatch.Unsupported: the named implementation, or every one, refuses; with the reasons.

    Source: Vaswani et al. 2017 (arXiv:1706.03762); grouped queries: Ainslie et al. 2023 (arXiv:2305.13245).
    """
    B, T, H, C = q_BTHC.shape
    K = k_BTKC.shape[2]
    if k_BTKC.shape != (B, T, K, C) or v_BTKC.shape != k_BTKC.shape or H % K:
        raise ValueError(
            f"attention: shapes do not fit: q {q_BTHC.shape}, k {k_BTKC.shape}, v {v_BTKC.shape}"
        )
    if segments.ids.shape != (B, T):
        raise ValueError(f"attention: segments are of {segments.ids.shape}, q of {(B, T)} rows and tokens")
    if not q_BTHC.dtype == k_BTKC.dtype == v_BTKC.dtype:
        raise ValueError(f"attention: dtypes differ: q {q_BTHC.dtype}, k {k_BTKC.dtype}, v {v_BTKC.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window = {window}: must be at least 1, which is the token itself")
    options = {} if window is None or window >= T else {"window": window}
    arguments = q_BTHC, k_BTKC, v_BTKC, segments
    if implementation in STAND_IN.values():
        return stand_in.attention(implementation.removesuffix(stand_in.SUFFIX), *arguments, **options)
    facts = {"elements": q_BTHC.size, "max_segments": segments.starts.shape[1], "width": C}
    how = {"implementation": implementation, "platform": platform, "facts": facts}
    return OPERATION.run(*arguments, **how, **options)
