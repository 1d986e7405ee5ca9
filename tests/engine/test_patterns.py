"""Blocks may differ: two kinds train alike in every executor and form, and lie by layer on disk."""

import dataclasses

import jax
import numpy as np
import parallel_blocks
import pytest
import tiny

from jaxthru.engine.model import from_parts, parts
from jaxthru.engine.offload import OffloadConfig
from jaxthru.models.stage import module_stage, repeated
from jaxthru.training.layout import abstract_disk, to_disk

SHAPE = parallel_blocks.Config()
NAMES = ("loss", "size_loss", "positive", "grad_norm")


@pytest.fixture(autouse=True)
def own_shape(monkeypatch):
    monkeypatch.setattr(tiny, "SHAPE", SHAPE)


def make(mesh=(1, 1, 1), loop="scan", **settings):
    return tiny.make.__wrapped__(mesh, loop=loop, **settings)


def trained(made, config=None, steps=3):
    compiled, state = (made.compiled, made.fresh()) if config is None else tiny.dispatched(made, config)
    rows = []
    for index in range(steps):
        state, metrics = compiled(state, made.batch(index))
        rows.append({name: np.asarray(metrics[name]) for name in NAMES})
    return rows, state if config is None else compiled.settled(state)


@pytest.fixture(scope="module")
def scanned():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "SHAPE", SHAPE)
        return trained(make())


OTHERS = {
    "unroll": {"loop": "unroll"},
    "remat": {"remat": "attention"},
    "mesh": {"mesh": (2, 2, 2)},
    "dispatched": {"loop": "unroll", "remat": "attention", "config": OffloadConfig("parameters")},
}


@pytest.mark.parametrize("other", OTHERS)
def test_every_executor_and_form_gives_the_same_losses(scanned, other):
    """The first step's to 1e-6; Adam then divides gradients near zero by their own size."""
    settings = dict(OTHERS[other])
    config = settings.pop("config", None)
    rows, _ = trained(make(**settings), config)
    for index, (found, wanted) in enumerate(zip(rows, scanned[0], strict=True)):
        for name in ("loss", "size_loss", "grad_norm"):
            assert found[name] == pytest.approx(wanted[name], rel=2e-4 if index else 1e-6), name
        assert found["positive"] == pytest.approx(wanted["positive"], abs=30 if index else 3)
    assert rows[0]["size_loss"] > 0 and rows[0]["positive"] > 4 * tiny.ROWS * tiny.SEQUENCE


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_micro_batches_add_up(loop, scanned):
    rows, _ = trained(make(loop=loop, microbatches=2))
    assert rows[0]["loss"] == pytest.approx(scanned[0][0]["loss"], rel=1e-6)
    assert rows[0]["positive"] == pytest.approx(scanned[0][0]["positive"], abs=3)  # a sum, over both


def test_the_auxiliary_loss_is_minimised(scanned):
    """What is recorded of it is what the step adds to the cross-entropy."""
    made = make()
    params, batch = made.fresh()["params"], made.batch(0)
    weight = 1 / batch["loss_mask"].sum()
    (minimised, terms), gradients = jax.value_and_grad(made.loss, has_aux=True)(params, batch, weight)
    assert float(minimised) == pytest.approx(float(terms["loss"] + terms["size_loss"]), rel=1e-5)
    _, found = made.gradients(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, gradients)


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_on_disk_a_layer_has_its_place(loop):
    state = make(loop=loop).fresh()
    disk = to_disk(state)["params"]["layers"]
    assert sorted(disk) == [str(layer) for layer in range(7)]
    assert [("mlp" in disk[str(layer)]) for layer in range(7)] == [True, False] * 3 + [True]
    again = make(loop="unroll" if loop == "scan" else "scan").fresh()
    other = to_disk(again)["params"]["layers"]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), disk, other)
    shapes = abstract_disk(make(loop=loop).abstract)["params"]["layers"]
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(lambda leaf: leaf.shape, disk)


def test_parts_are_layers_in_their_order():
    params = make(loop="unroll").fresh()["params"]
    taken = parts(params)
    assert [("mlp" in part) for part in taken[2:]] == [True, False] * 3 + [True]
    assert jax.tree.structure(from_parts(taken, params)) == jax.tree.structure(params)


def test_a_pattern_is_repeated_with_a_rest():
    a, b = parallel_blocks.stages(SHAPE).groups[0].blocks
    assert [(len(group.blocks), group.repetitions) for group in repeated((a, b), 7)] == [(2, 3), (1, 1)]
    assert [(len(group.blocks), group.repetitions) for group in repeated((a, b), 1)] == [(1, 1)]
    equal = module_stage("b", parallel_blocks.BlockB, dataclasses.replace(SHAPE))
    assert equal == b and equal != a, "equal stages share a program because they are equal"


def test_a_metric_that_is_not_declared_is_refused(monkeypatch):
    stages = parallel_blocks.stages

    def undeclared(config):
        chain = stages(config)
        group = chain.groups[0]
        blocks = tuple(dataclasses.replace(stage, metrics={}) for stage in group.blocks)
        return chain._replace(groups=(group._replace(blocks=blocks),))

    monkeypatch.setattr(parallel_blocks, "stages", undeclared)
    made = make()
    with pytest.raises(ValueError, match="'positive', which is not in its metrics"):
        jax.eval_shape(made.loss, made.abstract["params"], tiny.batch(0), np.float32(1))
