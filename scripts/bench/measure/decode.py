"""Times text from a Llama of 8B's shape with random weights, against the memory that each token reads.

    python scripts/bench/suite.py decode

A call is a prefill and a loop over tokens (see `text_timing`). What a token needs at least: each weight once,
but of the embedding one row, and the keys and values before it. That over the bandwidth of a sum over 4 GiB,
measured in the same run, is the roofline.
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
import numpy as np
import text_timing
import timed_loop

from jaxthru.engine.model import Model
from jaxthru.generation.generator import Generator
from jaxthru.generation.sampling import Sampling
from jaxthru.models import family
from jaxthru.models.llama import Config
from jaxthru.models.ops import Ops
from jaxthru.runtime import xla
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout

SUMS = 20  # to one wait


def model_of(shape: harness.Shape, compute: str) -> Model:
    """Returns the model on one device, its layers unrolled."""
    config = Config(**dataclasses.asdict(shape), loop="unroll")
    layout = Layout(make_mesh(MeshConfig(), jax.devices()[:1]))
    return Model(family.chain(config), Ops(layout, jnp.dtype(compute)), "none", "unroll")


def random_params(model: Model) -> Any:
    """Returns parameters as generation reads them, drawn in their own types: masters would need twice the
    memory."""
    draw = jax.jit(
        lambda key, shape: 0.02 * jax.random.normal(key, shape, model.ops.compute), static_argnums=1
    )
    count = iter(range(10**6))

    def one(info: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return draw(jax.random.key(next(count)), leaf.shape) if info.decays else jnp.ones(leaf.shape)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(one, model.weights, shapes)


def bandwidth(gib: float, seconds: float) -> float:
    """Returns the bytes per second of a sum over so many GiB, over and over."""
    values = jnp.ones((round(gib * 2**30) // 2 // 4096, 4096), jnp.bfloat16)
    total = jax.jit(lambda values: jnp.sum(values.astype(jnp.float32), axis=1))

    def dispatch() -> jax.Array:
        return [total(values) for _ in range(SUMS)][-1]

    timing = timed_loop.timed(dispatch, jax.block_until_ready, 0.0, seconds)
    return SUMS * values.nbytes / statistics.fmean(timing.seconds)


def needed_bytes(generator: Generator, shape: harness.Shape, rows: int, before: float) -> float:
    """Returns what one step of the loop must read. before: tokens before it, their mean."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params))
    width = generator.model.ops.compute.itemsize
    weights -= shape.vocabulary * shape.embed * width  # the embedding, of which it reads one row
    return weights + 2 * rows * before * shape.layers * shape.kv_heads * shape.head_dim * width


def measure(generator: Generator, shape: harness.Shape, arguments: argparse.Namespace) -> dict:
    """Returns what is to be said of the rows of a batch."""
    prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (arguments.batch, arguments.prompt))

    def generate(count: int) -> Any:
        return generator.generate(prompts, Sampling(temperature=0.0, max_tokens=count))

    line = text_timing.timed(generate, lambda result: result, arguments)
    before = arguments.prompt + arguments.generate / 2
    return line | {"needed_bytes": needed_bytes(generator, shape, arguments.batch, before)}


def decode(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what is to be said of a batch, beside the roofline."""
    shape = harness.Shape.of(arguments)
    xla.configure()
    rate = bandwidth(arguments.gib, min(arguments.timed_seconds, 5.0))
    model = model_of(shape, arguments.compute)
    line = measure(Generator(model, random_params(model)), shape, arguments)
    roofline, found = arguments.batch * rate / line["needed_bytes"], line["tokens_per_second"]
    return {
        "shape": dataclasses.asdict(shape),
        "read_bytes_per_second": round(rate),
        **line,
        "roofline_tokens_per_second": round(roofline, 1),
        "share_of_roofline": found and round(found / roofline, 4),
    }


main = harness.program(
    __doc__,
    decode,
    *text_timing.OPTIONS,
    harness.option("--compute", default="bfloat16"),
    harness.option("--gib", type=float, default=4.0, help="of the sum that says the bandwidth"),
    config=False,
    seconds=(20.0, 40.0),
)


if __name__ == "__main__":
    sys.exit(main())
