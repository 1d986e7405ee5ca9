"""Operations over a mesh equal those on one device, values and gradients."""

import math
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.models.kernels import KernelsConfig
from jaxthru.models.ops import Ops
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels import collective_matmul
from pallas_kernels.attention import find_segments
from pallas_kernels.testing import (
    CPU_TOLERANCE,
    assert_close,
    fresh_seed,
    normal,
    relative_error,
    segment_ids,
)

B, T, D, V = 8, 12, 16, 48


def loss_and_gradients(mesh: tuple[int, int, int], axes, hidden, matrix, targets, weights):
    """mesh: sizes of data, fsdp and tensor."""
    layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))]))
    ops = Ops(layout, jnp.dtype(jnp.float32))
    rows, stored = layout.sharding(("batch", "sequence")), layout.sharding(axes)
    hidden = jax.device_put(hidden, layout.sharding(("tokens", None)))
    matrix, targets, weights = (
        jax.device_put(*x) for x in ((matrix, stored), (targets, rows), (weights, rows))
    )

    def loss(hidden, matrix):
        objective, *by_token = ops.linear_cross_entropy(hidden, matrix, axes, targets, weights, 1e-2)
        return objective, by_token

    jitted = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (values, gradients), text = jitted(hidden, matrix), jitted.lower(hidden, matrix).as_text()
    assert gradients[1].sharding.is_equivalent_to(stored, 2), "the gradient is not laid out as the matrix"
    return (values, gradients), text


def test_every_collective_matmul_can_be_asked_for():
    named = typing.get_args(typing.get_type_hints(KernelsConfig)["collective_matmul"])
    assert set(collective_matmul.OPERATION.names) == set(named) - {"auto", "fused", "none"}


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("axes", [("embed", "vocab"), ("vocab", "embed")], ids="-".join)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (1, 2, 4), (2, 2, 2)], ids=str)
def test_linear_cross_entropy(mesh, axes):
    rng = np.random.default_rng(fresh_seed())
    hidden = normal(rng, (B * T, D), jnp.float32)
    matrix = normal(rng, (D, V) if axes[0] == "embed" else (V, D), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) < 0.7, jnp.float32) / (B * T)
    arguments = axes, hidden, matrix, targets, weights
    alone, _ = loss_and_gradients((1, 1, 1), *arguments)
    found, text = loss_and_gradients(mesh, *arguments)
    assert_close(found, alone, CPU_TOLERANCE)
    # The matrix is gathered, and its gradient scattered, where it is stored in parts; hidden where its tokens
    # are split further than rows; and nowhere else.
    moved = (mesh[1] > 1) + (mesh[2] > 1)
    assert text.count("stablehlo.all_gather") == text.count("stablehlo.reduce_scatter") == moved


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 4), (2, 2, 2)], ids=str)
def test_embed(mesh):
    rng = np.random.default_rng(fresh_seed())
    vocabulary = 8 * B * T  # so that the table is larger than all that is looked up
    table, cotangent = normal(rng, (vocabulary, D), jnp.float32), normal(rng, (B * T, D), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, vocabulary, (B, T)), jnp.int32)

    def run(mesh):
        layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))]))
        stored, rows = layout.sharding(("vocab", "embed")), layout.sharding(("batch", "sequence"))
        arguments = jax.device_put(table, stored), jax.device_put(tokens, rows)

        def both(table, tokens):
            x_ND, pull = jax.vjp(
                lambda table: Ops(layout, jnp.dtype(jnp.float32)).embed(table, tokens), table
            )
            return x_ND, layout.constrain(pull(cotangent)[0], ("vocab", "embed"))

        jitted = jax.jit(both)
        return jitted(*arguments), jitted.lower(*arguments).compile().as_text()

    (found, text), (alone, _) = run(mesh), run((1, 1, 1))
    assert_close(found, alone, CPU_TOLERANCE)
    # Neither the table nor its gradient moves, but for the sum over copies.
    moved = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:all-gather|reduce-scatter|all-to-all)", text)
    assert all(math.prod(map(int, size.split(","))) <= B * T * D for size in moved)
    assert text.count(" all-reduce(") == (mesh[0] > 1)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_attention_within_a_window():
    """Rows over two devices, heads over four; some documents are longer than the window, some are not."""
    rng = np.random.default_rng(fresh_seed())
    shapes = (B, T, 8, D), (B, T, 4, D), (B, T, 4, D), (B, T, 8, D)
    q, k, v, do = (normal(rng, shape, jnp.float32) for shape in shapes)
    segments = find_segments(jnp.asarray(segment_ids(rng, B, T, "mixed")), T)

    def run(mesh, window):
        layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: math.prod(mesh)]))
        ops = Ops(layout, jnp.dtype(jnp.float32))
        attend = jax.jit(lambda q, k, v: ops.attention(q, k, v, segments, window))
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    found = run((1, 2, 4), 5)
    assert_close(found, run((1, 1, 1), 5), CPU_TOLERANCE)
    assert relative_error(found[0], run((1, 1, 1), None)[0]) > 1e-2


def test_embed_sums_in_float32():
    """A bfloat16 sum of ones ends at 256, and 1001 is none of its numbers."""
    ops = Ops(Layout(make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])), jnp.dtype(jnp.bfloat16))
    tokens = jnp.zeros((1, 1001), jnp.int32)
    gradient = jax.grad(lambda table: ops.embed(table, tokens).sum())(jnp.ones((V, D)))
    assert (gradient[0] == 1001).all()
