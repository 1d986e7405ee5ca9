"""Grouped matmuls by Hopper's own kernels: what can be shown without a GPU, and the rest on one."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named, slow_but_for
from jax.experimental.mosaic.gpu import core as mosaic_gpu_core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec
from test_no_multicast import FORBIDDEN, lower_grouped_matmul

from jaxthru.runtime import aot
from pallas_kernels import grouped_matmul
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.grouped_matmul import hopper, hopper_tiles, mosaic_gpu
from pallas_kernels.grouped_matmul.hopper_tiles import Problem, Tiles
from pallas_kernels.grouped_matmul.shapes import GPU
from pallas_kernels.grouped_matmul.tiles import most, tiles_of
from pallas_kernels.hopper_tiles import RATES, SMEM_BYTES
from pallas_kernels.testing import GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

SMALL = Tiles(128, 64, stages=2, width=2)
CTAS = 2
cuda = pytest.mark.compiles_for("cuda")
bfloat16 = jnp.dtype(jnp.bfloat16)

SIZES = {
    "few": (65, 0, 1, 62),
    "off_the_tile": (127, 129, 128, 63, 0, 1, 64),
    "all_to_one": (0, 0, 250, 0),
    "one_row": (0, 1, 0),
    "none": (0, 0),
    "begin_late": (7, 1, 8, 120, 100),
}


def draw(sizes, columns: int, results: int, seed: int | None = None):
    """Returns x, w, y, the sizes and what sums are added to; rows behind the last group are not numbers."""
    rng = np.random.default_rng(fresh_seed() if seed is None else seed)
    own = sum(sizes)
    rows = max(-(-(own + 5) // 8) * 8, 128)
    x, y = (normal(rng, (rows, width), bfloat16).at[own:].set(jnp.nan) for width in (columns, results))
    w = normal(rng, (len(sizes), columns, results), bfloat16)
    into = normal(rng, w.shape, jnp.float32)
    return x, w, y, jnp.asarray(sizes, jnp.int32), into


def by_group(x, sizes):
    ends = np.cumsum(sizes)
    return np.split(np.asarray(x)[: ends[-1]].astype(np.float64), ends[:-1])


def products(x, w, sizes):
    matrices = np.asarray(w, np.float64)
    return [a @ matrix for a, matrix in zip(by_group(x, sizes), matrices, strict=True)]


def sums(x, y, sizes):
    return [a.T @ b for a, b in zip(by_group(x, sizes), by_group(y, sizes), strict=True)]


class Emulated:
    """The kernels on a CPU, by JAX's interpreter of GPU kernels. It has no copies that add, and no clusters
    that load for each other."""

    def __init__(self, monkeypatch, detect_races: bool = False):
        self.interpret = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
        load, store = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem

        def add(source, to, reduction_op=None, **how):
            assert reduction_op in (None, "add")
            if reduction_op is None:
                store(source, to, **how)
            else:
                to[...] += source[...]

        monkeypatch.setattr(plgpu, "copy_gmem_to_smem", lambda *a, collective_axes=None: load(*a))
        monkeypatch.setattr(plgpu, "copy_smem_to_gmem", add)

    def __call__(self, kernel, *arguments, **options):
        with plgpu.force_gpu_interpret_mode(self.interpret):
            return kernel(*arguments, **options)


# The kernels' arithmetic.


@slow_but_for(
    "few-plain-alone",
    slow=(
        *("off_the_tile-transposed-alone", "off_the_tile-plain-pairs", "begin_late-plain-tall"),
        *("all_to_one-transposed-pairs", "one_row-plain-alone", "none-plain-alone"),
        *("few-plain-late", "off_the_tile-transposed-late", "begin_late-plain-late_pairs"),
        *("one_row-transposed-late_pairs", "none-plain-late"),
        *("few-plain-shared_w", "off_the_tile-transposed-shared_w_late", "begin_late-plain-shared_w"),
        *("all_to_one-plain-shared_w_late", "none-plain-shared_w"),
    ),
    sizes=SIZES,
    transposed={"plain": False, "transposed": True},
    tiles={
        "alone": SMALL,
        "pairs": dataclasses.replace(SMALL, cluster=2),
        "tall": Tiles(256, 64, stages=3, minor="N"),
        "late": dataclasses.replace(SMALL, n=128, late=True),
        "late_pairs": dataclasses.replace(SMALL, cluster=2, late=True),
        "shared_w": dataclasses.replace(SMALL, cluster=2, shares_w=True),
        "shared_w_late": dataclasses.replace(SMALL, cluster=2, shares_w=True, late=True),
    },
)
def test_products(sizes, transposed, tiles, monkeypatch):
    results = tiles.n * tiles.cluster
    x, w, _, sizes_E, _ = draw(sizes, 128, results)
    x = jnp.pad(x, ((0, max(tiles.m - len(x), 0)), (0, 0)), constant_values=jnp.nan)
    given = w.swapaxes(1, 2) if transposed else w
    y = Emulated(monkeypatch)(hopper.grouped_matmul, x, given, sizes_E, tiles, CTAS, transposed=transposed)
    assert (y.shape, y.dtype) == ((len(x), results), bfloat16)
    assert_close(by_group(y, sizes), products(x, w, sizes), GPU_TOLERANCE)


@slow_but_for(
    "few-into-alone",
    slow=(
        *("off_the_tile-bfloat16-alone", "off_the_tile-into-pairs", "begin_late-float32-tall"),
        *("all_to_one-bfloat16-pairs", "one_row-into-alone", "none-bfloat16-alone"),
        *("few-bfloat16-late", "off_the_tile-bfloat16-late_pairs", "all_to_one-bfloat16-late"),
    ),
    sizes=SIZES,
    form={"bfloat16": (bfloat16, False), "float32": (jnp.float32, False), "into": (jnp.float32, True)},
    tiles={
        "alone": SMALL,
        "pairs": dataclasses.replace(SMALL, cluster=2),
        "tall": Tiles(256, 64, stages=3, minor="N"),
        "late": dataclasses.replace(SMALL, late=True),
        "late_pairs": dataclasses.replace(SMALL, cluster=2, late=True),
    },
)
def test_sums(sizes, form, tiles, monkeypatch):
    dtype, adds = form
    x, _, y, sizes_E, into = draw(sizes, 256, 64)
    emulated = Emulated(monkeypatch)
    arguments = x, y, sizes_E, into if adds else None, tiles, CTAS
    found = emulated(hopper.grouped_outer, *arguments, dtype=jnp.dtype(dtype))
    assert found.dtype == dtype
    expected = sums(x, y, sizes)
    if adds:
        expected = [a + b for a, b in zip(np.asarray(into, np.float64), expected, strict=True)]
    assert_close(list(found), expected, GPU_TOLERANCE if dtype == bfloat16 else 1e-5)
    empty = np.asarray(sizes) == 0
    np.testing.assert_array_equal(found[empty], (into if adds else jnp.zeros_like(found))[empty])


@pytest.mark.slow
def test_another_groups_rows_leave_no_trace(monkeypatch):
    """Infinities and NaN of a group stay within it, in what shares its blocks of rows too."""
    sizes = (30, 41, 60)
    x, w, y, sizes_E, _ = draw(sizes, 128, 64)
    x, y = (a.at[30:71].set(jnp.nan) for a in (x, y))
    emulated = Emulated(monkeypatch)
    product = emulated(hopper.grouped_matmul, x, w, sizes_E, SMALL, CTAS)
    summed = emulated(hopper.grouped_outer, x, y, sizes_E, None, SMALL, CTAS, dtype=bfloat16)
    for group in (0, 2):
        found = by_group(product, sizes)[group], np.asarray(summed)[group]
        expected = products(x, w, sizes)[group], sums(x, y, sizes)[group]
        assert_close(found, expected, GPU_TOLERANCE)
    assert np.isnan(np.float32(summed[1])).all()


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_no_races(late, monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    sizes, tiles = SIZES["few"], dataclasses.replace(SMALL, late=late)
    x, w, y, sizes_E, _ = draw(sizes, 128, 128)
    emulated = Emulated(monkeypatch, detect_races=True)
    found = emulated(hopper.grouped_matmul, x, w, sizes_E, tiles, CTAS)
    assert_close(by_group(found, sizes), products(x, w, sizes), GPU_TOLERANCE)
    assert not gpu_callbacks.get_races().races_found
    found = emulated(hopper.grouped_outer, x, y, sizes_E, None, tiles, CTAS, dtype=bfloat16)
    assert_close(list(found), sums(x, y, sizes), GPU_TOLERANCE)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.slow
def test_a_wait_left_out_is_found(monkeypatch):
    """Where a piece is written over while TMA may still read it, the interpreter says so. It does not follow
    what the tensor cores read."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    x, w, _, sizes_E, _ = draw((400, 200), 64, 128)
    emulated, wait = Emulated(monkeypatch, detect_races=True), plgpu.wait_smem_to_gmem
    at_the_end = lambda n, wait_read_only=False: None if wait_read_only else wait(n)  # noqa: E731
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", at_the_end)
    emulated(hopper.grouped_matmul, x, w, sizes_E, SMALL, CTAS)
    assert gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(("of_tile", "aligned"), [(64, 1), (128, 8)])
def test_tiles_hold_each_row_once(of_tile, aligned):
    rng = np.random.default_rng(fresh_seed())
    for groups in (1, 3, 64):
        sizes = rng.multinomial(rng.integers(0, 2000), rng.dirichlet(np.full(groups, 0.3)))
        rows = int(sizes.sum()) + int(rng.integers(0, 9)) + 1
        tiles = jax.tree.map(np.asarray, tiles_of(jnp.asarray(sizes, jnp.int32), rows, of_tile, aligned))
        assert tiles.count <= len(tiles.group_P) == most(rows, groups, of_tile, aligned)
        held = []
        for group, first, begins, end in zip(
            tiles.group_P, tiles.first_P, tiles.begins_P, tiles.end_P, strict=True
        ):
            if len(held) < tiles.count:
                assert first % aligned == 0 if aligned > 1 else first >= begins
                assert (begins, end) == (sizes[:group].sum(), sizes[: group + 1].sum())
                held.append(range(max(first, begins), min(first + of_tile, end)))
                assert held[-1]
            else:
                assert group == groups
        assert [row for span in held for row in span] == list(range(sizes.sum()))


# What they lower to.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_30b_up", "mixtral_down"])
def test_no_multicast_between_gpus_in_pairs(name, monkeypatch):
    """What thread blocks hand to each other stays in their GPU; test_no_multicast has those on their own."""
    choose = hopper_tiles.choose

    def clustered(*arguments):
        tiles = dataclasses.replace(choose(*arguments)[0], cluster=2)
        arguments[0].check(tiles)
        return tiles, True

    monkeypatch.setattr(mosaic_gpu, "choose", clustered)
    text = lower_grouped_matmul(GPU[name], "mosaic_gpu")
    assert text.count("@mosaic_gpu_v2") == 4  # product, its rows' gradient, and sums twice
    assert not [word for word in FORBIDDEN if word in text]


def test_layers_share_a_kernel():
    def layers(x, w, sizes):
        for _ in range(3):
            x = mosaic_gpu.grouped_matmul(x, w, sizes, transposed=False, named=True)
        return x

    struct = jax.ShapeDtypeStruct
    arguments = struct((256, 256), bfloat16), struct((4, 256, 256), bfloat16), struct((4,), jnp.int32)
    text = jax.jit(layers).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_within_a_shard_map():
    """Each device with rows and groups of its own; what varies over the mesh is marked as JAX asks."""
    mesh, own = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,)), PartitionSpec("expert")
    how = {"implementation": "mosaic_gpu", "platform": "gpu"}

    def local(x, w, y, sizes, into):
        product, pull = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, **how), x, w)
        return product, *pull(y), grouped_matmul.grouped_outer(x, y, sizes, into, **how)

    struct = jax.ShapeDtypeStruct
    x, w = struct((512, 256), bfloat16), struct((8, 256, 256), bfloat16)
    arguments = x, w, x, struct((8,), jnp.int32), struct(w.shape, jnp.float32)
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=own, out_specs=own))
    found = jax.eval_shape(function, *arguments)
    assert [each.shape for each in found] == [x.shape, x.shape, w.shape, w.shape]
    text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 4 and not [word for word in FORBIDDEN if word in text]


PROBLEM = Problem("matmul", 16, 4096, 1536, 1536)


def lowerable(operation: str, tiles: Tiles):
    """Returns an operation with these tiles, and its operands."""
    E, R, I, O = PROBLEM.groups, PROBLEM.rows, PROBLEM.columns, PROBLEM.results  # noqa: E741
    struct = jax.ShapeDtypeStruct
    x, y, w = (struct(size, bfloat16) for size in ((R, I), (R, O), (E, I, O)))
    sizes, into = struct((E,), jnp.int32), struct((E, I, O), jnp.float32)
    how = {"tiles": tiles}
    if operation.startswith("matmul"):
        transposed = operation != "matmul"
        w = struct((E, O, I), bfloat16) if transposed else w
        return functools.partial(mosaic_gpu.grouped_matmul, transposed=transposed, **how), (x, w, sizes)
    outer = functools.partial(mosaic_gpu.grouped_outer, **how)
    if operation == "outer":
        return functools.partial(outer, into=None, dtype=bfloat16), (x, y, sizes)
    return functools.partial(outer, dtype=jnp.float32), (x, y, sizes, into)


OPERATIONS = named("matmul", "matmul_transposed", "outer", "outer_into")


@slow_but_for("outer_into-(128, 256)", operation=OPERATIONS, size=named(*RATES))
def test_shared_memory_as_counted(operation, size):
    """Mosaic GPU asks for what `Tiles` counts, but for the barrier that products do without."""
    problem = dataclasses.replace(PROBLEM, operation=operation)
    deepest = hopper_tiles.Tiles.deepest(problem.check, *size)
    counted = deepest.smem_bytes(problem.piece_columns)
    assert counted <= SMEM_BYTES
    function, arguments = lowerable(operation, deepest)
    traced = jax.jit(function).trace(*arguments)
    counted -= 8 * (not problem.sums)
    limit = mosaic_gpu_core.artificial_shared_memory_limit
    with limit(counted - 1), pytest.raises(ValueError, match="exceeds available shared memory"):
        traced.lower(lowering_platforms=("cuda",))
    with limit(counted):
        traced.lower(lowering_platforms=("cuda",))


def forms(problem: Problem, size: tuple[int, int]) -> list[Tiles]:
    """Returns the tiles of a size in each form in which they can take a problem."""
    deepest, fitting = hopper_tiles.Tiles.deepest(problem.check, *size), []
    for cluster, late, shares_w in itertools.product((1, 2), (False, True), (False, True)):
        with contextlib.suppress(Unsupported):
            tiles = dataclasses.replace(deepest, cluster=cluster, late=late, shares_w=shares_w)
            problem.check(tiles)
            fitting.append(tiles)
    return fitting


@cuda
@pytest.mark.parametrize(("size", "form"), [((128, 256), 0), ((128, 256), -1), ((128, 192), 0)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiles_without_spilling_registers(operation, size, form, monkeypatch, capfd):
    """Down to a Hopper GPU's own code; and what sums are added to is not copied where it is donated."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mocked = {name: value for name, value in aot.OPTIONS.items() if name != "xla_gpu_mock_custom_calls"}
    monkeypatch.setattr(aot, "OPTIONS", mocked)
    problem = dataclasses.replace(PROBLEM, operation=operation)
    function, arguments = lowerable(operation, forms(problem, size)[form])
    donated = (3,) if operation == "outer_into" else ()
    lowered = aot.lower(jax.jit(function, donate_argnums=donated), *arguments)
    hlo = aot.compile_for(lowered, aot.TARGETS["h200"]).hlo
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"]
    assert "wgmma" not in said, "products one after another, for want of registers or a fence"
    assert not re.search(r"= \w+\[16,1536,1536\]\S* copy\(", hlo)


# What is refused, and what is chosen.


def call(rows=256, columns=256, results=256, dtype=bfloat16, outer=False, **options):
    options = {"implementation": "mosaic_gpu", "platform": "gpu"} | options
    struct = jax.ShapeDtypeStruct
    x, w = struct((rows, columns), dtype), struct((4, columns, results), dtype)
    if outer:
        other = struct((rows, results), dtype)
        run = lambda x, y, sizes: grouped_matmul.grouped_outer(x, y, sizes, **options)  # noqa: E731
        return jax.eval_shape(run, x, other, struct((4,), jnp.int32))
    run = lambda x, w, sizes: grouped_matmul.grouped_matmul(x, w, sizes, **options)  # noqa: E731
    return jax.eval_shape(run, x, w, struct((4,), jnp.int32))


@pytest.mark.parametrize(
    "reason, options",
    [
        ("needs an NVIDIA GPU of compute capability >= 9.0 and < 10.0, found cpu", {"platform": "cpu"}),
        ("multiplies bfloat16, found float32", {"dtype": jnp.float32}),
        ("rows, 1001, do not divide by 8", {"rows": 1001}),
        ("120 rows are fewer than the 128 of a block", {"rows": 120}),
        ("columns of x, 100, do not divide by 64", {"columns": 100}),
        ("columns of the result, 96, do not divide by 64", {"results": 96}),
        ("columns of x, 64, do not divide by 128", {"columns": 64, "outer": True}),
    ],
)
def test_refuses(reason, options):
    with pytest.raises(Unsupported, match=reason):
        call(**options)


@pytest.mark.parametrize(
    "reason, operation, tiles",
    [
        ("no registers for results of matmul in .* late", "matmul", Tiles(256, 128, late=True)),
        ("no registers for results of outer_into", "outer_into", Tiles(late=True)),
        ("a product's clusters share columns of w, no matmul", "matmul", Tiles(shares_w=True)),
        ("share columns of w, no outer", "outer", Tiles(cluster=2, shares_w=True)),
        ("1 slots of a ring: .* wait for ever", "matmul", Tiles(stages=1)),
    ],
)
def test_refuses_forms(reason, operation, tiles):
    with pytest.raises(Unsupported, match=reason):
        dataclasses.replace(PROBLEM, operation=operation).check(tiles)


def test_unmeasured_shapes_are_left_to_others(monkeypatch):
    assert call().shape == (256, 256) and call(outer=True).shape == (4, 256, 256)  # named, they run
    problem = Problem("matmul", 4, 256, 256, 256)
    with pytest.raises(Unsupported, match="not measured to be faster than others at matmul/4/256x256x256"):
        mosaic_gpu._plan(problem, bfloat16)
    entry = {"tiles": dataclasses.asdict(SMALL), "microseconds": 1, "others": {}, "faster": True}
    kind = mosaic_gpu.hopper_device()[0]
    monkeypatch.setattr(hopper_tiles, "TABLE", {kind: {problem.key: entry}})
    assert mosaic_gpu._plan(problem, bfloat16)[0] == SMALL
    # Of another number of rows the nearest counts, of other columns none.
    many = dataclasses.replace(problem, rows=8192)
    slower = entry | {"faster": False}
    monkeypatch.setattr(hopper_tiles, "TABLE", {kind: {problem.key: entry, many.key: slower}})
    assert mosaic_gpu._plan(dataclasses.replace(problem, rows=512), bfloat16)[0] == SMALL
    with pytest.raises(Unsupported, match="measured slower than others"):
        mosaic_gpu._plan(dataclasses.replace(problem, rows=4096), bfloat16)
    with pytest.raises(Unsupported, match="not measured"):
        mosaic_gpu._plan(dataclasses.replace(problem, results=512), bfloat16)


@pytest.mark.parametrize("operation", ["matmul", "matmul_transposed", "outer", "outer_into"])
@pytest.mark.parametrize("shape", ["qwen3_30b_up", "qwen3_30b_down", "olmoe_up", "mixtral_down"])
def test_choice_of_tiles(shape, operation):
    of = GPU[shape]
    problem = Problem(operation, of.groups, of.rows, of.columns, of.results)
    chosen, measured = hopper_tiles.choose(problem, "a GPU in no table")
    assert measured is None and chosen.n in (256, 128) and chosen.cluster == 1
    seconds = hopper_tiles.predict(problem, chosen)
    assert 0.8 < problem.flops / seconds / hopper_tiles.PRODUCT_FLOPS < 1
    for other in hopper_tiles.candidates(problem):
        problem.check(other)
        assert hopper_tiles.predict(problem, other) >= seconds
    assert {tiles.cluster for tiles in hopper_tiles.candidates(problem)} == {1, 2}


def test_the_table_fits_its_problems():
    """Each key is of a problem that its tiles divide; the kernels would refuse it otherwise."""
    assert json.loads(hopper_tiles.TABLE_FILE.read_text()) == hopper_tiles.TABLE
    for entries in hopper_tiles.TABLE.values():
        for key, entry in entries.items():
            Problem.of_key(key).check(Tiles(**entry["tiles"]))
            assert Problem.of_key(key).key == key


# On a GPU.

needs_hopper = pytest.mark.skipif(not has_gpu((9, 0)), reason="needs a Hopper GPU")


@functools.partial(jax.jit, static_argnames=("tiles", "operation"))
def run_on_gpu(operation, given, tiles):
    x, w, y, sizes, into = given
    how = {"tiles": tiles, "platform": "gpu"}
    if operation.startswith("matmul"):
        return mosaic_gpu.grouped_matmul(x, w, sizes, transposed=operation != "matmul", **how)
    dtype, to = (bfloat16, None) if operation == "outer" else (jnp.float32, into)
    return mosaic_gpu.grouped_outer(x, y, sizes, to, dtype=dtype, **how)


GROUPS, ROWS = 24, 4096


def sizes_on_a_gpu(rng) -> list[np.ndarray]:
    """Returns sizes of groups: around tiles and blocks, none, all of one, and at random."""
    edges = (0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 65, 127, 128, 129, 130, 191, 192, 193, 255, 256, 257, 0, 300)
    one = np.eye(GROUPS, dtype=int)[5] * (ROWS - 3)
    draws = [rng.multinomial(rng.integers(ROWS // 2, ROWS), rng.dirichlet(np.ones(GROUPS))) for _ in range(4)]
    return [np.array(edges), rng.permutation(edges), np.zeros(GROUPS, int), one, *draws]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("tiles", "width"), [((128, 256), 1024), ((256, 128), 1024), ((128, 192), 768), ((128, 64), 512)], ids=str
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_on_a_gpu(operation, tiles, width):
    """Group by group against float64, with NaN behind the last; and a hundred times the same bits."""
    rng = np.random.default_rng(fresh_seed())
    problem = Problem(operation, GROUPS, ROWS, width, width)
    x, y = (normal(rng, (ROWS, width), bfloat16) for _ in range(2))
    w = normal(rng, (GROUPS, width, width), bfloat16)
    into = normal(rng, w.shape, jnp.float32)
    for sizes in sizes_on_a_gpu(rng):
        own = int(sizes.sum())
        given = (x.at[own:].set(jnp.nan), w, y.at[own:].set(jnp.nan), jnp.asarray(sizes, jnp.int32), into)
        if problem.sums:
            expected = np.stack(sums(x, y, sizes))
            expected += np.asarray(into, np.float64) if operation == "outer_into" else 0
        else:
            matrices = w.swapaxes(1, 2) if operation == "matmul_transposed" else w
            expected = products(x, matrices, sizes)
        for shape in forms(problem, tiles):
            found = run_on_gpu(operation, given, shape)
            found = found if problem.sums else found[:own]
            parts = list(found) if problem.sums else by_group(found, sizes)
            for part, wanted in zip(parts, expected, strict=True):
                if np.any(wanted):  # where all are zero, there is no relative error
                    assert_close(part, wanted, GPU_TOLERANCE)
                else:
                    assert not np.any(np.asarray(part))
            for _ in range(100):
                again = run_on_gpu(operation, given, shape)
                assert bool(jnp.array_equal(again if problem.sums else again[:own], found))
