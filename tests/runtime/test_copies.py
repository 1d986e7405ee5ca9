"""Gathers made of permutes give what gathers give, and their gradients what scatters do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import AxisType, PartitionSpec

from jaxthru.runtime import copies, xla
from pallas_kernels.testing import has_gpu


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_all_gather(devices, dim):
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    rng = np.random.default_rng(devices)
    x = jnp.asarray(rng.standard_normal((24, 48)), jnp.float32)
    cotangents = jnp.asarray(rng.standard_normal((devices * 24, 48)), jnp.float32)
    split = PartitionSpec(*(["x"] if dim == 0 else [None, "x"]))

    def both(gather):
        def local(x, cotangent):
            whole, pull = jax.vjp(gather, x)
            return whole, pull(cotangent)[0]

        specs = (split, PartitionSpec("x"))
        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec("x"), split))
        )(x, cotangents)

    found = both(lambda x: copies.all_gather(x, "x", dim))
    expected = both(lambda x: jax.lax.all_gather(x, "x", axis=dim, tiled=True))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_sums_are_rounded_once():
    """One and seven times 2⁻⁹, which added one at a time leave one in bfloat16."""
    mesh, split = jax.make_mesh((8,), ("x",), (AxisType.Auto,)), PartitionSpec("x")

    def local(x):
        _, pull = jax.vjp(lambda x: copies.all_gather(x, "x", 0), x)
        part = jnp.where(jax.lax.axis_index("x") == 0, 1, 2.0**-9)
        return pull(jnp.full((8,), part, x.dtype))[0]

    summed = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    assert (summed(jnp.zeros(8, jnp.bfloat16)) == jnp.bfloat16(1 + 7 * 2.0**-9)).all()


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.skipif(not has_gpu() or jax.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_on_gpus_copy_engines_move_them(tmp_path):
    """Other numbers each time, in other memory; beside products, as in training."""
    mesh, split = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2]), PartitionSpec("x")
    options = xla.compiler_options("gpu", devices=2, deterministic=False, copies=True)

    def program(gather):
        def local(shard, rows):
            whole, pull = jax.vjp(gather, shard)
            return rows @ whole, pull(jnp.sin(whole))[0]

        sharded = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
        return jax.jit(sharded, compiler_options=options)

    copied = program(lambda shard: copies.all_gather(shard, "x", 0))
    collected = program(lambda shard: jax.lax.all_gather(shard, "x", axis=0, tiled=True))

    def inputs(index):
        keys = jax.random.split(jax.random.key(index))
        sharding = jax.sharding.NamedSharding(mesh, split)
        return [jax.device_put(jax.random.normal(key, (4096, 4096), jnp.bfloat16), sharding) for key in keys]

    kept = []
    for index in range(20):
        found, expected = (run(*inputs(index)) for run in (copied, collected))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        kept += found[: index % 2]  # the next finds its memory elsewhere
    arguments = inputs(0)
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(copied(*arguments))
    (path,) = tmp_path.rglob("*.xplane.pb")
    planes = [plane for plane in ProfileData.from_file(str(path)).planes if "/device:GPU:" in plane.name]
    names = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert any(name.startswith("MemcpyP2P") for name in names), sorted(names)
    assert not any("nccl" in name for name in names), sorted(names)
