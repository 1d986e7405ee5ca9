"""Routing of tokens to experts, part by part and with gradients: Triton's kernels and XLA's forms.

Predicted on an H200 at 4.1 TB/s for qwen3_30b, 16,384 tokens to 8 of 128 experts, 2,048 wide in bfloat16:
  choice   8.4 MB of logits: 25 µs by Triton with its gradient and the counts, mostly starts of kernels; XLA
           goes over the scores for each of a token's experts in a kernel each, 60 to 100
  sort     less than a MB: three starts, 20 µs; XLA's sums over blocks take a dozen, 60 µs
  rows     there: 537 MB written and 67 read; back the same turned around; both again
           backward: 2.4 GB, 0.6 ms by Triton, and by XLA where its gathers are as good
Beside the products of the layer's experts, 3.7 TFLOP in 6.6 ms at 560 TFLOP/s, that is 10 % by Triton.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from measure.workload import Pace, Workload, on

from pallas_kernels.routing import combine, dispatch, route, sort_assignments
from pallas_kernels.routing.shapes import CPU, GPU, Shape
from pallas_kernels.testing import normal

SHAPES, SHAPE = CPU | GPU, "qwen3_30b"
GROUPS = {"all": ("mixtral", "olmoe", "qwen3_30b")}
GPU_NAMES = "triton", "xla"
PACE = Pace(warmup=0.3, timed=0.3, turn=0.05, calls=20)


def passes(shape: Shape, implementation: str) -> dict:
    """Returns each part, and last all of them one after another. They take (logits, gradients of the weights,
    ids, order, tokens, gradients of sums)."""
    E, K, how = shape.experts, shape.top_k, {"implementation": implementation}

    def choice(logits, d_weights, *_):
        def of_weights(logits):
            made = route(logits, jnp.ones(len(logits), bool), top_k=K, score="softmax", normalise=True, **how)
            return made.weights_NK, (made.ids_NK, made.counts_E)

        weights, pullback, made = jax.vjp(of_weights, logits, has_aux=True)
        return weights, made, pullback(d_weights)

    def sort(_, __, ids, *___):
        return sort_assignments(ids, E, **how)

    def rows(_, __, ___, order, x, dy):
        there, pullback = jax.vjp(lambda x: dispatch(x, order, K, **how), x)
        there, dy = jax.lax.optimization_barrier((there, dy))  # the products lie between
        back, pullback_back = jax.vjp(lambda y: combine(y, order, len(x), **how), there)
        back, dy = jax.lax.optimization_barrier((back, dy))
        return back, pullback(*pullback_back(dy))

    def all_of_it(*arguments):
        return choice(*arguments), sort(*arguments), rows(*arguments)

    return {"choice": choice, "sort": sort, "rows": rows, "all": all_of_it}


def workload(shape: Shape) -> Workload:
    rng, (N, E, K, D) = np.random.default_rng(0), shape[:4]
    logits, d_weights = normal(rng, (N, E), jnp.float32), normal(rng, (N, K), jnp.float32)
    how = {"top_k": K, "score": "softmax", "normalise": True, "implementation": "xla"}
    ids = jax.jit(functools.partial(route, **how))(logits, jnp.ones(N, bool)).ids_NK
    order = jax.jit(functools.partial(sort_assignments, experts=E, implementation="xla"))(ids)
    x, dy = (normal(rng, (N, D), jnp.bfloat16) for _ in range(2))
    moved = 2 * D * N * (K + 1) * 4  # four times a token's rows and itself, of 2 bytes
    rates = lambda what, seconds, _: (  # noqa: E731
        {"needed_tb_per_second": round(moved / seconds / 1e12, 3)} if what == "rows" else {}
    )
    return Workload(
        (logits, d_weights, ids, order, x, dy),
        {name: passes(shape, name) for name in on(gpu=GPU_NAMES, cpu=("xla", "reference"))},
        base="xla",
        rates=rates,
        about={"sizes": list(shape)},
    )
