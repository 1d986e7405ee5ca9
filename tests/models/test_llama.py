"""The model: equal in all its forms, blind across documents, started at ln(vocabulary)."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from tiny import bind

from jaxthru import config as configuration
from jaxthru.engine.inline import hidden as hidden_of
from jaxthru.models import family, llama
from jaxthru.models.layers import RMSNorm
from jaxthru.models.llama import Config as ModelConfig
from jaxthru.models.llama import RopeScaling
from jaxthru.models.ops import Ops
from jaxthru.models.remat import BY_ROW, KEPT, LOW_RANK
from jaxthru.models.rotary import rotary_angles, rotate
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout

ROOT = Path(__file__).resolve().parent.parent.parent
FAMILY = {
    "plain": {},
    "varied": {
        "tied_embeddings": True,
        "qk_norm": True,
        "rope_scaling": RopeScaling(factor=4.0, original_sequence=32),
    },
}


@functools.cache  # so that what is compiled for one is found by the next test
def model(policy: str = "none", **shape):
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    return bind(dataclasses.replace(tiny.SHAPE, **shape), Ops(layout, jnp.dtype(jnp.float32)), policy)


def loss_and_logits(params, bound, batch):
    hidden = hidden_of(bound, params, batch, 8).reshape(*batch["tokens"].shape, -1)
    matrix, axes = bound.lm_head(params)
    logits = jnp.einsum(f"btd,{'dv' if axes == ('embed', 'vocab') else 'vd'}->btv", hidden, matrix)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * batch["loss_mask"]), logits


@functools.partial(jax.jit, static_argnums=0)
def logits_and_gradient(bound, params, batch):
    """One program for both: compiling is what these tests cost."""
    gradient, logits = jax.grad(loss_and_logits, has_aux=True)(params, bound, batch)
    return logits, gradient


def unstack(params, layers):
    def layer(i):
        return jax.tree.map(lambda leaf: leaf[i], tiny.layers(params))

    return {**params, "layers": ((tuple(layer(i) for i in range(layers)),),)}


@pytest.mark.parametrize("shape", FAMILY.values(), ids=FAMILY)
def test_scan_and_unroll_agree(shape):
    scan, unroll = model(loop="scan", **shape), model(loop="unroll", **shape)
    params = scan.init(jax.random.key(0))
    layers = tiny.SHAPE.layers
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        unstack(params, layers),
        unroll.init(jax.random.key(0)),
    )
    batch = tiny.batch(0)
    found, one = logits_and_gradient(scan, params, batch)
    wanted, two = logits_and_gradient(unroll, unstack(params, layers), batch)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(two))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * scale),
        unstack(one, layers),
        two,
    )


@pytest.mark.parametrize("shape", FAMILY.values(), ids=FAMILY)
def test_a_packed_row_equals_its_documents_alone(shape):
    """The first row is packed; each other one holds a document of it, and nothing else."""
    bound = model(**shape)
    params = bound.init(jax.random.key(1))
    draw = np.random.default_rng(2)
    lengths = [17, 1, 30, 9]  # and 7 of padding
    starts = np.cumsum([0, *lengths[:-1]])
    batch = {
        name: np.zeros((1 + len(lengths), tiny.SEQUENCE), np.int32)
        for name in ("tokens", "targets", "segment_ids", "positions")
    }
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        for name, values in {
            "tokens": draw.integers(0, tiny.SHAPE.vocabulary, length),
            "targets": draw.integers(0, tiny.SHAPE.vocabulary, length),
            "segment_ids": row,
            "positions": np.arange(length),
        }.items():
            batch[name][0, start : start + length] = batch[name][row, :length] = values
    used = (batch["segment_ids"] > 0).astype(np.float32)
    first = np.arange(len(used))[:, None] == 0
    together, packed = logits_and_gradient(bound, params, batch | {"loss_mask": used * first})
    apart, alone = logits_and_gradient(bound, params, batch | {"loss_mask": used * ~first})
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True), 1):
        np.testing.assert_allclose(together[0, start : start + length], apart[row, :length], atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4), packed, alone)


@pytest.mark.parametrize("policy", ["full", *KEPT])
def test_rematerialisation_changes_no_gradient(policy):
    plain, other = model(), model(policy)
    params, batch = plain.init(jax.random.key(0)), tiny.batch(0)
    one, two = (logits_and_gradient(bound, params, batch)[1] for bound in (plain, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, two)


@pytest.mark.parametrize("policy", KEPT)
def test_policies_keep_what_they_name(policy):
    """A name that no layer gives would silently keep nothing."""
    bound = model()
    params = jax.eval_shape(bound.init, jax.random.key(0))
    text = str(jax.make_jaxpr(lambda params: hidden_of(bound, params, tiny.batch(0), 8))(params))
    # The statistics are the GPU kernel's alone, float8 is that of float8 matmuls (test_fp8.py), low_rank that
    # of adapters (test_lora.py), and those of BY_ROW are of experts.
    given = set(KEPT[policy]) - {"attention_statistics", "float8", LOW_RANK, *BY_ROW}
    assert all(f"name[name={name}]" in text for name in given)


def test_too_many_segments_come_out_as_nan():
    bound = model()
    batch = tiny.batch(0)
    batch["segment_ids"][3] = np.arange(tiny.SEQUENCE) // 4 + 1
    hidden = hidden_of(bound, bound.init(jax.random.key(0)), batch, 8).reshape(tiny.ROWS, tiny.SEQUENCE, -1)
    assert np.isnan(hidden[3]).all() and np.isfinite(hidden[:3]).all()


def test_no_module_graph_is_walked_once_compiled(monkeypatch):
    made = tiny.make()
    losses = made.losses(2)

    def refuse(*_, **__):
        raise AssertionError("a module graph was walked")

    for name in ("merge", "split", "state"):
        monkeypatch.setattr(nnx, name, refuse)
    assert made.losses(2) == losses


def test_rotary_scores_depend_on_distance_alone():
    config = ModelConfig(head_dim=16)
    draw = np.random.default_rng(0)
    q, k = (jnp.asarray(draw.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(i, j):
        at = lambda x, p: rotate(x, rotary_angles(jnp.full((1, 1), p), config))  # noqa: E731
        return float(jnp.sum(at(q, i) * at(k, j)))

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-3)


def test_rope_scaling_stretches_long_wavelengths_alone():
    plain = ModelConfig(head_dim=128)
    scaled = dataclasses.replace(plain, rope_scaling=RopeScaling(factor=8.0, original_sequence=8192))
    position = jnp.ones((1, 1), jnp.int32)
    angle = {
        config: np.arctan2(*(np.asarray(part)[0, 0] for part in rotary_angles(position, config)[::-1]))
        for config in (plain, scaled)
    }
    wavelength = 2 * np.pi / angle[plain]
    short, long = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_allclose(angle[scaled][short], angle[plain][short], rtol=1e-5)
    np.testing.assert_allclose(angle[scaled][long], angle[plain][long] / 8, rtol=1e-3)
    between = ~(short | long)
    assert between.any()
    assert (angle[scaled][between] < angle[plain][between]).all()
    assert (angle[scaled][between] > angle[plain][between] / 8).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_rotary_angles_are_those_of_float64(scaled):
    """By the definition, frequency by frequency; bfloat16 would miss every odd position beyond 256."""
    factor, low, high, original = 8.0, 1.0, 4.0, 128
    scaling = RopeScaling(factor, low, high, original) if scaled else None
    positions = np.asarray([[0, 1, 2, 255, 257, 511, 701]], np.int32)
    frequencies = []
    for pair in range(8):
        frequency = 1e4 ** (-2 * pair / 16)
        wavelength = 2 * math.pi / frequency
        if scaled and wavelength > original / low:
            frequency /= factor
        elif scaled and wavelength > original / high:
            kept = (original / wavelength - low) / (high - low)
            frequency *= kept + (1 - kept) / factor
        frequencies.append(frequency)
    angle = positions[..., None] * np.asarray(frequencies)
    found = rotary_angles(positions, ModelConfig(head_dim=16, rope_theta=1e4, rope_scaling=scaling))
    assert {part.dtype for part in found} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(found, [np.cos(angle), np.sin(angle)], rtol=0, atol=2e-4)


def assert_rounded_once(found, exact):
    """Fails unless bfloat16 values are those nearest to float64 ones: arithmetic that rounds to bfloat16 on
    the way misses a tenth of them or more, in float32 it misses some of those halfway between two."""
    assert found.dtype == jnp.bfloat16
    assert np.mean(np.asarray(found) == exact.astype(jnp.bfloat16)) > 0.99


def test_bfloat16_is_rotated_in_float32():
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(1, 64, 2, 32)), jnp.bfloat16)
    angle = draw.uniform(0, 2 * np.pi, (1, 64, 16)).astype(np.float32)
    found = rotate(x, (jnp.cos(angle), jnp.sin(angle)))
    cos, sin = np.cos(angle, dtype=np.float64)[:, :, None], np.sin(angle, dtype=np.float64)[:, :, None]
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    assert_rounded_once(found, np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))


def test_bfloat16_is_normed_in_float32():
    draw = np.random.default_rng(0)
    x = jnp.asarray(0.01 * draw.normal(size=(64, 48)), jnp.bfloat16)
    norm = RMSNorm(48, epsilon=1e-5)
    norm.scale[...] = jnp.asarray(draw.uniform(0.5, 1.5, 48), jnp.float32)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...])
    assert_rounded_once(norm(x), exact)


PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_2_1b": 1_235_814_400,
    "mistral_7b": 7_248_023_552,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    # jaxthru's own shapes: what their files say.
    "llama_13b": 14_001_525_760,
    "llama_30b": 30_643_279_872,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_their_published_sizes(name):
    shape = configuration.load(ROOT / "configs" / f"{name}.py").model
    assert llama.parameters(shape) == PUBLISHED[name]
    bound = bind(
        shape, Ops(Layout(make_mesh(MeshConfig(), jax.devices()[:1])), jnp.dtype(jnp.float32)), "none"
    )
    leaves = jax.tree.leaves(jax.eval_shape(bound.init, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PUBLISHED[name]


NARROWED = "embed", "heads", "kv_heads", "mlp", "expert_mlp"
ALIKE = {
    **dict.fromkeys(("continued", "dpo", "lora", "sft"), "quickstart"),
    **dict.fromkeys(("llama3_8b_one_gpu", "llama_13b", "llama_30b"), "llama3_8b_8layer"),
    **dict.fromkeys(("qwen3_235b_a22b", "qwen3_30b_a3b_12layer"), "qwen3_30b_a3b"),
    **{"gemma3_1b": "gemma3_270m", "llama3_70b": "llama3_8b"},
}
"""Configurations that differ in their sizes alone from another, whose first loss is looked at."""


@pytest.mark.parametrize("name", ALIKE)
def test_configurations_alike_differ_in_sizes_alone(name):
    sizes = (*NARROWED, "head_dim", "layers", "loop", "max_sequence")
    one, other = (configuration.load(ROOT / "configs" / f"{each}.py").model for each in (name, ALIKE[name]))
    assert (
        dataclasses.replace(one, **{size: getattr(other, size) for size in sizes if hasattr(one, size)})
        == other
    )


def first_loss(path) -> tuple[float, float]:
    """Returns (first loss of a configuration with one layer, ln(vocabulary))."""
    shape = dataclasses.replace(configuration.load(path).model, layers=1, loop="scan")
    while family.module_of(shape).parameters(shape) > 2e7:  # narrower, for what is drawn takes the time
        widths = {name: getattr(shape, name, 0) for name in NARROWED}
        shape = dataclasses.replace(
            shape, **{name: max(1, width // 2) for name, width in widths.items() if width}
        )
    bound = bind(
        shape, Ops(Layout(make_mesh(MeshConfig(), jax.devices()[:1])), jnp.dtype(jnp.float32)), "none"
    )
    key = jax.random.key(0)
    params = jax.jit(bound.init)(key)
    draw = np.random.default_rng(0)
    tokens, targets = draw.integers(0, shape.vocabulary, (2, 1, 64)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": np.ones((1, 64), np.int32),
        "positions": np.arange(64, dtype=np.int32)[None],
        "loss_mask": np.ones((1, 64), np.float32),
    }
    total = jax.jit(lambda params: loss_and_logits(params, bound, batch)[0])(params)
    return float(total) / 64, math.log(shape.vocabulary)


CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.py")) if path.stem not in ALIKE]


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p.stem == "quickstart" else pytest.mark.slow) for p in CONFIGS],
    ids=lambda path: path.stem,
)
def test_the_first_loss_is_that_of_guessing(path):
    measured, guessing = first_loss(path)
    assert measured == pytest.approx(guessing, rel=0.05)


def test_flops_of_a_causal_row():
    shape = configuration.load(ROOT / "configs" / "llama3_8b_8layer.py").model
    tokens = 8192
    n = llama.matmul_parameters(shape)
    assert n == 8 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 4096 * 128256
    expected = tokens * (6 * n + 6 * 8 * 32 * 128 * tokens)
    assert llama.train_flops(shape, tokens, tokens**2) == pytest.approx(expected)
    # Two documents of half the length need half of the attention.
    attention = expected - 6 * n * tokens
    halves = llama.train_flops(shape, tokens, 2 * (tokens // 2) ** 2)
    assert halves == pytest.approx(expected - attention / 2)
