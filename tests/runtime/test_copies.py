"""Gathers made of permutes give what gathers give, and their gradients what scatters do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxthru.runtime import copies


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
