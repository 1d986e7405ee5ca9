"""A layered step is the whole step: same losses, same state, wherever the state lives."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxthru.training.layered import LayeredStep, compiler_with, init_by_parts
from jaxthru.training.offload import OffloadConfig, placed
from jaxthru.training.state import abstract_state
from jaxthru.training.step import abstract_batch


def layered(whole: tiny.Tiny, config: OffloadConfig):
    """Returns the layered step that does what a whole one does, and its first state."""
    step, layout = whole.step, whole.layout
    model = step.objective.model
    abstract = placed(abstract_state(model, step.optimizer, layout), config)
    batch = abstract_batch(tiny.ROWS, tiny.SEQUENCE, layout.sharding(("batch", "sequence")))
    compiled = LayeredStep(step, config, abstract, batch, compiler_with({}))
    return compiled, init_by_parts(model, step.optimizer, abstract, 0)


def optim(**settings):
    return dataclasses.replace(tiny.OPTIM, **settings)


LEVELS = {
    "optimizer, exact": (OffloadConfig("optimizer"), {"clip_rule": "exact"}),
    "gradients, exact": (OffloadConfig("gradients", fraction=0.5), {"clip_rule": "exact"}),
    "gradients, previous": (OffloadConfig("gradients"), {"clip_rule": "previous"}),
    "parameters, exact, inputs": (OffloadConfig("parameters", activations="inputs"), {"clip_rule": "exact"}),
    "parameters, previous, names": (
        OffloadConfig("parameters", activations="names"),
        {"clip_rule": "previous"},
    ),
    "activations alone": (OffloadConfig(activations="inputs"), {"clip_rule": "exact"}),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("state", ["float32", "split_master", "split_master_int8"])
def test_as_the_whole_step(level, state):
    config, settings = LEVELS[level]
    whole = tiny.make(loop="unroll", remat="attention", optim=optim(state=state, **settings))
    compiled, first = layered(whole, config)
    # The first step of all has no previous norm, and a layered one clips by what it has seen so far.
    expected, found = ({**state, "grad_norm": jnp.float32(2.0)} for state in (whole.fresh(), first))
    for index in range(4):
        expected, wanted = whole.compiled(expected, whole.batch(index))
        found, metrics = compiled(found, whole.batch(index))
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=2e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(float(wanted["grad_norm"]), rel=1e-3)
    found = compiled.settled(found)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    assert int(found["opt_state"]["count"]) == int(found["step"]) == 4
