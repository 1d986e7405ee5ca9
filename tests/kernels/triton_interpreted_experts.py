"""Triton's kernels of mixtures of experts, run on a CPU by Triton's interpreter, against the reference.

    TRITON_INTERPRET=1 python tests/kernels/triton_interpreted_experts.py [end | lost]

`end` has tiles leave out a group's last row, `lost` the sums what is beyond whole blocks: one case, which
then must fail.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import triton_interpreted

from pallas_kernels import grouped_matmul, routing, weighted_swiglu
from pallas_kernels.grouped_matmul import triton as grouped
from pallas_kernels.grouped_matmul import triton_kernels as grouped_kernels
from pallas_kernels.grouped_matmul.shapes import CPU, Shape
from pallas_kernels.grouped_matmul.triton_tiles import Tile
from pallas_kernels.routing import shapes as routed_shapes
from pallas_kernels.routing import triton as routed
from pallas_kernels.routing import triton_kernels as routed_kernels
from pallas_kernels.testing import CPU_TOLERANCE, assert_close, fresh_seed, normal
from pallas_kernels.weighted_swiglu import shapes as swiglu_shapes
from pallas_kernels.weighted_swiglu import triton as swiglu
from pallas_kernels.weighted_swiglu import triton_kernels as swiglu_kernels

# What Triton interprets takes time by the group: of 64, as of 512, most have no row.
GROUPED = CPU | {"more_than_rows": Shape(40, 8, 8, 64)}
ROUTED = routed_shapes.CPU | {
    "most": routed_shapes.Shape(18, 512, 8, 8, 0.0),  # time by token and expert
    "in_parts": routed_shapes.Shape(3, 4, 2, 300),  # rows wider than a program's part of them
}
TILES = Tile(16, 16, 16, 4, 1, 4), Tile(32, 16, 16, 4, 1, 1), Tile(16, 32, 32, 4, 1, 8)
HOW = {"platform": "gpu"}


def triton_call(*arrays, input_output_aliases=None, out_shape, grid, kernel, **constants):
    """As the one of triton_interpreted, and results lie in operands where they are to."""
    if not input_output_aliases:
        return triton_interpreted.triton_call(
            *arrays, out_shape=out_shape, grid=grid, kernel=kernel, **constants
        )
    ((operand, _),) = input_output_aliases.items()
    arrays = [np.array(x) for x in arrays]
    kept = {key: value for key, value in constants.items() if key not in ("num_warps", "num_stages")}
    tensors = [triton_interpreted.Tensor(x) for x in (*arrays, arrays[operand])]
    kernel[(grid,)](*tensors, **kept)
    return jnp.asarray(arrays[operand])


def check_grouped(name: str, tile: Tile, transposed: bool) -> None:
    grouped.tile_of = lambda problem: tile
    shape, rng = GROUPED[name], np.random.default_rng(fresh_seed())
    sizes = jnp.asarray(shape.draw(rng))
    rows = int(sizes.sum())
    x, dy = (
        normal(rng, (shape.rows, width), jnp.float32).at[rows:].set(jnp.nan)
        for width in (shape.columns, shape.results)
    )
    matrix = (shape.results, shape.columns) if transposed else (shape.columns, shape.results)
    w = normal(rng, (shape.groups, *matrix), jnp.float32)
    into = normal(rng, (shape.groups, shape.columns, shape.results), jnp.float32)

    def run(implementation: str):
        how = HOW | {"implementation": implementation}
        function = lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, transposed, **how)  # noqa: E731
        y, pullback = jax.vjp(function, x, w)
        dx, dw = pullback(dy)
        return y[:rows], dx[:rows], dw, grouped_matmul.grouped_outer(x, dy, sizes, into, **how)

    assert_close(run("triton"), run("reference"), CPU_TOLERANCE)


def check_routing(name: str, score: str, grouped: bool, bias: bool, normalise: bool) -> None:
    shape, rng = ROUTED[name], np.random.default_rng(fresh_seed())
    N, E, K = shape.tokens, shape.experts, shape.top_k
    logits = 3 * normal(rng, (N, E), jnp.float32)
    # Ties, whose gradients no softmax near 0 or 1 cancels: of three tokens all others' can be rounding.
    logits = logits.at[0].set(0.0)
    valid = jnp.asarray(rng.random(N) >= shape.padding).at[0].set(shape.padding < 1)
    logits = jnp.where(valid[:, None], logits, jnp.nan)
    bias_E = 0.3 * normal(rng, (E,), jnp.float32) if bias else None
    groups = {"groups": 4, "top_groups": 2} if grouped and E % 4 == 0 and E >= 8 and E // 2 >= K else {}
    d_weights, d_scores = normal(rng, (N, K), jnp.float32), normal(rng, (N, E), jnp.float32)
    x, dy = (normal(rng, (N, shape.width), jnp.float32) for _ in range(2))

    def run(implementation: str):
        how = HOW | {"implementation": implementation}

        def function(logits):
            rule = {"top_k": K, "score": score, "normalise": normalise, "scale": 2.0} | groups
            made = routing.route(logits, valid, bias_E, **rule, **how)
            total = jnp.sum(made.weights_NK * d_weights) + jnp.sum(made.scores_NE * d_scores)
            return total, made

        (_, made), d_logits = jax.value_and_grad(function, has_aux=True)(logits)
        order = routing.sort_assignments(made.ids_NK, E, **how)
        rows = int(order.sizes_E.sum())
        # As a device has it that shares the experts: no more rows than can have one, and one for all others.
        cut = routing.Order(order.order_R[: rows + 1], jnp.minimum(order.inverse_NK, rows), order.sizes_E)
        there, pullback = jax.vjp(lambda x: routing.dispatch(x, cut, K, **how), x)
        back, pullback_back = jax.vjp(
            lambda y: routing.combine(y, cut, N, **how), there.at[rows:].set(jnp.nan)
        )
        gradients = pullback(there.at[rows:].set(jnp.nan))[0], pullback_back(dy)[0][:rows]
        return made, d_logits, order, there[:rows], back, gradients

    wanted = run("reference")
    assert_close(run("triton"), wanted, CPU_TOLERANCE)


def check_different(score: str, grouped: bool) -> None:
    """A token's experts are different ones, whatever its logits are, and of no number comes none."""
    logits = jnp.tile(jnp.array([[jnp.nan], [-jnp.inf], [jnp.inf]]), (1, 6)).at[:, 2].set(0.0)
    groups = {"groups": 3, "top_groups": 2} if grouped else {}
    how = {"top_k": 4, "score": score, "normalise": True, "implementation": "triton"} | HOW | groups
    made = routing.route(logits, jnp.ones(3, bool), **how)
    for ids in made.ids_NK.tolist():
        assert len({*ids} & {*range(6)}) == 4, ids
    one = jnp.zeros((1, 6)).at[0, 3].set(jnp.nan)
    for each in made.weights_NK[:1], routing.route(one, jnp.ones(1, bool), **how).weights_NK:
        assert jnp.isnan(each).any(), each


def check_swiglu(shape: tuple[int, int], own: int | None = None) -> None:
    """own: rows that belong to groups, None all."""
    gate_up, weights, dy = swiglu_shapes.draw(np.random.default_rng(fresh_seed()), shape)

    def run(implementation: str):
        sizes = None if own is None else jnp.array([own // 3, 0, own - own // 3], jnp.int32)
        how = HOW | {"sizes_E": sizes, "implementation": implementation}
        y, pullback = jax.vjp(lambda *a: weighted_swiglu.weighted_swiglu(*a, **how), gate_up, weights)
        return jax.tree.map(lambda array: array[:own], (y, pullback(dy)))

    assert_close(run("triton"), run("reference"), CPU_TOLERANCE)


def main() -> None:
    triton_interpreted.numbers_are_numbers()
    stub = type("jax_triton", (), {"triton_call": staticmethod(triton_call)})
    every = (grouped, grouped_kernels), (routed, routed_kernels), (swiglu, swiglu_kernels)
    for module, kernels in every:
        module.load_triton = lambda package, kernels=kernels: (stub, kernels)
    routed.SUMMED, routed.RANKED, routed.ENTRIES, routed.WIDEST = 2, 16, 64, 16
    swiglu.ENTRIES, swiglu.WIDEST = 256, 256
    if sys.argv[1:] == ["end"]:
        sound = grouped.tiles_of
        grouped.tiles_of = lambda *how: (made := sound(*how))._replace(end_P=made.end_P - 1)
        check_grouped("off_the_tile", TILES[0], False)
    elif sys.argv[1:] == ["lost"]:
        sound = grouped.grouped_outer
        grouped.grouped_outer = lambda x, y, sizes, *how, **more: sound(x, y, sizes // 16 * 16, *how, **more)
        check_grouped("off_the_tile", TILES[0], False)
    else:
        for index, name in enumerate(GROUPED):
            tile, transposed = TILES[index % len(TILES)], index % 2 == 1
            check_grouped(name, tile, transposed)
            print("ok grouped", name, tile, transposed, flush=True)
        for index, name in enumerate(ROUTED):
            score, grouped_ = routing.SCORES[index % 3], index % 2 == 1
            check_routing(name, score, grouped_, not grouped_, normalise=index % 4 < 2)
            print("ok routing", name, score, grouped_, flush=True)
        for score in routing.SCORES:
            check_different(score, False)
            check_different(score, True)
            print("ok different experts", score, flush=True)
        for shape in swiglu_shapes.CPU.values():
            check_swiglu(shape)
            check_swiglu(shape, own=shape[0] // 2)
            print("ok swiglu", *shape, flush=True)


if __name__ == "__main__":
    main()
