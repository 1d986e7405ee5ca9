"""Checks the fused collective matrix products on the GPUs at hand, in a process of its own under a time-out.

    python scripts/bench/collective_matmul_check.py [--axes tensor=2 ...] [--shapes tiny|all|NAME ...]

A kernel that waits for a signal which never comes hangs every GPU of its mesh, and only the end of its
process ends it (`ends_within`). So a test or a benchmark calls `in_child` first, which runs this script at
tiny shapes and kills it when the time is up. Values and gradients are compared with products accumulated in
float64, of operands drawn anew and with free buffers filled with NaN before each run; repeats have to be
equal bit for bit.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxthru.runtime import xla
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED, Shape
from pallas_kernels.dispatch import Unsupported

os.environ.update(xla.NO_MULTICAST)  # whoever imports this is about to start collectives
os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # as `xla.configure` says; for pytest's process and children too

BFLOAT16_TOLERANCE = 1e-2
HANGS = 3  # the exit status of a process that a hung kernel holds

# The smallest that every kernel, each size of tile and an axis of 4 take; several tiles for some thread
# blocks and none for others.
TINY = {
    "tiny_gather": Shape("all_gather_matmul", 1024, 256, (1024,)),
    "tiny_gather_three": Shape("all_gather_matmul", 2048, 512, (2048, 512, 256)),
    "tiny_gather_many_tiles": Shape("all_gather_matmul", 8192, 768, (3072,)),
    "tiny_scatter": Shape("matmul_reduce_scatter", 1024, 256, (256,)),
    "tiny_scatter_many_tiles": Shape("matmul_reduce_scatter", 8192, 3072, (768,)),
}
TRIES_TILES = "tiny_gather_many_tiles", "tiny_scatter_many_tiles"  # which divide by all; forward and backward
SHAPES = TINY | GPU | UNTUNED


def in_child(axes: list[dict[str, int]], seconds: float, *options: str) -> None:
    """Runs this script on the meshes, and raises RuntimeError if it fails or is not done in time."""
    named = [",".join(f"{name}={size}" for name, size in mesh.items()) for mesh in axes]
    run_script([__file__, "--axes", *named, *options], seconds)


def try_tiles(axes: dict[str, int], candidates: list[tiles.Tiles]) -> None:
    """Runs tiles at tiny shapes in a child process, and raises RuntimeError if any is wrong or hangs."""
    given = json.dumps([dataclasses.asdict(of) for of in candidates])
    in_child([axes], 60 + 30 * len(candidates), "--shapes", *TRIES_TILES, "--tiles", given)


def try_adds(axes: dict[str, int]) -> None:
    """Runs the kernels that add to the result at tiny shapes in a child process, and raises RuntimeError if
    any is wrong or hangs. What more than two devices add up need not repeat."""
    repeats = "3" if axes["tensor"] == 2 else "0"
    in_child([axes], 240, "--implementation", "mosaic_gpu_adds", "--repeats", repeats)


def impose(imposed: tiles.Tiles) -> None:
    """Has every problem that these tiles fit take them, in this process."""

    class Imposed(dict):
        def get(self, key, default=None):
            try:
                tiles.Problem.of_key(key).check(imposed)
            except Unsupported:
                return default
            return {"tiles": dataclasses.asdict(imposed), "faster": None}

    tiles.TABLE[jax.local_devices()[0].device_kind] = Imposed()


def run_script(arguments: list[str], seconds: float, **environment: str) -> str:
    """Returns what a Python script prints, run in a session of its own.

    Raises RuntimeError, with the ends of its output and of its errors, where it fails or is not done in time.
    It and all processes that it started are then killed, see `harness.session`.
    """
    command = [sys.executable, *arguments]
    # This process may hold most of the GPUs' memory already.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # a pipe could stay open
        with harness.session(command, stdout=out, stderr=err, env=environment) as child:
            try:
                failed = f"ended with status {child.returncode}" if child.wait(seconds) else ""
            except subprocess.TimeoutExpired:
                failed = f"not done in {seconds} s, so it may hang"
        said, complained = (file.seek(0) or file.read() for file in (out, err))
    if failed:
        raise RuntimeError(f"{failed}: {' '.join(command)}: {said[-2000:]}{complained[-3000:]}")
    return said


@contextlib.contextmanager
def ends_within(seconds: float, case: str) -> Iterator[None]:
    """Ends this process with status HANGS, naming the case, if the block is not done in time.

    Nothing gentler helps: a thread that waits for a hung kernel takes no exception.
    """

    def end():
        os.write(2, f"\nnot done in {seconds} s, so it may hang: {case}\n".encode())
        os._exit(HANGS)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def make_mesh(axes: dict[str, int]) -> Mesh:
    """Returns a mesh of the first devices, in the order of their ids as the kernels need it."""
    devices = sorted(jax.devices(), key=lambda device: device.id)[: math.prod(axes.values())]
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def draw(mesh: Mesh, shape: Shape, seed: int, dtype=jnp.bfloat16) -> tuple[tuple, tuple]:
    """Returns the operands and cotangents of the results, each drawn where it lies."""
    operands, results = shape.arrays(mesh, dtype)
    keys = iter(jax.random.split(jax.random.key(seed), len(operands) + len(results)))
    drawn = [
        tuple(
            jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=x.sharding)(
                next(keys), x.shape, dtype
            )
            for x in of
        )
        for of in (operands, results)
    ]
    return drawn[0], drawn[1]


def compile_safely(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Returns the compiled program, with `xla.for_peers` where a kernel may write into peers' memory."""
    fused = "mosaic_gpu" in lowered.as_text()
    return lowered.compile(compiler_options=xla.for_peers(jax.default_backend()) if fused else None)


def values_and_gradients(function):
    """Returns the (operands, cotangents) -> results, gradients of the operands; to be compiled safely."""

    def both(operands, cotangents):
        values, pull = jax.vjp(function, *operands)
        return values, pull(cotangents)

    return jax.jit(both)


def poison(compiled: jax.stages.Compiled, mesh: Mesh) -> None:
    """Fills memory of each device with NaN and frees it, so that what the program allocates next holds NaN.

    Two arrays for each of its results, of the same size, as the allocator gives the smallest free block that
    fits; and as much again as its temporary buffers take.
    """
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    results = zip(jax.tree.leaves(compiled.out_info), jax.tree.leaves(compiled.output_shardings), strict=True)
    sizes = [math.prod(of.shard_shape(x.shape)) for x, of in results] * 2
    sizes.append(compiled.memory_analysis().temp_size_in_bytes // 2)
    filled = [jnp.full((mesh.size * n,), jnp.nan, jnp.bfloat16, device=split) for n in sizes if n]
    jax.block_until_ready(filled)
    for array in filled:
        array.delete()


def errors(found, operands, cotangents) -> list[float]:
    """Returns ‖found - wanted‖ / ‖wanted‖ of each result and gradient; infinite if any element is not finite.

    What is wanted is of whole matrices, accumulated in float64 on the first device.
    """
    x, *weights = operands
    pairs = list(zip(weights, cotangents, strict=True))
    wanted = [([(x, w)], 1, 0) for w in weights]
    wanted.append(([(c, w) for w, c in pairs], 1, 1))
    wanted += [([(x, c)], 0, 0) for c in cotangents]
    with jax.enable_x64(True):
        return [_error(a, *entry) for a, entry in zip(jax.tree.leaves(found), wanted, strict=True)]


def _error(found, products, a_dim: int, b_dim: int) -> float:
    device = jax.devices()[0]

    @jax.jit
    def relative(found, products):
        def dot(a, b):
            a, b = a.astype(jnp.float64), b.astype(jnp.float64)
            return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())))

        wanted = sum(dot(a, b) for a, b in products)
        return jnp.linalg.norm(found.astype(jnp.float64) - wanted) / jnp.linalg.norm(wanted)

    error = float(relative(*jax.device_put((found, products), device)))
    return error if math.isfinite(error) else math.inf


def compile_both(mesh: Mesh, shape: Shape, implementation: str | None) -> jax.stages.Compiled:
    """Returns the (operands, cotangents) -> results, gradients of the operands."""
    run = values_and_gradients(shape.on(mesh, implementation=implementation))
    return compile_safely(run.lower(*shape.arrays(mesh, jnp.bfloat16)))


@functools.cache  # many tiles are compared with it
def compiled_reference(mesh: Mesh, shape: Shape) -> jax.stages.Compiled:
    return compile_both(mesh, shape, "reference")


def check(mesh: Mesh, shape: Shape, program: jax.stages.Compiled, seed: int) -> dict:
    """Returns the relative errors of a run on random operands with NaN wherever nothing was written.

    The plain form runs first: what only it needs of XLA and NCCL is then loaded.
    """
    operands, cotangents = draw(mesh, shape, seed)
    for compiled in (compiled_reference(mesh, shape), program):
        poison(compiled, mesh)
        began = time.perf_counter()
        found = jax.block_until_ready(compiled(operands, cotangents))
        seconds = time.perf_counter() - began
    return {"errors": errors(found, operands, cotangents), "seconds": round(seconds, 5)}


@jax.jit
def equal(found, first):
    """Returns whether two trees of bfloat16 arrays are equal bit for bit."""
    bits = lambda tree: [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in jax.tree.leaves(tree)]  # noqa: E731
    return jnp.all(jnp.stack([jnp.all(a == b) for a, b in zip(bits(found), bits(first), strict=True)]))


def unequal_repeats(mesh: Mesh, shape: Shape, compiled: jax.stages.Compiled, seed: int, repeats: int) -> int:
    """Returns how many of the repeats differ in any bit from the first run on the same operands.

    Two sets of operands alternate, so that what a run leaves behind is never what the next should give.
    """
    sets = [draw(mesh, shape, 2 * seed + i) for i in range(2)]
    firsts = [jax.block_until_ready(compiled(*of)) for of in sets]
    unequal = 0
    for _ in range(repeats):
        for of, first in zip(sets, firsts, strict=True):
            poison(compiled, mesh)
            unequal += not bool(equal(jax.block_until_ready(compiled(*of)), first))
    return unequal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--axes", nargs="+", default=["tensor=2"], help="as tensor=2 or data=2,tensor=2")
    add("--shapes", nargs="+", default=["tiny"], help="tiny, all, or names")
    add("--implementation", default="mosaic_gpu")
    add("--repeats", type=int, default=3)
    add("--seconds", type=float, default=90, help="that each shape may take")
    add("--seed", type=int, default=time.time_ns() % 2**31)
    add("--tiles", type=json.loads, help="JSON list of tiles, each of which is checked")
    options = parser.parse_args()
    xla.configure()
    groups = {"tiny": list(TINY), "all": list(SHAPES)}
    names = [name for word in options.shapes for name in groups.get(word, [word])]
    lines = []
    every = itertools.product(options.tiles or [None], options.axes, names)
    for imposed, axes, name in every:
        if imposed:
            impose(tiles.Tiles(**imposed))
        mesh = make_mesh({name: int(size) for name, size in (part.split("=") for part in axes.split(","))})
        case = {"shape": name, "axes": axes} | ({"tiles": imposed} if imposed else {})
        print(json.dumps({"starts": name, "seed": options.seed} | case), flush=True)
        with ends_within(options.seconds, f"{case}, seed {options.seed}"):
            shape = SHAPES[name]
            compiled = compile_both(mesh, shape, options.implementation)
            line = check(mesh, shape, compiled, options.seed)
            line["unequal_repeats"] = unequal_repeats(
                mesh, shape, compiled, options.seed + 1, options.repeats
            )
        good = max(line["errors"]) <= BFLOAT16_TOLERANCE and not line["unequal_repeats"]
        lines.append(case | {"good": good} | line)
        print(json.dumps(lines[-1]), flush=True)
    good = all(line["good"] for line in lines)
    found = {"good": good, "repeats": options.repeats, "checked": lines}
    print(json.dumps(found | harness.provenance()), flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
