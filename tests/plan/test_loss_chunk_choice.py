"""`train.loss_chunk=auto`: large chunks of the LM head where a GPU has room for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.build import choices, loss_chunk_choice
from jaxthru.build.memory_estimate import Room, estimate, layout_of
from jaxthru.build.proposals import candidates
from jaxthru.build.step import bound
from jaxthru.engine.step import LARGE_LOSS_CHUNK
from jaxthru.models import ops as operations

GIB, HOPPER = 2**30, (9, 0)


def load(*overrides: str, name: str = "llama3_8b_8layer") -> configuration.RunConfig:
    return configuration.load(ROOT / "configs" / f"{name}.py", [*overrides])


def fastest(config: configuration.RunConfig, gib: float, devices: int = 1):
    return next(candidates(config, Room(round(gib * GIB), 100 * GIB), devices=devices, segments=1))


def test_it_is_large_where_a_tenth_is_free_and_small_where_memory_is_short():
    config = load("model.layers=4", "optim.state=split_master_float32")
    wide = fastest(config, 130)
    assert wide.config.train.loss_chunk == "large" and "large loss chunks" in wide.said
    least = wide.plan.peak_device / GIB
    # As soon as the same step fits with less to spare, it has small ones.
    tight = fastest(config, 1.02 * least)
    assert (tight.config.train.loss_chunk, tight.config.remat.policy) == ("small", wide.config.remat.policy)
    assert fastest(config, 1.2 * least + 2).config.train.loss_chunk == "large"
    assert fastest(load("model.layers=4", "train.loss_chunk=small"), 130).config.train.loss_chunk == "small"


def test_a_step_of_several_programs_has_small_ones():
    for more in (["offload.level=optimizer", "offload.fraction=0.5"], []):
        layered = fastest(load("optim.state=split_master", *more), 130 if more else 24)
        assert layered.config.offload.layered and layered.config.train.loss_chunk == "small"


@pytest.mark.parametrize(("devices", "chunk"), [(1, "large"), (2, "large"), (8, "small")])
def test_it_goes_by_a_device_s_own_logits(devices, chunk):
    """Which are a part of 4.2 GB at 8 × 2,048 tokens."""
    config = load("model.layers=4", "train.rows=8", "data.sequence=2048", f"mesh.fsdp={devices}")
    assert fastest(config, 130, devices).config.train.loss_chunk == chunk


def test_a_candidate_s_plan_is_of_its_own_chunks():
    large, small = (
        fastest(load("model.layers=4", f"train.loss_chunk={chunk}"), 130) for chunk in ("auto", "small")
    )
    assert large.config.train.loss_chunk == "large"
    assert large.plan.peak_device > small.plan.peak_device
    assert large.plan == estimate(large.config)[0]


def test_a_resume_that_asks_for_other_chunks_is_planned_anew():
    """As one with other micro-batches is: they take other memory."""
    settled = "train.loss_chunk=small", "remat.policy=projections", "model.loop=unroll", "offload.level=none"
    run, chosen = load(*settled), {"remat.policy"}
    assert choices._alike(load("train.loss_chunk=small", *settled[2:]), run, chosen)
    assert not choices._alike(load("train.loss_chunk=large", *settled[2:]), run, chosen)


def test_few_logits_are_one_small_chunk():
    config = load("model.layers=4", "train.rows=1", "data.sequence=2048")
    assert fastest(config, 130).config.train.loss_chunk == "small"


@pytest.mark.parametrize(
    ("settings", "capability"),
    [
        (["model.loop=unroll", "remat.policy=none", "offload.level=none"], HOPPER),  # nothing is searched
        (["train.deterministic=true"], HOPPER),  # the same bits on a device of other memory
        ([], None),  # not timed anywhere else
    ],
)
def test_elsewhere_it_is_small_without_a_search(settings, capability):
    assert loss_chunk_choice.settled(load(*settings), capability).train.loss_chunk == "small"
    assert loss_chunk_choice.settled(load(), HOPPER).train.loss_chunk == "auto"
    assert choices.resolve(load()).train.loss_chunk == "small"  # here, on a CPU


def test_large_chunks_reach_the_kernel_and_the_plan(monkeypatch):
    given = []

    def counted(*arrays, chunk_bytes, **options):
        given.append(chunk_bytes)
        return tuple(jnp.zeros(shape, jnp.float32) for shape in ((), (2, 8192), (2, 8192)))

    monkeypatch.setattr(operations, "linear_cross_entropy", counted)
    for chunk in ("small", "large"):
        config = load(f"train.loss_chunk={chunk}")
        ops = bound(config, layout_of(config, 1), "xla").ops
        hidden = jax.ShapeDtypeStruct((16_384, 4096), jnp.bfloat16)
        matrix = jax.ShapeDtypeStruct((4096, 128_256), jnp.bfloat16)
        targets, weights = (jax.ShapeDtypeStruct((2, 8192), dtype) for dtype in (jnp.int32, jnp.float32))
        loss = functools.partial(ops.linear_cross_entropy, axes=("embed", "vocab"), z_loss=0.0)
        arrays = {"targets_BT": targets, "weights_BT": weights}
        jax.eval_shape(loss, hidden, matrix, **arrays)
        jax.eval_shape(functools.partial(loss, weighted_only=True), hidden, matrix, **arrays)
    assert given == [None, None, LARGE_LOSS_CHUNK, None]
    full = load("remat.policy=none", "model.loop=unroll", "offload.level=none")  # whose fullest moment it is
    small, large = (
        estimate(dataclasses.replace(full, train=dataclasses.replace(full.train, loss_chunk=chunk)))[0]
        for chunk in ("small", "large")
    )
    grown = large.peak_device - small.peak_device
    assert grown == large.device["loss"] - small.device["loss"] == pytest.approx(GIB, rel=0.05)
