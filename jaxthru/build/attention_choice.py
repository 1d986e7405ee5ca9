"""Which attention a run takes where none is named: the fastest measured for documents as long as its own.

A program knows the most documents that a row may hold, but not how long they are. So the choice is made here,
before the step is traced, from the corpus; training and evaluation share it, for they share the step's model.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxthru.build.checks import attention_by
from jaxthru.config import RunConfig
from jaxthru.data.loading.host_pool import RunData
from jaxthru.engine.model import AttentionShape, Model
from jaxthru.models import family
from jaxthru.models.ops import Ops
from jaxthru.runtime.sharding import Layout
from pallas_kernels import dispatch
from pallas_kernels.attention import attention, automatic, find_segments, measured
from pallas_kernels.dispatch import Unsupported, nvidia_compute_capability
from pallas_kernels.rms_norm import PARTITIONED


def mean_document(data: RunData) -> float | None:
    """Returns the mean tokens of a piece of a document in the rows to train on, as the mix weighs its sources
    at its start; None where there are none. A row's end cuts documents, and attention sees the pieces."""
    weights, tokens, pieces = data.mixture.weights(0, 1), 0.0, 0.0
    for name in data.names:
        if data.pieces[name]:
            mean = data.tokens[name] / data.pieces[name]
            pieces += weights[name] / (mean if data.mixture.count == "tokens" else 1)
            tokens += weights[name] * (1 if data.mixture.count == "tokens" else mean)
    return tokens / pieces if pieces else None


def shapes_of(config: RunConfig, layout: Layout) -> tuple[int, list[AttentionShape]]:
    """Returns the rows of a micro-batch that a device has, and each kind of attention of the model, of all
    heads."""
    rows = config.train.rows_at_once
    ops = Ops(layout, jnp.dtype(config.precision.compute), rms_norm_by=PARTITIONED)
    model = Model(family.chain(config.model), ops, "none", "unroll")
    with dispatch.assumed("cpu"):  # which alters no shape, and no backend has to start
        shapes = model.attention_shapes(rows, config.data.sequence)
    return rows // layout.size("batch"), shapes


def capability_of(layout: Layout) -> tuple[int, int] | None:
    """Returns the compute capability of a layout's devices, None where they are no NVIDIA GPUs."""
    on_gpu = layout.mesh.devices.flat[0].platform == "gpu"
    return nvidia_compute_capability() if on_gpu else None


def of_run(config: RunConfig, layout: Layout, data: RunData) -> tuple[RunConfig, str]:
    """Returns `by_table` of the data and of the devices of a layout."""
    capability = capability_of(layout)
    if capability is None or not _open(config, data.segments):
        return config, ""
    return by_table(config, layout, data.segments, mean_document(data), capability)


def by_table(
    config: RunConfig,
    layout: Layout,
    segments: int,
    mean: float | None,
    capability: tuple[int, int] | None,
) -> tuple[RunConfig, str]:
    """Returns a configuration with the attention that was measured to be the fastest, and why; itself and
    nothing where one is asked for, or what is like it was not measured: then `attention.automatic` decides.

    segments: most documents in a row. mean: tokens of one; None is unknown. capability: the GPU's, None for
    another device.
    """
    if capability is None or mean is None or not _open(config, segments):
        return config, ""
    rows, kinds = shapes_of(config, layout)
    found = {}
    for kind in kinds:
        point = measured.nearest(kind.head_dim, config.data.sequence, mean, capability)
        if kind.window is not None or point is None or point.fastest is None:  # no window was measured
            return config, ""
        if not _runs(point.fastest, kind, rows, config, layout, segments):
            return config, ""
        found[point.fastest] = point
    if len(found) != 1:
        return config, ""
    ((name, point),) = found.items()
    kernels = dataclasses.replace(config.kernels, attention=name)
    return dataclasses.replace(config, kernels=kernels), point.said(config.data.sequence, mean)


def _open(config: RunConfig, segments: int) -> bool:
    """Says whether the table may decide. It has no rows with room for one segment alone, for which cuDNN has
    another kernel."""
    named = attention_by(config, "gpu") != "auto"
    return not named and segments > 1 and config.precision.compute != "float32"


def _runs(
    name: str, kind: AttentionShape, rows: int, config: RunConfig, layout: Layout, segments: int
) -> bool:
    """Says whether an implementation can run here, or on the GPU that is planned for, with a workspace that
    `automatic` would give it."""
    shape, dtype = (rows, config.data.sequence), jnp.dtype(config.precision.compute)
    heads, kv_heads = kind.heads // layout.size("heads"), kind.kv_heads // layout.size("kv_heads")
    elements = math.prod((*shape, heads, kind.head_dim))
    if name == "cudnn_packed" and automatic(elements, segments, "cpu", width=kind.head_dim)[0] != name:
        return False
    if jax.default_backend() != "gpu":
        return True  # the machine that runs it has what jaxthru[gpu] installs

    def call(q, k, ids):
        return attention(q, k, k, find_segments(ids, segments), implementation=name, platform="gpu")

    q, k = (jax.ShapeDtypeStruct((*shape, each, kind.head_dim), dtype) for each in (heads, kv_heads))
    try:
        with dispatch.assumed("gpu"):  # so that it is not logged as what runs
            jax.eval_shape(call, q, k, jax.ShapeDtypeStruct(shape, jnp.int32))
    except Unsupported:
        return False
    return True
