"""Grouped matmuls of experts, each a call of its own: products, their gradients, sums into a buffer.

`qwen3_30b` is Qwen3-30B-A3B's at 16,384 tokens, 131,072 rows of 128 groups, whose sizes are multinomial: `up`
2,048 → 1,536 and `down` 768 → 2,048. `product` is forward, `turned` the gradient of the rows, `sum` that of
the matrices, `into` the same added to a float32 buffer. `dense` is one matmul of as many FLOPs: rows times
one matrix, or one sum over all rows. `tokamax` is its ragged dot, of its kernels for Hopper, where that
imports; its sums and turned products are its own gradients. `float8` is these shapes and Mixtral's at 16,384
tokens, beside products of rows and matrices that are quantised within the call. --tiles has Hopper's kernel
contend in other tiles too; of the record, measure/experts_tiles.py makes the table that `auto` follows.

Predicted on an H200, TFLOP/s, where `dense` has 690 (`mosaic_gpu`: as its file counts; `triton`: pointers and
no ring, which others find at 470 to 560; `tokamax`: its own tables on an H100, with the H200's memory):
                    dense   mosaic_gpu   triton   tokamax
  up_product          690          645      500       430
  up_turned           690          640      490       430
  up_sum              690          625      480       120
  up_into             690          600      450       120
  down_product        680          615      470       330
  down_turned         690          640      490       350
  down_sum            690          625      480       120
  down_into           690          580      440       120
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measure.tokamax_beside_jax import import_tokamax, reason
from measure.workload import Pace, Workload, on

from jaxthru.models import fp8
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_matmul.shapes import CPU, GPU, Shape

CALLS = ("product", "turned", "sum", "into")


class Case(NamedTuple):
    """A call of a shape's product, or of what its gradients are made of. float8: beside float8's."""

    of: Shape
    call: str
    float8: bool = False


def cases(name: str, of: Shape) -> dict[str, Case]:
    return {f"{name}_{call}": Case(of, call) for call in CALLS}


SHAPES = cases("up", GPU["qwen3_30b_up"]) | cases("down", GPU["qwen3_30b_down"])
GROUPS, SHAPE = {"qwen3_30b": tuple(SHAPES)}, "qwen3_30b"
SHAPES |= cases("cpu", CPU["drawn"])
GROUPS["tiny"] = tuple(name for name in SHAPES if name.startswith("cpu_"))
for model in ("olmoe", "mixtral"):
    both = cases(f"{model}_up", GPU[f"{model}_up"]) | cases(f"{model}_down", GPU[f"{model}_down"])
    SHAPES, GROUPS[model] = SHAPES | both, tuple(both)
FLOAT8 = ("qwen3_30b_up", "qwen3_30b_down", "mixtral_up", "mixtral_down")
SHAPES |= {f"float8_{name}_{call}": Case(GPU[name], call, True) for name in FLOAT8 for call in CALLS[:3]}
GROUPS["float8"] = tuple(name for name in SHAPES if name.startswith("float8_"))
PACE = Pace(warmup=2.0, timed=2.0, turn=0.2, calls=10)


def call(case: Case, implementation: str):
    """Returns the function of (into, x, w, dy, sizes) that an implementation is timed with."""
    how = {"implementation": implementation}
    return {
        "product": lambda into, x, w, dy, sizes: grouped_matmul(x, w, sizes, **how),
        "turned": lambda into, x, w, dy, sizes: grouped_matmul(dy, w, sizes, transposed=True, **how),
        "sum": lambda into, x, w, dy, sizes: grouped_outer(x, dy, sizes, **how),
        "into": lambda into, x, w, dy, sizes: grouped_outer(x, dy, sizes, into, **how),
    }[case.call]


def in_float8(case: Case) -> dict[str, Callable]:
    """Returns {name: the function}: rows and matrices quantised, and multiplied by Hopper's kernel in each of
    its tiles. None for sums, which stay in bfloat16."""
    from pallas_kernels.grouped_matmul import (
        hopper_tiles,
        mosaic_gpu,
    )  # here, for they are of use on a GPU alone

    if case.call not in ("product", "turned"):
        return {}
    turned, problem = case.call == "turned", problem_of(case)
    problem = dataclasses.replace(problem, operation="float8_exact" if turned else "float8")

    def multiply(tiles, into, x, w, dy, sizes):
        rows = fp8.quantise(dy, fp8.BACKWARD) if turned else fp8.quantise(x, fp8.FORWARD)
        matrices = jax.vmap(lambda matrix: fp8.quantise(matrix, fp8.FORWARD))(w)
        w8 = matrices.values if turned else matrices.values.swapaxes(1, 2)
        how = {"dtype": x.dtype, "exact": turned, "tiles": tiles}
        return mosaic_gpu.grouped_matmul_float8(rows.values, w8, matrices.scale * rows.scale, sizes, **how)

    return {
        f"float8 {name_of(tiles)}": functools.partial(multiply, tiles)
        for tiles in hopper_tiles.candidates(problem)
    }


def dense(case: Case):
    """Returns one matmul of as many FLOPs."""

    def dot(a, b, of_a: int, of_b: int, dtype=None):
        dims = (((of_a,), (of_b,)), ((), ()))
        return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype or a.dtype)

    return {
        "product": lambda into, x, w, dy, sizes: dot(x, w[0], 1, 0),
        "turned": lambda into, x, w, dy, sizes: dot(dy, w[0], 1, 1),
        "sum": lambda into, x, w, dy, sizes: dot(x, dy, 0, 0),
        "into": lambda into, x, w, dy, sizes: into.at[0].add(dot(x, dy, 0, 0, jnp.float32)),
    }[case.call]


def of_tokamax(tokamax, case: Case):
    """Returns tokamax's call, by its kernels of Mosaic GPU."""

    def ragged(x, w, sizes):
        return tokamax.ragged_dot(x, w, sizes, implementation="mosaic")

    def gradients(x, w, dy, sizes):
        return jax.vjp(lambda x, w: ragged(x, w, sizes), x, w)[1](dy)

    return {
        "product": lambda into, x, w, dy, sizes: ragged(x, w, sizes),
        "turned": lambda into, x, w, dy, sizes: gradients(x, w, dy, sizes)[0],
        "sum": lambda into, x, w, dy, sizes: gradients(x, w, dy, sizes)[1],
        "into": lambda into, x, w, dy, sizes: into + gradients(x, w, dy, sizes)[1].astype(jnp.float32),
    }[case.call]


def tuned_by_tokamax(tokamax, call, arguments: tuple) -> str | None:
    """Has tokamax's own tuner choose what a call's kernels are like, for its tables know no H200; returns why
    it could not. It tries what its table for an H100 has for 128 groups, and what it would take untuned. The
    table's two-stage tiles of 512 columns are left out: where 512 does not divide a product's columns, as of
    768, the kernel leaves out the rest, and elsewhere they do not fit."""
    try:
        # Of another function: of this one JAX would keep what it has traced before anything was chosen.
        for bound in tokamax.autotuning.get_bound_args(lambda *given: call(*given), *arguments):
            if bound.arguments["return_residuals"]:
                continue  # the forward product of gradients, which XLA leaves out
            tiles = {
                config
                for config in bound.autotuning_configs
                if (config.block_m, config.block_k, config.num_stages) == (128, 128, 4)
                and config.persistent
                and config.grid_tile_width in (4, 8)
            }
            found = bound.cached_autotuning_data or bound.autotune(tiles | {bound.heuristics_config})
            found.fastest_config  # noqa: B018  # raises if all have failed
    except Exception as error:  # must not cost the others' results
        return reason(error)
    return None


def multinomial(of: Shape) -> jax.Array:
    """Returns the sizes of groups that every row takes one of, all equally likely; no row is left over."""
    draw = np.random.default_rng(0).multinomial(of.rows, np.full(of.groups, 1 / of.groups))
    return jnp.asarray(draw, jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def arrays(of: Shape, dtype) -> tuple[jax.Array, ...]:
    """Returns x, w and dy, made on the device."""
    shapes = (of.rows, of.columns), (of.groups, of.columns, of.results), (of.rows, of.results)
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def problem_of(case: Case):
    """Returns the case as Hopper's table of tiles knows it."""
    from pallas_kernels.grouped_matmul.hopper_tiles import Problem  # here, for it is of use on a GPU alone

    of, turned = case.of, case.call == "turned"
    operation = {"product": "matmul", "turned": "matmul_transposed", "sum": "outer", "into": "outer_into"}
    widths = (of.results, of.columns) if turned else (of.columns, of.results)
    return Problem(operation[case.call], of.groups, of.rows, *widths)


def use_table(file: Path) -> None:
    """Has Hopper's kernel take its tiles from this file, which experts_tiles.py wrote."""
    from pallas_kernels.grouped_matmul import hopper_tiles

    hopper_tiles.TABLE = json.loads(file.read_text())


def tiles(case: Case) -> dict[str, dict]:
    """Returns {name: how tiles are chosen}, for each of those that are to be measured."""
    from pallas_kernels.grouped_matmul.hopper_tiles import candidates

    return {
        name_of(each): {"choose": lambda *_, each=each: (each, True)} for each in candidates(problem_of(case))
    }


def name_of(tiles) -> str:
    """Returns what a contender of other tiles is called."""
    more = " of w" * tiles.shares_w + " late" * tiles.late
    return f"{tiles.m}x{tiles.n}x{tiles.stages} {tiles.minor}{tiles.width} cluster {tiles.cluster}{more}"


def workload(case: Case) -> Workload:
    gpu = jax.default_backend() == "gpu"
    x, w, dy = arrays(case.of, jnp.bfloat16 if gpu else jnp.float32)
    into = jnp.ones(w.shape, jnp.float32) if case.call == "into" else None
    names = on(gpu=("mosaic_gpu", "triton"), cpu=("xla", "reference"))
    functions = {name: call(case, name) for name in names} | {"dense": dense(case)}
    tokamax, missing = import_tokamax() if gpu else (None, "timed on GPUs alone")
    arguments = into, x, w, dy, multinomial(case.of)
    if tokamax:
        theirs = of_tokamax(tokamax, case)
        missing = tuned_by_tokamax(tokamax, theirs, arguments)
        if missing is None:
            functions["tokamax"] = theirs
    if gpu and case.float8:
        functions |= in_float8(case)
    flops = 2.0 * case.of.rows * case.of.columns * case.of.results
    more = {}
    if gpu:
        from pallas_kernels.grouped_matmul import mosaic_gpu

        more = {"tiles": tiles(case), "tuned": mosaic_gpu}
        more["tuned_passes"] = {"call": call(case, "mosaic_gpu")}
    return Workload(
        arguments,
        {name: {"call": function} for name, function in functions.items()},
        base=names[-1],
        unlike=("dense",),
        updates=into is not None,  # in place, as the gradient of a step's micro-batches is
        rates=lambda _, seconds, memory: {"tflops": round(flops / seconds / 1e12, 4 if flops < 1e9 else 1)},
        about={"sizes": {"rows": case.of.rows, "groups": case.of.groups}, "tokamax_missing": missing},
        **more,
    )
