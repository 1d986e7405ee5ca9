"""Which attention a run takes where none is named: the fastest measured for documents as long as its own.

A program knows the most documents that a row may hold, but not how long they are. So the choice is made here,
before the step is traced, from the corpus; training and evaluation share it, for they share the step's model.
cuDNN's attention for packed rows needs a workspace that grows with the documents in a row. Where a step has
room for that only by computing more again, or by moving more to the host and back, Triton's may be faster.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxthru.build.attention_shapes import shapes_of
from jaxthru.build.checks import attention_by
from jaxthru.build.defaults import replaced
from jaxthru.build.memory_estimate import Room
from jaxthru.build.proposals import INEXACT, candidates, least_seconds
from jaxthru.build.refusal import NothingFits
from jaxthru.build.stand_ins import attention_stand_in
from jaxthru.config import RunConfig
from jaxthru.data.loading.host_pool import RunData
from jaxthru.engine.model import AttentionShape
from jaxthru.models import family
from jaxthru.runtime.sharding import Layout
from pallas_kernels import dispatch
from pallas_kernels.attention import attention, automatic, find_segments, measured
from pallas_kernels.dispatch import Unsupported, nvidia_compute_capability

KEY = "kernels.attention"
NO_WORKSPACE = "triton"
"""The attention for packed rows that needs none."""
NO_ROOM = "as nothing fits with cuDNN's, which needs a workspace"
NOTABLE = 0.01
"""By how much longer a step has to be by arithmetic for another attention than the fastest to be taken; or by
how much shorter at least for the fastest, where that has more on the host."""


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


def capability_of(layout: Layout) -> tuple[int, int] | None:
    """Returns the compute capability of a layout's devices, None where they are no NVIDIA GPUs."""
    on_gpu = layout.mesh.devices.flat[0].platform == "gpu"
    return nvidia_compute_capability() if on_gpu else None


def of_run(
    config: RunConfig, layout: Layout, data: RunData, room: Room | None = None
) -> tuple[RunConfig, str]:
    """Returns `by_table` of the data and of the devices of a layout."""
    capability = capability_of(layout)
    if capability is None or not _open(config, data.segments):
        return config, ""
    return by_table(config, layout, data.segments, mean_document(data), capability, room)


def by_table(
    config: RunConfig,
    layout: Layout,
    segments: int,
    mean: float | None,
    capability: tuple[int, int] | None,
    room: Room | None = None,
) -> tuple[RunConfig, str]:
    """Returns a configuration with the attention that was measured to be the fastest, and why; itself and
    nothing where one is asked for, or what is like it was not measured: then `attention.automatic` decides.

    segments: most documents in a row. mean: tokens of one; None is unknown. capability: the GPU's, None for
    another device. room: for a step of which more is open; by arithmetic it may be too narrow for cuDNN's.
    """
    if capability is None or mean is None or not _open(config, segments):
        return config, ""
    _, kinds = shapes_of(config, layout)
    points = [measured.nearest(kind.head_dim, config.data.sequence, mean, capability) for kind in kinds]
    names = {point and point.fastest for point in points}
    if len(names) != 1 or None in names or any(kind.window is not None for kind in kinds):
        return config, ""  # no window was measured
    (name,) = names
    if not _runs(name, config, layout, segments):
        return config, ""
    fastest, why = replaced(config, {KEY: name}), points[-1].said(config.data.sequence, mean)
    if name == "cudnn_packed" and room is not None and _runs(NO_WORKSPACE, config, layout, segments):
        tokens, layers = config.train.rows * config.data.sequence, len(family.chain(config.model).layers)
        longer = max(
            point.seconds(NO_WORKSPACE, kind.heads, tokens) - point.seconds(name, kind.heads, tokens)
            for kind, point in zip(kinds, points, strict=True)
        )
        other, longer = replaced(config, {KEY: NO_WORKSPACE}), longer * layers / layout.mesh.size
        if instead := _no_room(fastest, other, longer, room, layout, segments):
            return other, f"as {name}, the faster one {why}, needs a workspace: {instead}"
    return fastest, why


def _no_room(
    fastest: RunConfig, other: RunConfig, longer: float, room: Room, layout: Layout, segments: int
) -> str:
    """Returns how a step would have to make room for the workspace of the fastest attention, if by arithmetic
    it is faster with another; else nothing. longer: seconds that the other takes longer in a step."""
    of = {"devices": layout.mesh.size, "segments": segments}
    first = next(candidates(fastest, room, **of), None)
    may_fit = first and (not first.near or first.plan.peak_device <= INEXACT * room.device)
    if may_fit and first.seconds <= least_seconds(fastest, layout.mesh.size):
        return ""  # with all the memory in the world it would be no other
    second = next(candidates(other, room, **of), None)
    if second is None or second.near:
        return ""
    if first is None or first.near:
        return "there is no room for it"
    slower = first.seconds / (second.seconds + longer) - 1
    if slower <= (-NOTABLE if first.moved > second.moved else NOTABLE):
        return ""
    said = "as long" if slower <= NOTABLE else f"{slower:.0%} longer"
    return f"a step with {first.said} would take {said}"


def or_without_workspace[Found](
    search: Callable[[RunConfig, str], Found],
    config: RunConfig,
    layout: Layout,
    segments: int,
    capability: tuple[int, int] | None,
) -> Found:
    """Returns what a search finds for a configuration; and where nothing fits with cuDNN's attention, which
    the configuration does not name, what is found with Triton's.

    search: of a configuration, and why another attention than the table's is asked for, if so. segments,
    capability: as of `by_table`. Raises NothingFits.
    """
    try:
        return search(config, "")
    except NothingFits as error:
        if (
            capability is None
            or attention_by(config, "gpu") != "auto"
            or not attention_stand_in(error.config, layout, segments)[1]
            or not _runs(NO_WORKSPACE, config, layout, segments)
        ):
            raise
    return search(replaced(config, {KEY: NO_WORKSPACE}), NO_ROOM)


def _open(config: RunConfig, segments: int) -> bool:
    """Says whether the table may decide. It has no rows with room for one segment alone, for which cuDNN has
    another kernel."""
    named = attention_by(config, "gpu") != "auto"
    return not named and segments > 1 and config.precision.compute != "float32"


def _runs(name: str, config: RunConfig, layout: Layout, segments: int) -> bool:
    """Says whether an implementation can run each kind of a model's attention here, or on the GPU that is
    planned for, with a workspace that `automatic` would give it."""
    rows, kinds = shapes_of(config, layout)
    return all(_runs_kind(name, kind, rows, config, layout, segments) for kind in kinds)


def _runs_kind(
    name: str, kind: AttentionShape, rows: int, config: RunConfig, layout: Layout, segments: int
) -> bool:
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
