"""The AdamW update on 8-bit moments, in place: Triton's kernel, XLA's slab by slab, and XLA's of the whole.

A split master and a bfloat16 gradient: 8 bytes of a parameter are read and 6 written, and 8/256 of scales
each way.

Predicted on an H200 at 4.2 TB/s: 14.06 bytes a parameter, for `up` (4096 x 14,336) 0.197 ms, for `output`
(4096 x 128,256) 1.76 ms. The reference keeps float32 moments between its passes, written and read again: 30
bytes, 0.42 and 3.75 ms. In slabs ("xla") most of that stays in the cache, but there are eight kernels to
launch for each of 14 slabs or 126: between the two. The Triton kernel's divisions and roots, about 60
instructions an entry at 132 x 128 a cycle, take 0.11 of the 0.197 ms and hide behind the loads.

Found for `up`: triton 0.646, reference 0.925, xla 1.218 ms. IEEE's divisions and roots are far more than 60
instructions, and in slabs the launches cost more than the cache saves. Predicted with the hardware's roots
and products with inverses, 74 instructions an entry: 0.2 to 0.25 ms. Found: 0.228, at 3.6 TB/s.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from measure.workload import Pace, Workload, on

from pallas_kernels.adamw_8bit import Adam, Scalars, quantise, split, update
from pallas_kernels.adamw_8bit.shapes import CPU, GPU
from pallas_kernels.testing import normal

SHAPES, GROUPS, SHAPE = CPU | GPU, {}, "up"
PACE = Pace(warmup=5.0, timed=10.0, turn=0.2, calls=20)
ADAM = Adam(0.9, 0.95, 1e-8, 0.1)


def step(state, gradient, scalars, implementation: str):
    return update(gradient, *state, None, scalars, ADAM, implementation=implementation)


def workload(shape: tuple[int, ...]) -> Workload:
    draw = np.random.default_rng(0)
    gradient = normal(draw, shape, jnp.bfloat16)
    state = (
        *split(normal(draw, shape, jnp.float32)),
        quantise(0.1 * normal(draw, shape, jnp.float32), "signed"),
        quantise(jnp.square(normal(draw, shape, jnp.float32)), "unsigned"),
    )
    scalars = Scalars(*(jnp.float32(x) for x in (1.0, 1e-4, 0.9, 0.9)), jnp.asarray(True))
    names = on(gpu=("triton", "xla", "reference"), cpu=("xla", "reference"))
    least = math.prod(shape) * (14 + 16 / 256)
    return Workload(
        (state, gradient, scalars),
        {name: {"update": functools.partial(step, implementation=name)} for name in names},
        base="reference",
        rates=lambda _, seconds, memory: {"needed_gb_per_second": round(least / seconds / 1e9, 1)},
        updates=True,
    )
