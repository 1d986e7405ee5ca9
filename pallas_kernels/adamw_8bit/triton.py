"""AdamW on 8-bit moments in one pass over memory and without temporary arrays.

A split master with a bfloat16 gradient reads 8 bytes a parameter and writes 6. XLA makes several passes, with
float32 arrays between them: a block's scale has to be known before its codes.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.adamw_8bit.reference import SMALLEST_BLOCK, SMALLEST_SCALE, block_length
from pallas_kernels.dispatch import Unsupported, require_gpu
from pallas_kernels.triton_loading import load_triton

MIN_CAPABILITY = (8, 0)
ENTRIES = 2048  # of one program: 16 a thread


def update(gradient, weight, remainder, mu, nu, key, scalars, adam, *, platform: str):
    """Returns (weight, remainder, mu, nu) in the memory of the old ones; see `update` of the package.

    Raises:
      Unsupported: no GPU, or NVIDIA's before compute capability 8.0; jax-triton is not installed; or a
        last dim without blocks of a power of two.
    """
    require_gpu(platform, MIN_CAPABILITY)
    block = block_length(weight.shape[-1])
    if block < SMALLEST_BLOCK or block & (block - 1):
        raise Unsupported(f"needs a last dim that is a multiple of {SMALLEST_BLOCK}, got {weight.shape[-1]}")
    jax_triton, kernels = load_triton(__package__)
    inverse = lambda x: 1 / jnp.asarray(x, jnp.float32)  # noqa: E731
    clip, *biases = map(inverse, (scalars.clip_scale, scalars.bias_1, scalars.bias_2))
    factors = clip, scalars.learning_rate, *biases, scalars.finite
    given = jnp.stack([jnp.asarray(factor, jnp.float32) for factor in factors])
    if remainder is not None:
        kernel, masters, seed, how = kernels.update_split, (weight, remainder), (), {}
    else:
        kernel, masters, how = kernels.update_alone, (weight,), {"rounded": key is not None}
        # Where nothing is rounded nothing reads the seed.
        seed = (given if key is None else jax.random.bits(key, (1,), jnp.uint32).astype(jnp.int32),)
    updated = (*masters, *mu, *nu)
    blocks, rows = math.prod(weight.shape) // block, ENTRIES // block
    *masters, codes_mu, scale_mu, codes_nu, scale_nu = jax_triton.triton_call(
        gradient,
        *updated,
        given,
        *seed,
        blocks,
        kernel=kernel,
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated],
        input_output_aliases={1 + index: index for index in range(len(updated))},
        grid=-(-blocks // rows),
        **how,
        **adam._asdict(),
        smallest_scale=SMALLEST_SCALE,
        R=rows,
        B=block,
    )
    weight, remainder = masters if len(masters) == 2 else (*masters, None)
    return weight, remainder, type(mu)(codes_mu, scale_mu), type(nu)(codes_nu, scale_nu)
