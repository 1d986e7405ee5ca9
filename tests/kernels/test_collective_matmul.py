"""The contract of collective matrix products: values and gradients of all implementations on all meshes, what
they send, that transfers and products do not wait for each other, repeats, and what is refused."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import collective_matmul, dispatch
from pallas_kernels.collective_matmul.shapes import CPU, DEVICES, GPU, UNTUNED, Shape
from pallas_kernels.testing import CPU_TOLERANCE, assert_close, fresh_seed, normal

HALF_PRECISION_TOLERANCE = 1e-2

MESHES = {
    "2": {"tensor": 2},
    "4": {"tensor": 4},
    "8": {"tensor": 8},
    "data2_tensor2": {"data": 2, "tensor": 2},
    "data2_tensor4": {"data": 2, "tensor": 4},
    "tensor4_data2": {"tensor": 4, "data": 2},
}
every_mesh = pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
every_implementation = pytest.mark.parametrize("name", ["reference", "ring", "ring_bidirectional"])
rings = pytest.mark.parametrize("name", ["ring", "ring_bidirectional"])


def make_mesh(axes: dict[str, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def sharded(operation: str, axes: dict[str, int], check_vma=True, **options):
    """Returns the operation over whole arrays (x, *weights) -> tuple; any axis but "tensor" splits rows."""
    others = tuple(name for name in axes if name != "tensor")
    all_rows, columns = PartitionSpec((*others, "tensor")), PartitionSpec(None, "tensor")

    def gather(x, *weights):
        return collective_matmul.all_gather_matmul(x, weights, axis_name="tensor", **options)

    def scatter(y, w):
        return (collective_matmul.matmul_reduce_scatter(y, w, axis_name="tensor", **options),)

    def whole(x, *weights):
        if operation == "all_gather_matmul":
            local, specs = gather, (all_rows, *[columns] * len(weights))
            out = PartitionSpec(others or None, "tensor")
        else:
            local, specs = scatter, (PartitionSpec(others or None, "tensor"), PartitionSpec("tensor"))
            out = all_rows
        mesh = make_mesh(axes)
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)(
            x, *weights
        )

    return whole


def draw(rng: np.random.Generator, shape: Shape, axes: dict[str, int], dtype=jnp.float32):
    """Returns whole operands, with rows for each shard of the other axes, and cotangents of the result."""
    rows = shape.rows * axes.get("data", 1)
    x = normal(rng, (rows, shape.contracted), dtype)
    weights = [normal(rng, (shape.contracted, columns), dtype) for columns in shape.columns]
    return (x, *weights), tuple(normal(rng, (rows, columns), dtype) for columns in shape.columns)


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
    found = run(sharded(shape.operation, axes, **options), operands, cotangents)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    assert_close(found, expected(operands, cotangents), tolerance)


@every_mesh
@every_implementation
@pytest.mark.parametrize("shape", [CPU["three_matrices"], CPU["scatter"]], ids=lambda shape: shape.operation)
def test_values_and_gradients(shape, name, axes):
    check(shape, axes, implementation=name)


@every_implementation
@pytest.mark.parametrize("shape", CPU.values(), ids=CPU)
def test_odd_shapes(shape, name):
    check(shape, {"tensor": 8}, implementation=name)


@every_implementation
@pytest.mark.parametrize("shape", [CPU["three_matrices"], CPU["scatter"]], ids=lambda shape: shape.operation)
def test_without_varying_axes(shape, name):
    """check_vma=False, where shard_map adds what the replicated weights' gradients lack."""
    check(shape, MESHES["data2_tensor4"], implementation=name, check_vma=False)


@every_implementation
@pytest.mark.parametrize("t", [2, 8])
@pytest.mark.parametrize("shape", [CPU["three_matrices"], CPU["scatter"]], ids=lambda shape: shape.operation)
def test_half_precision(shape, t, name):
    check(shape, {"tensor": t}, jnp.bfloat16, HALF_PRECISION_TOLERANCE, implementation=name)


@rings
@pytest.mark.parametrize("t", DEVICES)
@pytest.mark.parametrize("shape", (GPU | UNTUNED).values(), ids=GPU | UNTUNED)
def test_scaled_benchmark_shapes(shape, t, name):
    check(shape.scaled(64), {"tensor": t}, implementation=name)


@every_implementation
@pytest.mark.parametrize("shape", [CPU["three_matrices"], CPU["scatter"]], ids=lambda shape: shape.operation)
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
    gather = sharded("all_gather_matmul", axes, implementation="ring")
    scatter = sharded("matmul_reduce_scatter", axes, implementation="ring")

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
    function = sharded(shape.operation, axes, **options)
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


def test_forward_and_backward_are_chosen_apart():
    forward, backward = primitives(CPU["one_matrix"], 4, implementation="reference", backward="ring")
    assert "ppermute" not in forward and "all_gather" in forward
    assert "ppermute" in backward and "all_gather" not in backward
    check(CPU["one_matrix"], MESHES["4"], implementation="ring", backward="reference")


@rings
@pytest.mark.parametrize("shape", [CPU["three_matrices"], CPU["scatter"]], ids=lambda shape: shape.operation)
def test_transfers_and_products_do_not_wait_for_each_other(shape, name):
    """No gathered row waits for a product, and no product for a sum that is on its way: a scheduler is free
    to run each transfer beside a product."""
    operands, _ = draw(np.random.default_rng(0), shape, MESHES["4"])
    jaxpr = jax.make_jaxpr(sharded(shape.operation, MESHES["4"], implementation=name))(*operands)
    made_by = {}  # variable -> names of all operations that it depends on
    late, early = (
        ("ppermute", "dot_general") if shape.operation == "all_gather_matmul" else ("dot_general", "ppermute")
    )
    seen = 0
    for equation in equations(jaxpr.jaxpr):
        before = set().union(*(made_by.get(v, set()) for v in equation.invars if hasattr(v, "count")))
        for variable in equation.outvars:
            made_by[variable] = before | {equation.primitive.name}
        if equation.primitive.name == late:
            seen += 1
            assert early not in before
    assert seen >= 3


@every_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_repeats_are_equal_bit_for_bit(dtype, name):
    for shape in (CPU["three_matrices"], CPU["scatter"]):
        operands, cotangents = draw(np.random.default_rng(fresh_seed()), shape, MESHES["8"], dtype)
        function = sharded(shape.operation, MESHES["8"], implementation=name)
        first, *others = (run(function, operands, cotangents) for _ in range(5))
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, first, other)


def test_automatic_choice():
    names = set(collective_matmul.implementations())
    for platform, first in (("cpu", "reference"), ("cuda", "ring"), ("rocm", "ring"), ("tpu", "ring")):
        tried = collective_matmul.automatic(platform)
        assert set(tried) <= names and first in tried
    forward, _ = primitives(CPU["scatter"], 4)
    assert "ppermute" not in forward and "reduce_scatter" in forward
    forward, backward = primitives(CPU["scatter"], 4, platform="cuda")
    assert "ppermute" in forward and "ppermute" in backward


def test_what_is_refused():
    x, w = jnp.zeros((8, 4)), jnp.zeros((4, 6))

    def gather(*arguments, **options):
        return sharded("all_gather_matmul", MESHES["2"], **options)(*arguments)

    def scatter(*arguments, **options):
        return sharded("matmul_reduce_scatter", MESHES["2"], **options)(*arguments)

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
