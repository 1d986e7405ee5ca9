"""AdamW with moments in 8 bits an entry, in blocks that share a scale."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.adamw_8bit import reference, triton, xla
from pallas_kernels.adamw_8bit.masters import join, round_stochastically, split
from pallas_kernels.adamw_8bit.reference import (
    Adam,
    Quantised,
    Scalars,
    block_length,
    dequantise,
    quantise,
)

__all__ = [
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
    that is rounded by chance. Arrays are taken as they lie on one device: a kernel is not partitioned.

    Args:
      gradient: [..., D], of any float dtype.
      weight: [..., D]. remainder: int16 of that shape, or None.
      mu, nu: first and second moment, `quantise`d as signed and unsigned.
      key: to round by, or None. Implementations draw other bits from it.
      scalars, adam: what is the same for all parameters.
      implementation: "triton", "xla", or "reference", which XLA can partition; None takes the first on an
        NVIDIA GPU where it can run, and else the second.
      platform: "cpu", "gpu" or "tpu", where it will run; None is JAX's default backend.

    Raises:
      ValueError: no implementation has the name, or there are both a remainder and a key.
      dispatch.Unsupported: the named implementation refuses.

    Source: AdamW: Loshchilov and Hutter 2019 (arXiv:1711.05101); for the moments see reference.py.
    """
    if remainder is not None and key is not None:
        raise ValueError("adamw_8bit: a weight with a remainder is not rounded by chance; give no key")
    platform = dispatch.resolve_platform(platform)
    implementations = {
        "triton": functools.partial(triton.update, platform=platform),
        "xla": xla.update,
        "reference": reference.update,
    }
    arguments = gradient, weight, remainder, mu, nu, key, scalars, adam
    automatic = ("triton", "xla") if dispatch.on_nvidia(platform) else ("xla",)
    return dispatch.run("adamw_8bit", implementations, automatic, implementation, *arguments)
