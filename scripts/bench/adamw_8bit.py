"""Times the AdamW update on 8-bit moments, Triton's kernel against XLA's, and prints one JSON line.

XLA's are two: slab by slab, and the reference, of the whole.

    python scripts/bench/adamw_8bit.py [--shape up] [--output FILE]

Contenders take turns, A-B-A-B, and medians count; both update the arrays in place. A split master and a
bfloat16 gradient: 8 bytes of a parameter are read and 6 written, and 8/256 of scales each way.

Predicted on an H200 at 4.2 TB/s: 14.06 bytes a parameter, for `up` (4096 x 14,336) 0.197 ms, for `output`
(4096 x 128,256) 1.76 ms. The reference keeps float32 moments between its passes, written and read again: 30
bytes, 0.42 and 3.75 ms. In slabs ("xla") most of that stays in the cache, but there are eight kernels to
launch for each of 14 slabs or 126: between the two. The Triton kernel's divisions and roots, about 60
instructions an entry at 132 x 128 a cycle, take 0.11 of the 0.197 ms and hide behind the loads.

Found for `up`: triton 0.646, reference 0.925, xla 1.218 ms. IEEE's divisions and roots are far more than 60
instructions, and in slabs the launches cost more than the cache saves. Predicted with the hardware's roots
and products with inverses, 74 instructions an entry: 0.2 to 0.25 ms. Found: 0.228, at 3.6 TB/s.
"""

import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import turns

from jaxthru.runtime import xla
from pallas_kernels.adamw_8bit import Adam, Scalars, quantise, split, update
from pallas_kernels.adamw_8bit.shapes import CPU, GPU
from pallas_kernels.testing import normal

ADAM = Adam(0.9, 0.95, 1e-8, 0.1)
CALLS = 20


def contender(implementation: str, shape: tuple[int, ...]):
    """Returns the compiled update, and a function without arguments that runs it on its own state, which it
    takes over."""
    draw = np.random.default_rng(0)
    gradient = normal(draw, shape, jnp.bfloat16)
    state = (
        *split(normal(draw, shape, jnp.float32)),
        quantise(0.1 * normal(draw, shape, jnp.float32), "signed"),
        quantise(jnp.square(normal(draw, shape, jnp.float32)), "unsigned"),
    )
    scalars = Scalars(*(jnp.float32(x) for x in (1.0, 1e-4, 0.9, 0.9)), jnp.asarray(True))

    def one(state, gradient, scalars):
        return update(gradient, *state, None, scalars, ADAM, implementation=implementation)

    compiled = jax.jit(one, donate_argnums=0).lower(state, gradient, scalars).compile()

    def run():
        nonlocal state
        state = compiled(state, gradient, scalars)
        return state

    return compiled, run


def main() -> int:
    shapes = CPU | GPU
    options = turns.parser(__doc__.splitlines()[0], shapes, "up").parse_args()
    xla.configure()
    shape = shapes[options.shape]
    names = ("triton", "xla", "reference") if jax.default_backend() == "gpu" else ("xla", "reference")
    made = {name: contender(name, shape) for name in names}
    runs = {name: run for name, (_, run) in made.items()}
    times, clocks = turns.compare(runs, (), options, turn_seconds=0.2, calls=CALLS)
    least = float(np.prod(shape)) * (14 + 16 / 256)
    contended = {
        name: turns.told(times[name], compiled.memory_analysis(), CALLS)
        | {"needed_gb_per_second": round(least / statistics.median(times[name]) / 1e9, 1)}
        for name, (compiled, _) in made.items()
    }
    turns.emit("adamw_8bit", options, contended, clocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
