"""Float8 matmuls: as near to float32 as their mantissas allow, in float8 indeed, and hiding nothing."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import named, slow_but_for

from jaxthru.build import checks as fit
from jaxthru.models import fp8
from jaxthru.models.ops import Ops
from jaxthru.models.remat import KEPT
from jaxthru.runtime import aot
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels import dispatch
from pallas_kernels.cast_transpose import STAND_IN

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
TOKENS, EMBED, HEADS, HEAD_DIM, MLP = 256, 64, 4, 16, 128
MESHES = {"data=2": (2, 1, 1), "fsdp=4": (1, 4, 1), "tensor=2 fsdp=2": (1, 2, 2)}


class Weight:
    """What `Ops` sees of a parameter."""

    def __init__(self, values, *axes):
        self.values, self.shape = values, values.shape
        inputs = values.ndim - 1 if axes[-1] == "embed" else 1
        self.info = WeightInfo(axes, "matrix", tuple(range(inputs)))

    def __getitem__(self, _):
        return self.values


def multiply(using: Ops, x, values, *axes: str) -> jax.Array:
    """Returns `x` times a weight, by its linear layer: one to or from the width of the
    stream."""
    weight = Weight(values, *axes)
    return using.column_parallel(x, weight)[0] if axes[0] == "embed" else using.row_parallel(x, weight)


def layers(using: Ops):
    """Returns a function of an input and weights from the width of the stream: the results of all."""
    return lambda x, weights: using.column_parallel(x, *(Weight(each, "embed", "mlp") for each in weights))


def draw(seed: int, *shape: int, deviation: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, deviation, shape), jnp.float32)


def make_ops(mesh=(1, 1, 1), *, compute="float32", float8=True) -> Ops:
    layout = Layout(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))]))
    return Ops(layout, jnp.dtype(compute), float8=float8)


PARAMETERS = {
    "query": draw(1, EMBED, HEADS, HEAD_DIM, deviation=0.1),
    "key": draw(2, EMBED, 2, HEAD_DIM, deviation=0.1),
    "out": draw(3, HEADS, HEAD_DIM, EMBED, deviation=0.1),
    "up": draw(4, EMBED, MLP, deviation=0.1),
    "down": draw(5, MLP, EMBED, deviation=0.1),
}
AXES = {
    "query": ("embed", "heads", "head_dim"),
    "key": ("embed", "kv_heads", "head_dim"),
    "out": ("heads", "head_dim", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}
COTANGENT = draw(6, TOKENS, EMBED, deviation=1e-4)


def apply(using: Ops, parameters, x_ND):
    """Column-parallel and row-parallel linear layers of several dims, two of them with a shared input."""
    weights = {name: Weight(values, *AXES[name]) for name, values in parameters.items()}
    query, key = using.column_parallel(x_ND, weights["query"], weights["key"])
    mixed = using.row_parallel(query + jnp.repeat(key, 2, axis=1), weights["out"])
    (up,) = using.column_parallel(x_ND + mixed, weights["up"])
    return using.row_parallel(up, weights["down"])


def value_and_gradients(using: Ops, x_ND, parameters=PARAMETERS):
    @jax.jit
    def both(parameters, x_ND):
        y, pull = jax.vjp(lambda p, x: apply(using, p, x), parameters, x_ND)
        return y, *pull(COTANGENT.astype(y.dtype))

    return both(parameters, x_ND.astype(using.compute))


def distance(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def equations(jaxpr) -> list:
    """Returns the equations of a jaxpr and of all jaxprs within it."""
    found = list(jaxpr.eqns)
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            found += equations(inner) if hasattr(inner, "eqns") else []
    return found


def dots(jaxpr) -> list[tuple]:
    return [
        (*(v.aval.dtype for v in (*e.invars, *e.outvars)), e.params["precision"][0])
        for e in equations(jaxpr)
        if e.primitive.name == "dot_general"
    ]


@pytest.mark.parametrize(("dtype", "step"), [(E4M3, 2.0**-4), (E5M2, 2.0**-3)], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("deviation", [1e-12, 1.0, 1e12])
def test_a_quantised_tensor_is_within_half_a_step(dtype, step, deviation):
    x = draw(0, 64, 64, deviation=deviation)
    values, scale = fp8.quantise(x, dtype)
    assert values.dtype == dtype and scale.dtype == jnp.float32
    assert np.log2(float(scale)) % 1 == 0
    largest = float(jnp.abs(values.astype(jnp.float32)).max())
    assert float(jnp.finfo(dtype).max) / 2 * (1 - step) <= largest <= float(jnp.finfo(dtype).max)
    back = values.astype(jnp.float32) * scale
    normal = jnp.abs(x) > float(jnp.finfo(dtype).tiny) * scale
    assert float(normal.mean()) > 0.98
    assert float(jnp.max(jnp.where(normal, jnp.abs(back - x) / jnp.abs(x), 0))) <= step


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_one_layer_is_near_float32(compute):
    """Half a step of e4m3 is 2^-4 of a power of two. A rounding error is uniform within it, and mantissas are
    about log-uniform, so its deviation is 2^-4 / √3 × √(3 / (8 ln 2)) = 2.7 % of a value; e5m2: twice that.
    Errors of a dot's many terms are independent: √2 × 2.7 % = 3.8 % forward, √(2.7² + 5.3²) = 5.9 % backward.
    """
    using, x_ND = make_ops(compute=compute), draw(7, TOKENS, EMBED).astype(compute)
    gate, up = draw(8, EMBED, MLP), draw(9, EMBED, MLP)
    cotangents = tuple(draw(seed, TOKENS, MLP).astype(compute) for seed in (10, 11))

    def project(x_ND, *weights):
        return tuple(layers(using)(x_ND, weights))

    def plain(x_ND, *weights):
        return tuple(x_ND.astype(jnp.float32) @ weight for weight in weights)

    ys, pull = jax.vjp(project, x_ND, gate, up)
    references, pull_reference = jax.vjp(plain, x_ND, gate, up)
    for y, reference in zip(ys, references, strict=True):
        assert y.dtype == jnp.dtype(compute)
        assert 0.032 < distance(y, reference) < 0.042
    wide = tuple(cotangent.astype(jnp.float32) for cotangent in cotangents)
    for got, reference in zip(pull(cotangents), pull_reference(wide), strict=True):
        assert got.dtype == reference.dtype
        assert 0.05 < distance(got, reference) < 0.066


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_all_three_matmuls_are_in_float8(compute):
    using, x_ND = make_ops(compute=compute), draw(7, TOKENS, EMBED).astype(compute)
    run, given = both_passes(using, x_ND, draw(8, EMBED, MLP), draw(9, EMBED, MLP))
    jaxpr = jax.make_jaxpr(run)(*given).jaxpr
    out = jnp.dtype(compute)
    fast, exact = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST
    expected = [(E4M3, E4M3, out, fast), (E5M2, E4M3, out, exact), (E4M3, E5M2, out, exact)] * 2
    assert sorted(map(str, dots(jaxpr))) == sorted(map(str, expected))
    casts = [
        (e.outvars[0].aval.dtype, e.outvars[0].aval.shape)
        for e in equations(jaxpr)
        if e.primitive.name == "convert_element_type" and e.outvars[0].aval.dtype.itemsize == 1
    ]
    assert casts.count((E4M3, (TOKENS, EMBED))) == 1, "the shared input is quantised once"
    assert len(casts) == 5  # and each weight and each gradient once


def both_passes(using: Ops, x_ND, *weights):
    """Returns a function of a layer's input and weights: results, and gradients of these as cotangents."""

    def run(x_ND, weights):
        ys, pull = jax.vjp(layers(using), x_ND, weights)
        return ys, pull(ys)

    return run, (x_ND, weights)


@pytest.mark.parametrize("cast_by", [None, "reference"])
def test_with_its_transposes_all_is_contracted_along_rows(cast_by):
    """As Hopper's products are: of what they took otherwise, XLA makes the transpose."""
    using = dataclasses.replace(make_ops(), cast_transpose_by=cast_by)
    run, given = both_passes(using, draw(7, TOKENS, EMBED), draw(8, EMBED, MLP), draw(9, EMBED, MLP))
    made = [e for e in equations(jax.make_jaxpr(run)(*given).jaxpr) if e.primitive.name == "dot_general"]
    contracted = {e.params["dimension_numbers"][0] for e in made}
    otherwise = {((0,), (0,)), ((1,), (0,))}
    assert contracted == {((1,), (1,))} | (set() if cast_by else otherwise)


@pytest.mark.parametrize("cast_by", ["reference", "xla"])
def test_however_it_is_cast_the_numbers_are_the_same(cast_by):
    x_ND = draw(7, TOKENS, EMBED).astype("bfloat16")
    using = make_ops(compute="bfloat16")
    other = dataclasses.replace(using, cast_transpose_by=cast_by)
    (run, given), (run_other, _) = (
        both_passes(of, x_ND, draw(8, EMBED, MLP), draw(9, EMBED, MLP)) for of in (using, other)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(*given), jax.jit(run_other)(*given))


@pytest.mark.parametrize("cast_by", [None, "reference"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_the_backward_pass_is_given_an_input_once(policy, cast_by):
    """And each weight as it is: a loop over layers would stack whatever else there is."""
    using, x_ND = dataclasses.replace(make_ops(), cast_transpose_by=cast_by), draw(7, TOKENS, EMBED)
    weights = draw(8, EMBED, MLP), draw(9, EMBED, MLP)
    project = layers(using)
    if policy == "full":
        project = jax.checkpoint(project, policy=jax.checkpoint_policies.save_only_these_names(fp8.KEPT_NAME))
    kept = [e for e in jax.tree.leaves(jax.vjp(project, x_ND, weights)[1]) if e.dtype.itemsize == 1]
    of_weights = [] if policy == "full" else [(EMBED, MLP)] * 2
    of_input = (EMBED, TOKENS) if cast_by else (TOKENS, EMBED)
    assert sorted(each.shape for each in kept) == sorted([of_input, *of_weights])


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize(("cast_by", "casts"), [(STAND_IN, 3), ("xla", 0)])
def test_a_kernel_s_casts_are_what_products_take_on_a_gpu(cast_by, casts):
    """Of the input, the weight and the gradient; XLA transposes nothing behind them."""
    using = dataclasses.replace(make_ops(compute="bfloat16"), cast_transpose_by=cast_by)
    wide, mlp = 512, 1024
    x_ND = jax.ShapeDtypeStruct((TOKENS, wide), jnp.bfloat16)
    run, given = both_passes(using, x_ND, jax.ShapeDtypeStruct((wide, mlp), jnp.float32))
    text = aot.compile_for(aot.lower(jax.jit(run), *given), aot.TARGETS["h200"]).hlo
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert text.count('custom_call_target="jaxthru_stand_in_cast_transpose"') == casts
    made_by_xla = [line for line in text.splitlines() if " fusion(" in line and re.search(r"f8\w+\[\d", line)]
    assert bool(made_by_xla) == (not casts), made_by_xla


COLLECTIVE = re.compile(r" = (.*?) ((?:all-\w+|reduce-scatter|collective-\w+)(?:-start)?)\(")


@pytest.mark.parametrize(("rows", "mesh"), [(TOKENS, (1, 1, 1)), (126, (1, 1, 1)), (TOKENS, (1, 2, 2))])
def test_what_a_kernel_refuses_is_xla_s(rows, mesh, caplog):
    """As if it had been asked for; but not where the kernel was."""
    caplog.set_level("INFO", "jaxthru")
    dispatch._logged.discard(("cast_transpose", "xla"))
    weights, x_ND = (draw(8, EMBED, MLP), draw(9, EMBED, MLP)), draw(7, rows, EMBED)

    def program(by):
        run, given = both_passes(dataclasses.replace(make_ops(mesh), cast_transpose_by=by), x_ND, *weights)
        return jax.jit(run).lower(*given).as_text()

    assert program(("triton", "xla")) == program("xla") == program(None)
    assert caplog.text.count("cast_transpose uses xla (refused: triton: needs an NVIDIA GPU") == 1
    with pytest.raises(dispatch.Unsupported, match=r"triton: needs an NVIDIA GPU .* found cpu(\n|$)"):
        program("triton")


def test_without_a_backward_pass_no_input_is_transposed():
    using, x_ND = dataclasses.replace(make_ops(), cast_transpose_by="reference"), draw(7, TOKENS, EMBED)
    jaxpr = jax.make_jaxpr(layers(using))(x_ND, (draw(8, EMBED, MLP),))
    made = [v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars if v.aval.dtype == E4M3]
    assert (EMBED, TOKENS) not in made and (TOKENS, EMBED) in made and (MLP, EMBED) in made


@pytest.mark.compiles_for("cuda")
@pytest.mark.parametrize(("mesh", "casts"), [("data=2", 6), ("fsdp=4", 4), ("tensor=2 fsdp=2", 2)])
def test_a_kernel_casts_what_stays_on_its_device_and_nothing_else_moves(mesh, casts):
    """Inputs and gradients of a block's two linear layers, and weights that are not gathered; over `tensor`,
    where the stream is gathered first, the input and the gradient of what lies between the two."""
    mesh, tokens, wide, mlp, moved = MESHES[mesh], 2048, 512, 1024, []
    for by, kernels in (("xla", 0), (STAND_IN, casts)):
        using = dataclasses.replace(make_ops(mesh, compute="bfloat16"), cast_transpose_by=by)

        def block(x_ND, up, down, using=using):
            (y,) = using.column_parallel(x_ND, Weight(up, "embed", "mlp"))
            return using.row_parallel(jax.nn.silu(y), Weight(down, "mlp", "embed"))

        def both(*given, block=block):
            y_ND, pull = jax.vjp(block, *given)
            return y_ND, pull(y_ND)

        given = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=using.layout.sharding(axes))
            for shape, dtype, axes in (
                ((tokens, wide), jnp.bfloat16, ("tokens", None)),
                ((wide, mlp), jnp.float32, ("embed", "mlp")),
                ((mlp, wide), jnp.float32, ("mlp", "embed")),
            )
        )
        lowered = aot.lower(jax.jit(both), *given)
        text = aot.compile_for(lowered, aot.TARGETS["h200"], int(np.prod(mesh))).hlo
        assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 6
        assert text.count('custom_call_target="jaxthru_stand_in_cast_transpose"') == kernels
        found = [match.groups() for match in map(COLLECTIVE.search, text.splitlines()) if match]
        arrays = ((kind, shape) for shape, kind in found if re.search(r"\[\d", shape))  # all but scales
        moved.append(sorted(arrays))
    assert moved[0] == moved[1] != []


def test_embedding_and_lm_head_stay_out():
    made, batch = tiny.make(float8=True, vocabulary=640), tiny.batch(0)
    params = made.state["params"]
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: made.loss(p, batch, jnp.float32(1))[0]))(params).jaxpr
    shapes = [
        v.aval.shape
        for e in equations(jaxpr)
        for v in e.outvars
        if getattr(v.aval, "dtype", None) in (E4M3, E5M2)
    ]
    assert shapes and not [shape for shape in shapes if 640 in shape]


@pytest.mark.parametrize("cast_by", [None, "reference"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_every_mesh_gives_one_device_s_numbers(mesh, cast_by):
    """Scales are those of whole tensors, so that only the order of float32 additions differs."""
    x_ND = draw(7, TOKENS, EMBED)
    alone, sharded = make_ops(), dataclasses.replace(make_ops(mesh), cast_transpose_by=cast_by)
    weights = [Weight(PARAMETERS[name], *AXES[name]) for name in ("query", "key")]
    for name in ("query", "out", "up", "down"):
        axes, values = AXES[name], PARAMETERS[name]
        shape = (TOKENS, *values.shape[: 2 if name == "out" else 1])
        x, cotangent = draw(8, *shape), draw(9, TOKENS, *values.shape[len(shape) - 1 :])

        def both(x, values, using, axes=axes, cotangent=cotangent):
            y, pull = jax.vjp(lambda x, w: multiply(using, x, w, *axes), x, values)
            return y, *pull(cotangent)

        placed = jax.device_put(values, sharded.layout.sharding(axes))
        got = jax.jit(both, static_argnums=2)(x, placed, sharded)
        for one, other in zip(got, jax.jit(both, static_argnums=2)(x, values, alone), strict=True):
            assert distance(one, other) < 1e-5
        assert got[2].sharding.is_equivalent_to(sharded.layout.sharding(axes), values.ndim)
    together = (
        jax.jit(lambda x, using=using: using.column_parallel(x, *weights))(x_ND) for using in (sharded, alone)
    )
    for one, other in zip(*together, strict=True):
        assert distance(one, other) < 1e-5


@slow_but_for(mesh=named((1, 8, 1), (2, 2, 2)))
def test_a_sharded_model_learns_alike(mesh):
    """Rounding to float8 makes large differences of some tiny ones, so only the first loss is equal."""
    losses, alone = tiny.make(mesh, float8=True).losses(8), tiny.make(float8=True).losses(8)
    assert losses[0] == pytest.approx(alone[0], abs=1e-4)
    np.testing.assert_allclose(losses, alone, rtol=5e-3)


def test_weights_are_gathered_in_float8():
    """Of the program as it is given to XLA; on a CPU XLA widens them first."""
    using = make_ops((1, 8, 1))
    weight = jax.device_put(PARAMETERS["up"], using.layout.sharding(AXES["up"]))
    lowered = jax.jit(lambda x, w: multiply(using, x, w, *AXES["up"])).lower(draw(7, TOKENS, EMBED), weight)
    text = lowered.as_text()
    constrained = [line for line in text.splitlines() if "sharding_constraint" in line]
    assert any(f"tensor<{EMBED}x{MLP}xf8E4M3FN>" in line for line in constrained), text


def test_tokens_are_gathered_in_float8():
    """One map's input and the other's gradient, each laid out over tokens and then over rows."""
    using = make_ops((1, 1, 2))

    def both(x_ND, parameters):
        up = multiply(using, x_ND, parameters["up"], *AXES["up"])
        return multiply(using, up, parameters["down"], *AXES["down"])

    lowered = jax.jit(lambda x, p, dy: jax.vjp(both, x, p)[1](dy)).lower(
        draw(7, TOKENS, EMBED), PARAMETERS, COTANGENT
    )
    constrained = [line for line in lowered.as_text().splitlines() if "sharding_constraint" in line]
    for dtype in ("f8E4M3FN", "f8E5M2"):
        of_tokens = [line for line in constrained if f"tensor<{TOKENS}x{EMBED}x{dtype}>" in line]
        assert ['"tensor"' in line for line in of_tokens] == [True, False], of_tokens


def test_scan_and_unroll_agree():
    scan, unroll = tiny.make(float8=True).losses(4), tiny.make(float8=True, loop="unroll").losses(4)
    assert scan[0] == pytest.approx(unroll[0], abs=1e-5)
    np.testing.assert_allclose(scan, unroll, rtol=2e-3)


@pytest.mark.parametrize("policy", ["full", *KEPT])
def test_rematerialisation_changes_no_gradient(policy):
    plain, other = tiny.make(float8=True), tiny.make(float8=True, remat=policy)
    gradients = [made.gradients(plain.state["params"], plain.batch(0))[1] for made in (plain, other)]
    whole = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in gradients]
    assert distance(*whole) < 1e-3


def test_inputs_are_kept_in_float8():
    """`projections` quantises no input twice: as many casts of activations as with everything kept."""

    def casts(policy):
        made = tiny.make(float8=True, remat=policy)
        params = tiny.make(float8=True).state["params"]
        jaxpr = jax.make_jaxpr(jax.grad(lambda p: made.loss(p, tiny.batch(0), jnp.float32(1))[0]))(params)
        rows = tiny.ROWS * tiny.SEQUENCE
        return sum(
            e.primitive.name == "convert_element_type"
            and e.outvars[0].aval.dtype == E4M3
            and e.outvars[0].aval.shape[0] == rows
            for e in equations(jaxpr.jaxpr)
        )

    assert casts("none") == 4
    assert casts("full") == 8
    assert casts("projections") == 4


def test_zeros_stay_zeros():
    using = make_ops()
    values, scale = fp8.quantise(jnp.zeros((4, 4)), E4M3)
    assert not values.astype(jnp.float32).any() and np.isfinite(scale) and scale > 0
    zeros = jax.tree.map(jnp.zeros_like, PARAMETERS)
    for parameters, x_ND in (
        (PARAMETERS, jnp.zeros((TOKENS, EMBED))),
        (zeros, draw(7, TOKENS, EMBED)),
    ):
        y, *gradients = value_and_gradients(using, x_ND, parameters)
        assert not y.any()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_what_is_not_finite_shows(where, bad, compute):
    using = make_ops(compute=compute)
    x_ND, weight, cotangent = (
        draw(7, TOKENS, EMBED),
        draw(8, EMBED, MLP),
        draw(9, TOKENS, MLP),
    )
    spoil = lambda array: array.at[(0,) * array.ndim].set(bad)  # noqa: E731
    if where == "input":
        x_ND = spoil(x_ND)
    elif where == "weight":
        weight = spoil(weight)
    else:
        cotangent = spoil(cotangent)
    y, pull = jax.vjp(lambda x, w: multiply(using, x, w, "embed", "mlp"), x_ND.astype(compute), weight)
    dx, dweight = pull(cotangent.astype(compute))
    finite = {"y": np.isfinite(y).all(), "dx": np.isfinite(dx).all(), "dw": np.isfinite(dweight).all()}
    expected = {"input": {"y", "dw"}, "weight": {"y", "dx"}, "gradient": {"dx", "dw"}}[where]
    assert not [name for name in expected if finite[name]]


def test_a_step_that_is_not_finite_is_skipped():
    made = tiny.make(float8=True)
    state = made.fresh()
    up = tiny.layers(state["params"])["mlp"]["up"]
    tiny.layers(state["params"])["mlp"]["up"] = up.at[0, 0, 0].set(jnp.inf)
    before = np.asarray(tiny.layers(state["params"])["mlp"]["down"])
    state, metrics = made.compiled(state, made.batch(0))
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(tiny.layers(state["params"])["mlp"]["down"], before)


@pytest.mark.slow
def test_a_small_model_learns_as_well():
    float8 = np.mean(tiny.make(float8=True, compute="bfloat16").losses(40)[-10:])
    plain = np.mean(tiny.make().losses(40)[-10:])
    assert plain < tiny.make().losses(1)[0] - 1
    assert float8 == pytest.approx(plain, rel=0.03)


@pytest.mark.parametrize(
    ("platform", "capability", "runs"),
    [
        ("cpu", None, True),
        ("gpu", (8, 9), True),
        ("gpu", (9, 0), True),
        ("gpu", (8, 0), False),
        ("gpu", None, False),
        ("tpu", None, False),
    ],
)
def test_devices_without_float8_refuse(platform, capability, runs, monkeypatch):
    monkeypatch.setattr(fit, "nvidia_compute_capability", lambda: capability)
    device = types.SimpleNamespace(platform=platform, device_kind="Accelerator X")
    if runs:
        fit.check_float8(device)
    else:
        with pytest.raises(InputError, match=r"precision\.matmul = 'fp8'.*8\.9.*Accelerator X"):
            fit.check_float8(device)
