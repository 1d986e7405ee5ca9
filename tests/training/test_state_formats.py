"""Formats within the whole step: sharded as parameters are, resumed in either form, with wide gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxthru.engine.inline import InlineStep
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer


def optim(state, **config):
    return OptimConfig(learning_rate=1e-2, state=state, **config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "config"),
    [((2, 2, 2), optim("split_master_int8")), ((1, 8, 1), optim("int8", name="muon"))],
    ids=["split_master_int8", "muon"],
)
def test_slots_are_sharded_as_their_parameters(mesh, config):
    made = tiny.make(mesh, optim=config, loop="unroll")
    up = tiny.layers(made.state["params"])[1]["mlp"]["up"]
    slots = {
        name: tiny.layers(tree)[1]["mlp"]["up"] for name, tree in made.state["opt_state"]["slots"].items()
    }
    for codes in (slots["mu"].codes, slots["nu"] and slots["nu"].codes, slots["remainder"]):
        assert codes is None or codes.sharding.is_equivalent_to(up.sharding, 2)
    # [64, 128] in blocks of 128: one scale a row, which no two devices of a row's can share out.
    assert slots["mu"].scale.shape == (64, 1) and slots["mu"].scale.sharding.spec[0] == "fsdp"
    single = tiny.make(optim=config, loop="unroll")
    losses, wanted = made.losses(6), single.losses(6)
    assert losses[-1] < losses[0] - 0.05
    # A sum in another order now and then rounds a code or a weight the other way, and such steps add up.
    np.testing.assert_allclose(losses[:4], wanted[:4], atol=1e-3, rtol=0)
    np.testing.assert_allclose(losses, wanted, atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("saved", "read"), [pytest.param("scan", "unroll", marks=pytest.mark.slow), ("unroll", "scan")]
)
def test_int8_state_resumes_in_either_form(tmp_path, saved, read):
    made, other = (tiny.make(optim=optim("split_master_int8"), loop=loop) for loop in (saved, read))
    state = made.fresh()
    for index in range(3):
        state, _ = made.compiled(state, made.batch(index))
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(3, state, {})
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other.state
    )
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        step, resumed, _ = checkpointer.restore(abstract)
    assert step == 3
    layers = [tiny.layers(each["opt_state"]["slots"]["nu"]) for each in (resumed, state)]
    unrolled, stacked = layers if read == "unroll" else layers[::-1]
    for index in range(tiny.SHAPE.layers):
        for one, whole in zip(unrolled[index]["mlp"]["up"], stacked["mlp"]["up"], strict=True):
            np.testing.assert_array_equal(one, whole[index])
    for index in range(3, 5):
        state, metrics = made.compiled(state, made.batch(index))
        resumed, others = other.compiled(resumed, other.batch(index))
        np.testing.assert_allclose(others["loss"], metrics["loss"], atol=2e-4)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"tied_embeddings": True}, {"float8": True}], ids=str)
def test_gradients_of_bfloat16_weights(shape, microbatches):
    """Of matrices in the compute dtype or float32, whatever they are kept in; sums of parts in float32."""
    config = optim("split_master_int8")
    made = tiny.make(compute="bfloat16", microbatches=microbatches, optim=config, **shape)
    assert made.state["params"]["embedding"]["table"].dtype == jnp.bfloat16
    _, gradients = jax.eval_shape(InlineStep(made.step).gradients, made.state["params"], tiny.batch(0))
    outer = {
        gradients[part][name].dtype
        for part in ("embedding", "head")
        for name in gradients[part]
        if name != "norm"
    }
    assert outer == {jnp.dtype(jnp.float32)}
    layer = tiny.layers(gradients)["mlp"]["up"].dtype
    assert layer == (jnp.bfloat16 if microbatches == 1 else jnp.float32)


def test_bfloat16_weights_compute_in_float32_as_wide_ones_do():
    """No gradient is rounded to the dtype that its weight is kept in."""
    made = tiny.make(optim=optim("split_master"))
    params, batch = made.fresh()["params"], made.batch(0)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        *(made.gradients(weights, batch)[1] for weights in (params, wide)),
    )


def test_the_previous_norm_clips_the_next_step():
    exact, previous = (tiny.make(optim=optim("float32", clip_rule=rule)) for rule in ("exact", "previous"))
    table = lambda state: np.array(state["opt_state"]["slots"]["mu"]["embedding"]["table"])  # noqa: E731
    state, metrics = previous.compiled(previous.fresh(), previous.batch(0))
    first = float(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, state["params"], previous.state["params"])  # measured alone
    assert int(state["step"]) == 1 and int(state["opt_state"]["count"]) == 0 and not table(state).any()
    assert float(state["grad_norm"]) == first and int(state["skipped"]) == 0
    state, metrics = previous.compiled(state, previous.batch(1))
    wanted, metrics = exact.compiled(exact.fresh(), exact.batch(1))
    norms = [first, float(metrics["grad_norm"])]
    assert min(norms) > 1 and norms[0] != norms[1]
    # Of the same weights and the same batch mu is 0.1 g / norm: the two differ by which norm it was.
    np.testing.assert_allclose(table(state) * norms[0], table(wanted) * norms[1], rtol=1e-5, atol=1e-8)
    states = [wanted, state]
    assert float(states[1]["grad_norm"]) == norms[1]
    bad = previous.batch(1) | {"segment_ids": previous.batch(1)["segment_ids"] * 0 + jnp.arange(64)[None]}
    state, metrics = previous.compiled(states[1], bad)
    assert not np.isfinite(metrics["loss"]) and float(state["grad_norm"]) == norms[1]
