"""The contract of collective matmuls: values and gradients of all implementations on all meshes, what
they send, that transfers and products do not wait for each other, repeats, and what is refused. Kernels for
TPUs are run by JAX's interpreter of them, which looks for races."""

import functools
import re
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named, slow_but_for
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from jaxthru.runtime import aot
from pallas_kernels import collective_matmul, dispatch
from pallas_kernels.collective_matmul import mosaic_tpu
from pallas_kernels.collective_matmul.shapes import CPU, DEVICES, GPU, UNTUNED, Shape
from pallas_kernels.testing import CPU_TOLERANCE, assert_close, fresh_seed, normal, relative_error

HALF_PRECISION_TOLERANCE = 1e-2

MESHES = {
    "2": {"tensor": 2},
    "4": {"tensor": 4},
    "8": {"tensor": 8},
    "data2_tensor2": {"data": 2, "tensor": 2},
    "data2_tensor4": {"data": 2, "tensor": 4},
    "tensor4_data2": {"tensor": 4, "data": 2},
}
IMPLEMENTATIONS = named("reference", "ring", "ring_bidirectional")
OPERATIONS = {"gather": CPU["three_matrices"], "scatter": CPU["scatter"]}
every_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
every_operation = pytest.mark.parametrize("shape", OPERATIONS.values(), ids=OPERATIONS)
rings = pytest.mark.parametrize("name", ["ring", "ring_bidirectional"])


def make_mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def draw(rng: np.random.Generator, shape: Shape, axes: dict[str, int], dtype=jnp.float32):
    """Returns whole operands, and cotangents of the results."""
    structs = shape.arrays(make_mesh(axes), dtype)
    return jax.tree.map(lambda s: jax.device_put(normal(rng, s.shape, s.dtype), s.sharding), structs)


@functools.partial(jax.jit, static_argnums=0)
def run(function, operands, cotangents):
    """Returns values and gradients."""
    values, pull = jax.vjp(function, *operands)
    return values, pull(cotangents)


def expected(operands, cotangents):
    """Returns them in float64, of whole matrices."""
    x, *weights = (np.asarray(a.astype(jnp.float32), np.float64) for a in operands)
    cotangents = [np.asarray(a.astype(jnp.float32), np.float64) for a in cotangents]
    dx = sum(c @ w.T for c, w in zip(cotangents, weights, strict=True))
    return tuple(x @ w for w in weights), (dx, *(x.T @ c for c in cotangents))


def check(shape: Shape, axes, dtype=jnp.float32, tolerance=CPU_TOLERANCE, **options):
    operands, cotangents = draw(np.random.default_rng(fresh_seed()), shape, axes, dtype)
    found = run(shape.on(make_mesh(axes), **options), operands, cotangents)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    assert_close(found, expected(operands, cotangents), tolerance)


@slow_but_for(
    *(
        f"{shape}-{name}-{axes}"
        for shape in OPERATIONS
        for name in IMPLEMENTATIONS
        for axes in ("4", "data2_tensor2")
    ),
    shape=OPERATIONS,
    name=IMPLEMENTATIONS,
    axes=MESHES,
)
def test_values_and_gradients(shape, name, axes):
    check(shape, axes, implementation=name)


@slow_but_for(*(f"{shape}-ring" for shape in CPU), shape=CPU, name=IMPLEMENTATIONS)
def test_odd_shapes(shape, name):
    check(shape, {"tensor": 8}, implementation=name)


@every_implementation
@every_operation
def test_without_varying_axes(shape, name):
    """check_vma=False, where shard_map adds what the replicated weights' gradients lack."""
    check(shape, MESHES["data2_tensor4"], implementation=name, check_vma=False)


@slow_but_for(
    *(f"{shape}-2-{name}" for shape in OPERATIONS for name in IMPLEMENTATIONS),
    shape=OPERATIONS,
    t=named(2, 8),
    name=IMPLEMENTATIONS,
)
def test_half_precision(shape, t, name):
    check(shape, {"tensor": t}, jnp.bfloat16, HALF_PRECISION_TOLERANCE, implementation=name)


@slow_but_for(
    "qkv-4-ring_bidirectional",
    slow=(f"{shape}-{max(DEVICES)}-ring_bidirectional" for shape in GPU | UNTUNED),
    shape=GPU | UNTUNED,
    t=named(*DEVICES),
    name=named("ring", "ring_bidirectional"),
)
def test_scaled_benchmark_shapes(shape, t, name):
    check(shape.scaled(64), {"tensor": t}, implementation=name)


@every_implementation
@every_operation
def test_one_device_on_the_axis(shape, name):
    check(shape, {"data": 2, "tensor": 1}, implementation=name)


def test_weights_that_the_axis_does_not_split():
    """The same matrix on all shards: its gradient is the sum of what each made of it."""
    axes = MESHES["4"]
    (x, w), _ = draw(np.random.default_rng(fresh_seed()), CPU["one_matrix"], axes)

    def local(x, w):
        (y,) = collective_matmul.all_gather_matmul(x, (w,), axis_name="tensor", implementation="ring")
        rank = jax.lax.axis_index("tensor").astype(jnp.float32)
        return jax.lax.psum(jnp.sum(jnp.sin(y) * (1 + rank)), "tensor")

    rows, whole = PartitionSpec("tensor"), PartitionSpec()
    split = jax.shard_map(local, mesh=make_mesh(axes), in_specs=(rows, whole), out_specs=whole)
    found = jax.jit(jax.grad(split, (0, 1)))(x, w)
    assert_close(found, jax.grad(lambda x, w: 10 * jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w), CPU_TOLERANCE)


def test_one_layer_is_rematerialised():
    """Both operations in a row, as a layer has them, under jax.checkpoint."""
    axes = MESHES["data2_tensor4"]
    (x, w), _ = draw(np.random.default_rng(fresh_seed()), CPU["one_matrix"], axes)
    gather = CPU["one_matrix"].on(make_mesh(axes), implementation="ring")
    scatter = CPU["scatter"].on(make_mesh(axes), implementation="ring")

    def split(x, w):
        return jnp.sum(jnp.square(scatter(jnp.tanh(gather(x, w)[0]), w.T)[0]))

    def plain(x, w):
        return jnp.sum(jnp.square(jnp.tanh(x @ w) @ w.T))

    found = jax.jit(jax.value_and_grad(jax.checkpoint(split), (0, 1)))(x, w)
    assert_close(found, jax.value_and_grad(plain, (0, 1))(x, w), CPU_TOLERANCE)


def equations(jaxpr):
    """Yields all equations in order, those of inner functions in the place of their calls."""
    for equation in jaxpr.eqns:
        inner = [
            value for value in equation.params.values() if hasattr(value, "jaxpr") or hasattr(value, "eqns")
        ]
        for value in inner:
            yield from equations(getattr(value, "jaxpr", value))
        if not inner:
            yield equation


def primitives(shape: Shape, t: int, **options) -> tuple[Counter, Counter]:
    """Returns how often each operation is in the forward and in the backward pass."""
    axes = {"tensor": t}
    operands, cotangents = draw(np.random.default_rng(0), shape, axes)
    function = shape.on(make_mesh(axes), **options)
    forward = jax.make_jaxpr(function)(*operands)
    both = jax.make_jaxpr(functools.partial(run, function))(operands, cotangents)
    forward, both = (Counter(e.primitive.name for e in equations(j.jaxpr)) for j in (forward, both))
    return forward, both - forward


@pytest.mark.parametrize("t", [2, 4])
def test_weights_share_a_gather_and_gradients_a_ring_pass(t):
    forward, backward = primitives(CPU["three_matrices"], t, implementation="ring")
    assert forward["ppermute"] == t - 1
    assert backward["ppermute"] == 2 * (t - 1)  # the rows, and the sums of their gradient
    forward, backward = primitives(CPU["scatter"], t, implementation="ring")
    assert forward["ppermute"] == backward["ppermute"] == t - 1
    assert forward["dot_general"] == t and backward["dot_general"] == 2 * t


@pytest.mark.parametrize("name, in_float32", [("one_matrix", False), ("three_matrices", True)])
def test_the_plain_form_sums_several_products_in_float32(name, in_float32):
    """One product comes in its operands' dtype, as it accumulates in float32 anyway."""
    operands, cotangents = draw(np.random.default_rng(0), CPU[name], MESHES["2"], jnp.bfloat16)
    function = CPU[name].on(make_mesh(MESHES["2"]), implementation="reference")
    traced = jax.make_jaxpr(functools.partial(run, function))(operands, cotangents)
    assert ("f32" in str(traced)) == in_float32


def test_forward_and_backward_are_chosen_apart():
    forward, backward = primitives(CPU["one_matrix"], 4, implementation="reference", backward="ring")
    assert "ppermute" not in forward and "all_gather" in forward
    assert "ppermute" in backward and "all_gather" not in backward
    check(CPU["one_matrix"], MESHES["4"], implementation="ring", backward="reference")


@rings
@every_operation
def test_transfers_and_products_do_not_wait_for_each_other(shape, name):
    """Rows on their way wait for products of earlier steps alone, and no product for a sum that is on its
    way: a scheduler is free to run each transfer beside a product."""
    t, shards = 4, MESHES["4"]
    operands, _ = draw(np.random.default_rng(0), shape, shards)
    jaxpr = jax.make_jaxpr(shape.on(make_mesh(shards), implementation=name))(*operands)
    made_by = {}  # variable -> all transfers and products that it depends on
    waits = {"ppermute": [], "dot_general": []}  # for each in order, how many of the other kind it waits for
    for number, equation in enumerate(equations(jaxpr.jaxpr)):
        kind = equation.primitive.name
        before = set().union(*(made_by.get(v, set()) for v in equation.invars if hasattr(v, "count")))
        if kind in waits:
            waits[kind].append(sum(other != kind for _, other in before))
            before = before | {(number, kind)}
        made_by |= dict.fromkeys(equation.outvars, before)
    lanes = len(waits["ppermute"]) // (t - 1)
    assert lanes == (2 if name == "ring_bidirectional" else 1)
    if shape.operation == "all_gather_matmul":
        products = lanes * len(shape.columns)  # of a step
        assert all(n <= k // lanes * products for k, n in enumerate(waits["ppermute"])), waits
    else:
        assert waits["dot_general"] == [0] * t * lanes, waits


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize("t", DEVICES)
@pytest.mark.parametrize("shape", [GPU["qkv"], GPU["scatter_6144"]], ids=lambda shape: shape.operation)
def test_ring_overlaps_as_compiled_for_a_gpu(shape, t):
    """Left to itself XLA merges the products of all steps into one, behind all transfers, or sends rows all
    the way around before it multiplies any."""
    mesh = make_mesh({"tensor": t})
    function = functools.partial(run, shape.on(mesh, implementation="ring", platform="gpu"))
    lowered = aot.lower(jax.jit(function), *shape.arrays(mesh, jnp.bfloat16))
    hlo = aot.compile_for(lowered, aot.target("h200"), t).hlo
    marks = re.findall(r" (collective-permute(?:-start|-done)?)\(|__cublas(\$)lt", hlo[hlo.index("ENTRY") :])
    scheduled = "".join(
        {"-start": "(", "-done": ")"}.get(name[18:], "sync") if name else "x" for name, _ in marks
    )
    assert scheduled.count("(") == scheduled.count(")") >= 2 * (t - 1), scheduled
    assert scheduled.count("x") == 3 * t, scheduled
    assert "()" not in scheduled and "sync" not in scheduled, scheduled


@slow_but_for(
    *(f"{name}-float32-4" for name in IMPLEMENTATIONS),
    name=IMPLEMENTATIONS,
    dtype={"float32": jnp.float32, "bfloat16": jnp.bfloat16},
    axes={name: MESHES[name] for name in ("4", "8")},
)
def test_repeats_are_equal_bit_for_bit(name, dtype, axes):
    for shape in OPERATIONS.values():
        operands, cotangents = draw(np.random.default_rng(fresh_seed()), shape, axes, dtype)
        function = shape.on(make_mesh(axes), implementation=name)
        first, *others = (run(function, operands, cotangents) for _ in range(5))
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, first, other)


def test_automatic_choice():
    names = set(collective_matmul.OPERATION.names)
    for platform, first in (
        ("cpu", "reference"),
        ("cuda", "reference"),
        ("rocm", "reference"),
        ("tpu", "ring"),
    ):
        tried = collective_matmul.automatic(platform)
        assert set(tried) <= names and first in tried
    forward, _ = primitives(CPU["scatter"], 4)
    assert "ppermute" not in forward and "reduce_scatter" in forward
    forward, backward = primitives(CPU["scatter"], 4, platform="tpu")
    assert "ppermute" in forward and "ppermute" in backward


def test_what_is_refused():
    x, w = jnp.zeros((8, 4)), jnp.zeros((4, 6))

    mesh = make_mesh(MESHES["2"])

    def gather(*arguments, **options):
        return Shape("all_gather_matmul", 0, 0, arguments[1:]).on(mesh, **options)(*arguments)

    def scatter(*arguments, **options):
        return Shape("matmul_reduce_scatter", 0, 0, ()).on(mesh, **options)(*arguments)

    with pytest.raises(ValueError, match=r"shapes do not fit: x \(4, 4\), weights \[\(6, 2\)\]"):
        gather(x, w.T)
    with pytest.raises(ValueError, match=r"shapes do not fit: x \(4, 4\), weights \[\]"):
        gather(x)
    with pytest.raises(ValueError, match=r"shapes do not fit: y \(8, 2\), w \(3, 4\)"):
        scatter(x, w.T)
    with pytest.raises(ValueError, match=r"all float32 or all bfloat16, got \['float32', 'bfloat16'\]"):
        gather(x, w.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"all float32 or all bfloat16, got \['int32', 'int32'\]"):
        scatter(x.astype(jnp.int32), w.astype(jnp.int32))
    with pytest.raises(ValueError, match="7 rows do not divide by the 2 shards of axis 'tensor'"):
        scatter(x[:7], w)
    with pytest.raises(ValueError, match=r"no implementation 'nccl'; there are .*ring, .*reference"):
        gather(x, w, implementation="nccl")
    with pytest.raises(ValueError, match="no implementation 'nccl'"):
        jax.grad(lambda x: jnp.sum(scatter(x, w, backward="nccl")[0]))(x)


def test_peer_memory_needs_one_process(monkeypatch):
    dispatch.require_one_process()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(dispatch.Unsupported, match="needs every device in one process, found 2 processes"):
        dispatch.require_one_process()


def test_hopper_alone(monkeypatch):
    require = functools.partial(dispatch.require_nvidia, "gpu", (9, 0), below=(10, 0))
    require()  # no GPU here: what is traced is lowered for another machine
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for found in ((8, 0), (10, 0), None):
        monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda found=found: found)
        with pytest.raises(dispatch.Unsupported, match=r">= 9\.0 and < 10\.0, found"):
            require()
    monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda: (9, 0))
    require()
    with pytest.raises(dispatch.Unsupported, match=r">= 9\.0 and < 10\.0, found tpu"):
        dispatch.require_nvidia("tpu", (9, 0), below=(10, 0))


# Its kernels take whole tiles; these have several blocks, and rows of a shard that halve and that do not.
TPU = {
    "gather": Shape("all_gather_matmul", 64, 256, (512, 512)),
    "gather_one_way": Shape("all_gather_matmul", 32, 128, (512,)),
    "scatter": Shape("matmul_reduce_scatter", 64, 512, (256,)),
    "scatter_one_way": Shape("matmul_reduce_scatter", 32, 512, (128,)),
}
TPU_OPTIONS = {"implementation": "mosaic_tpu", "platform": "tpu"}


def tpu_mesh(axes: dict[str, int]) -> AbstractMesh:
    """Returns a mesh of TPUs for what is traced, in the place of the CPUs that it is run or lowered on."""
    return make_mesh(axes).abstract_mesh.update(abstract_device=AbstractDevice("TPU v5p", 1, "tpu"))


@pytest.fixture
def simulated_tpu(request, monkeypatch):
    """Kernels for TPUs run on CPUs here. When transfers happen: as late as possible, as early as possible."""
    monkeypatch.setattr(mosaic_tpu, "BLOCK", 128)
    jax.clear_caches()  # the interpreter takes the order of the axes from a cache that does not heed it
    parameters = pltpu.InterpretParams(detect_races=True, dma_execution_mode=request.param)
    with pltpu.force_tpu_interpret_mode(parameters):
        yield
    pltpu.reset_tpu_interpret_mode_state()


late, early = (pytest.mark.parametrize("simulated_tpu", [m], indirect=True) for m in ("on_wait", "eager"))
late_and_early = pytest.mark.parametrize("simulated_tpu", ["on_wait", "eager"], indirect=True)


def run_on_simulated_tpu(shape: Shape, axes, dtype=jnp.float32):
    """Returns what was found, what was expected, and whether there were races."""
    operands, cotangents = draw(np.random.default_rng(fresh_seed()), shape, axes, dtype)
    # The interpreter itself cannot be traced with check_vma=True.
    function = shape.on(tpu_mesh(axes), check_vma=False, **TPU_OPTIONS)
    found = jax.block_until_ready(run(function, operands, cotangents))
    return found, expected(operands, cotangents), interpret_pallas_call.races.races_found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("simulated_tpu", "axes"),
    [("on_wait", {"tensor": 4}), ("eager", {"data": 2, "tensor": 2})],
    indirect=["simulated_tpu"],
    ids=str,
)
@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_simulated_tpu(operation, axes, simulated_tpu):
    found, values, races = run_on_simulated_tpu(TPU[operation], axes)
    assert not races
    assert_close(found, values, CPU_TOLERANCE)


@late
@pytest.mark.parametrize("operation", ["gather_one_way", "scatter_one_way"])
def test_simulated_tpu_one_way(operation, simulated_tpu):
    found, values, races = run_on_simulated_tpu(TPU[operation], {"tensor": 2, "data": 2})
    assert not races
    assert_close(found, values, CPU_TOLERANCE)


@pytest.mark.slow
@early
@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_simulated_tpu_in_half_precision(operation, simulated_tpu):
    found, values, races = run_on_simulated_tpu(TPU[operation], {"tensor": 2}, jnp.bfloat16)
    assert not races
    assert_close(found, values, HALF_PRECISION_TOLERANCE)


@pytest.mark.slow
@late_and_early
@pytest.mark.parametrize("operation", ["gather_one_way", "scatter_one_way"])
def test_a_wait_left_out_is_found(operation, simulated_tpu, monkeypatch):
    """The tests above would notice a kernel that reads what is still on its way."""
    send = mosaic_tpu._send
    unawaited = types.SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(mosaic_tpu, "_send", lambda *arguments: send(*arguments) and unawaited)
    found, values, races = run_on_simulated_tpu(TPU[operation], {"tensor": 2})
    errors = jax.tree.leaves(jax.tree.map(relative_error, found, values))
    assert races or max(errors) > CPU_TOLERANCE


@slow_but_for(
    *(f"{shape}-bfloat16-data2_tensor2-vma" for shape in ("qkv_apart", "down")),
    slow=[
        f"{shape}-{rest}"
        for shape in ("qkv_apart", "down")
        for rest in ("float32-4-vma", "bfloat16-4-no_vma")
    ],
    shape={name: GPU[name] for name in ("qkv_apart", "down")},
    dtype={"bfloat16": jnp.bfloat16, "float32": jnp.float32},
    axes={name: MESHES[name] for name in ("4", "data2_tensor2")},
    check_vma={"vma": True, "no_vma": False},
)
def test_lowers_for_a_tpu(shape, dtype, axes, check_vma):
    function = functools.partial(run, shape.on(tpu_mesh(axes), check_vma=check_vma, **TPU_OPTIONS))
    traced = jax.jit(function).trace(*shape.arrays(make_mesh(axes), dtype))
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call") == 2


@pytest.mark.compiles_for("tpu")
@pytest.mark.parametrize(
    ("shape", "dtype", "chips", "sizes", "name"),
    [  # each kernel, dtype and chip at least once; the ring once, as its products and permutes are XLA's own
        ("qkv_apart", jnp.bfloat16, "v5e:2x2", (1, 4), "mosaic_tpu"),
        ("down", jnp.float32, "v6e:2x2", (2, 2), "mosaic_tpu"),
        ("down", jnp.bfloat16, "v5p:2x2x1", (1, 4), "ring"),
    ],
)
def test_compiles_for_a_tpu(shape, dtype, chips, sizes, name):
    """By the TPU's own compiler, which needs no TPU."""
    devices, shape = topologies.get_topology_desc(chips, "tpu").devices, GPU[shape]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), ("data", "tensor"))
    function = functools.partial(run, shape.on(mesh, implementation=name, platform="tpu"))
    compiled = jax.jit(function).lower(*shape.arrays(mesh, dtype)).compile()
    assert ("tpu_custom_call" in compiled.as_text()) == (name == "mosaic_tpu")


def test_what_a_tpu_kernel_refuses():
    def trace(shape, axes, platform="tpu"):
        mesh = make_mesh(axes)
        function = shape.on(mesh, implementation="mosaic_tpu", platform=platform)
        jax.eval_shape(function, *shape.arrays(mesh, jnp.float32)[0])

    with pytest.raises(dispatch.Unsupported, match="mosaic_tpu: needs a TPU, found cpu"):
        trace(TPU["gather"], MESHES["4"], platform=None)
    with pytest.raises(dispatch.Unsupported, match="needs 2 devices on axis 'tensor', found 1"):
        trace(TPU["gather"], {"data": 2, "tensor": 1})
    for shape in (CPU["three_matrices"], CPU["scatter"]):
        with pytest.raises(dispatch.Unsupported, match=r"rows .* multiples of 8 and all other .* of 128"):
            trace(shape, MESHES["2"])
