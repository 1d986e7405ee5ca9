"""Collective matmuls fused on Hopper: what can be shown without a GPU, and the rest on 2 and 4."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named, slow_but_for
from hopper_emulation import Shards
from jax.experimental.mosaic.gpu import core as mosaic_gpu_core
from jax.sharding import AxisType, PartitionSpec
from test_no_multicast import FORBIDDEN, lower_collective_matmul

from jaxthru.runtime import aot, xla
from pallas_kernels import collective_matmul
from pallas_kernels.collective_matmul import hopper, mosaic_gpu, mosaic_gpu_adds, schedule
from pallas_kernels.collective_matmul import tiles as tiles_module
from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED, Shape
from pallas_kernels.collective_matmul.tiles import SMEM_BYTES, SMS, Problem, Tiles
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.testing import GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

SMALL = Tiles(128, 128, stages=2, width=2, senders=2)
CTAS = 3  # with more tiles than these, and with fewer; one of them does not send
PAIRS = dataclasses.replace(SMALL, cluster=2)
cuda = pytest.mark.compiles_for("cuda")


def draw(rng, *shape):
    return normal(rng, shape, jnp.bfloat16)


def backwards(t: int) -> schedule.Lane:
    """Returns the lane of the schedule that these kernels follow."""
    return schedule.ring(t, rows=2, directions=2)[1]


def product(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


# The kernels' arithmetic, on an emulation of several shards.


@slow_but_for(
    "2-plain-alone",
    slow=("1-transposed-alone", "3-plain-clusters"),
    t=named(1, 2, 3),
    transposed={"plain": False, "transposed": True},
    form={"alone": (SMALL, CTAS), "clusters": (PAIRS, 4)},
)
def test_gather_matmul(t, transposed, form, monkeypatch):
    shape, ctas = form
    rng = np.random.default_rng(fresh_seed())
    M, K, N = 256, 192, (256, 128)
    rows = [draw(rng, M, K) for _ in range(t)]
    weights = [[draw(rng, *((n, K) if transposed else (K, n))) for n in N] for _ in range(t)]
    shards = Shards(monkeypatch, t)
    found = shards.run(
        hopper.gather_matmul,
        lambda rank: (rows[rank], weights[rank], shape, ctas),
        keep=True,
        transposed=transposed,
    )
    whole = jnp.concatenate(rows)
    for (ys, gathered), of_shard in zip(found, weights, strict=True):
        np.testing.assert_array_equal(np.float32(gathered), np.float32(whole))
        for y, w in zip(ys, of_shard, strict=True):
            assert_close(y, product(whole, w.T if transposed else w), GPU_TOLERANCE)
    # Rows are waited for in the order of the schedule.
    blocks, lane = M // shape.m, backwards(t)
    for (shard, _, index), sources in shards.sources.items():
        assert sources == {(shard + lane.gather[1 + index // blocks]) % t}


def scatter(monkeypatch, t, shape, ctas, beside: bool, contracted=(128, 64), **options) -> Shards:
    """Checks products that are added up, and another matrix gathered beside them; returns the shards."""
    rng = np.random.default_rng(fresh_seed())
    M, N = 256, 128
    pairs = [[(draw(rng, t * M, K), draw(rng, N, K)) for K in contracted] for _ in range(t)]
    extra = [draw(rng, M, 128) for _ in range(t)]

    def kernel(pairs, gather, *arguments, **options):
        return hopper.matmul_scatter(pairs, *arguments, gather=gather, transposed=True, **options)

    shards = Shards(monkeypatch, t)
    arguments = lambda rank: (pairs[rank], extra[rank] if beside else None, shape, ctas)  # noqa: E731
    found = shards.run(kernel, arguments, **options)
    total = sum(product(a, w.T) for of_shard in pairs for a, w in of_shard)
    for rank, (out, gathered) in enumerate(found):
        assert_close(out, total[rank * M :][:M], GPU_TOLERANCE)
        if beside:
            np.testing.assert_array_equal(np.float32(gathered), np.float32(jnp.concatenate(extra)))
    return shards


FORMS_OF_SCATTER = {
    "128": (SMALL, CTAS),
    "256": (Tiles(256, 64, stages=3, minor="N", width=1), CTAS),
    "clusters": (dataclasses.replace(PAIRS, senders=1), 6),
}
RANKS = {"1_beside": (1, True), "2": (2, False), "2_beside": (2, True), "3_beside": (3, True)}
RANKS |= {"4_beside": (4, True)}


@slow_but_for(
    "128-2",
    slow=("256-2", "clusters-1_beside", "clusters-3_beside"),
    form=FORMS_OF_SCATTER,
    ranks={name: RANKS[name] for name in ("1_beside", "2", "3_beside")},
)
def test_matmul_scatter(form, ranks, monkeypatch):
    (shape, ctas), (t, beside) = form, ranks
    shards = scatter(monkeypatch, t, shape, ctas, beside)
    # A tile that is to leave is announced on its own shard. What a shard adds up as that of the k-th shard
    # before it, and in that order, is that shard's: each sends in the order of the schedule.
    count, lane = (256 // shape.m) * (128 // shape.n), backwards(t)
    for (shard, array, index), sources in shards.sources.items():
        (source,) = sources
        if array == 1:
            assert source == shard
        elif array == 2:
            assert shard == (source + lane.reduce[index // count]) % t
        else:
            assert source == (shard + lane.gather[1 + index]) % t


@slow_but_for(
    "128-2",
    slow=("128-1_beside", "256-4_beside", "clusters-2_beside"),
    form=FORMS_OF_SCATTER,
    ranks={name: RANKS[name] for name in ("1_beside", "2", "2_beside", "4_beside")},
)
def test_matmul_scatter_that_adds(form, ranks, monkeypatch):
    """As the forward pass does, without another matrix beside, and as the backward pass does."""
    (shape, ctas), (t, beside) = form, ranks
    contracted = (128, 64) if beside else (128,)
    shards = scatter(monkeypatch, t, shape, ctas, beside, contracted, adds=True)
    count = (256 // shape.m) * (128 // shape.n)
    added = {shard: n for (shard, array, _), n in shards.waits.items() if array == 2}
    assert added == ({shard: (t - 1) * count for shard in range(t)} if t > 1 else {})


@pytest.mark.slow
def test_fewer_tiles_than_thread_blocks(monkeypatch):
    rng = np.random.default_rng(fresh_seed())
    x, w = draw(rng, 128, 64), draw(rng, 64, 64)
    shards = Shards(monkeypatch, 2)
    found = shards.run(hopper.gather_matmul, lambda rank: (x, (w,), Tiles(128, 64, 2), 4))
    for (y,), _ in found:
        assert_close(y, product(jnp.concatenate((x, x)), w), GPU_TOLERANCE)


def test_no_races_within_a_device(monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    rng = np.random.default_rng(fresh_seed())
    x, w = draw(rng, 256, 256), draw(rng, 256, 128)
    shards = Shards(monkeypatch, 1, detect_races=True)
    ((y,), _) = shards.run(hopper.gather_matmul, lambda rank: (x, (w,), SMALL, 2))[0]
    assert_close(y, product(x, w), GPU_TOLERANCE)
    assert not gpu_callbacks.get_races().races_found


# What they lower to.


@pytest.mark.parametrize("name", ["mosaic_gpu", "mosaic_gpu_adds"])
def test_layers_share_a_kernel(name):
    """Mosaic would compile it for each of them: of 8 layers 64 kernels."""
    module = collective_matmul.OPERATION.load(name)
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    rows, columns = PartitionSpec("tensor"), PartitionSpec(None, "tensor")

    def layers(x, w):
        for _ in range(3):
            (y,) = module.all_gather_matmul(x, (w,), axis_name="tensor", named=True)
            x = module.matmul_reduce_scatter(y, w.T, axis_name="tensor", named=True)
        return x

    function = jax.shard_map(layers, mesh=mesh, in_specs=(rows, columns), out_specs=rows)
    arguments = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((1024, 1024), (1024, 1024)))
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, axes",
    [
        ("mosaic_gpu", {"data": 2, "tensor": 4}),
        ("mosaic_gpu", {"tensor": 1}),
        ("mosaic_gpu_adds", {"tensor": 4}),
        ("mosaic_gpu_adds", {"tensor": 1}),
    ],
    ids=str,
)
def test_lowers_every_first_run(name, axes, bench):
    for shape in bench("collective_matmul_check").TINY.values():
        text = lower_collective_matmul(shape, axes, name, "cuda")
        assert text.count("@mosaic_gpu_v2") == 2
        assert not [word for word in FORBIDDEN if word in text]


@slow_but_for(
    *(f"{operation}-{next(iter(tiles_module.RATES))}" for operation in ("gather", "scatter")),
    operation=named("gather", "scatter"),
    shape=named(*tiles_module.RATES),
)
def test_shared_memory_as_counted(operation, shape):
    """Mosaic GPU asks for what `Tiles` counts."""
    rows, K, N = 3072, 1536, 1536
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    rows_split, columns_split = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
    if operation == "gather":
        problem = Problem("gather", 2, rows // 2, (K,), (N // 2,), "bfloat16")
        specs, out = (rows_split, columns_split), columns_split
    else:
        problem = Problem("scatter", 2, rows // 2, (K // 2,), (N,), "bfloat16")
        specs, out = (columns_split, rows_split), rows_split
    deepest = tiles_module.Tiles.deepest(problem.check, *shape)
    counted = deepest.smem_bytes(problem.sends)
    assert counted <= SMEM_BYTES

    def local(x, w):
        if operation == "gather":
            return mosaic_gpu.all_gather_matmul(x, (w,), axis_name="tensor", tiles=deepest)[0]
        return mosaic_gpu.matmul_reduce_scatter(x, w, axis_name="tensor", tiles=deepest)

    x, w = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((rows, K), (K, N)))
    traced = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out)).trace(x, w)
    limit = mosaic_gpu_core.artificial_shared_memory_limit
    with limit(counted - 1), pytest.raises(ValueError, match="exceeds available shared memory"):
        traced.lower(lowering_platforms=("cuda",))
    with limit(counted):
        traced.lower(lowering_platforms=("cuda",))


@cuda
@pytest.mark.parametrize(  # the two that accumulate most, and the smallest; alone and in clusters
    ("shape", "cluster"), [((256, 128), 1), ((128, 256), 2), ((128, 64), 2)], ids=str
)
def test_compiles_without_spilling_registers(shape, cluster, monkeypatch, capfd):
    """All kernels, down to a Hopper GPU's own code: a consumer has just the registers it needs."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mocked = {name: value for name, value in aot.OPTIONS.items() if name != "xla_gpu_mock_custom_calls"}
    monkeypatch.setattr(aot, "OPTIONS", mocked)
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    rows, columns = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
    m, n = shape
    tiles = Tiles(m, n, cluster=cluster)

    def local(x, w, y):
        options = {"axis_name": "tensor", "tiles": tiles}
        (gathered,) = mosaic_gpu.all_gather_matmul(x, (w,), **options)
        dx, _ = mosaic_gpu.all_gather_matmul_backward(x, (w,), (y,), **options)
        out = mosaic_gpu.matmul_reduce_scatter(y, dx, **options)
        dy, dw = mosaic_gpu.matmul_reduce_scatter_backward(y, dx, out, **options)
        added, _ = mosaic_gpu_adds.all_gather_matmul_backward(x, (w,), (y,), **options)
        return gathered, dy, dw, out, added, mosaic_gpu_adds.matmul_reduce_scatter(y, dx, **options)

    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, columns, columns),
        out_specs=(columns, columns, rows, rows, rows, rows),
    )
    sizes = (3072, 1536), (1536, 3072), (3072, 3072)
    lowered = aot.lower(jax.jit(split), *(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes))
    aot.compile_for(lowered, aot.TARGETS["h200"], devices=2)
    said = "".join(capfd.readouterr())
    assert re.findall(r"(\d+) bytes spill stores", said) == ["0"] * 6
    assert "wgmma" not in said, "products one after another, for want of registers or a fence"


@slow_but_for(
    "nothing_saveable-scan",
    policy=named("nothing_saveable", "everything_saveable", "dots_saveable"),
    loop=named("scan", "unroll"),
)
def test_adds_where_layers_are_rematerialised(policy, loop):
    """A result that is written in place must not be taken apart from its kernel."""
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    rows, columns = PartitionSpec("tensor"), PartitionSpec(None, None, "tensor")

    @functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    def layer(x, w):
        options = {"axis_name": "tensor", "implementation": "mosaic_gpu_adds", "platform": "gpu"}
        (y,) = collective_matmul.all_gather_matmul(x, (w,), **options)
        return jnp.sin(collective_matmul.matmul_reduce_scatter(jnp.sin(y), w.T, **options)), None

    def layers(x, ws):
        if loop == "scan":
            return jax.lax.scan(layer, x, ws)[0]
        return functools.reduce(lambda x, w: layer(x, w)[0], ws, x)

    function = jax.shard_map(layers, mesh=mesh, in_specs=(rows, columns), out_specs=rows)
    gradients = jax.jit(jax.grad(lambda *a: jnp.sum(function(*a).astype(jnp.float32)), (0, 1)))
    arguments = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((512, 256), (2, 256, 256)))
    text = gradients.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") >= 4


# What is refused, and what is chosen.


def call(
    x_shape=(512, 256), w_shape=(256, 512), dtype=jnp.bfloat16, axes=("tensor",), manual=None, **options
):
    """Traces the gather on a mesh of two devices along each axis."""
    mesh = jax.make_mesh((2,) * len(axes), axes, (AxisType.Auto,) * len(axes))
    x, w = jax.ShapeDtypeStruct(x_shape, dtype), jax.ShapeDtypeStruct(w_shape, dtype)
    options = {"implementation": "mosaic_gpu", "platform": "gpu"} | options

    def local(x, w):
        return collective_matmul.all_gather_matmul(x, (w,), axis_name="tensor", **options)[0]

    specs = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
    function = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs[1], axis_names=manual or frozenset(axes)
    )
    return jax.eval_shape(jax.jit(function), x, w)


@pytest.mark.parametrize(
    "reason, options",
    [
        ("needs an NVIDIA GPU of compute capability >= 9.0 and < 10.0, found cpu", {"platform": "cpu"}),
        ("multiplies bfloat16, found float32", {"dtype": jnp.float32}),
        ("rows of a shard, 257, do not divide by 128", {"x_shape": (514, 256)}),
        ("what is contracted, 100, do not divide by 64", {"x_shape": (512, 100), "w_shape": (100, 512)}),
        ("columns, 50, do not divide by 64", {"w_shape": (256, 100)}),
        (
            r"needs a shard_map over every axis of the mesh, not without \['data'\]",
            {"axes": ("data", "tensor"), "manual": {"tensor"}},
        ),
    ],
)
def test_refuses(reason, options):
    with pytest.raises(Unsupported, match=reason):
        call(**options)


def test_takes_one_axis_of_several():
    assert call(axes=("data", "tensor")).shape == (512, 512)


def test_someone_has_to_send():
    problem = Problem("gather", 2, 256, (64,), (128,), "bfloat16")
    problem.check(SMALL)
    with pytest.raises(Unsupported, match="0 senders: peers would wait for ever"):
        problem.check(dataclasses.replace(SMALL, senders=0))


def test_refuses_several_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(Unsupported, match="every device in one process, found 2 processes"):
        call()


def problem_of(shape: Shape, t: int) -> Problem:
    columns = tuple(n // t for n in shape.columns)
    return Problem("gather", t, shape.rows // t, (shape.contracted,), columns, "bfloat16")


def test_small_products_are_left_to_others():
    """Where the transfer takes less than the wait for all devices, the first that is tried gives way."""
    assert call().shape == (512, 512)  # named, it runs
    operation = collective_matmul.OPERATION
    module, options = operation.load("mosaic_gpu"), operation.options("mosaic_gpu", "gpu", named=False)
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    x, w = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((512, 256), (256, 512)))

    def local(x, w):
        return module.all_gather_matmul(x, (w,), axis_name="tensor", **options)[0]

    specs = PartitionSpec("tensor"), PartitionSpec(None, "tensor")
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1])
    with pytest.raises(
        Unsupported, match="expected to be slower than the plain form at gather/2/256x256x256"
    ):
        jax.eval_shape(function, x, w)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("shape", [s for s in (GPU | UNTUNED).values() if s.operation == "all_gather_matmul"])
def test_choice_of_tiles(shape, t):
    problem = problem_of(shape, t)
    chosen, measured = tiles_module.choose(problem, "a GPU in no table", SMS)
    assert measured is None
    problem.check(chosen)
    fused, _ = tiles_module.predict(problem, chosen, SMS)
    assert fused > max(
        problem.flops / tiles_module.PRODUCT_FLOPS, problem.bytes_sent / tiles_module.LINK_BYTES
    )
    for other in tiles_module.candidates(problem):
        assert tiles_module.predict(problem, other, SMS)[0] >= fused


def test_the_table_decides(monkeypatch):
    problem = problem_of(GPU["qkv"], 2)
    measured = Tiles(256, 128, 4, "N", 16)
    entry = {
        "tiles": dataclasses.asdict(measured),
        "microseconds": 2,
        "plain_microseconds": 1,
        "faster": False,
    }
    monkeypatch.setattr(tiles_module, "TABLE", {"NVIDIA H200": {problem.key: entry}})
    assert tiles_module.choose(problem, "NVIDIA H200", SMS) == (measured, False)
    assert tiles_module.choose(problem, "NVIDIA H100 80GB HBM3", SMS) == (measured, None), "the same chip"
    assert tiles_module.choose(problem, "NVIDIA H100 PCIe", 114) != (measured, None)
    with pytest.raises(Unsupported, match="measured slower than the plain form"):
        mosaic_gpu.tiles_for(problem, named=False)
    assert mosaic_gpu.tiles_for(problem, named=True)[0] == measured


def test_the_table_fits_its_problems():
    """Each key is of a problem that its tiles divide; the kernels would refuse it otherwise."""
    for entries in tiles_module.TABLE.values():
        for key, entry in entries.items():
            Problem.of_key(key).check(Tiles(**entry["tiles"]))
            assert Problem.of_key(key).key == key


def test_the_table_is_read_as_it_was_written(bench, monkeypatch, tmp_path):
    entry = {
        "tiles": dataclasses.asdict(Tiles(width=16, cluster=2)),
        "microseconds": [1.5, 1.0],
        "plain_microseconds": [2.0, 1.75],
        "faster": True,
    }
    table = {"NVIDIA H200": {problem_of(GPU[name], 2).key: entry for name in ("qkv", "gate")}}
    monkeypatch.setattr(tiles_module, "TABLE_FILE", tmp_path / "table.json")
    bench("tune_collective_matmul").write(table)
    assert json.loads(tiles_module.TABLE_FILE.read_text()) == table


def test_a_problem_and_its_key():
    problem = Problem("scatter_transposed", 4, 2048, (3584, 3584), (4096,), "float16", gathers=4096)
    assert Problem.of_key(problem.key) == problem


def test_compiled_for_peers_where_a_kernel_writes_to_them(bench, monkeypatch):
    """A CUDA graph keeps a peer's address that may have gone stale; a collective beside a kernel may hang."""
    check = bench("collective_matmul_check")
    seen = []

    class Lowered:
        def __init__(self, text):
            self.as_text = lambda: text

        def compile(self, compiler_options):
            seen.append(compiler_options)

    of_kernels = lower_collective_matmul(GPU["qkv"], {"tensor": 2}, "mosaic_gpu", "cuda")
    texts = of_kernels, jax.jit(jnp.sin).lower(1.0).as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for text in texts:
        check.compile_safely(Lowered(text))
    assert seen == [xla.for_peers("gpu"), None]


@cuda
@pytest.mark.parametrize("over, axes", [("tensor", {"tensor": 2}), ("data", {"data": 2, "tensor": 2})])
def test_no_collective_runs_beside_a_kernel(over, axes, monkeypatch):
    """Compiled for a GPU, a sum over the kernel's own axis or another starts before the kernel and ends after
    it, unless it is told not to: either may then hold what the other waits for."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    rows, columns = PartitionSpec("tensor"), PartitionSpec(None, "tensor")

    def local(x, w, z):
        (y,) = mosaic_gpu.all_gather_matmul(x, (w,), axis_name="tensor", named=True)
        return y, jax.lax.psum(z, over)

    function = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, columns, PartitionSpec(over)),
        out_specs=(columns, PartitionSpec()),
    )
    sizes = (8192, 4096), (4096, 6144), (4096, 4096)
    lowered = aot.lower(jax.jit(function), *(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes))

    def order() -> list[str]:
        hlo = aot.compile_for(lowered, aot.TARGETS["h200"], devices=mesh.size).hlo
        return re.findall(r" (all-reduce(?:-start|-done)?|custom-call)\(", hlo[hlo.index("\nENTRY ") :])

    assert order() == ["all-reduce-start", "custom-call", "all-reduce-done"]
    monkeypatch.setattr(aot, "OPTIONS", aot.OPTIONS | xla.for_peers("gpu"))
    assert sorted(order()) == ["all-reduce", "custom-call"]


@cuda
def test_no_kernel_is_in_a_graph(monkeypatch):
    """XLA takes what stands around it into CUDA graphs; by default custom calls, and so kernels, too."""
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    rows, columns = PartitionSpec("tensor"), PartitionSpec(None, "tensor")

    def local(x, w):
        (y,) = mosaic_gpu.all_gather_matmul(jnp.sin(x) * 2, (w,), axis_name="tensor", named=True)
        return jnp.cos(y) @ y[:4096].T

    function = jax.shard_map(local, mesh=mesh, in_specs=(rows, columns), out_specs=columns)
    sizes = (8192, 4096), (4096, 6144)
    lowered = aot.lower(jax.jit(function), *(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes))
    monkeypatch.setattr(aot, "DUMPED", {"thunks": "*after_thunk_passes.txt"})

    def found() -> tuple[list[str], list[str]]:
        """Returns the kinds of thunks outside of graphs, and within one."""
        lines = aot.compile_for(lowered, aot.TARGETS["h200"], devices=2).dump["thunks"].splitlines()
        kinds = [kind for line in lines if (kind := re.match(r"( *)\d+: (k\w+)", line))]
        return tuple([kind[2] for kind in kinds if bool(kind[1]) is inner] for inner in (False, True))

    monkeypatch.setattr(aot, "OPTIONS", aot.OPTIONS | xla.for_peers("gpu"))
    outside, inside = found()
    assert outside.count("kCustomCall") == 1 and "kCommandBuffer" in outside
    assert inside and "kCustomCall" not in inside


# On GPUs.

GPU_AXES = ({"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2})


@pytest.fixture(scope="module")
def first_run(request):
    """The kernels have run at tiny shapes in a process that can be killed; else none runs in this one."""
    if not has_gpu((9, 0)) or jax.device_count() < 2:
        pytest.skip("needs two Hopper GPUs")
    import sys
    from pathlib import Path

    folder = str(Path(__file__).resolve().parents[2] / "scripts" / "bench")
    sys.path.insert(0, folder)
    request.addfinalizer(lambda: sys.path.remove(folder))
    import collective_matmul_check

    able = [axes for axes in GPU_AXES if np.prod(list(axes.values())) <= jax.device_count()]
    collective_matmul_check.in_child(able, seconds=240)
    return collective_matmul_check


def mesh_or_skip(check, axes):
    if np.prod(list(axes.values())) > jax.device_count():
        pytest.skip(f"needs more GPUs than {jax.device_count()}")
    return check.make_mesh(axes)


def check_values(check, name, axes, implementation):
    mesh, shape = mesh_or_skip(check, axes), (GPU | UNTUNED)[name]
    with check.ends_within(120, f"{name} on {axes}"):
        line = check.check(mesh, shape, check.compile_both(mesh, shape, implementation), fresh_seed())
    assert max(line["errors"]) <= check.BFLOAT16_TOLERANCE, line


def check_repeats(check, name, axes, implementation):
    mesh = mesh_or_skip(check, axes)
    with check.ends_within(300, f"{name} on {axes}"):
        compiled = check.compile_both(mesh, GPU[name], implementation)
        unequal = check.unequal_repeats(mesh, GPU[name], compiled, fresh_seed(), repeats=50)
    assert unequal == 0


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("axes", GPU_AXES, ids=str)
@pytest.mark.parametrize("name", GPU | UNTUNED)
def test_values_and_gradients_on_gpus(name, axes, first_run):
    check_values(first_run, name, axes, "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("axes", GPU_AXES, ids=str)
@pytest.mark.parametrize("name", ["qkv", "down"])
def test_repeats_are_equal_bit_for_bit(name, axes, first_run):
    check_repeats(first_run, name, axes, "mosaic_gpu")


@pytest.fixture(scope="module")
def first_adds(first_run):
    """The same of kernels that add to each other's results."""
    for t in (2, 4):
        if t <= jax.device_count():
            first_run.try_adds({"tensor": t})
    return first_run


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", GPU | UNTUNED)
def test_values_and_gradients_where_shards_add(name, t, first_adds):
    check_values(first_adds, name, {"tensor": t}, "mosaic_gpu_adds")


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.parametrize("name", ["qkv", "down"])
def test_what_two_shards_add_is_the_same_in_either_order(name, first_adds):
    check_repeats(first_adds, name, {"tensor": 2}, "mosaic_gpu_adds")
