"""The contract of attention: values and gradients of all implementations; packed rows; who is chosen."""

import dataclasses
import functools
import itertools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.attention import (
    Segments,
    attention,
    automatic,
    cudnn_packed,
    find_segments,
    reference,
    triton,
    xla,
)
from pallas_kernels.attention.shapes import CPU, GPU, Shape
from pallas_kernels.testing import (
    CPU_TOLERANCE,
    GPU_TOLERANCE,
    assert_close,
    fresh_seed,
    has_gpu,
    normal,
    relative_error,
    segment_ids,
)

needs_hopper = pytest.mark.skipif(not has_gpu((9, 0)), reason="needs a Hopper GPU")
CASES = [
    *(pytest.param("xla", CPU[name], jnp.float32, id=f"xla-{name}") for name in CPU),
    pytest.param("xla", CPU["odd_length"], jnp.bfloat16, id="xla-odd_length-bfloat16"),
    *(
        pytest.param(
            implementation,
            GPU[name],
            jnp.bfloat16,
            id=f"{implementation}-{name}",
            marks=[pytest.mark.gpu, needs_hopper],
        )
        for implementation in ("cudnn_packed", "triton")
        for name in GPU
        if implementation != "cudnn_packed" or GPU[name].head_dim <= cudnn_packed.MAX_HEAD_DIM
    ),
]


def draw(rng: np.random.Generator, shape: Shape, dtype):
    """Returns q, k, v, the output's cotangent and segment ids."""
    B, T, H, K, C = shape.rows, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim
    q, do = (normal(rng, (B, T, H, C), dtype) for _ in range(2))
    k, v = (normal(rng, (B, T, K, C), dtype) for _ in range(2))
    return q, k, v, do, jnp.asarray(segment_ids(rng, B, T, shape.layout))


@functools.partial(jax.jit, static_argnames=("function",))
def values_and_gradients(function, q, k, v, do, segments):
    o, pullback = jax.vjp(lambda q, k, v: function(q, k, v, segments), q, k, v)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *pullback(do)), strict=True))


def expected(q, k, v, do, segments, function=reference.attention):
    """Returns the reference's in float32, one row and key head at a time: all scores would fill a GPU."""
    B, _, H, _ = q.shape
    K = k.shape[2]
    out = {n: np.zeros(x.shape, np.float32) for n, x in (("o", q), ("dq", q), ("dk", k), ("dv", v))}
    q, k, v, do = (x.astype(jnp.float32) for x in (q, k, v, do))
    for b in range(B):
        for head in range(K):
            rows, group, one = (
                slice(b, b + 1),
                slice(head * H // K, (head + 1) * H // K),
                slice(head, head + 1),
            )
            part = values_and_gradients(
                function,
                q[rows, :, group],
                k[rows, :, one],
                v[rows, :, one],
                do[rows, :, group],
                Segments(*(x[rows] for x in segments)),
            )
            for name, value in part.items():
                out[name][rows, :, group if name in ("o", "dq") else one] = value
    return out


def assert_agrees(found, exact, tolerance, window):
    if window == 1:  # each token sees itself alone, whatever its score: dq and dk are zero but for rounding
        found, exact = (
            {n: 1 + x if n in ("dq", "dk") else x for n, x in run.items()} for run in (found, exact)
        )
    assert_close(found, exact, tolerance)


@pytest.mark.parametrize("implementation, shape, dtype", CASES)
def test_agrees_with_reference(implementation, shape, dtype):
    q, k, v, do, ids = draw(np.random.default_rng(fresh_seed()), shape, dtype)
    segments = find_segments(ids, shape.max_segments)
    assert not segments.overflow.any()
    function = functools.partial(attention, implementation=implementation, window=shape.window)
    found = values_and_gradients(function, q, k, v, do, segments)
    assert {x.dtype for x in found.values()} == {jnp.dtype(dtype)}
    tolerance = CPU_TOLERANCE if dtype == jnp.float32 else GPU_TOLERANCE
    exact = functools.partial(reference.attention, window=shape.window)
    assert_agrees(found, expected(q, k, v, do, segments, exact), tolerance, shape.window)


def by_loops(q, k, v, segments, window=None):
    """Attention as its definition says it, in NumPy: each query and head over its list of keys."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    o, ids = np.zeros(q.shape), np.asarray(segments.ids)
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t] and (window is None or t - window < s)]
        head = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, head] @ q[b, t, h] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        o[b, t, h] = weights @ v[b, seen, head] / weights.sum()
    return o


@pytest.mark.parametrize("window", [None, 1, 2, 7, 46, 47])
def test_reference_is_the_definition(window):
    shape = Shape(2, 47, 4, 2, 8, "padding_tail", 8)
    q, k, v, _, ids = draw(np.random.default_rng(fresh_seed()), shape, jnp.float32)
    given = q, k, v, find_segments(ids, shape.max_segments)
    found = attention(*given, window=window, implementation="reference")
    assert_close(found, by_loops(*given, window), CPU_TOLERANCE)
    if window is not None and window < shape.sequence - 1:  # the boundary is told from its neighbours
        for wrong in {max(window - 1, 1), window + 1} - {window}:
            assert relative_error(found, by_loops(*given, wrong)) > 100 * CPU_TOLERANCE


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", ["window_5", "window_in_chunk", "window_across_chunks"])
def test_contract_fails_where_a_window_is_off_by_one(monkeypatch, name, off):
    sound = xla.attention
    monkeypatch.setattr(xla, "attention", lambda *x, window: sound(*x, window=window + off))
    with pytest.raises(AssertionError, match="relative error above"):
        test_agrees_with_reference("xla", CPU[name], jnp.float32)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", ["window_100", "window_100_causal"])
def test_the_tolerance_on_gpus_would_see_a_window_off_by_one(name, off):
    shape = dataclasses.replace(GPU[name], heads=1, kv_heads=1)
    q, k, v, _, ids = draw(np.random.default_rng(fresh_seed()), shape, jnp.float32)
    given = q, k, v, find_segments(ids, shape.max_segments)
    found, wrong = (reference.attention(*given, window=shape.window + each) for each in (0, off))
    assert relative_error(wrong, found) > 2 * GPU_TOLERANCE


@pytest.mark.parametrize("implementation", ["cudnn_packed", "triton", "xla", "reference"])
def test_a_window_of_the_row_is_none(implementation):
    """The same program, so that nothing gets slower; one below is another."""
    shape = jax.ShapeDtypeStruct((1, 640, 2, 16), jnp.bfloat16)
    segments = jax.eval_shape(lambda: find_segments(jnp.ones((1, 640), jnp.int32), 4))

    def text(window):
        name = "triton_stand_in" if implementation == "triton" else implementation
        how = {"implementation": name, "platform": "gpu"}
        run = lambda q, s: attention(q, q, q, s, window=window, **how)  # noqa: E731
        return jax.jit(run).trace(shape, segments).lower(lowering_platforms=("cuda",)).as_text()

    assert text(640) == text(5000) == text(None)
    assert implementation == "triton" or text(639) != text(None)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match=rf"window = {window}: must be at least 1"):
        attention(*small(), window=window)


def test_cudnn_s_window_counts_the_query():
    """What JAX hands to cuDNN, in both passes: a key j is seen by the query i where j + window > i."""
    q = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)
    segments = jax.eval_shape(lambda: find_segments(jnp.ones((1, 64), jnp.int32), 4))

    def loss(q, segments):
        o = attention(q, q, q, segments, window=9, implementation="cudnn_packed", platform="gpu")
        return jnp.sum(o.astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).trace(q, segments).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"sliding_window_length\\22: (\d+)", text) == ["9", "9"]


def test_chunks_meet_only_the_keys_in_their_window():
    """The portable implementation's products with a window of 512 in a row of 8,192, against all."""
    q = jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.float32)
    segments = jax.eval_shape(lambda: find_segments(jnp.ones((1, 8192), jnp.int32), 4))

    def flops(window):
        run = lambda q, s: attention(q, q, q, s, window=window, implementation="xla")  # noqa: E731
        (cost,) = [jax.jit(run).lower(q, segments).compile().cost_analysis()]
        return cost["flops"]  # of one chunk: a loop's body counts once

    assert flops(512) < flops(None) / 6


def test_triton_s_bounds_are_those_of_the_window():
    ids = jnp.asarray(segment_ids(np.random.default_rng(fresh_seed()), 5, 40, "mixed"))
    segments = find_segments(ids, 41)
    assert triton._bounds(segments, None) == (segments.first, segments.last)
    position = np.arange(40)
    for window in (1, 3, 39):
        first, last = triton._bounds(segments, window)
        causal = position[:, None] >= position  # [query, key]
        seen = (position >= np.asarray(first)[:, :, None]) & causal
        near = (position[:, None] - position < window) & causal
        same = np.asarray(segments.ids)[:, :, None] == np.asarray(segments.ids)[:, None]
        np.testing.assert_array_equal(seen, near & same)
        last_query = np.where(near & same, position[:, None], -1).max(1)
        np.testing.assert_array_equal(last, last_query)
        assert (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all()  # the kernels count on it


def test_scores_and_softmax_are_float32():
    """Scores of some tens: in bfloat16 they, and the weights made of them, would be an eighth wrong."""
    shape = CPU["odd_length"]
    q, k, v, do, ids = draw(np.random.default_rng(fresh_seed()), shape, jnp.bfloat16)
    given = 8 * q, k, v, do, find_segments(ids, shape.max_segments)
    function = functools.partial(attention, implementation="xla")
    assert_close(values_and_gradients(function, *given), expected(*given), GPU_TOLERANCE)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("implementation", ["xla", "cudnn_packed", "triton"])
def test_half_precision_on_gpu(implementation):
    """Also for the fallback that is only taken when named, and for float16."""
    shape = GPU["multi_head"]
    for dtype in (jnp.bfloat16, jnp.float16):
        q, k, v, do, ids = draw(np.random.default_rng(fresh_seed()), shape, dtype)
        segments = find_segments(ids, shape.max_segments)
        found = values_and_gradients(
            functools.partial(attention, implementation=implementation), q, k, v, do, segments
        )
        assert_close(found, expected(q, k, v, do, segments), GPU_TOLERANCE)


def packed_implementations():
    return [
        ("reference", jnp.float32),
        ("xla", jnp.float32),
        pytest.param("cudnn_packed", jnp.bfloat16, marks=[pytest.mark.gpu, needs_hopper]),
        pytest.param("triton", jnp.bfloat16, marks=[pytest.mark.gpu, needs_hopper]),
    ]


@pytest.mark.parametrize("window", [None, 1, 5, 20])
@pytest.mark.parametrize("implementation, dtype", packed_implementations())
def test_packed_row_equals_each_document_alone(implementation, dtype, window):
    rng = np.random.default_rng(fresh_seed())
    bounds = np.cumsum([0, *rng.permutation([1, 7, 16, 16, 30])])
    shape = Shape(1, int(bounds[-1]), 4, 2, 16, "one_document", 8)
    q, k, v, do, _ = draw(rng, shape, dtype)
    ids = np.repeat(np.arange(5) + 1, np.diff(bounds)).astype(np.int32)[None]
    function = functools.partial(attention, implementation=implementation, window=window)
    exact = functools.partial(attention, implementation="reference", window=window)
    packed = values_and_gradients(function, q, k, v, do, find_segments(jnp.asarray(ids), 8))
    alone = []
    for begin, end in itertools.pairwise(bounds):
        document = [x[:, begin:end].astype(jnp.float32) for x in (q, k, v, do)]
        segments = find_segments(jnp.ones((1, end - begin), jnp.int32), 1)
        alone.append(values_and_gradients(exact, *document, segments))
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *alone)
    assert_agrees(packed, joined, CPU_TOLERANCE if dtype == jnp.float32 else GPU_TOLERANCE, window)


@pytest.mark.parametrize("implementation, dtype", packed_implementations())
def test_padding_is_finite_and_does_not_leak(implementation, dtype):
    rng = np.random.default_rng(fresh_seed())
    shape = Shape(4, 64, 4, 2, 16, "padding_tail", 8)
    q, k, v, do, ids = draw(rng, shape, dtype)
    ids = ids.at[-1].set(0)
    segments = find_segments(ids, shape.max_segments)
    function = functools.partial(attention, implementation=implementation)
    is_padding = (ids == 0)[:, :, None, None]
    clean = values_and_gradients(function, q, k, v, jnp.where(is_padding, 0, do), segments)
    assert all(np.isfinite(x).all() for x in clean.values())
    # Whatever padding holds, documents see nothing of it, in either direction. On a GPU the backward kernel
    # sums in no fixed order, so two runs are close; a leak of values this large would not be.
    poisoned = [jnp.where(is_padding, jnp.asarray(1e4, dtype), x) for x in (q, k, v)]
    dirty = values_and_gradients(function, *poisoned, jnp.where(is_padding, 0, do), segments)
    clean, dirty = ({name: jnp.where(is_padding, 0, x) for name, x in run.items()} for run in (clean, dirty))
    assert_close(dirty, clean, 0.0 if dtype == jnp.float32 else GPU_TOLERANCE)


@pytest.mark.gpu
@needs_hopper
def test_deterministic_flag_makes_the_backward_kernel_repeatable():
    """XLA takes the flag to cuDNN; nothing in the implementation does. The shape is small because the
    deterministic kernel's workspace grows with rows × segments × heads × sequence²."""
    shape = GPU["multi_head"]
    q, k, v, do, ids = draw(np.random.default_rng(fresh_seed()), shape, jnp.bfloat16)
    segments = find_segments(ids, shape.max_segments)
    function = functools.partial(attention, implementation="cudnn_packed")
    lowered = values_and_gradients.lower(function, q, k, v, do, segments)
    run = lowered.compile(compiler_options={"xla_gpu_deterministic_ops": True})
    first = run(q, k, v, do, segments)
    for _ in range(5):
        for name, value in run(q, k, v, do, segments).items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(first[name]), err_msg=name)


def test_find_segments():
    ids = jnp.asarray(
        [[1, 1, 2, 2, 2, 0], [7, 7, 7, 7, 7, 7], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0]], jnp.int32
    )
    segments = jax.jit(find_segments, static_argnums=1)(ids, 4)
    np.testing.assert_array_equal(segments.ids, [[0, 0, 1, 1, 1, 2], [0] * 6, [0] * 6, [0, 1, 2, 3, 4, 4]])
    np.testing.assert_array_equal(
        segments.starts, [[0, 2, 5, -1], [0, -1, -1, -1], [0, -1, -1, -1], [0, 1, 2, 3]]
    )
    np.testing.assert_array_equal(
        segments.lengths, [[2, 3, 1, -1], [6, -1, -1, -1], [6, -1, -1, -1], [1, 1, 1, 1]]
    )
    np.testing.assert_array_equal(segments.overflow, [False, False, False, True])
    assert {x.dtype for x in segments[:3]} == {jnp.dtype("int32")}


def test_an_id_used_twice_is_two_segments():
    """The definition is by runs, because the kernels' layout is: reference and kernels must agree on it."""
    segments = find_segments(jnp.asarray([[1, 1, 2, 1, 1]], jnp.int32), 4)
    np.testing.assert_array_equal(segments.ids, [[0, 0, 1, 2, 2]])


@pytest.mark.parametrize("layout", ["one_document", "documents", "tiny_documents", "padding_tail", "mixed"])
def test_segments_cover_every_token_once(layout):
    ids = segment_ids(np.random.default_rng(fresh_seed()), 6, 90, layout)
    segments = find_segments(jnp.asarray(ids), 91)
    for row, starts, lengths in zip(ids, segments.starts, segments.lengths, strict=True):
        used = np.asarray(lengths) > 0
        assert np.all((np.asarray(starts) >= 0) == used) and np.asarray(lengths)[used].sum() == row.size
        for start, length in zip(np.asarray(starts)[used], np.asarray(lengths)[used], strict=True):
            assert len({*row[start : start + length]}) == 1
            assert start == 0 or row[start - 1] != row[start]


def test_statistics_are_kept_by_position():
    """cuDNN's line of each segment, counted through the batch, holds those of the segment's tokens."""
    rng = np.random.default_rng(fresh_seed())
    ids = segment_ids(rng, 5, 40, "mixed")
    segments = find_segments(jnp.asarray(ids), 41)
    statistics = normal(rng, (5, 3, 40), jnp.float32)
    lines = np.asarray(cudnn_packed.unpack_statistics(statistics, segments))
    line = 0
    for row in range(5):
        for start, length in zip(segments.starts[row], segments.lengths[row], strict=True):
            if length > 0:
                np.testing.assert_array_equal(
                    lines[line, :, :length], statistics[row, :, start : start + length]
                )
                assert (lines[line, :, length:] == 1e30).all()
                line += 1
    assert (lines[line:] == 1e30).all()
    np.testing.assert_array_equal(cudnn_packed.pack_statistics(jnp.asarray(lines), segments), statistics)


# The choice of an implementation


def small(dtype=jnp.float32):
    q, k, v, _, ids = draw(np.random.default_rng(0), CPU["padding_tail"], dtype)
    return q, k, v, find_segments(ids, 8)


def test_none_takes_the_portable_one_and_logs_once(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        for _ in range(3):
            attention(*small(), platform="cpu")
        attention(*small(), implementation="reference")
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: attention uses xla (refused: cudnn_packed: needs an NVIDIA GPU of compute capability "
        ">= 9.0, found cpu; triton: needs an NVIDIA GPU of compute capability >= 8.0, found cpu)",
        "kernels: attention uses reference",
    ]


def test_named_runs_or_raises():
    with pytest.raises(dispatch.Unsupported, match=r"cudnn_packed: needs an NVIDIA GPU .*, found cpu"):
        attention(*small(jnp.bfloat16), implementation="cudnn_packed", platform="cpu")
    with pytest.raises(dispatch.Unsupported, match="found tpu"):
        attention(*small(jnp.bfloat16), implementation="cudnn_packed", platform="tpu")
    with pytest.raises(
        ValueError, match=r"no implementation 'xal'; there are cudnn_packed, triton, xla, reference"
    ):
        attention(*small(), implementation="xal")
    with pytest.raises(ValueError, match=r"no implementation 'xal'; there are"):
        attention(*small(), implementation=("xal", "xla"))


def test_gpu_refuses_the_quadratic_ones_unless_named():
    with pytest.raises(
        dispatch.Unsupported, match="bfloat16 or float16, got float32; only when named: xla, reference"
    ):
        attention(*small(), platform="gpu")
    attention(*small(), platform="gpu", implementation="xla")


@pytest.mark.parametrize(
    "capability, cudnn, head_dim, reason",
    [
        ((8, 0), 91900, 16, r"compute capability >= 9\.0, found 8\.0"),
        (None, None, 16, "found another maker's"),
        ((9, 0), 90700, 16, "needs cuDNN >= 90800, found 90700"),
        ((9, 0), None, 16, "found None"),
        ((9, 0), 91900, 136, "head dim .* got 136"),
        ((9, 0), 91900, 20, "head dim .* got 20"),
    ],
)
def test_cudnn_refuses_what_it_cannot_run(monkeypatch, capability, cudnn, head_dim, reason):
    for module in (dispatch, cudnn_packed):
        monkeypatch.setattr(module, "nvidia_compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn_packed, "_cudnn_version", lambda: cudnn)
    q = jnp.zeros((1, 8, 2, head_dim), jnp.bfloat16)
    segments = find_segments(jnp.ones((1, 8), jnp.int32), 4)
    with pytest.raises(dispatch.Unsupported, match=reason):
        attention(q, q, q, segments, implementation="cudnn_packed", platform="gpu")


def test_cudnn_refuses_offsets_beyond_32_bits():
    q, ids = (
        jax.ShapeDtypeStruct(*s) for s in (((64, 8192, 32, 128), jnp.bfloat16), ((64, 8192), jnp.int32))
    )
    with pytest.raises(dispatch.Unsupported, match="fewer than"):
        jax.eval_shape(lambda q, ids: attention(q, q, q, find_segments(ids, 4), platform="gpu"), q, ids)


@pytest.mark.parametrize(
    ("capability", "shape", "dtype", "reason"),
    [
        ((7, 5), (1, 8, 2, 16), jnp.bfloat16, r"needs an NVIDIA GPU .* found 7\.5"),
        ((9, 0), (1, 8, 2, 16), jnp.float32, "got float32"),
        ((9, 0), (1, 8, 2, 48), jnp.bfloat16, "head dim of 16, 32, 64, 128, 256, got 48"),
        ((9, 0), (1, 2**17, 128, 128), jnp.bfloat16, "fewer than 2..31 elements"),
    ],
)
def test_triton_refuses_what_it_cannot_run(monkeypatch, capability, shape, dtype, reason):
    monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda: capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, ids = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    run = functools.partial(attention, implementation="triton", platform="gpu")
    with pytest.raises(dispatch.Unsupported, match=reason):
        jax.eval_shape(lambda q, ids: run(q, q, q, find_segments(ids, 4)), q, ids)


@pytest.mark.parametrize(("max_segments", "first"), [(32, "cudnn_packed"), (64, "triton")])
def test_gpu_takes_triton_where_cudnn_wants_much_memory(max_segments, first):
    """Two rows of 8,192 tokens with 32 heads of 128: 512 MiB a segment."""
    assert automatic(2 * 8192 * 32 * 128, max_segments, "gpu")[0] == first


@pytest.mark.parametrize(("head_dim", "first"), [(128, "cudnn_packed"), (256, "triton")])
def test_gpu_takes_triton_where_heads_are_wide(head_dim, first):
    assert automatic(2 * 8192 * 4 * head_dim, 4, "gpu", width=head_dim)[0] == first


def test_shapes_and_dtypes_are_checked():
    q, k, v, segments = small()
    with pytest.raises(ValueError, match="shapes do not fit"):
        attention(q[:, :, :3], k, v, segments)
    with pytest.raises(ValueError, match="dtypes differ"):
        attention(q, k.astype(jnp.bfloat16), v, segments)
    with pytest.raises(ValueError, match="segments are of"):
        attention(q[:, :-1], k[:, :-1], v[:, :-1], segments)


def test_a_changed_private_interface_is_refused(monkeypatch):
    cudnn_packed._private.cache_clear()
    name = "_dot_product_attention_bwd_impl"
    monkeypatch.setitem(cudnn_packed.SIGNATURES, name, (*cudnn_packed.SIGNATURES[name], "one_more"))
    with pytest.raises(
        dispatch.Unsupported, match=rf"jax >=0.11.2,<0.13, and jax {jax.__version__} differs in: {name}"
    ):
        attention(*small(jnp.bfloat16), platform="gpu")
    monkeypatch.setattr(cudnn_packed, "SIGNATURES", {"gone": ()})
    with pytest.raises(dispatch.Unsupported, match="has no attribute 'gone'"):
        attention(*small(jnp.bfloat16), platform="gpu")


# Within a shard_map


def sharded_gradients(implementation, platform, q, k, v, do, ids):
    """Rows and query heads are split; the one key head is the same on all devices of its axis."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    rows, heads = PartitionSpec("data"), PartitionSpec("data", None, "tensor")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(heads, rows, rows, rows), out_specs=heads)
    def run(q, k, v, segments):
        return attention(q, k, v, segments, implementation=implementation, platform=platform)

    return jax.vjp(lambda q, k, v: run(q, k, v, find_segments(ids, 8)), q, k, v)[1](do)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_sharded_over_rows_and_heads():
    shape = Shape(4, 48, 4, 1, 16, "padding_tail", 8)
    q, k, v, do, ids = draw(np.random.default_rng(fresh_seed()), shape, jnp.float32)
    found = jax.jit(functools.partial(sharded_gradients, "xla", "cpu"))(q, k, v, do, ids)
    whole = expected(q, k, v, do, find_segments(ids, 8))
    assert_close(found, tuple(whole[name] for name in ("dq", "dk", "dv")), CPU_TOLERANCE)
    # The cuDNN kernel runs on no CPU, but what is summed between devices shows in the lowered program.
    half = [x.astype(jnp.bfloat16) for x in (q, k, v, do)]
    traced = jax.jit(functools.partial(sharded_gradients, "cudnn_packed", "gpu")).trace(*half, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.all_reduce") == 2, "the gradients of shared keys and values are sums"


# Rematerialisation

SAVED = ("query", "key", "value", "attention", "attention_statistics")


def layer_loss(x, segments, policy, implementation, platform):
    """A layer as a model has it, names on q, k and v and rematerialised under a policy, and a loss."""

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x):
        q = checkpoint_name(jnp.sin(x), "query")
        k = checkpoint_name(jnp.cos(x[:, :, :2]), "key")
        v = checkpoint_name(jnp.tanh(x[:, :, :2]), "value")
        return jnp.sin(attention(q, k, v, segments, implementation=implementation, platform=platform))

    return jnp.sum(layer(x).astype(jnp.float32))


@pytest.mark.parametrize("max_segments", [1, 4])
@pytest.mark.parametrize("names, forwards", [(SAVED, 1), (SAVED[:-1], 2), ((), 2)])
def test_forward_kernel_runs_once_a_layer(max_segments, names, forwards):
    """With the statistics saved by name; without, it does run again, so that the test can tell."""
    x = jax.ShapeDtypeStruct((2, 32, 4, 16), jnp.bfloat16)
    segments = jax.eval_shape(lambda: find_segments(jnp.ones((2, 32), jnp.int32), max_segments))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    step = jax.value_and_grad(lambda x, s: layer_loss(x, s, policy, "cudnn_packed", "gpu"))
    jaxpr = str(jax.make_jaxpr(step)(x, segments))
    assert jaxpr.count("dot_product_attention_bwd[") == 1
    assert jaxpr.count("dot_product_attention_fwd[") == forwards
    text = jax.jit(step).trace(x, segments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert text.count("@__cudnn$fmhaSoftmax(") == forwards


@pytest.mark.parametrize("names, forwards", [(SAVED, 1), (SAVED[:-1], 2), ((), 2)])
def test_triton_s_forward_kernel_runs_once_a_layer(monkeypatch, names, forwards):
    """Without a GPU: a stand-in for each kernel has its name and its outputs' shapes."""

    def triton_call(*arrays, kernel, out_shape, **_):
        def stand_in(*arrays):
            return jax.tree.map(
                lambda s: jnp.broadcast_to(arrays[0].max(), s.shape).astype(s.dtype), out_shape
            )

        stand_in.__name__ = kernel
        return jax.jit(stand_in)(*arrays)

    kernels = types.SimpleNamespace(forward="forward", backward_q="backward_q", backward_kv="backward_kv")
    stub = types.SimpleNamespace(triton_call=triton_call)
    monkeypatch.setattr(triton, "load_triton", lambda _: (stub, kernels))
    x = jax.ShapeDtypeStruct((2, 32, 4, 16), jnp.bfloat16)
    segments = jax.eval_shape(lambda: find_segments(jnp.ones((2, 32), jnp.int32), 4))
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    step = jax.value_and_grad(lambda x, s: layer_loss(x, s, policy, "triton", "gpu"))
    jaxpr = str(jax.make_jaxpr(step)(x, segments))
    assert [jaxpr.count(f"name={kernel}\n") for kernel in vars(kernels)] == [forwards, 1, 1]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_policy_does_not_change_gradients(implementation):
    rng = np.random.default_rng(fresh_seed())
    x = normal(rng, (2, 32, 4, 16), jnp.float32)
    segments = find_segments(jnp.asarray(segment_ids(rng, 2, 32, "padding_tail")), 8)
    policies = jax.checkpoint_policies
    found, plain = (
        jax.grad(layer_loss)(x, segments, policy, implementation, "cpu")
        for policy in (policies.save_only_these_names(*SAVED), policies.everything_saveable)
    )
    assert_close(found, plain, 1e-6)


def test_long_rows_make_no_quadratic_scores():
    """The portable implementation's memory for 16 times the default chunk is a few chunks' scores."""
    B, T, H, C = 1, 8192, 2, 16
    q = jax.ShapeDtypeStruct((B, T, H, C), jnp.float32)
    segments = jax.eval_shape(lambda: find_segments(jnp.ones((B, T), jnp.int32), 4))

    def loss(q, segments):
        return jnp.sum(attention(q, q, q, segments, implementation="xla") ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(q, segments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < B * H * T * T * 4 / 2
