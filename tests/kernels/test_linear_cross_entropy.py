"""The contract of linear cross-entropy: values and gradients, odd inputs, split vocabularies, one product
for the logits, and memory."""

import functools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxthru.runtime import aot
from pallas_kernels import dispatch
from pallas_kernels.linear_cross_entropy import linear_cross_entropy, triton, xla
from pallas_kernels.linear_cross_entropy.shapes import CPU, GPU, Shape
from pallas_kernels.testing import CPU_TOLERANCE, GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

NAMES = ("objective", "losses", "log_z", "d_hidden", "d_matrix")
needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, needs_gpu])


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 16 tokens for these shapes, so that there are many and one is not full."""
    for form in (xla, triton):
        monkeypatch.setattr(form, "LOGITS_BYTES", 0)
    monkeypatch.setattr(triton, "LOGITS_BYTES_OF_MANY", 0)
    monkeypatch.setattr(xla, "TILE", 16)


KERNELS = "losses_and_gradient", "logits_gradient"


@pytest.fixture
def triton_calls(monkeypatch):
    """Returns a function that has another one called in the place of `jax_triton.triton_call`."""

    def set_call(triton_call):
        stub = types.SimpleNamespace(triton_call=triton_call)
        kernels = types.SimpleNamespace(**{name: name for name in KERNELS})
        monkeypatch.setattr(triton, "load_triton", lambda _: (stub, kernels))

    return set_call


def draw(rng: np.random.Generator, shape: Shape, dtype=jnp.float32):
    """Returns hidden, a float32 matrix, targets, and weights of which a third are 0."""
    B, T = shape.rows, shape.sequence
    hidden = normal(rng, (B, T, shape.embed), dtype)
    matrix = normal(rng, (shape.embed, shape.vocabulary), jnp.float32) * shape.embed**-0.5
    targets = jnp.asarray(rng.integers(0, shape.vocabulary, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T), np.float32) * (rng.random((B, T)) < 0.67))
    return hidden, matrix, targets, weights


def run(hidden, matrix, targets, weights, **options):
    """Returns values and gradients; compiled anew each time, for tests change the size of a chunk."""

    def loss(hidden, matrix):
        objective, *by_token = linear_cross_entropy(hidden, matrix, targets, weights, **options)
        return objective, by_token

    (objective, by_token), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, matrix)
    return dict(zip(NAMES, (objective, *by_token, *gradients), strict=True))


def expected(hidden, matrix, targets, weights, z_loss=0.0):
    """Returns the reference's in float32, a row at a time: all logits would fill a GPU."""
    rows = []
    for b in range(len(targets)):
        one = slice(b, b + 1)
        arguments = hidden[one].astype(jnp.float32), matrix, targets[one], weights[one]
        rows.append(run(*arguments, z_loss=z_loss, implementation="reference"))
    joined = {name: np.concatenate([row[name] for row in rows]) for name in ("losses", "log_z", "d_hidden")}
    return joined | {name: sum(np.asarray(row[name]) for row in rows) for name in ("objective", "d_matrix")}


@pytest.mark.parametrize("shape", CPU.values(), ids=CPU)
def test_agrees_with_reference(shape, small_chunks):
    arguments = draw(np.random.default_rng(fresh_seed()), shape)
    found = run(*arguments, z_loss=shape.z_loss, implementation="xla")
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.float32)}
    assert_close(found, expected(*arguments, shape.z_loss), CPU_TOLERANCE)


def test_half_precision(small_chunks):
    half_precision(CPU["odd"], "xla")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", ["small", "odd"])
def test_half_precision_on_gpu(name, implementation):
    half_precision(GPU[name], implementation)


def half_precision(shape: Shape, implementation: str) -> None:
    """Fails unless bfloat16 hidden vectors give the reference's values and gradients of a rounded matrix."""
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), shape, jnp.bfloat16)
    options = {"z_loss": shape.z_loss, "implementation": implementation}
    found = run(hidden, matrix, targets, weights, **options)
    assert found["d_hidden"].dtype == jnp.bfloat16 and found["d_matrix"].dtype == jnp.float32
    rounded = matrix.astype(jnp.bfloat16).astype(jnp.float32)
    assert_close(found, expected(hidden, rounded, targets, weights, shape.z_loss), GPU_TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_matrix_may_lie_as_an_embedding_table(implementation, small_chunks):
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), CPU["z_loss"])
    found = run(hidden, matrix.T, targets, weights, layout="VD", implementation=implementation)
    found["d_matrix"] = found["d_matrix"].T
    assert_close(found, expected(hidden, matrix, targets, weights), CPU_TOLERANCE)
    text = jax.jit(
        jax.grad(lambda h, m: linear_cross_entropy(h, m, targets, weights, layout="VD")[0], (0, 1))
    )
    assert "stablehlo.transpose" not in text.lower(hidden, matrix.T).as_text()


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["DV", "VD"])
def test_tokens_of_weight_0_may_be_left_out(layout, share, small_chunks):
    """Whatever stands there, and however many are left."""
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), CPU["z_loss"])
    weights = jnp.where(np.random.default_rng(fresh_seed()).random(weights.shape) < share, weights, 0.0)
    if layout == "VD":
        matrix = matrix.T
    arguments, options = (matrix, targets, weights), {"z_loss": 0.1, "layout": layout, "weighted_only": True}
    found = run(jnp.where(weights[..., None] == 0, jnp.nan, hidden), *arguments, **options)
    wanted = run(hidden, *arguments, **options, implementation="reference")
    assert_close(found, wanted, CPU_TOLERANCE)
    plain = linear_cross_entropy(hidden, *arguments, **options)
    assert_close(plain, tuple(found[name] for name in NAMES[:3]), CPU_TOLERANCE)


def test_the_loop_ends_with_the_weighted_tokens(small_chunks):
    """It has one product of logits a chunk, as the one over all has, and no number of chunks beforehand."""
    arguments = draw(np.random.default_rng(0), CPU["even"])
    step = jax.grad(lambda *arguments: linear_cross_entropy(*arguments, weighted_only=True)[0], (0, 1))
    compiled = jax.jit(step).lower(*arguments).compile().as_text()
    assert str(jax.make_jaxpr(step)(*arguments)).count("dot_general[") == 3
    loops = [line for line in compiled.splitlines() if " while(" in line]
    assert any("known_trip_count" not in line for line in loops) and "scatter(" not in compiled


@pytest.mark.parametrize("weighted_only", [False, True])
def test_a_frozen_matrix_costs_no_product(weighted_only, small_chunks):
    """XLA leaves out of the first chunk, and of the loop over the others, what nobody reads after them."""
    shape = CPU["even"]
    arguments = draw(np.random.default_rng(0), shape)
    form = f" = f32[{shape.embed},{shape.vocabulary}]{{1,0}} dot("

    def products(*arguments_of: int) -> int:
        loss = lambda *arguments: linear_cross_entropy(*arguments, weighted_only=weighted_only)[0]  # noqa: E731
        return jax.jit(jax.grad(loss, arguments_of)).lower(*arguments).compile().as_text().count(form)

    assert products(0, 1) == (1 if weighted_only else 2) and products(0) == 0


def test_evaluation_forms_no_gradient(small_chunks):
    arguments = draw(np.random.default_rng(fresh_seed()), CPU["odd"])
    plain = linear_cross_entropy(*arguments, z_loss=0.1)
    both = run(*arguments, z_loss=0.1)
    assert_close(plain, tuple(both[name] for name in NAMES[:3]), CPU_TOLERANCE)
    once_and_in_a_loop = 2
    assert str(jax.make_jaxpr(linear_cross_entropy)(*arguments)).count("dot_general[") == once_and_in_a_loop


def test_logits_are_computed_once():
    """Three products a chunk: the logits, and the two gradients made of theirs."""
    arguments = draw(np.random.default_rng(0), CPU["even"])
    step = jax.value_and_grad(lambda h, m: linear_cross_entropy(h, m, *arguments[2:])[0], (0, 1))
    assert str(jax.make_jaxpr(step)(*arguments[:2])).count("dot_general[") == 3
    text = jax.jit(step).lower(*arguments[:2]).as_text()
    assert text.count("stablehlo.dot_general") == 3
    assert "scatter" not in text and "gather" not in text


def test_the_backward_pass_scales(small_chunks):
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), CPU["odd"])
    function = lambda h, m: linear_cross_entropy(h, m, targets, weights)[0]  # noqa: E731
    _, pullback = jax.vjp(function, hidden, matrix)
    once, thrice = pullback(jnp.float32(1)), pullback(jnp.float32(3))
    assert_close(thrice, jax.tree.map(lambda x: 3 * x, once), 1e-6)


def test_only_the_objective_has_a_gradient():
    arguments = draw(np.random.default_rng(fresh_seed()), CPU["even"])
    for implementation in ("xla", "reference"):
        function = functools.partial(linear_cross_entropy, implementation=implementation)
        by_token = jax.grad(lambda *a, f=function: sum(map(jnp.sum, f(*a)[1:])), (0, 1))
        of_weights = jax.grad(lambda w, *a, f=function: f(*a, w)[0])
        gradients = *by_token(*arguments), of_weights(arguments[3], *arguments[:3])
        assert not any(np.any(x) for x in gradients)


@pytest.mark.parametrize("implementation", ["xla", "reference", TRITON])
def test_odd_inputs(implementation, small_chunks):
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), CPU["odd"])
    plain = run(hidden, matrix, targets, weights, implementation=implementation)
    # A token whose weight is 0 counts for nothing.
    changed = jnp.where(weights[..., None] == 0, 5.0, hidden)
    other = run(changed, matrix, targets, weights, implementation=implementation)
    for name in ("objective", "d_matrix"):
        np.testing.assert_allclose(other[name], plain[name], rtol=1e-5, atol=1e-5)
    assert not np.any(np.asarray(other["d_hidden"])[np.asarray(weights) == 0])
    # Nothing but such tokens.
    masked = run(hidden, matrix, targets, weights * 0, implementation=implementation)
    assert masked["objective"] == 0 and not np.any(masked["d_hidden"]) and not np.any(masked["d_matrix"])
    # Logits whose exponential is beyond float32.
    huge = run(hidden * 1e4, matrix, targets, weights, implementation=implementation)
    assert all(np.isfinite(x).all() for x in huge.values()) and np.abs(huge["log_z"]).max() > 1e3
    # What is not finite shows, wherever it is.
    for bad in (jnp.nan, jnp.inf):
        broken = run(hidden.at[1, 5].set(bad), matrix, targets, weights, implementation=implementation)
        assert not np.isfinite(broken["objective"])


def test_chunks_fit():
    most = xla.LOGITS_BYTES
    assert xla.chunk_length(16_384, 128_256, 2, most) == 2048
    for tokens, vocabulary, C in ((16_384, 128_256, 3072), (32_768, 128_256, 4096), (10**6, 128_256, 4096)):
        room = triton.logits_bytes(tokens * vocabulary * 2, None)
        assert xla.chunk_length(tokens, vocabulary, 2, room) == C
        assert C * vocabulary * 2 <= 2 * most  # a plan of memory counts with xla's logits and gradient
    assert xla.chunk_length(16_384, 64_128, 2, most) == 4096  # a vocabulary split in two
    assert xla.chunk_length(100, 512, 4, most) == 100
    for tokens, vocabulary in ((16_384, 128_256), (8191, 151_936), (1_000_000, 32_000), (700, 10**7)):
        C = xla.chunk_length(tokens, vocabulary, 2, most)
        assert C % xla.TILE == 0
        assert C == xla.TILE or C * vocabulary * 2 <= most < (C + xla.TILE) * vocabulary * 2


def test_whole_logits_never_exist(monkeypatch):
    shape = CPU["benchmark"]
    N, V, D = shape.rows * shape.sequence, shape.vocabulary, shape.embed
    monkeypatch.setattr(xla, "LOGITS_BYTES", N * V * 4 // 8)
    hidden, matrix, targets, weights = draw(np.random.default_rng(0), shape)
    function = lambda h, m: linear_cross_entropy(h, m, targets, weights)[0]  # noqa: E731
    compiled = jax.jit(jax.grad(function, (0, 1))).lower(hidden, matrix).compile()
    assert f"[{N // 8},{V}]" in compiled.as_text() and f"[{N},{V}]" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < N * V * 4 + D * V * 4


def test_chunk_bytes_are_of_a_chunk_s_logits_and_their_gradient():
    shape = CPU["benchmark"]
    N, V = shape.rows * shape.sequence, shape.vocabulary
    hidden, matrix, targets, weights = draw(np.random.default_rng(0), shape)
    gradients = {}
    for C in (N // 4, N // 2):
        loss = functools.partial(linear_cross_entropy, chunk_bytes=2 * C * V * 4)
        objective = lambda h, m, loss=loss: loss(h, m, targets, weights)[0]  # noqa: E731
        compiled = jax.jit(jax.grad(objective, (0, 1))).lower(hidden, matrix).compile()
        assert f"[{C},{V}]" in compiled.as_text() and f"[{2 * C},{V}]" not in compiled.as_text()
        gradients[C] = compiled(hidden, matrix)
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-5, atol=1e-6), *gradients.values())
    # Where the gradient takes the logits' place.
    assert triton.logits_bytes(1 << 40, chunk_bytes=1 << 20) == 1 << 20


def beyond_matrix_and_gradient(memory, shape: Shape) -> int:
    """Returns the bytes that a compiled value_and_grad needs beyond its arguments, the matrix's copy in the
    compute dtype and its float32 gradient; hidden's gradient, which is an output, counts."""
    matrix = shape.embed * shape.vocabulary
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes - 6 * matrix


def traced_at(shape: Shape, **options):
    """Returns value_and_grad of the objective, traced in bfloat16 and a float32 matrix."""
    B, T, D, V = shape.rows, shape.sequence, shape.embed, shape.vocabulary
    hidden, matrix = (jax.ShapeDtypeStruct(*x) for x in (((B, T, D), jnp.bfloat16), ((D, V), jnp.float32)))
    targets, weights = (jax.ShapeDtypeStruct((B, T), dtype) for dtype in (jnp.int32, jnp.float32))
    step = jax.jit(jax.value_and_grad(lambda *a: linear_cross_entropy(*a, **options)[0], (0, 1)))
    return step.trace(hidden, matrix, targets, weights)


@pytest.mark.gpu
@needs_gpu
def test_memory_at_the_benchmarks_shape():
    """Of what runs by default."""
    shape = GPU["llama3_8b"]
    memory = traced_at(shape).lower().compile().memory_analysis()
    used = beyond_matrix_and_gradient(memory, shape)
    print(f"{used / 2**30:.3f} GiB beyond the matrix and its gradient")
    assert used <= 1 << 30, memory


# Triton's form, without a GPU


@pytest.fixture
def lowered_of_triton(triton_calls):
    """Returns Triton's form at the benchmark's shape, lowered with a stand-in for its kernel."""

    def triton_call(*arrays, out_shape, input_output_aliases, **_):
        call = jax.ffi.ffi_call("stand_in", out_shape, input_output_aliases=input_output_aliases)
        return call(*arrays)

    triton_calls(triton_call)
    traced = traced_at(GPU["llama3_8b"], implementation="triton", platform="gpu")
    return traced.lower(lowering_platforms=("cuda",))


def test_triton_s_gradient_takes_the_logits_place(lowered_of_triton):
    """Its kernel's output is its first operand's memory."""
    of_the_first_chunk_and_in_the_loop = 2
    assert lowered_of_triton.as_text().count("output_operand_alias<") == of_the_first_chunk_and_in_the_loop


@pytest.mark.compiles_for("cuda")
def test_xla_copies_no_logits_for_triton_s_gradient_and_clears_none_of_the_matrix(lowered_of_triton):
    shape = GPU["llama3_8b"]
    made = aot.compile_for(lowered_of_triton, aot.TARGETS["h200"])
    assert beyond_matrix_and_gradient(made.stats, shape) < 0.9 * 2**30, made.stats
    gradient = f"f32[{shape.embed},{shape.vocabulary}]"
    assert gradient in made.hlo and not re.search(rf"{re.escape(gradient)}\S* broadcast\(", made.hlo)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_triton_s_kernel_is_given_what_it_needs(triton_calls, small_chunks):
    """Also of a split vocabulary. The kernels are replaced by their definitions."""
    asked = []

    def triton_call(*arrays, kernel, out_shape, input_output_aliases, grid, z_loss, V, num_warps, **tile):
        asked.append(kernel)
        of_logits = jax.tree.leaves(out_shape)[-1]
        (tokens, columns), (programs, *blocks) = arrays[0].shape, grid
        assert of_logits == jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype) and columns == V
        if kernel == "losses_and_gradient":
            assert tile["C"] == tokens and 1 <= programs <= tokens and input_output_aliases == {0: 2}
            assert 32 * num_warps <= tile["LANES"] * tile["EACH"]
            assert [x.dtype for x in arrays[1:]] == [jnp.int32, jnp.float32]
            return xla.losses_and_gradient(*arrays, z_loss, None)
        assert programs == tokens and input_output_aliases == {0: 0}
        assert (blocks[0] - 1) * tile["BV"] < V <= blocks[0] * tile["BV"]
        assert [x.dtype for x in arrays[1:]] == [jnp.float32, jnp.int32, jnp.float32]
        return xla.logits_gradient(*arrays, z_loss)

    triton_calls(triton_call)
    options = {"z_loss": 1e-2, "implementation": "triton", "platform": "gpu"}
    arguments = draw(np.random.default_rng(fresh_seed()), Shape(4, 21, 16, 136))
    whole = expected(*arguments, z_loss=1e-2)
    assert_close(run(*arguments, **options), whole, CPU_TOLERANCE)
    assert set(asked) == {"losses_and_gradient"}
    asked.clear()
    assert_close(split_run((2, 2), "DV", *arguments, **options), whole, CPU_TOLERANCE)
    assert set(asked) == {"logits_gradient"}


# A split vocabulary


def split_run(mesh_shape, layout, hidden, matrix, targets, weights, **options):
    """As `run`, on a mesh whose first axis splits rows and whose second the vocabulary."""
    mesh = jax.make_mesh(mesh_shape, ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    rows = PartitionSpec("data")
    columns = PartitionSpec(None, "tensor") if layout == "DV" else PartitionSpec("tensor")

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(rows, columns, rows, rows),
        out_specs=(PartitionSpec(), rows, rows),
    )
    def local(hidden, matrix, targets, weights):
        objective, *by_token = linear_cross_entropy(
            hidden, matrix, targets, weights, layout=layout, axis_name="tensor", **options
        )
        return jax.lax.psum(objective, "data"), *by_token

    def loss(hidden, matrix):
        objective, *by_token = local(hidden, matrix, targets, weights)
        return objective, by_token

    (objective, by_token), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, matrix)
    return dict(zip(NAMES, (objective, *by_token, *gradients), strict=True))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("layout", ["DV", "VD"])
@pytest.mark.parametrize("mesh_shape", [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)], ids=str)
def test_split_vocabulary_equals_one_device(mesh_shape, layout, small_chunks):
    shape = Shape(4, 21, 16, 136, z_loss=1e-2)
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), shape)
    stored = matrix if layout == "DV" else matrix.T
    found = split_run(mesh_shape, layout, hidden, stored, targets, weights, z_loss=shape.z_loss)
    if layout == "VD":
        found["d_matrix"] = found["d_matrix"].T
    assert_close(found, expected(hidden, matrix, targets, weights, shape.z_loss), CPU_TOLERANCE)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("mesh_shape", [(2, 4), (4, 2)], ids=str)
def test_each_device_leaves_out_its_own(mesh_shape, small_chunks):
    """Shards of rows go around unequally often, some never; those of a vocabulary meet in every chunk."""
    shape = Shape(4, 21, 16, 136, z_loss=1e-2)
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), shape)
    weights = weights.at[:2].set(0).at[3, :15].set(0)
    options = {"z_loss": shape.z_loss, "weighted_only": True}
    found = split_run(mesh_shape, "DV", hidden, matrix, targets, weights, **options)
    wanted = run(hidden, matrix, targets, weights, **options, implementation="reference")
    assert_close(found, wanted, CPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_tokens_of_weight_0_left_out_on_gpu(implementation, share):
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), GPU["small"], jnp.bfloat16)
    weights = jnp.where(np.random.default_rng(fresh_seed()).random(weights.shape) < share, weights, 0.0)
    found = run(hidden, matrix, targets, weights, weighted_only=True, implementation=implementation)
    rounded = matrix.astype(jnp.bfloat16).astype(jnp.float32)
    wanted = expected(hidden, rounded, targets, weights)
    for name in ("losses", "log_z"):
        wanted[name] = np.where(weights == 0, 0, wanted[name])
    assert_close(found, wanted, GPU_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.several_gpus
@needs_gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_split_vocabulary_on_gpu(implementation):
    """Over two GPUs, or one: there too, what lies within a shard_map has to have the right types."""
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), GPU["small"], jnp.bfloat16)
    mesh_shape = (1, min(2, jax.device_count()))
    found = split_run(mesh_shape, "DV", hidden, matrix, targets, weights, implementation=implementation)
    rounded = matrix.astype(jnp.bfloat16).astype(jnp.float32)
    assert_close(found, expected(hidden, rounded, targets, weights), GPU_TOLERANCE)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_what_is_not_finite_on_one_device_shows_on_all():
    hidden, matrix, targets, weights = draw(np.random.default_rng(fresh_seed()), CPU["even"])
    for bad in (jnp.nan, jnp.inf):
        found = split_run((1, 2), "DV", hidden, matrix.at[3, 7].set(bad), targets, weights)
        assert not np.isfinite(found["objective"])


# What is refused


def test_named_runs_or_raises(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    arguments = draw(np.random.default_rng(0), CPU["one_token"])
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        linear_cross_entropy(*arguments)
    assert [r.getMessage() for r in caplog.records] == ["kernels: linear_cross_entropy uses xla"]
    with pytest.raises(ValueError, match=r"no implementation 'xal'; there are triton, xla, reference"):
        linear_cross_entropy(*arguments, implementation="xal")


def test_triton_comes_first_on_a_gpu(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    arguments = draw(np.random.default_rng(0), CPU["one_token"])

    def missing(package):
        raise dispatch.Unsupported("needs jax-triton")

    monkeypatch.setattr(triton, "load_triton", missing)
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        linear_cross_entropy(*arguments, platform="gpu")
    (record,) = caplog.records
    assert record.getMessage() == "kernels: linear_cross_entropy uses xla (refused: triton: needs jax-triton)"
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* >= 8\.0, found cpu"):
        linear_cross_entropy(*arguments, implementation="triton")


def test_arguments_are_checked():
    hidden, matrix, targets, weights = draw(np.random.default_rng(0), CPU["odd"])
    with pytest.raises(ValueError, match="shapes do not fit"):
        linear_cross_entropy(hidden, matrix, targets, weights, layout="VD")
    with pytest.raises(ValueError, match="shapes do not fit"):
        linear_cross_entropy(hidden, matrix, targets[:, 1:], weights)
    with pytest.raises(ValueError, match="targets are int32 and weights float32, got float32"):
        linear_cross_entropy(hidden, matrix, weights, weights)
    with pytest.raises(ValueError, match="neither DV nor VD"):
        linear_cross_entropy(hidden, matrix, targets, weights, layout="DB")
    with pytest.raises(ValueError, match="not split over 'tensor'"):
        linear_cross_entropy(hidden, matrix, targets, weights, axis_name="tensor")


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_the_reference_refuses_a_split_vocabulary():
    arguments = draw(np.random.default_rng(0), CPU["even"])
    with pytest.raises(dispatch.Unsupported, match="whole vocabulary"):
        split_run((1, 2), "DV", *arguments, implementation="reference")
