"""An update in 8 bits over several devices: each updates what it has, and all together the whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from runs import ROOT

from jaxthru import config as configuration
from jaxthru.build.memory_estimate import layout_of
from jaxthru.build.step import assemble
from jaxthru.optim import shards
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from pallas_kernels import adamw_8bit, dispatch
from pallas_kernels.adamw_8bit import Adam, Scalars, join, quantise, split

ADAM = Adam(0.9, 0.95, 1e-8, 0.1)
AXES = ("embed", "mlp")


@pytest.fixture
def layout() -> Layout:
    return Layout(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


@pytest.fixture
def ran(monkeypatch):
    """The implementations that were traced, and the shape of the weight of each."""
    found, update = [], adamw_8bit.update

    def noted(gradient, weight, *arguments, implementation, **how):
        found.append((implementation, weight.shape))
        return update(gradient, weight, *arguments, implementation=implementation, **how)

    monkeypatch.setattr(adamw_8bit, "update", noted)
    return found


def scalars() -> Scalars:
    return Scalars(*map(jnp.float32, (1.5, 1e-2, 0.1, 0.05)), jnp.bool(True))


def state(shape: tuple[int, int], master: str, same: bool = False) -> tuple:
    """Returns a gradient and what it updates. same: in each row and block."""
    draw = np.random.default_rng(0)
    gradient, weight, mu, nu = (
        jnp.asarray(np.broadcast_to(draw.normal(size=(1, 1) if same else shape), shape), jnp.float32)
        for _ in range(4)
    )
    weight, remainder = split(weight) if master == "split" else (weight, None)
    if master == "none":
        weight = weight.astype(jnp.bfloat16)
    return gradient, weight, remainder, quantise(mu, "signed"), quantise(jnp.square(nu), "unsigned")


def prepared(layout, implementation, axes, given, key=None, lie=None):
    """Returns an update as JAX stages it, and its arguments. lie: how the arrays lie at first, if not as
    their axes say."""
    place = lambda leaf: jax.device_put(leaf, layout.sharding(lie or axes)) if layout else leaf  # noqa: E731
    update = functools.partial(shards.update, layout, axes, adam=ADAM, implementation=implementation)
    return jax.jit(lambda given, scalars: update(given, key, scalars)), jax.tree.map(place, given), scalars()


def updated(*how, **more):
    """Returns the next weight and state."""
    update, *arguments = prepared(*how, **more)
    return update(*arguments)


@pytest.mark.parametrize("master", ["weight", "split"])
@pytest.mark.parametrize("axes", [AXES, AXES[::-1], (None, None)], ids=str)
def test_each_device_updates_what_it_has(master, axes, layout, ran):
    given = state((16, 1024), master)
    wanted = updated(None, "reference", axes, given)
    found = updated(layout, "xla", axes, given)
    local = {"embed": 2, "mlp": 2, None: 1}
    assert ran[1:] == [("xla", (16 // local[axes[0]], 1024 // local[axes[1]]))]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert found[0].sharding.is_equivalent_to(layout.sharding(axes), 2)


@pytest.mark.parametrize("last", [256, 384, 48])  # of which a half has other blocks than the whole
@pytest.mark.parametrize("rows", [16, 6])
def test_parts_whose_blocks_would_be_cut_go_along_another_dim(rows, last, layout, ran):
    """Or, where none can be split so far, the partitioner splits the update; but no kernel that is named."""
    given, lie = state((rows, last), "weight"), (AXES[0], None)
    wanted = updated(None, "reference", AXES, given)
    if rows == 6:
        with pytest.raises(
            dispatch.Unsupported, match=r"adamw_8bit: xla: needs a dim of \(6, \d+\)"
        ) as refused:
            updated(layout, "xla", AXES, given, lie=lie)
        assert refused.value.operation == "adamw_8bit"
    found = updated(layout, "xla" if rows == 16 else None, AXES, given, lie=lie)
    assert ran[1:] == [("xla", (4, last)) if rows == 16 else ("reference", (6, last))]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_such_parts_move_by_no_gather(layout):
    """An all-to-all there and back: of a device's own part alone."""
    update, *arguments = prepared(layout, "xla", AXES, state((16, 256), "split"), lie=(AXES[0], None))
    assert " all-gather(" not in update.lower(*arguments).compile().as_text()


def test_each_device_rounds_by_bits_of_its_own_and_copies_stay_equal(layout):
    """Where all have the same numbers, only these tell them apart."""
    weight, *_ = updated(layout, "xla", AXES, state((16, 1024), "none", same=True), jax.random.key(3))
    parts = {}
    for shard in weight.addressable_shards:
        parts.setdefault(str(shard.index), []).append(np.asarray(shard.data).astype(np.float32))
    assert len(parts) == 4 and all(np.array_equal(*copies) for copies in parts.values())
    first, *others = (copies[0] for copies in parts.values())
    assert not any(np.array_equal(first, other) for other in others)
    assert len(np.unique(weight.astype(jnp.float32))) == 2  # the two nearest


@pytest.mark.slow
def test_a_model_trains_so_as_partitioned():
    """Stacked layers, too, whose arrays have a dim more than the tests above give them."""
    optim = OptimConfig(learning_rate=1e-2, state="split_master_int8")
    made = tiny.make((1, 2, 2), optim=optim, embed=512, mlp=512, microbatches=2)
    optimizer = dataclasses.replace(made.step.optimizer, adamw_8bit="xla", layout=made.layout)
    by_shard = dataclasses.replace(made, step=dataclasses.replace(made.step, optimizer=optimizer))
    np.testing.assert_allclose(by_shard.losses(3), made.losses(3), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("axes", [AXES, AXES[::-1]], ids=str)
@pytest.mark.parametrize("master", ["weight", "split"])
def test_several_gpus_update_by_kernels_as_by_their_definition(master, axes):
    """The last dim, over two GPUs, has blocks that both would have; so that one case moves its parts."""
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    layout = Layout(make_mesh(MeshConfig(fsdp=2), jax.devices()[:2]))
    given = state((512, 768), master)
    found = updated(layout, "triton", axes, given, lie=(None, None))
    wanted = updated(None, "reference", axes, given)
    np.testing.assert_allclose(*(weight_of(*each[:2]) for each in (found, wanted)), rtol=1e-5, atol=1e-7)
    for mine, theirs in zip(found[2:], wanted[2:], strict=True):
        assert np.abs(np.asarray(mine.codes, int) - np.asarray(theirs.codes, int)).max() <= 1
        np.testing.assert_allclose(mine.scale, theirs.scale, rtol=1e-6)


def weight_of(weight: jax.Array, remainder: jax.Array | None) -> np.ndarray:
    """Returns the weight in float32."""
    return np.asarray(weight if remainder is None else join(weight, remainder))


def test_kernels_are_for_several_gpus():
    """And `reference` for other devices, unless another is named; in plans, which are for GPUs, too."""

    def made(devices: int = 2, by: str = "auto", **how):
        settings = ["optim.state=int8", "train.rows=8", "mesh.fsdp=-1", f"kernels.adamw_8bit={by}"]
        config = configuration.load(ROOT / "configs" / "quickstart.py", settings)
        layout = layout_of(config, devices)
        how = {"attention": "xla", "segments": 4, "sources": 1} | how
        optimizer = assemble(config, layout, **how).step.optimizer
        return optimizer.adamw_8bit, optimizer.layout is layout

    assert made(1) == (None, False)
    assert made() == made(by="reference") == ("reference", False)
    assert made(by="xla") == ("xla", True)
    assert made(experts=(None, None)) == (None, True)
    with dispatch.assumed("gpu"):
        assert made() == (None, True)
