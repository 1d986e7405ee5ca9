"""The contract of grouped matmuls: values and gradients of each group, odd counts, rows without a group, and
what each form takes and refuses."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named, slow_but_for
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import (
    OPERATION,
    grouped_matmul,
    grouped_outer,
    ragged,
    tiles,
    triton_tiles,
    xla,
)
from pallas_kernels.grouped_matmul.shapes import CPU, GPU, Shape
from pallas_kernels.testing import CPU_TOLERANCE, GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")
ON_GPU = [name for name in OPERATION.names if name not in ("ragged", "reference")]
f32 = jnp.float32


def draw(shape: Shape, dtype=f32, transposed: bool = False, seed: int | None = None) -> dict:
    """Returns operands and gradients of a shape; rows without a group are not numbers."""
    rng = np.random.default_rng(fresh_seed() if seed is None else seed)
    sizes = shape.draw(rng)
    widths = shape.columns, shape.results
    x, dy = (normal(rng, (shape.rows, width), dtype) for width in widths)
    w = normal(rng, (shape.groups, *(widths[::-1] if transposed else widths)), dtype)
    rows = int(sizes.sum())
    x, dy = (a.at[rows:].set(jnp.nan) for a in (x, dy))
    return {
        "x": x,
        "w": w,
        "dy": dy,
        "sizes": jnp.asarray(sizes),
        "into": normal(rng, (len(w), *widths), f32),
    }


@functools.partial(jax.jit, static_argnames=("transposed", "implementation"))
def run(given: dict, transposed: bool = False, implementation: str | None = None) -> dict:
    """Returns values and all gradients, and the weights' summed into a buffer."""
    how = {"implementation": implementation}
    product = lambda x, w: grouped_matmul(x, w, given["sizes"], transposed, **how)  # noqa: E731
    y, pullback = jax.vjp(product, given["x"], given["w"])
    dx, dw = pullback(given["dy"])
    added = grouped_outer(given["x"], given["dy"], given["sizes"], given["into"], **how)
    return {"y": y, "dx": dx, "dw": dw, "added": added}


def by_numpy(given: dict, transposed: bool = False) -> dict:
    """Returns the same by a loop over groups, in float64, without the rows behind the last."""
    x, w, dy, into = (np.asarray(given[name], np.float64) for name in ("x", "w", "dy", "into"))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    begin = 0
    for group, size in enumerate(given["sizes"].tolist()):
        own, begin = slice(begin, begin + size), begin + size
        matrix = w[group].T if transposed else w[group]
        y[own], dx[own] = x[own] @ matrix, dy[own] @ matrix.T
        dw[group] = dy[own].T @ x[own] if transposed else x[own].T @ dy[own]
    added = into + (dw.transpose(0, 2, 1) if transposed else dw)
    return {"y": y[:begin], "dx": dx[:begin], "dw": dw, "added": added}


def by_group(found: dict, sizes) -> dict:
    """Returns results group by group, so that no large one hides a small one's error."""
    ends = np.cumsum(sizes)
    rows = {name: np.split(np.asarray(found[name])[: ends[-1]], ends[:-1]) for name in ("y", "dx")}
    return rows | {name: list(np.asarray(found[name])) for name in ("dw", "added")}


def check(given: dict, found: dict, transposed: bool, tolerance: float = CPU_TOLERANCE) -> None:
    sizes = np.asarray(given["sizes"])
    assert_close(by_group(found, sizes), by_group(by_numpy(given, transposed), sizes), tolerance)
    np.testing.assert_array_equal(np.asarray(found["dw"])[sizes == 0], 0)
    empty = sizes == 0
    np.testing.assert_array_equal(np.asarray(found["added"])[empty], np.asarray(given["into"])[empty])


TURNED = "one_row", "odd", "off_a_larger_tile", "more"


@slow_but_for(*(CPU.keys() - {"many", "more"}), name=named(*CPU))
def test_agrees_with_numpy(name):
    transposed = name in TURNED
    given = draw(CPU[name], transposed=transposed)
    check(given, run(given, transposed, "xla"), transposed)


@pytest.mark.parametrize(("name", "transposed"), [("rows_left_over", False), ("odd", True)])
def test_the_reference_agrees_with_numpy(name, transposed):
    given = draw(CPU[name], transposed=transposed)
    check(given, run(given, transposed, "reference"), transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_xla_s_ragged_dot_agrees_with_numpy(transposed, monkeypatch):
    """Off a TPU, where it is refused: XLA does the same there, of all groups."""
    monkeypatch.setattr(ragged, "require_tpu", lambda platform: None)
    given = draw(CPU["rows_left_over"], transposed=transposed)
    run.clear_cache()
    check(given, run(given, transposed, "ragged"), transposed)
    run.clear_cache()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_half_precision_is_summed_in_float32(implementation):
    given = draw(CPU["odd"], jnp.bfloat16)
    found = run(given, False, implementation)
    assert [found[name].dtype for name in ("y", "dx", "dw", "added")] == [jnp.bfloat16] * 3 + [f32]
    check(given, found, False, GPU_TOLERANCE)
    wide = grouped_outer(given["x"], given["dy"], given["sizes"], dtype=f32, implementation=implementation)
    assert wide.dtype == f32
    assert_close(wide, by_numpy(given)["dw"], CPU_TOLERANCE)  # the products of bfloat16 are exact in float32


def test_repeats_to_the_bit():
    given = draw(CPU["rows_left_over"])
    once, again = (run(given, False, "xla") for _ in range(2))
    rows = int(given["sizes"].sum())
    for name in ("y", "dx", "dw", "added"):
        first, second = (each[name][:rows] if name in ("y", "dx") else each[name] for each in (once, again))
        np.testing.assert_array_equal(first, second)


def test_permuted_groups_permute_the_rest():
    """What a group gives depends on its own rows, not on where they lie."""
    given = draw(CPU["rows_left_over"])
    sizes, ends = np.asarray(given["sizes"]), np.cumsum(given["sizes"])
    order = np.array([2, 0, 4, 3, 1])
    rows = np.concatenate([np.arange(ends[group] - sizes[group], ends[group]) for group in order])
    rows = np.concatenate([rows, np.arange(ends[-1], len(given["x"]))])
    moved = {name: given[name][rows] for name in ("x", "dy")} | {
        name: given[name][order] for name in ("w", "sizes", "into")
    }
    one, other = run(given, False, "xla"), run(moved, False, "xla")
    used = slice(None, ends[-1])
    for name in ("y", "dx"):
        np.testing.assert_array_equal(np.asarray(one[name])[rows][used], np.asarray(other[name])[used])
    np.testing.assert_array_equal(np.asarray(one["added"])[order], other["added"])


def test_sums_are_added_in_the_buffer_s_memory():
    """Where the buffer is donated, no second one is made."""
    given = draw(Shape(64, 256, 256, 4), seed=0)
    function = jax.jit(
        lambda x, dy, sizes, into: grouped_outer(x, dy, sizes, into, implementation="xla"), donate_argnums=3
    )
    arrays = (given[name] for name in ("x", "dy", "sizes", "into"))
    memory = function.lower(*arrays).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= given["into"].nbytes
    assert memory.temp_size_in_bytes < given["into"].nbytes


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_within_a_shard_map(implementation):
    """Each device has rows and sizes of its own; the matrices' gradient is a sum over both."""
    one, other = (draw(Shape(40, 8, 16, 3), seed=seed) for seed in (0, 1))
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole, rows), out_specs=rows)
    def local(x, w, sizes):
        return grouped_matmul(x, w, sizes, implementation=implementation)

    def loss(x, w):
        sizes = jnp.concatenate([one["sizes"], other["sizes"]])
        return jnp.sum(local(x, w, sizes) * jnp.concatenate([one["dy"], other["dy"]]))

    x = jnp.concatenate([one["x"], other["x"]])
    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, one["w"])
    each = [by_numpy(given | {"w": one["w"]}) for given in (one, other)]
    assert_close(dx, np.concatenate([given["dx"] for given in each]), CPU_TOLERANCE)
    assert_close(dw, sum(given["dw"] for given in each), CPU_TOLERANCE)


# Tiles


@pytest.mark.parametrize(
    ("name", "of_tile"),
    [("off_the_tile", 8), ("off_the_tile", 1), ("empty_groups", 8), ("none_has_rows", 8), ("one_row", 64)],
)
def test_tiles_are_those_of_each_group_in_turn(name, of_tile):
    shape = CPU[name]
    sizes = shape.draw(np.random.default_rng(fresh_seed()))
    found = jax.jit(tiles.tiles_of, static_argnums=(1, 2))(jnp.asarray(sizes), shape.rows, of_tile)
    wanted, begin = [], 0
    for group, size in enumerate(sizes.tolist()):
        wanted += [(group, begin + at, begin + size, begin) for at in range(0, size, of_tile)]
        begin += size
    assert (
        int(found.count) == len(wanted) <= len(found.group_P) == tiles.most(shape.rows, len(sizes), of_tile)
    )
    made = np.stack([np.asarray(part) for part in found[:4]], axis=1)
    np.testing.assert_array_equal(made[: len(wanted)], np.array(wanted).reshape(-1, 4))
    assert (made[len(wanted) :, 0] == len(sizes)).all()


def test_there_may_be_as_many_tiles_as_there_is_room_for():
    for rows, groups, of_tile in ((100, 4, 8), (7, 3, 4), (64, 64, 8), (5, 512, 16), (1000, 1, 128)):
        sizes = np.zeros(groups, int)
        sizes[: min(groups, rows)] = 1  # one row beyond whole tiles, of as many groups as can have it
        for group in range(len(sizes)):
            sizes[group] += (rows - sizes.sum()) // of_tile * of_tile if sizes[group] else 0
        assert -(-sizes // of_tile) @ np.ones(groups) == tiles.most(rows, groups, of_tile)


def test_tiles_of_the_portable_form_waste_little():
    assert xla.tile_rows(131_072, 128) == 128 and xla.tile_rows(8192, 128) == 16
    assert xla.tile_rows(300, 512) == 8 and xla.tile_rows(3, 1) == 3


@pytest.mark.parametrize("operation", ["matmul", "transposed", "outer"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("capability", "shared"), [((8, 0), 99), ((8, 6), 99), ((9, 0), 227), ((10, 0), 227), (None, 64)], ids=str
)
def test_triton_s_tiles_fit(operation, dtype, capability, shared):
    for shape in GPU.values():
        problem = triton_tiles.Problem(
            operation, shape.rows, shape.groups, shape.columns, shape.results, dtype
        )
        tile = triton_tiles.choose(problem, None, capability)
        itemsize = 4 if dtype == "float32" else 2
        assert tile.shared_bytes(itemsize) <= shared << 10
        assert min(tile.m, tile.n, tile.k) >= 16
        assert tile.m * tile.n <= 128 * 32 * tile.warps  # float32 sums: 128 registers a thread


def test_measured_tiles_come_first(monkeypatch):
    problem = triton_tiles.Problem("matmul", 1 << 17, 128, 2048, 1536, "bfloat16")
    assert problem.key == "matmul/1024x2048x1536/bfloat16" and problem.flops == 2 * (1 << 17) * 2048 * 1536
    tile = triton_tiles.candidates(problem, 227 << 10)[3]
    table = {"NVIDIA H200": {problem.key: {"tile": vars(tile), "microseconds": 1.0}}}
    monkeypatch.setattr(triton_tiles, "TABLE", table)
    assert triton_tiles.choose(problem, "NVIDIA H200", (9, 0)) == tile
    assert triton_tiles.choose(problem, "NVIDIA H100", (9, 0)) == triton_tiles.HOPPER
    for rows, near in ((1 << 18, True), (1 << 15, True), (1 << 20, False)):
        other = dataclasses.replace(problem, rows=rows)
        assert (triton_tiles.choose(other, "NVIDIA H200", (9, 0)) == tile) is near
    assert all(
        vars(tile) | {"band": other.band} == vars(other)
        for other in triton_tiles.in_other_bands(problem, tile)
    )


def test_the_table_that_is_shipped_can_be_read():
    for entries in triton_tiles.TABLE.values():
        for key, entry in entries.items():
            assert key.split("/")[0] in ("matmul", "transposed", "outer")
            assert triton_tiles.Tile(**entry["tile"]).shared_bytes(2) <= 227 << 10


# On a GPU


def can_run(implementation: str, shape: Shape, transposed: bool) -> bool:
    """Says whether an implementation is for a shape: TMA, by which `mosaic_gpu` loads, begins at whole blocks
    of rows, and of what is summed."""
    blocks = shape.rows % 8 == 0 and (shape.results if transposed else shape.columns) % 128 == 0
    return implementation != "mosaic_gpu" or blocks


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("name", "transposed", "implementation"),
    [
        (name, transposed, implementation)
        for name, shape in GPU.items()
        for transposed in (False, True)
        for implementation in ON_GPU
        if shape.rows <= 4096 and can_run(implementation, shape, transposed)
    ],
)
def test_half_precision_on_gpu(name, transposed, implementation):
    given = draw(GPU[name], jnp.bfloat16, transposed)
    try:
        found = run(given, transposed, implementation)
    except dispatch.Unsupported as refusal:
        pytest.skip(str(refusal))
    check(given, found, transposed, GPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ON_GPU)
def test_a_model_s_shape_on_gpu(implementation):
    given = draw(GPU["qwen3_30b_down"], jnp.bfloat16)
    wide = {name: x.astype(f32) if x.dtype == jnp.bfloat16 else x for name, x in given.items()}
    with jax.default_matmul_precision("highest"):
        wanted = run(wide, False, "xla")
    assert_close(run(given, False, implementation), wanted, GPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ON_GPU)
def test_repeats_to_the_bit_on_gpu(implementation):
    given = draw(GPU["off_the_tile"]._replace(sizes=(127, 128, 129, 255, 257, 104)), jnp.bfloat16)
    try:
        once, *others = (run(given, False, implementation) for _ in range(100))
    except dispatch.Unsupported as refusal:
        pytest.skip(str(refusal))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, once, other)


# On a TPU


@pytest.mark.compiles_for("tpu")
def test_ragged_is_no_dense_product_on_a_tpu():
    """By the TPU's own compiler, which needs no TPU: values, gradients, and a sum into a buffer."""
    shape = Shape(4096, 512, 256, 16)
    devices = np.array(topologies.get_topology_desc("v5e:2x2", "tpu").devices[:1])
    here = NamedSharding(jax.sharding.Mesh(devices, ("data",)), PartitionSpec())
    R, I, O, E = shape[:4]  # noqa: E741
    dims = {"x": (R, I), "w": (E, I, O), "dy": (R, O), "sizes": (E,), "into": (E, I, O)}
    dtypes = {"sizes": jnp.int32, "into": f32}
    given = {
        name: jax.ShapeDtypeStruct(of, dtypes.get(name, jnp.bfloat16), sharding=here)
        for name, of in dims.items()
    }

    def all_of_it(given):
        how = {"implementation": "ragged", "platform": "tpu"}
        product = lambda x, w: grouped_matmul(x, w, given["sizes"], **how)  # noqa: E731
        y, pullback = jax.vjp(product, given["x"], given["w"])
        added = grouped_outer(given["x"], given["dy"], given["sizes"], given["into"], **how)
        return y, pullback(given["dy"]), added

    compiled = jax.jit(all_of_it).lower(given).compile()
    assert "ragged-dot" in compiled.as_text() and " dot(" not in compiled.as_text()
    assert compiled.cost_analysis()["flops"] < 1.1 * 4 * 2 * R * I * O


# What is refused


def test_named_runs_or_raises(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    given = draw(CPU["one_row"])
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        grouped_matmul(given["x"], given["w"], given["sizes"])
        grouped_outer(given["x"], given["dy"], given["sizes"])
    said = [record.getMessage() for record in caplog.records]
    assert said == ["kernels: grouped_matmul uses xla", "kernels: grouped_outer uses xla"]
    for name, reason in (("ragged", "needs a TPU, found cpu"), ("triton", r">= 8\.0, found cpu")):
        with pytest.raises(dispatch.Unsupported, match=reason):
            grouped_matmul(given["x"], given["w"], given["sizes"], implementation=name)
        with pytest.raises(dispatch.Unsupported, match=reason):
            grouped_outer(given["x"], given["dy"], given["sizes"], implementation=name)
    with pytest.raises(ValueError, match="no implementation 'ragde'; there are "):
        grouped_matmul(given["x"], given["w"], given["sizes"], implementation="ragde")


def test_arguments_are_checked():
    x, w, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.array([2, 3], jnp.int32)
    with pytest.raises(
        ValueError, match=r"shapes do not fit: x \[R, I\] \(6, 4\), w \[E, O, I\] \(2, 4, 8\)"
    ):
        grouped_matmul(x, w, sizes, transposed=True)
    with pytest.raises(ValueError, match="shapes do not fit"):
        grouped_matmul(x, w, sizes[:1])
    with pytest.raises(ValueError, match="both float32 or both bfloat16, got float32 and bfloat16"):
        grouped_matmul(x, w.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="sizes are int32, got int8"):
        grouped_matmul(x, w, sizes.astype(jnp.int8))
    with pytest.raises(ValueError, match="needs a row and a group, got 0 rows and 2 groups"):
        grouped_matmul(x[:0], w, sizes)
    with pytest.raises(ValueError, match="shapes do not fit"):
        grouped_outer(x, jnp.ones((5, 8)), sizes)
    with pytest.raises(ValueError, match=r"added to float32\[2, 4, 8\] and are of that dtype, got bfloat16"):
        grouped_outer(x, jnp.ones((6, 8)), sizes, w.astype(jnp.bfloat16))
