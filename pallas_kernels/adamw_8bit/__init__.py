"""AdamW with moments in 8 bits an entry, in blocks that share a scale."""

import jax

from pallas_kernels.adamw_8bit.masters import join, round_stochastically, split
from pallas_kernels.adamw_8bit.reference import (
    Adam,
    Quantised,
    Scalars,
    block_length,
    dequantise,
    quantise,
)
from pallas_kernels.dispatch import Implementation, Operation, triton_before_xla

__all__ = [
    "OPERATION",
    "PARTITIONED",
    "Adam",
    "Quantised",
    "Scalars",
    "block_length",
    "dequantise",
    "join",
    "quantise",
    "round_stochastically",
    "split",
    "update",
]

OPERATION = Operation(
    __name__,
    {
        "triton": Implementation(takes=("platform",)),
        "xla": Implementation(),
        "reference": Implementation(),
    },
    triton_before_xla,
    function="update",
)

PARTITIONED = "reference"
"""What XLA's partitioner can split: on a mesh of several devices the one for outside a shard_map."""


def update(
    gradient: jax.Array,
    weight: jax.Array,
    remainder: jax.Array | None,
    mu: Quantised,
    nu: Quantised,
    key: jax.Array | None,
    scalars: Scalars,
    adam: Adam,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array | None, Quantised, Quantised]:
    """Returns the next (weight, remainder, mu, nu) of one parameter. The arithmetic is float32.

    The master is the weight and its remainder (`split`), or a float32 weight, or, with a key, a bfloat16 one
    that is stochastically rounded. Arrays are taken as they lie on one device: a kernel is not partitioned.

    Args:
      gradient: [..., D], of any float dtype.
      weight: [..., D]. remainder: int16 of that shape, or None.
      mu, nu: first and second moment, `quantise`d as signed and unsigned.
      key: to round by, or None. Implementations draw other bits from it.
      scalars, adam: what is the same for all parameters.
      implementation: one of `OPERATION.names`; None takes "triton" on an NVIDIA GPU where it can run, and
        else "xla". On a mesh of several devices name `PARTITIONED`, or call this in a shard_map.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: no implementation has the name, or there are both a remainder and a key.
      dispatch.Unsupported: the named implementation refuses.

    Source: AdamW: Loshchilov and Hutter 2019 (arXiv:1711.05101); for the moments see reference.py.
    """
    if remainder is not None and key is not None:
        raise ValueError("adamw_8bit: a weight with a remainder is not stochastically rounded; give no key")
    arguments = gradient, weight, remainder, mu, nu, key, scalars, adam
    return OPERATION.run(*arguments, implementation=implementation, platform=platform)
