"""Blocks may differ: two kinds train alike in every executor and form, and lie by layer on disk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parallel_blocks
import pytest
import tiny

from jaxthru.engine.model import join_stages, split_stages
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.programs import Programs, by_rows
from jaxthru.models.stage import Extras, Group, Metric, Stage, module_stage, repeated
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.weights import WeightInfo
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
    "unroll": {"loop": "unroll", "microbatches": 2},
    "mesh": {"mesh": (2, 2, 2), "remat": "attention"},
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


def test_micro_batches_add_up(scanned):
    rows, _ = trained(make(microbatches=2), steps=1)
    for name in ("loss", "size_loss"):
        assert rows[0][name] == pytest.approx(scanned[0][0][name], rel=1e-6), name
    assert rows[0]["positive"] == pytest.approx(scanned[0][0]["positive"], abs=3)  # a sum, over both


def test_the_auxiliary_loss_is_minimised(scanned):
    """What is recorded of it is what the step adds to the cross-entropy."""
    made = make()
    params, batch = made.fresh()["params"], made.batch(0)
    weight = 1 / batch["loss_mask"].sum()
    value_and_grad = jax.jit(jax.value_and_grad(made.loss, has_aux=True))
    (minimised, terms), gradients = value_and_grad(params, batch, weight)
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
    taken = split_stages(params)
    assert [("mlp" in stage) for stage in taken[2:]] == [True, False] * 3 + [True]
    assert jax.tree.structure(join_stages(taken, params)) == jax.tree.structure(params)


def test_a_pattern_is_repeated_with_a_rest():
    a, b = parallel_blocks.stages(SHAPE).groups[0].blocks
    assert [(len(group.blocks), group.repetitions) for group in repeated((a, b), 7)] == [(2, 3), (1, 1)]
    assert [(len(group.blocks), group.repetitions) for group in repeated((a, b), 1)] == [(1, 1)]
    equal = module_stage("b", parallel_blocks.BlockB, dataclasses.replace(SHAPE))
    assert equal == b and equal != a, "equal stages share a program because they are equal"


def changed(monkeypatch, change):
    """Makes the family's chain one whose first block of two is another."""
    monkeypatch.setattr(tiny, "first_state", tiny.first_state.__wrapped__)  # it keeps those of equal shapes
    stages = parallel_blocks.stages

    def others(config):
        chain = stages(config)
        groups = [
            group._replace(blocks=(change(group.blocks[0]), *group.blocks[1:])) for group in chain.groups
        ]
        return chain._replace(groups=tuple(groups))

    monkeypatch.setattr(parallel_blocks, "stages", others)


def giving(**extras):
    """Returns a change of a block: it gives these losses and metrics, of which `declared` are."""
    declared = extras.pop("declared", {})

    def apply(params, x_ND, context):
        return x_ND, Extras(**extras)

    return lambda stage: dataclasses.replace(stage, apply=apply, metrics=declared)


ONE = jnp.float32(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (giving(metrics={"positive": ONE}), "'positive' of stage 'a': is not in Stage.metrics"),
        (giving(losses={"loss": ONE}), "'loss' of stage 'a': every step has one of this name"),
        (giving(losses={"source_loss": ONE}), "'source_loss' of stage 'a': every step has one"),
        (giving(metrics={"mfu": ONE}, declared={"mfu": Metric()}), "'mfu' of stage 'a': every step has one"),
        (
            giving(losses={"x": ONE}, metrics={"x": ONE}, declared={"x": Metric()}),
            "'x' of stage 'a': is a loss",
        ),
    ],
)
def test_a_metric_has_a_name_of_its_own_and_is_declared(monkeypatch, change, message):
    changed(monkeypatch, change)
    made = make()
    with pytest.raises(InputError, match=message):
        jax.eval_shape(made.loss, made.abstract["params"], tiny.batch(0), np.float32(1))


@pytest.mark.parametrize("other", ["scan", "unroll", "dispatched"])
def test_a_layer_may_have_no_weights(monkeypatch, other):
    def halved(params, x_ND, context):
        return x_ND / 2, Extras()

    nothing = Stage("nothing", halved, lambda key: {}, {})
    changed(monkeypatch, lambda stage: nothing)
    loop = "scan" if other == "scan" else "unroll"
    config = OffloadConfig("optimizer") if other == "dispatched" else None
    made = make(loop=loop, remat="attention")
    compiled, state = (made.compiled, made.fresh()) if config is None else tiny.dispatched(made, config)
    first = to_disk(state)
    state, metrics = compiled(state, made.batch(0))
    assert sorted(first["params"]["layers"]) == ["1", "3", "5"], "B alone has weights"
    assert float(metrics["loss"]) == pytest.approx(np.log(SHAPE.vocabulary), rel=0.1)


def test_the_first_layers_may_not_train(monkeypatch):
    """Scanned: the group after theirs finds its place on disk though they have no slots."""
    monkeypatch.setattr(tiny, "first_state", tiny.first_state.__wrapped__)
    stages = parallel_blocks.stages

    def frozen(config):
        chain = stages(config)
        (group, *_), a = chain.groups, chain.groups[0].blocks[0]
        still = jax.tree.map(lambda info: dataclasses.replace(info, trains=False), a.weights)
        groups = Group((dataclasses.replace(a, weights=still),), 2), group
        return chain._replace(groups=groups)

    monkeypatch.setattr(parallel_blocks, "stages", frozen)
    made = make()
    slots = to_disk(made.fresh())["opt_state"]["slots"]["mu"]["layers"]
    assert sorted(slots) == [str(layer) for layer in range(2, 2 + 6)]
    shapes = abstract_disk(made.abstract)
    assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, to_disk(made.fresh()))


def test_what_is_no_row_s_is_whole_on_each_device():
    """A table that `prepare` makes, or a scale of each head, has no rows to be split by."""
    made = make((2, 2, 2), loop="unroll", remat="attention", microbatches=2)
    model = made.step.model
    chain = model.chain._replace(prepare=lambda positions: (model.chain.prepare(positions), jnp.ones((3, 5))))
    step = dataclasses.replace(
        made.step,
        objective=dataclasses.replace(made.step.objective, model=dataclasses.replace(model, chain=chain)),
    )
    layout = model.ops.layout
    rows, scalar = layout.sharding((None, "batch")), layout.sharding(())
    placed = by_rows(Programs(step), tiny.batch(0), rows, scalar)
    assert placed.prepared[1] == scalar and placed.positions == rows


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: WeightInfo(("embed", "ff"), "matrix", (0,)), "no logical axis 'ff'"),
        (lambda: WeightInfo(("embed", "mlp"), "matrix"), "a matrix sums over some dims"),
        (lambda: WeightInfo(("embed", "mlp"), "matrix", (0, 1)), "a matrix sums over some dims"),
        (lambda: WeightInfo(("embed", "mlp"), "matrix", (-2,)), "must be dims, each once"),
        (lambda: WeightInfo(("experts", "embed", "mlp"), "matrix", (1,), (1,)), "must be dims, each once"),
    ],
)
def test_a_weight_says_what_it_is(made, message):
    with pytest.raises(InputError, match=message):
        made()
