"""A mixture of experts trains alike on every mesh: losses, gradients, counts and the router's bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import moe
from jaxthru.models.router import TOKENS
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer
from pallas_kernels.testing import assert_close

SHAPE = moe.Config(
    **{"vocabulary": tiny.VOCABULARY, "layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8},
    **{"experts": 8, "top_k": 2, "expert_mlp": 16, "shared_mlp": 16, "qk_norm": True},
    **{"bias_rate": 1e-2, "aux_loss": 1e-2, "router_z_loss": 1e-3},
)
MESHES = {
    "expert=2": (1, 1, 1, 2),
    "expert=2 fsdp=2 tensor=2": (1, 2, 2, 2),
    "expert=8": (1, 1, 1, 8),
    "expert=4 data=2": (2, 1, 1, 4),
    "tensor=2 fsdp=4": (1, 4, 2, 1),
}
STEPS = 3


@functools.cache
def made(mesh: tuple[int, ...] = (1, 1, 1, 1), **settings) -> tiny.Tiny:
    return tiny.make(mesh, of=SHAPE, ops=(), remat="projections", **settings)


@functools.cache
def gradients(mesh: tuple[int, ...] = (1, 1, 1, 1), **settings):
    of = made(mesh, **settings)
    return jax.device_get(of.gradients(of.state["params"], of.batch(0)))


@functools.cache
def trained(mesh: tuple[int, ...] = (1, 1, 1, 1), **settings) -> tuple[list[float], dict]:
    """Returns losses and the last parameters."""
    of, losses = made(mesh, **settings), []
    state = of.fresh()
    for index in range(STEPS):
        state, metrics = of.compiled(state, of.batch(index))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state["params"])


@pytest.mark.slow(minutes=0.1)
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_every_mesh_gives_the_losses_and_gradients_of_one_device(mesh):
    (terms, found), (of_one, alone) = gradients(mesh), gradients()
    np.testing.assert_allclose(terms["loss"], of_one["loss"], rtol=1e-5)
    for (path, each), (_, wanted) in zip(
        *(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (found, alone)), strict=True
    ):
        assert np.abs(wanted).max() > 0
        distance = np.linalg.norm(each - wanted) / np.linalg.norm(wanted)
        assert distance < 1e-5, f"{jax.tree_util.keystr(path)}: {distance}"
    np.testing.assert_array_equal(terms[TOKENS], of_one[TOKENS])
    assert terms[TOKENS].dtype == jnp.int32 and terms[TOKENS].shape == (SHAPE.layers, SHAPE.experts)


@pytest.mark.slow
def test_steps_and_the_router_s_bias_are_those_of_one_device():
    (losses, params), (alone, of_one) = trained(MESHES["expert=8"]), trained()
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    bias = lambda tree: np.asarray(tree["layers"][0][0]["mlp"]["router"]["bias"])  # noqa: E731
    assert np.abs(bias(of_one)).max() > 0
    np.testing.assert_array_equal(bias(params), bias(of_one))


@pytest.mark.slow
@pytest.mark.parametrize("to", MESHES.values(), ids=MESHES)
def test_a_checkpoint_of_one_mesh_goes_on_with_any_other_to_the_bit(to, tmp_path):
    """Saved with experts over four devices, and over two again from where it was put."""
    saved, wanted = made(MESHES["expert=4 data=2"]), None
    for number, of in enumerate((saved, made(to), made(loop="unroll"))):
        with Checkpointer(tmp_path / str(number), CheckpointConfig()) as checkpointer:
            if wanted is None:
                state = of.fresh()
                slots = state["opt_state"]["slots"]
                state["opt_state"]["slots"] = jax.tree.map(distinct, slots)
                wanted = {"params": by_layer(state), "slots": by_layer(state, "mu")}
            else:
                with Checkpointer(tmp_path / str(number - 1), CheckpointConfig()) as before:
                    _, state, _ = before.restore(of.abstract)
            for leaf, abstract in zip(*map(jax.tree.leaves, (state, of.abstract)), strict=True):
                assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
            found = {"params": by_layer(state), "slots": by_layer(state, "mu")}
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            checkpointer.save(1, state, {"step": 1})


def distinct(leaf: jax.Array) -> jax.Array:
    """Returns another array of the same kind and place, of which no two numbers are alike."""
    numbers = np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)
    return jax.device_put(numbers.astype(leaf.dtype), leaf.sharding)


def by_layer(state: dict, slot: str | None = None) -> list:
    """Returns the arrays of parameters, or of an optimizer's slot, of each layer."""
    tree = state["opt_state"]["slots"][slot] if slot else state["params"]
    ((block,),) = tree["layers"]
    layers = (
        block if isinstance(block, tuple) else [jax.tree.map(lambda x, at=at: x[at], block) for at in (0, 1)]
    )
    return jax.device_get([tree["embedding"], tree["head"], *layers])


@pytest.mark.slow
def test_layers_that_the_host_dispatches_one_by_one_do_the_same():
    whole = made(MESHES["expert=2 fsdp=2 tensor=2"], loop="unroll", microbatches=2)
    compiled, state = tiny.dispatched(whole, OffloadConfig("parameters", activations="names"))
    alone = whole.fresh()
    for index in range(2):
        state, metrics = compiled(state, whole.batch(index))
        alone, of_whole = whole.compiled(alone, whole.batch(index))
        np.testing.assert_allclose(metrics["loss"], of_whole["loss"], rtol=1e-6)
    found = compiled.settled(state)["params"]
    assert_close(jax.device_get(found["layers"]), jax.device_get(alone["params"]["layers"]), 1e-5)
