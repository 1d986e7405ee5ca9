"""A router's product of bfloat16 tokens and float32 weights, with its gradients: by float32 or its pieces.

`split` is what a layer of experts takes on a GPU, jaxthru/models/split_matmul.py; `float32` XLA's product of
the highest precision, `tf32_x3` and `bf16_x6` XLA's own ways to make it of several. `errors` says of each how
far it is from float64, ‖Δ‖ over ‖exact‖ of the first tokens; that of `split` should be at most four times
that of `float32`.

Predicted on an H200 for qwen3_30b, 32,768 tokens 2,048 wide to 128 experts, both passes: `float32` makes
float32 of x (0.4 GB) and 52 GFLOP at 45 TFLOP/s: 1.2 ms; `split` 155 GFLOP at 500 TFLOP/s and 0.5 GB: 0.4 ms;
`bf16_x6` 18 products of 384 columns in all, each of which reads x: 0.9 ms; `tf32_x3` 1.1 ms.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure.workload import Pace, Passes, Workload, on

from jaxthru.models.split_matmul import split_matmul

COMPARED = 512  # tokens


class Product(NamedTuple):
    tokens: int
    embed: int
    experts: int


SHAPES = {
    "qwen3_30b": Product(32_768, 2048, 128),
    "olmoe": Product(32_768, 2048, 64),
    "wide": Product(32_768, 4096, 128),
    "cpu": Product(48, 64, 8),
}
GROUPS, SHAPE = {"all": ("qwen3_30b", "olmoe", "wide"), "tiny": ("cpu",)}, "all"
PACE = Pace(warmup=0.5, timed=0.4, turn=0.05, calls=10)


def products() -> dict:
    """Returns {name: (x, weight) -> their product}."""

    def by(precision):
        return lambda x, weight: jnp.matmul(x.astype(jnp.float32), weight, precision=precision)

    preset = jax.lax.DotAlgorithmPreset
    found = {"float32": by("highest"), "split": split_matmul}
    found |= {"tf32_x3": by(preset.TF32_TF32_F32_X3), "bf16_x6": by(preset.BF16_BF16_F32_X6)}
    return {name: found[name] for name in on(gpu=tuple(found), cpu=("float32", "split"))}


def passes(product) -> Passes:
    """Returns the product, and it with both gradients."""

    def both(x, weight, dy):
        y, pullback = jax.vjp(product, x, weight)
        return y, *pullback(dy)

    return {"forward": lambda x, weight, dy: product(x, weight), "both": both}


def errors(found: Passes, arguments) -> dict:
    """Returns how far the product and both gradients are from float64, or why it cannot run."""
    x, weight, dy = (np.asarray(each, np.float64) for each in arguments)
    exact = {"logits": x @ weight, "dx": dy @ weight.T, "d_weight": x.T @ dy}
    try:
        made = jax.jit(found["both"])(*arguments)
    except Exception as error:  # one that cannot run here must not cost the others' results
        return {"failed": repr(error)[:300]}
    norm = np.linalg.norm
    return {
        name: float(f"{norm(np.asarray(ours, np.float64) - exact[name]) / norm(exact[name]):.2g}")
        for name, ours in zip(exact, made, strict=True)
    }


def workload(shape: Product) -> Workload:
    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    x = draw(jax.random.key(0), (shape.tokens, shape.embed)).astype(jnp.bfloat16)
    weight = shape.embed**-0.5 * draw(jax.random.key(1), (shape.embed, shape.experts))
    arguments = x, weight, draw(jax.random.key(2), (shape.tokens, shape.experts))
    few = x[:COMPARED], weight, arguments[2][:COMPARED]
    contenders = {name: passes(product) for name, product in products().items()}
    times = {"forward": 1, "both": 3}
    flops = 2.0 * shape.tokens * shape.embed * shape.experts
    digits = 4 if shape.tokens < 1000 else 1
    return Workload(
        arguments,
        contenders,
        base="float32",
        rates=lambda what, seconds, _: {"tflops": round(times[what] * flops / seconds / 1e12, digits)},
        about={
            "sizes": shape._asdict(),
            "errors": {name: errors(of, few) for name, of in contenders.items()},
        },
    )
