"""Times text from a Llama of 8B's shape with random weights, against the memory that each token reads.

    python scripts/bench/decode.py [--output FILE] [--rows 1,8] [--peer hf]
    python scripts/bench/decode.py --tiny     # a small shape on a CPU, to try the script

A call is a prefill and a loop over tokens; the loop's time is that of whole calls less that of calls for one
token. What a token needs at least: each weight once, but of the embedding one row, and the keys and values
before it. That over the bandwidth of a sum over 4 GiB, measured in the same run, is the roofline. The peer is
transformers with a static cache and torch.compile, in a process of its own (peers/hugging_face_decode.py).
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.engine.model import Model
from jaxthru.generation.generator import Generator
from jaxthru.generation.sampling import Sampling
from jaxthru.models import family
from jaxthru.models.llama import Config
from jaxthru.models.ops import Ops
from jaxthru.runtime import xla
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout

WHOLE = harness.Shape(layers=32)
TINY = harness.Shape(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocabulary=512)


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
    total(values).block_until_ready()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds or not done:
        for _ in range(20):
            last = total(values)
        last.block_until_ready()
        done += 20
    return values.nbytes * done / (time.perf_counter() - began)


def needed_bytes(generator: Generator, shape: harness.Shape, rows: int, before: float) -> float:
    """Returns what one step of the loop must read. before: tokens before it, their mean."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params))
    width = generator.model.ops.compute.itemsize
    weights -= shape.vocabulary * shape.embed * width  # the embedding, of which it reads one row
    return weights + 2 * rows * before * shape.layers * shape.kv_heads * shape.head_dim * width


def measure(generator: Generator, shape: harness.Shape, rows: int, arguments: argparse.Namespace) -> dict:
    """Returns what is to be said of so many rows."""
    prompts = np.random.default_rng(0).integers(0, shape.vocabulary, (rows, arguments.prompt))
    tokens, took = arguments.tokens, {}
    for name, count in (("prefill", 1), ("whole", tokens)):
        sampling = Sampling(temperature=0.0, max_tokens=count)
        seconds = arguments.warmup_seconds, arguments.timed_seconds
        share = 0.1 if name == "prefill" else 1.0
        took[name] = harness.timed(
            lambda sampling=sampling: generator.generate(prompts, sampling),
            lambda result: result,
            *(share * each for each in seconds),
        )
        print(f"  {rows} rows, {name}: {np.mean(took[name].seconds):.4f} s", file=sys.stderr, flush=True)
    prefill, whole = (float(np.mean(took[name].seconds)) for name in ("prefill", "whole"))
    step = (whole - prefill) / (tokens - 1)
    return {
        "rows": rows,
        "prefill_seconds": round(prefill, 5),
        "tokens_per_second": round(rows / step, 1),
        "step_seconds": round(step, 6),
        "calls_timed": len(took["whole"].seconds),
        "seconds": [round(each, 4) for each in took["whole"].seconds],
        "sm_clock_mhz": took["whole"].mhz,
        "power_watts": took["whole"].watts,
        "needed_bytes": needed_bytes(generator, shape, rows, arguments.prompt + tokens / 2),
    }


def peer(shape: harness.Shape, rows: int, arguments: argparse.Namespace) -> dict:
    """Returns what the peer's process says of so many rows."""
    command = [sys.executable, "-m", "peers.hugging_face_decode", *shape.flags(), "--batch", str(rows)]
    command += ["--prompt", str(arguments.prompt), "--generate", str(arguments.tokens)]
    command += ["--warmup-seconds", str(arguments.warmup_seconds)]
    command += ["--timed-seconds", str(arguments.timed_seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    return (
        {"error": done.returncode} if done.returncode else {"line": json.loads(done.stdout.splitlines()[-1])}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rows", default="1,8", help="of a batch, one measurement each")
    add("--prompt", type=int, default=128, help="tokens of a prompt")
    add("--tokens", type=int, default=256, help="generated")
    add("--peer", choices=("hf",), help="run it too, before us: JAX keeps the memory")
    add("--tiny", action="store_true", help="a small shape on a CPU, for a moment")
    add("--output", type=Path)
    harness.add_seconds(parser)
    arguments = parser.parse_args()
    shape, compute, gib = WHOLE, "bfloat16", 4.0
    if arguments.tiny:
        shape, compute, gib = TINY, "float32", 1 / 64
        arguments.warmup_seconds = arguments.timed_seconds = 0.0
        arguments.prompt, arguments.tokens = 8, 16
        jax.config.update("jax_platforms", "cpu")
    peers = [peer(shape, int(rows), arguments) for rows in arguments.rows.split(",") if arguments.peer]
    xla.configure()
    rate = bandwidth(gib, min(arguments.timed_seconds, 5.0))
    model = model_of(shape, compute)
    generator = Generator(model, random_params(model))
    line = {"benchmark": "decode", "shape": dataclasses.asdict(shape), "read_bytes_per_second": round(rate)}
    line |= {"prompt": arguments.prompt, "tokens": arguments.tokens, "peers": peers, "results": []}
    for rows in map(int, arguments.rows.split(",")):
        found = measure(generator, shape, rows, arguments)
        roofline = rows * rate / found["needed_bytes"]
        found["roofline_tokens_per_second"] = round(roofline, 1)
        found["share_of_roofline"] = round(found["tokens_per_second"] / roofline, 4)
        line["results"].append(found)
        harness.write(line | harness.provenance(), arguments.output)
    harness.emit(line | harness.provenance(), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
