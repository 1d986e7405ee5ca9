"""Objectives: cross-entropy of sparse masks on trained positions alone, and preferences."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from batches import ROWS, SEQUENCE, VOCABULARY, batch
from cases import slow_but_for

from jaxthru.build.step import update_flops
from jaxthru.config import RunConfig
from jaxthru.engine.inline import InlineStep, hidden, loss
from jaxthru.engine.objectives.answers import Answers
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.step import TrainConfig
from jaxthru.models import llama
from jaxthru.runtime.errors import InputError
from pallas_kernels.testing import assert_close

MESHES = {
    "one": {},
    "one, unroll, 4 micro-batches": {"loop": "unroll", "microbatches": 4},
    "tensor": {"mesh": (1, 1, 2), "tied_embeddings": True},
    "cube": {"mesh": (2, 2, 2)},
    "cube, unroll, 2 micro-batches": {"mesh": (2, 2, 2), "loop": "unroll", "microbatches": 2, "groups": 4},
}


def sparse(index: int) -> dict[str, np.ndarray]:
    """A batch of which a fifth is trained on, and of one row nothing."""
    made = batch(index)
    kept = np.random.default_rng(index).random((ROWS, SEQUENCE)) < 0.2
    made["loss_mask"] = made["loss_mask"] * kept
    made["loss_mask"][3] = 0
    return made


def pairs(index: int) -> dict[str, np.ndarray]:
    """Rows of one to three pairs, their answers after a prompt that both have; of the last row no pair."""
    draw = np.random.default_rng(index)
    made = {name: np.zeros_like(array) for name, array in batch(0).items()}
    made["source"] = batch(0)["source"]
    for row in range(ROWS - 1):
        at, segment = 0, 0
        for _ in range(1 + row % 3):
            prompt = draw.integers(0, VOCABULARY, draw.integers(2, 6))
            for _ in range(2):
                answer = draw.integers(0, VOCABULARY, draw.integers(2, 5))
                tokens = np.concatenate([prompt, answer]).astype(np.int32)
                segment += 1
                here = slice(at, at + len(tokens))
                made["tokens"][row, here] = tokens
                made["targets"][row, here] = [*tokens[1:], 0]
                made["segment_ids"][row, here] = segment
                made["positions"][row, here] = np.arange(len(tokens))
                made["loss_mask"][row, at + len(prompt) - 1 : here.stop - 1] = 1
                at = here.stop
    made["reference"] = draw.normal(-20, 2, (ROWS, 8)).astype(np.float32)
    return made


def gradients(made: tiny.Tiny, arrays: dict[str, np.ndarray]):
    """Returns (terms, gradients) of the step, by its own way."""
    return jax.jit(InlineStep(made.step).gradients)(made.state["params"], made.put(arrays))


@functools.cache
def whole(loop: str, tied: bool, objective: str):
    """Returns (terms, gradients) of one device and one micro-batch, with all positions."""
    made = tiny.make(loop=loop, tied_embeddings=tied, objective=objective)
    return gradients(made, sparse(0) if objective == "cross_entropy" else pairs(0))


def assert_as_the_whole(objective: str, settings: dict) -> None:
    settings = dict(settings)
    made = tiny.make(settings.pop("mesh", (1, 1, 1)), masked=True, objective=objective, **settings)
    arrays = sparse(0) if objective == "cross_entropy" else pairs(0)
    terms, found = gradients(made, arrays)
    tied, loop = settings.get("tied_embeddings", False), settings.get("loop", tiny.SHAPE.loop)
    wanted_terms, wanted = whole(loop, tied, objective)
    assert_close({name: terms[name] for name in wanted_terms}, dict(wanted_terms), 1e-5)
    assert_close(found, wanted, 1e-5)


@slow_but_for("cube, unroll, 2 micro-batches", settings=MESHES)
def test_trained_positions_alone_give_the_same(settings):
    """Loss and gradients, of masks that leave nothing of a row, on devices with unequal counts."""
    assert_as_the_whole("cross_entropy", settings)


def test_the_loss_is_over_the_trained_tokens_of_the_whole_batch():
    """Not a mean over rows, devices or micro-batches."""
    terms, _ = whole("unroll", False, "cross_entropy")
    made, arrays = tiny.make(loop="unroll"), sparse(0)
    hidden_ND = hidden(made.step.model, made.state["params"], made.put(arrays), 8)
    logits = hidden_ND @ made.step.model.lm_head(made.state["params"])[0]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), arrays["targets"].reshape(-1, 1), axis=1)
    mask = arrays["loss_mask"].reshape(-1)
    assert float(terms["loss"]) == pytest.approx(-float(chosen[:, 0] @ mask) / mask.sum(), rel=1e-5)
    by_rows = (chosen.reshape(ROWS, -1) * arrays["loss_mask"]).sum(1)[:3] / arrays["loss_mask"].sum(1)[:3]
    assert abs(float(terms["loss"]) + float(by_rows.mean())) > 1e-3, "a mean of means would be the same here"


def test_no_masked_position_reaches_the_head():
    """What is not finite there does not show, and the loop goes around for what is trained on."""
    made = tiny.make(masked=True, loop="unroll")
    arrays = {name: jnp.asarray(array) for name, array in sparse(0).items()}
    objective, params = made.step.objective, made.state["params"]
    hidden_ND = hidden(made.step.model, params, arrays, 8)
    broken = jnp.where(arrays["loss_mask"].reshape(-1, 1) > 0, hidden_ND, jnp.nan)

    def value(hidden_ND):
        return objective(params, hidden_ND, arrays, objective.weight(arrays))

    (found, terms), slope = jax.jit(jax.value_and_grad(value, has_aux=True))(broken)
    assert float(found) == pytest.approx(float(value(hidden_ND)[0]), rel=1e-6)
    assert terms["source_tokens"].sum() == arrays["loss_mask"].sum()
    assert not np.any(np.asarray(slope)[np.asarray(arrays["loss_mask"]).reshape(-1) == 0])


def test_what_masked_tokens_do_not_need_is_the_head():
    config = RunConfig(model=tiny.SHAPE)
    needed, fewer = update_flops(config, tiny.make(masked=True).step.objective)
    everywhere, none = update_flops(config, tiny.make().step.objective)
    assert needed(100, 500) == everywhere(100, 500) == llama.train_flops(tiny.SHAPE, 100, 500)
    assert fewer == 6 * tiny.SHAPE.embed * tiny.SHAPE.vocabulary and none == 0


# Preferences


def plain_dpo(model, params, arrays: dict[str, np.ndarray], beta: float) -> jax.Array:
    """Returns the loss by its definition, each answer in a row of its own."""
    where = [
        (row, segment) for row, ids in enumerate(arrays["segment_ids"]) for segment in range(1, ids.max() + 1)
    ]
    one = {name: np.zeros((len(where), 16), np.int32) for name in ("tokens", "targets", "loss_mask")}
    for at, (row, segment) in enumerate(where):
        own = arrays["segment_ids"][row] == segment
        for name, array in one.items():
            array[at, : own.sum()] = arrays[name][row, own]
    places = np.broadcast_to(np.arange(16, dtype=np.int32), one["tokens"].shape)
    rows = one | {"positions": places, "segment_ids": np.ones_like(places)}
    logits = hidden(model, params, rows, 1) @ model.lm_head(params)[0]
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), rows["targets"].reshape(-1, 1), axis=1)
    answers = jnp.sum(log_p.reshape(places.shape), axis=1, where=rows["loss_mask"] > 0)
    reference = np.asarray([arrays["reference"][row, segment - 1] for row, segment in where])
    chosen, rejected = ((answers - reference)[first::2] for first in (0, 1))
    return -jnp.mean(jax.nn.log_sigmoid(beta * (chosen - rejected)))


def test_dpo_is_its_definition():
    """Value and gradients, of packed rows against one answer a row."""
    made = tiny.make(objective="dpo", loop="unroll")
    arrays, params = pairs(0), made.state["params"]
    terms, found = whole("unroll", False, "dpo")
    value, wanted = jax.jit(
        jax.value_and_grad(lambda params: plain_dpo(made.step.model, params, arrays, 0.1))
    )(params)
    assert float(terms["loss"]) == pytest.approx(float(value), rel=1e-6)
    assert_close(found, wanted, 1e-5)
    assert terms["source_tokens"].sum() == sum(1 + row % 3 for row in range(ROWS - 1))
    assert terms["source_loss"].sum() / terms["source_tokens"].sum() == pytest.approx(float(value), rel=1e-5)
    margin = float(terms["chosen_reward"] - terms["rejected_reward"])
    assert float(terms["reward_margin"]) == pytest.approx(margin, abs=1e-6)
    assert 0 < terms["reward_accuracy"] < 1


@slow_but_for("cube, unroll, 2 micro-batches", settings=MESHES)
def test_dpo_over_meshes_and_micro_batches(settings):
    assert_as_the_whole("dpo", settings)


def answers(made: tiny.Tiny, arrays: dict) -> jax.Array:
    step = made.step
    asked = Answers(model=step.model, max_segments=8, sources=tiny.SOURCES, masked=True)
    return jax.jit(lambda params: loss(asked, params, arrays, jnp.float32(1))[1]["answers"])(
        made.state["params"]
    )


def test_the_first_loss_is_ln_2():
    """Before the first update the model is its own reference."""
    made, arrays = tiny.make(objective="dpo", loop="unroll"), pairs(1)
    arrays["reference"] = np.asarray(answers(made, made.put(arrays)))
    terms = jax.jit(made.loss)(made.state["params"], made.put(arrays), made.step.objective.weight(arrays))[1]
    assert float(terms["loss"]) == pytest.approx(math.log(2), abs=1e-6)
    assert float(terms["chosen_log_probability"]) < -1
    assert abs(float(terms["reward_margin"])) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "microbatches"), [("cross_entropy", 2), ("dpo", 1)])
def test_dispatched_as_the_whole_step(objective, microbatches):
    settings = {"objective": objective, "masked": True, "microbatches": microbatches}
    made = tiny.make(loop="unroll", remat="attention", **settings)
    step, state = tiny.dispatched(made, OffloadConfig("parameters"))
    whole_state, draw = made.fresh(), sparse if objective == "cross_entropy" else pairs
    for index in range(3):
        whole_state, wanted = made.compiled(whole_state, made.put(draw(index)))
        state, found = step(state, made.put(draw(index)))
        for name in ("loss", "grad_norm", *made.step.objective.means):
            assert float(found[name]) == pytest.approx(float(wanted[name]), rel=1e-5), name
    state = step.settled(state)
    assert_close(jax.device_get(state["params"]), jax.device_get(whole_state["params"]), 1e-4)
    evaluated = step.terms_of(made.step.objective)(state["params"], made.put(draw(9)), jnp.float32(1))
    wanted = jax.jit(made.loss)(whole_state["params"], made.put(draw(9)), jnp.float32(1))[1]
    for name in ("loss", *made.step.objective.means):
        assert float(evaluated[name]) == pytest.approx(float(wanted[name]), rel=1e-4), name


def test_refuses():
    with pytest.raises(
        InputError, match=r"train\.z_loss = 0\.1: train\.objective = 'dpo' has none; choose 0"
    ):
        TrainConfig(objective="dpo", z_loss=0.1)
    with pytest.raises(InputError, match=r"train\.dpo_beta = 0: must be above 0"):
        TrainConfig(dpo_beta=0)
