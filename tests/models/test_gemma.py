"""Gemma, and what llama's shapes have beside Llama's own: against float64 written plainly, in all forms."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import plain_decoder
import pytest
import tiny
from tiny import bind

from jaxthru import config as configuration
from jaxthru.engine.inline import hidden as hidden_of
from jaxthru.models import family, flops, gemma, llama
from jaxthru.models.layers import RMSNorm, Weight
from jaxthru.models.ops import Ops
from jaxthru.models.rotary import RopeScaling
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout

ROOT = Path(__file__).resolve().parent.parent.parent
GEMMA = gemma.Config(
    vocabulary=128,
    layers=4,
    embed=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=48,
    window=6,
    global_every=3,
    rope_theta=1e4,
    rope_local_theta=1e2,
    rope_factor=4.0,
    query_scalar=24.0,
)
LLAMA = llama.Config(vocabulary=128, layers=3, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=48)
YARN = RopeScaling(kind="yarn", factor=4.0, original_sequence=16, beta_fast=4.0)
SHAPES = {
    "gemma": GEMMA,
    "biases": dataclasses.replace(LLAMA, qkv_bias=True, tied_embeddings=True, window=5, window_from=1),
    "yarn": dataclasses.replace(LLAMA, rope_theta=1e3, rope_scaling=YARN, window=7),
    "linear": dataclasses.replace(LLAMA, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
}


@functools.cache
def model(shape, mesh=(1, 1, 1)):
    layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: math.prod(mesh)]))
    return bind(shape, Ops(layout, jnp.dtype(jnp.float32), attention_by="xla"), "none")


@functools.cache
def weights(shape) -> dict:
    """Returns unrolled parameters, none of them its first value: norms and biases too."""
    params = model(dataclasses.replace(shape, loop="unroll")).init(jax.random.key(0))
    draw = np.random.default_rng(1)
    moved = lambda leaf: np.asarray(leaf) + draw.normal(0, 0.1, leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(moved, params)


def stacked(params: dict) -> dict:
    """Returns parameters as scanned layers have them."""
    join = lambda *leaves: np.stack(leaves)  # noqa: E731
    groups = tuple(tuple(jax.tree.map(join, *block) for block in group) for group in params["layers"])
    return {**params, "layers": groups}


def logits(shape, params, batch, mesh=(1, 1, 1)):
    bound = model(shape, mesh)

    def run(params):
        hidden = hidden_of(bound, params, batch, 8).reshape(*batch["tokens"].shape, -1)
        matrix, axes = bound.lm_head(params)
        return jnp.einsum(f"btd,{'dv' if axes == ('embed', 'vocab') else 'vd'}->btv", hidden, matrix)

    if math.prod(mesh) == 1:
        return np.asarray(jax.jit(run)(params))
    shardings = jax.tree.map(lambda info: bound.ops.layout.sharding(info.axes), bound.weights)
    return np.asarray(jax.jit(run, in_shardings=(shardings,))(params))


def rows(lengths: list[list[int]], sequence: int = 24) -> dict[str, np.ndarray]:
    """Returns rows of documents of these lengths."""
    draw = np.random.default_rng(2)
    shape = len(lengths), sequence
    batch = {name: np.zeros(shape, np.int32) for name in ("segment_ids", "positions")}
    for row, documents in enumerate(lengths):
        ends = np.cumsum(documents)
        for number, (length, end) in enumerate(zip(documents, ends, strict=True), 1):
            batch["segment_ids"][row, end - length : end] = number
            batch["positions"][row, end - length : end] = np.arange(length)
    return batch | {"tokens": draw.integers(0, 128, shape).astype(np.int32)}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_what_float64_says_scanned_and_packed(name):
    """Each document by itself, layer by layer, in numpy; the program has them packed in rows, and scanned."""
    shape, batch = SHAPES[name], rows([[24], [15, 8]])
    params = weights(shape)
    found = logits(dataclasses.replace(shape, loop="scan"), stacked(params), batch)
    for row, start, length in ((0, 0, 24), (1, 0, 15), (1, 15, 8)):
        tokens = batch["tokens"][row, start : start + length]
        wanted = plain_decoder.logits(shape, params, tokens)
        np.testing.assert_allclose(found[row, start : start + length], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["gemma", "biases"])
def test_on_a_mesh_it_is_what_it_is_on_one_device(name):
    """And unrolled, what it is scanned."""
    shape, batch = SHAPES[name], rows([[24], [15, 8], [4, 4, 9], [23]])
    params = weights(shape)
    unrolled = dataclasses.replace(shape, loop="unroll")
    one = logits(dataclasses.replace(shape, loop="scan"), stacked(params), batch)
    used = batch["segment_ids"] > 0
    np.testing.assert_allclose(logits(unrolled, params, batch, (2, 2, 2))[used], one[used], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_gemma_trains_on_a_mesh_as_on_one_device():
    shape = {name: getattr(GEMMA, name) for name in ("window", "global_every", "query_scalar")}
    base = gemma.Config(
        **{**shape, "vocabulary": 512, "layers": 4, "embed": 32, "heads": 4, "kv_heads": 2},
        **{"head_dim": 16, "mlp": 48},
    )
    before, tiny.SHAPE = tiny.SHAPE, base
    try:
        losses = [tiny.make(mesh).losses(3) for mesh in ((1, 1, 1), (2, 2, 2))]
    finally:
        tiny.SHAPE = before
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted(name):
    count = family.module_of(SHAPES[name]).parameters
    assert count(SHAPES[name]) == sum(leaf.size for leaf in jax.tree.leaves(weights(SHAPES[name])))


PUBLISHED = {"gemma3_270m": 268_098_176, "gemma3_1b": 999_885_952}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_their_published_sizes(name):
    assert gemma.parameters(configuration.load(ROOT / "configs" / f"{name}.py").model) == PUBLISHED[name]


@pytest.mark.parametrize("lengths", [[64], [64, 64], [8], [16], [100, 3, 20], [1, 1, 1, 200]])
def test_the_span_within_a_window(lengths):
    tokens, span = sum(lengths), sum(length**2 for length in lengths)
    found, window = flops.span_within(16, tokens, span), 16
    true = sum(length**2 if length <= window else 2 * window * length - window**2 for length in lengths)
    # Twice the pairs of tokens that see each other, but for each token's own half.
    pairs = sum(min(at + 1, window) for length in lengths for at in range(length))
    assert 2 * pairs - tokens <= true <= 2 * pairs
    if len(set(lengths)) == 1:
        assert found == pytest.approx(true)
    assert true <= found * (1 + 1e-12) <= span * (1 + 1e-9)


def test_flops_of_windowed_layers():
    shape = dataclasses.replace(LLAMA, layers=3, window=16, window_from=1)
    whole = dataclasses.replace(shape, window=None)
    tokens = 128
    attention = 6 * 32 * tokens**2  # of a layer
    less = 2 * attention - 2 * 6 * 32 * (2 * 16 * tokens - 16**2)
    found, full = (llama.train_flops(each, tokens, tokens**2) for each in (shape, whole))
    assert full - found == pytest.approx(less)
    local = dataclasses.replace(GEMMA, window=16)
    n = gemma.matmul_parameters(local)
    span = tokens**2 + 3 * (2 * 16 * tokens - 16**2)
    assert gemma.train_flops(local, tokens, tokens**2) == pytest.approx(6 * n * tokens + 6 * 64 * span)


def test_a_norm_s_scale_may_be_bfloat16():
    norm = RMSNorm(16, 1e-6, offset=1.0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.bfloat16)
    plain = norm(x)
    norm.scale = Weight(norm.scale[...].astype(jnp.bfloat16), info=norm.scale.info)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(norm(x)), np.asarray(plain))


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_embeddings_are_scaled_by_what_the_compute_type_holds(compute):
    shape = dataclasses.replace(GEMMA, embed=48, vocabulary=16)  # √48 = 6.928…, 6.9375 in bfloat16
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    bound = bind(shape, Ops(layout, jnp.dtype(compute)), "none")
    context = bound.context(rows([[16]], 16), 8)
    table = np.ones((16, 48), np.float32)
    tokens = np.arange(16, dtype=np.int32)[None]
    found, _ = bound.embed({"table": table}, tokens, context)
    wanted = {"bfloat16": 6.9375, "float32": np.float32(48**0.5)}[compute]
    assert found.dtype == compute and np.all(np.asarray(found, np.float32) == wanted)
