"""No kernel may use NVLink multicast: it is unsupported on machines that this package is meant for.

Each is lowered for CUDA, which needs no GPU, forward and backward, and the text is searched. The list grows
by one entry for each operation and, for those that exchange data between devices, for each kind of mesh.
"""

import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cases import named, slow_but_for
from jax.sharding import PartitionSpec

from pallas_kernels import collective_matmul
from pallas_kernels.adamw_8bit import Adam, Scalars, quantise, update
from pallas_kernels.adamw_8bit.shapes import GPU as MOMENTS
from pallas_kernels.attention import attention, find_segments
from pallas_kernels.attention.shapes import GPU
from pallas_kernels.collective_matmul import shapes as collective_shapes
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_matmul.shapes import GPU as GROUPED
from pallas_kernels.linear_cross_entropy import linear_cross_entropy
from pallas_kernels.linear_cross_entropy.shapes import GPU as LINEAR_CROSS_ENTROPY
from pallas_kernels.rms_norm import rms_norm_residual, rms_norm_rotary
from pallas_kernels.routing import combine, dispatch, dispatch_weights, route, sort_assignments
from pallas_kernels.weighted_swiglu import weighted_swiglu

FORBIDDEN = ("multimem", "symmetric_memory_parameters")


def lower_attention(shape, implementation: str, devices: int) -> str:
    """Returns the lowered value and gradient, sharded by rows as a model shards it where devices > 1."""
    B, T, H, K, C = shape.rows * devices, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim
    q, k = (jax.ShapeDtypeStruct((B, T, heads, C), jnp.bfloat16) for heads in (H, K))
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def local(q, k, v, segments):
        return attention(q, k, v, segments, implementation=implementation, platform="gpu")

    def loss(q, k, v, ids):
        run = local
        if devices > 1:
            mesh, rows = (
                jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,)),
                PartitionSpec("data"),
            )
            run = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)
        return jnp.sum(run(q, k, v, find_segments(ids, shape.max_segments)).astype(jnp.float32))

    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(q, k, k, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("implementation", ["cudnn_packed", "xla", "reference"])
@pytest.mark.parametrize("name", ["llama3_8b", "llama3_8b_causal"])
def test_attention(name, implementation, devices):
    if devices > jax.device_count():
        pytest.skip(f"needs {devices} devices")
    text = lower_attention(GPU[name], implementation, devices)
    assert (text.count("@__cudnn$fmha") > 0) == (implementation == "cudnn_packed")
    assert not [word for word in FORBIDDEN if word in text]


TRITON = (
    *("attention", "linear_cross_entropy", "adamw_8bit", "rms_norm"),
    *("grouped_matmul", "routing", "weighted_swiglu", "cast_transpose"),
)


@pytest.mark.parametrize("operation", TRITON)
def test_triton_kernels_are_all_triton(operation):
    """Lowering them needs a GPU's own compiler. Triton makes such instructions of inline assembly and foreign
    functions alone."""
    package = importlib.util.find_spec(f"pallas_kernels.{operation}")
    source = Path(package.origin).with_name("triton_kernels.py").read_text()
    assert "@triton.jit" in source
    assert not [
        word for word in (*FORBIDDEN, "asm", "extern", "import triton.experimental") if word in source
    ]


@pytest.mark.parametrize("mesh_shape", [(1, 1), (2, 1), (1, 2), (2, 4)], ids=str)
def test_linear_cross_entropy(mesh_shape):
    """Rows over the first axis of the mesh, the vocabulary over the second."""
    if mesh_shape[0] * mesh_shape[1] > jax.device_count():
        pytest.skip(f"needs {mesh_shape[0] * mesh_shape[1]} devices")
    shape = LINEAR_CROSS_ENTROPY["llama3_8b"]
    B, T, D, V = shape.rows * mesh_shape[0], shape.sequence, shape.embed, shape.vocabulary
    mesh = jax.make_mesh(mesh_shape, ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    rows = PartitionSpec("data")

    def local(*arguments):
        return jax.lax.psum(linear_cross_entropy(*arguments, axis_name="tensor")[0], "data")

    def loss(*arguments):
        if mesh.size == 1:
            return linear_cross_entropy(*arguments)[0]
        in_specs = rows, PartitionSpec(None, "tensor"), rows, rows
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())(*arguments)

    arguments = (
        jax.ShapeDtypeStruct(*x)
        for x in (
            *(((B, T, D), jnp.bfloat16), ((D, V), jnp.float32)),
            *(((B, T), jnp.int32), ((B, T), jnp.float32)),
        )
    )
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("all_reduce" in text) == (mesh.size > 1)
    assert not [word for word in FORBIDDEN if word in text]


def lower_collective_matmul(shape, axes: dict[str, int], implementation: str, platform: str) -> str:
    """Returns the lowered values and gradients on a mesh of these axes."""
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), (jax.sharding.AxisType.Auto,) * len(axes))
    function = shape.on(mesh, implementation=implementation, platform=platform)

    def both(operands, cotangents):
        values, pull = jax.vjp(function, *operands)
        return values, pull(cotangents)

    traced = jax.jit(both).trace(*shape.arrays(mesh, jnp.bfloat16))
    return traced.lower(lowering_platforms=(platform,)).as_text()


COLLECTIVE_SHAPES = collective_shapes.GPU | collective_shapes.UNTUNED
COLLECTIVE_MESHES = ({"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"tensor": 2, "data": 4})
# What it is that exchanges data, for each of those that send by collectives of XLA.
COLLECTIVES = {
    "ring": "collective_permute",
    "ring_bidirectional": "collective_permute",
    "reference": "all_gather",
}


COLLECTIVE_IMPLEMENTATIONS = [name for name in collective_matmul.OPERATION.names if name != "mosaic_tpu"]


@slow_but_for(
    *(
        f"{implementation}-{shape}-{COLLECTIVE_MESHES[2]}"
        for implementation in COLLECTIVE_IMPLEMENTATIONS
        for shape in ("qkv", "down")
    ),
    slow=[  # every shape on one mesh, and one of each operation on the others
        f"{implementation}-{shape}-{axes}"
        for implementation in COLLECTIVE_IMPLEMENTATIONS
        for axes in COLLECTIVE_MESHES
        for shape in (COLLECTIVE_SHAPES if axes == COLLECTIVE_MESHES[0] else ("qkv", "down"))
    ],
    implementation=named(*COLLECTIVE_IMPLEMENTATIONS),
    shape=COLLECTIVE_SHAPES,
    axes=named(*COLLECTIVE_MESHES),
)
def test_collective_matmul(implementation, shape, axes):
    text = lower_collective_matmul(shape, axes, implementation, "cuda")
    if implementation in COLLECTIVES:
        assert COLLECTIVES[implementation] in text
    else:
        assert text.count("@mosaic_gpu_v2") == 2  # of all products, those that exchange nothing are XLA's
    assert not [word for word in FORBIDDEN if word in text]


def lower_grouped_matmul(shape, implementation: str) -> str:
    """Returns the lowered product and its gradients, and the sums of a matrix's gradient into a buffer."""
    x, y = (jax.ShapeDtypeStruct((shape.rows, n), jnp.bfloat16) for n in (shape.columns, shape.results))
    w = jax.ShapeDtypeStruct((shape.groups, shape.columns, shape.results), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    into = jax.ShapeDtypeStruct(w.shape, jnp.float32)
    how = {"implementation": implementation, "platform": "gpu"}

    def both(x, w, y, sizes, into):
        value, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, **how), x, w)
        return value, pull(y), grouped_outer(x, y, sizes, into, **how)

    traced = jax.jit(both).trace(x, w, y, sizes, into)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", [name for name in GROUPED if name.startswith("qwen3_30b")])
def test_grouped_matmul(name):
    """What is not Triton's. test_grouped_matmul_hopper has thread blocks that share what they load."""
    text = lower_grouped_matmul(GROUPED[name], "mosaic_gpu")
    assert text.count("@mosaic_gpu_v2") == 4
    assert not [word for word in FORBIDDEN if word in text]


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
@pytest.mark.parametrize("implementation", COLLECTIVES)
@pytest.mark.parametrize(
    "shape", [COLLECTIVE_SHAPES["qkv_apart"], COLLECTIVE_SHAPES["down"]], ids=lambda s: s.operation
)
def test_collective_matmul_lowers_for(platform, implementation, shape):
    text = lower_collective_matmul(shape, {"data": 2, "tensor": 4}, implementation, platform)
    assert COLLECTIVES[implementation] in text


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_portable_forms_lower_for(platform):
    """What is left where there is no NVIDIA GPU: forms in plain JAX."""
    shape = GPU["llama3_8b"]
    q, k = (
        jax.ShapeDtypeStruct((shape.rows, shape.sequence, heads, shape.head_dim), jnp.bfloat16)
        for heads in (shape.heads, shape.kv_heads)
    )
    ids = jax.ShapeDtypeStruct((shape.rows, shape.sequence), jnp.int32)

    def attend(q, k, v, ids):
        segments = find_segments(ids, shape.max_segments)
        return jnp.sum(attention(q, k, v, segments, implementation="xla").astype(jnp.float32))

    def adamw(x):
        moments = (quantise(jnp.abs(x), kind) for kind in ("signed", "unsigned"))
        scalars = Scalars(*(jnp.float32(1),) * 4, jnp.asarray(True))
        return update(x, x, None, *moments, None, scalars, Adam(0.9, 0.95, 1e-8, 0.1), implementation="xla")

    tokens = LINEAR_CROSS_ENTROPY["llama3_8b"]
    B, T, D, V = tokens.rows, tokens.sequence, tokens.embed, tokens.vocabulary
    loss_arguments = (
        jax.ShapeDtypeStruct(*x)
        for x in (
            *(((B, T, D), jnp.bfloat16), ((D, V), jnp.float32)),
            *(((B, T), jnp.int32), ((B, T), jnp.float32)),
        )
    )
    moments = jax.ShapeDtypeStruct(MOMENTS["up"], jnp.float32)
    norm_scale = jax.ShapeDtypeStruct((64,), jnp.float32)

    def norms(x, scale):
        how, angle = {"epsilon": 1e-5, "implementation": "xla"}, jnp.ones((4, 8, 32))
        both = *rms_norm_residual(x, scale, **how), rms_norm_rotary(x, scale, angle, angle, **how)
        return sum(jnp.sum(each.astype(jnp.float32)) for each in both)

    experts = GROUPED["qwen3_30b_up"]
    x, w, logits = (
        jax.ShapeDtypeStruct(dims, dtype)
        for dims, dtype in (
            ((experts.rows // 8, experts.columns), jnp.bfloat16),
            ((experts.groups, experts.columns, experts.results), jnp.bfloat16),
            ((experts.rows // 8, experts.groups), jnp.float32),
        )
    )

    def mixture(x, w, logits):
        how = {"implementation": "xla"}
        valid = jnp.ones(len(x), bool)
        routed = route(logits, valid, top_k=8, score="softmax", normalise=True, **how)
        order = sort_assignments(routed.ids_NK, len(w), **how)
        rows = grouped_matmul(dispatch(x, order, 8, **how), w, order.sizes_E, **how)
        rows = rows.reshape(len(rows), 2, -1)
        rows = weighted_swiglu(rows, dispatch_weights(routed.weights_NK, order), **how)
        return jnp.sum(combine(rows, order, len(x), **how).astype(jnp.float32))

    for function, arguments in (
        (jax.grad(mixture, (0, 1, 2)), (x, w, logits)),
        (jax.grad(attend, (0, 1, 2)), (q, k, k, ids)),
        (jax.grad(lambda *a: linear_cross_entropy(*a, implementation="xla")[0], (0, 1)), loss_arguments),
        (adamw, (moments,)),
        (jax.grad(norms, (0, 1)), (jax.ShapeDtypeStruct((4, 8, 2, 64), jnp.bfloat16), norm_scale)),
    ):
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        assert "custom_call @cudnn" not in text and "triton" not in text


def test_every_operation_with_kernels_is_here():
    package = Path(importlib.util.find_spec("pallas_kernels").origin).parent
    plain = {"__init__.py", "reference.py", "shapes.py"}
    for folder in (path.parent for path in package.glob("*/__init__.py")):
        if {path.name for path in folder.glob("*.py")} - plain:
            here = f"test_{folder.name}" in globals() or folder.name in TRITON
            assert here, f"{folder.name} has kernels and no test here"


def test_the_table_of_platforms_names_tests_that_exist():
    tests = Path(__file__).parent
    named = re.findall(
        r"`((?:tests/\w+/)?test_\w+\.py)::(test_\w+)`",
        (tests.parents[1] / "docs" / "lab" / "kernels.md").read_text(),
    )
    assert len(named) > 10
    for file, test in named:
        path = tests.parents[1] / file if "/" in file else tests / file
        assert f"def {test}(" in path.read_text(), f"docs/lab/kernels.md names {file}::{test}"
