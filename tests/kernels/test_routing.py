"""The contract of routing: the choice against its definition in NumPy, ties, tokens that go nowhere, the
sort, rows there and back and their gradients, and what each form takes and refuses."""

import functools
import importlib
import logging
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import named, slow_but_for
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch as choices
from pallas_kernels.routing import (
    OPERATION,
    SCORES,
    Order,
    Rule,
    combine,
    dispatch,
    dispatch_weights,
    route,
    sort_assignments,
)
from pallas_kernels.routing.shapes import CPU, GPU, Shape
from pallas_kernels.testing import CPU_TOLERANCE, GPU_TOLERANCE, assert_close, fresh_seed, has_gpu, normal

needs_gpu = pytest.mark.skipif(not has_gpu((8, 0)), reason="needs an NVIDIA GPU of capability 8.0")
f32 = jnp.float32
PLAIN = {"score": "softmax", "normalise": True}
RULES = {
    "softmax": PLAIN | {"normalise": False},
    "normalised": PLAIN | {"scale": 2.5},
    "sigmoid": {"score": "sigmoid", "normalise": False},
    "sigmoid normalised": {"score": "sigmoid", "normalise": True, "scale": 2.5},
    "of_chosen": {"score": "softmax_of_chosen", "normalise": False},
    "grouped": {"score": "sigmoid", "normalise": True, "groups": 4, "top_groups": 2},
    "balanced": PLAIN | {"balanced": True},
}


def draw(shape: Shape) -> dict:
    """Returns a router's inputs, of which invalid tokens' are not numbers, and gradients of its results."""
    rng = np.random.default_rng(fresh_seed())
    N, E, K = shape.tokens, shape.experts, shape.top_k
    valid = rng.random(N) >= shape.padding
    logits = np.where(valid[:, None], 2 * rng.standard_normal((N, E), np.float32), np.nan)
    given = {"logits": logits, "valid": valid, "bias": 0.2 * rng.standard_normal(E, np.float32)}
    given |= {name: rng.standard_normal((N, of), np.float32) for name, of in (("dw", K), ("ds", E))}
    return {name: jnp.asarray(array) for name, array in given.items()}


@functools.partial(jax.jit, static_argnames=("K", "rule", "implementation"))
def routed(given: dict, K: int, rule: tuple, implementation: str | None):
    """Returns a Routing, and the gradient of the logits."""

    def function(logits):
        how = dict(rule) | {"implementation": implementation}
        made = route(logits, given["valid"], given.get("bias"), top_k=K, **how)
        return jnp.sum(made.weights_NK * given["dw"]) + jnp.sum(made.scores_NE * given["ds"]), made

    (_, made), d_logits = jax.value_and_grad(function, has_aux=True)(given["logits"])
    return made, d_logits


def run(given: dict, K: int, implementation: str | None = "xla", **rule):
    return routed(given, K, tuple(rule.items()), implementation)


def weigh(logits, ids, score, normalise, scale=1.0, **_):
    """Returns a token's weights and scores by their definition, in float64."""
    power = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if score == "sigmoid" else power / power.sum()
    weights = scores[ids]
    if score == "softmax_of_chosen":
        weights = power[ids] / power[ids].sum()
    return (weights / weights.sum() if normalise else weights) * scale, scores


def choose(n, logits, bias, K, score, groups=1, top_groups=1, balanced=False, **_) -> list[int]:
    """Returns token n's experts by their definition: the largest first, of equal ones the lowest id first."""
    if balanced:
        return [(n * K + k) % len(logits) for k in range(K)]
    scores = logits if score == "softmax_of_chosen" else weigh(logits, [0], score, False)[1]
    choice = scores + bias
    experts = range(len(logits))
    if top_groups < groups:
        of_group = len(logits) // groups
        best = [sum(sorted(choice[g * of_group : (g + 1) * of_group])[-2:]) for g in range(groups)]
        among = sorted(range(groups), key=lambda g: (-best[g], g))[:top_groups]
        experts = [e for e in experts if e // of_group in among]
    return sorted(experts, key=lambda e: (-choice[e], e))[:K]


def by_numpy(given: dict, K: int, **rule):
    """Returns (ids, weights, counts, scores, gradient of the logits), a token at a time."""
    inputs = {name: np.asarray(array, np.float64) for name, array in given.items()}
    N, E = inputs["logits"].shape
    ids, weights, scores = np.full((N, K), E), np.zeros((N, K)), np.zeros((N, E))
    gradient = np.zeros((N, E))
    bias = inputs.get("bias", np.zeros(E))
    for n in np.flatnonzero(inputs["valid"]):
        logits, dw, ds = (inputs[name][n] for name in ("logits", "dw", "ds"))
        ids[n] = choose(n, logits, bias, K, **rule)
        weights[n], scores[n] = weigh(logits, ids[n], **rule)

        def loss(logits, n=n, dw=dw, ds=ds):
            w, s = weigh(logits, ids[n], **rule)
            return w @ dw + s @ ds

        step = 1e-5  # central differences in float64, with the choice held
        gradient[n] = [(loss(logits + d) - loss(logits - d)) / (2 * step) for d in step * np.eye(E)]
    counts = np.bincount(ids.reshape(-1), minlength=E + 1)[:E]
    return ids, weights, counts, scores, gradient


def check(given: dict, K: int, implementation: str, rule: dict, tolerance=CPU_TOLERANCE) -> None:
    made, d_logits = run(given, K, implementation, **rule)
    ids, weights, counts, scores, gradient = by_numpy(given, K, **rule)
    np.testing.assert_array_equal(made.ids_NK, ids)
    np.testing.assert_array_equal(made.counts_E, counts)
    assert (made.ids_NK.dtype, made.counts_E.dtype, made.weights_NK.dtype) == (jnp.int32, jnp.int32, f32)
    assert_close((made.weights_NK, made.scores_NE), (weights, scores), tolerance)
    # A gradient is a difference, which all but vanishes where a softmax is a step: its terms are rounded.
    size = sum(np.linalg.norm(term) for term in (gradient, scores * given["ds"], weights * given["dw"]))
    assert np.linalg.norm(d_logits - gradient) <= tolerance * size
    assert not np.any(np.asarray(d_logits)[~np.asarray(given["valid"])])


@slow_but_for(
    *(f"many-{rule}-xla" for rule in RULES if rule != "softmax"),
    *("many-grouped-reference", "padding_alone-normalised-xla"),
    *("one_expert-normalised-xla", "three-of_chosen-reference"),
    shape=CPU,
    rule=RULES,
    implementation=named("xla", "reference"),
)
def test_agrees_with_numpy(shape, rule, implementation):
    if rule.get("groups", 1) > 1 and (shape.experts % 8 or shape.experts // 2 < shape.top_k):
        rule = PLAIN
    check(draw(shape), shape.top_k, implementation, rule)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_ties_go_to_the_lowest_id(implementation):
    """Also among groups, and where a bias makes them."""
    zeros = {"logits": jnp.zeros((3, 8)), "valid": jnp.ones(3, bool), "dw": jnp.ones((3, 2))}
    zeros["ds"] = jnp.zeros((3, 8))
    made, _ = run(zeros, 2, implementation, **PLAIN)
    assert made.ids_NK.tolist() == [[0, 1]] * 3
    bias = jnp.zeros(8).at[jnp.array([3, 6])].set(1.0)
    made, _ = run(zeros | {"bias": bias}, 2, implementation, **RULES["grouped"])
    assert made.ids_NK.tolist() == [[3, 6]] * 3
    made, _ = run(zeros | {"bias": -bias}, 2, implementation, **RULES["grouped"])
    assert made.ids_NK.tolist() == [[0, 1]] * 3  # groups 0 and 2 are the first without an expert of less


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_a_token_has_different_experts_whatever_its_logits_are(score, grouped, implementation):
    """There are rows for these alone where experts are split over devices."""
    bad = jnp.array([jnp.nan, -jnp.inf, jnp.inf])
    logits = jnp.concatenate([jnp.tile(bad[:, None], (1, 8)), jnp.zeros((3, 8)).at[:, 2:5].set(bad[:, None])])
    how = {"groups": 4, "top_groups": 2} if grouped else {}
    how |= {"top_k": 4, "score": score, "normalise": True, "implementation": implementation}
    made = route(logits, jnp.ones(6, bool), **how)
    for ids in made.ids_NK.tolist():
        assert len({*ids} & {*range(8)}) == 4, ids
    assert np.isnan(made.weights_NK[jnp.array([0, 3])]).any(axis=1).all(), "or nobody would notice"


def test_a_bias_moves_the_choice_and_not_the_weights():
    given = draw(CPU["many"]._replace(padding=0.0))
    plain, _ = run({name: x for name, x in given.items() if name != "bias"}, 8, **PLAIN)
    pushed, _ = run(given | {"bias": jnp.zeros(64).at[jnp.array([5, 6])].set(10.0)}, 8, **PLAIN)
    assert (pushed.counts_E[5], pushed.counts_E[6]) == (64, 64) != (plain.counts_E[5], plain.counts_E[6])
    np.testing.assert_array_equal(pushed.scores_NE, plain.scores_NE)
    chosen = jnp.take_along_axis(pushed.scores_NE, pushed.ids_NK, axis=1)
    assert_close(pushed.weights_NK, chosen / jnp.sum(chosen, axis=1, keepdims=True), CPU_TOLERANCE)
    how = {"top_k": 8, **PLAIN}
    loss = lambda bias: jnp.sum(route(given["logits"], given["valid"], bias, **how).weights_NK)  # noqa: E731
    assert not np.any(jax.grad(loss)(given["bias"]))


# The sort


def test_the_sort_is_stable_and_leaves_sentinels_last():
    rng = np.random.default_rng(fresh_seed())
    for N, K, E in ((64, 8, 7), (1, 1, 1), (37, 3, 130)):
        ids = rng.integers(0, E + 1, (N, K)).astype(np.int32)
        for implementation in ("xla", "reference"):
            sort = jax.jit(functools.partial(sort_assignments, experts=E, implementation=implementation))
            order = sort(jnp.asarray(ids))
            wanted = np.argsort(ids.reshape(-1), kind="stable")
            np.testing.assert_array_equal(order.order_R, wanted)
            np.testing.assert_array_equal(np.asarray(order.inverse_NK).reshape(-1)[wanted], np.arange(N * K))
            np.testing.assert_array_equal(order.sizes_E, np.bincount(ids.reshape(-1), minlength=E + 1)[:E])
            assert {array.dtype for array in order} == {jnp.dtype(jnp.int32)}


# Rows there and back


def rows_of(shape: Shape, dtype=f32) -> tuple[dict, Order, np.ndarray]:
    """Returns tokens and gradients, an order, and the ids that it is of."""
    rng = np.random.default_rng(fresh_seed())
    N, E, K, D = shape[:4]
    ids = np.stack([rng.permutation(E)[:K] for _ in range(N)])
    ids[rng.random(N) < shape.padding] = E
    ids = np.where(rng.random((N, K)) < 0.2, E, ids).astype(np.int32)  # those of experts elsewhere
    order = sort_assignments(jnp.asarray(ids), E, implementation="reference")
    given = {"x": normal(rng, (N, D), dtype), "dy": normal(rng, (N, D), dtype)}
    given |= {"rows": normal(rng, (N * K, D), dtype), "weights": normal(rng, (N, K), f32)}
    return given, order, ids


@functools.partial(jax.jit, static_argnames=("implementation", "top_k"))
def moved(given: dict, order: Order, top_k: int, implementation: str):
    """Returns rows there and back, and their gradients; rows without an expert are not numbers."""
    how, tokens = {"implementation": implementation}, len(given["x"])
    nobody = (jnp.arange(len(given["rows"])) >= jnp.sum(order.sizes_E))[:, None]
    rows = jnp.where(nobody, jnp.asarray(jnp.nan, given["rows"].dtype), given["rows"])
    there, pullback = jax.vjp(lambda x: dispatch(x, order, top_k, **how), given["x"])
    back, pullback_back = jax.vjp(lambda y: combine(y, order, tokens, **how), rows)
    return {"there": there, "dx": pullback(rows)[0], "back": back, "dy": pullback_back(given["dy"])[0]}


def check_moved(shape: Shape, implementation: str, dtype=f32, tolerance=CPU_TOLERANCE) -> None:
    given, order, ids = rows_of(shape, dtype)
    found = moved(given, order, shape.top_k, implementation)
    x, dy, rows = (np.asarray(given[name], np.float64) for name in ("x", "dy", "rows"))
    flat, used = ids.reshape(-1), int(order.sizes_E.sum())
    token_R = np.argsort(flat, kind="stable")[:used] // shape.top_k
    back = np.zeros(x.shape)
    np.add.at(back, token_R, rows[:used])
    wanted = {"there": x[token_R], "dx": back, "back": back, "dy": dy[token_R]}
    found = {name: np.asarray(found[name])[: len(wanted[name])] for name in wanted}
    assert_close(found, wanted, tolerance)
    np.testing.assert_array_equal(found["there"], np.asarray(given["x"])[token_R])


@slow_but_for("three-xla", "three-reference", "more-xla", shape=CPU, implementation=named("xla", "reference"))
def test_rows_go_there_and_back(shape, implementation):
    check_moved(shape, implementation)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_rows_without_an_expert_may_be_cut_off(implementation):
    """As on a device that has fewer experts than a token has: of its rows some can never be filled."""
    given, order, _ = rows_of(CPU["three"])
    used = int(order.sizes_E.sum())
    whole = moved(given, order, 2, implementation)
    short = order._replace(order_R=order.order_R[:used])
    cut = moved(given | {"rows": given["rows"][:used]}, short, 2, implementation)
    for name in cut:
        np.testing.assert_array_equal(cut[name], whole[name][: len(cut[name])])
    d_rows = jnp.ones(used)
    _, pullback = jax.vjp(lambda w: dispatch_weights(w, short), given["weights"])
    np.testing.assert_array_equal(pullback(d_rows)[0], order.inverse_NK < used)


def test_half_precision_is_summed_in_float32():
    """A sum of 8 rows is rounded once."""
    shape = CPU["all_of_few"]._replace(padding=0.0)
    given, order, _ = rows_of(shape, jnp.bfloat16)
    found = moved(given, order, shape.top_k, "xla")["back"]
    wide = moved({name: x.astype(f32) for name, x in given.items()}, order, shape.top_k, "xla")["back"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))


def test_weights_follow_their_rows():
    given, order, ids = rows_of(CPU["three"])
    used = int(order.sizes_E.sum())
    weights, pullback = jax.vjp(lambda w: dispatch_weights(w, order), given["weights"])
    flat, order_R = np.asarray(given["weights"]).reshape(-1), np.asarray(order.order_R)
    np.testing.assert_array_equal(np.asarray(weights)[:used], flat[order_R[:used]])
    d_rows = jnp.arange(1.0, len(order_R) + 1).at[used:].set(jnp.nan)
    (d_weights,) = pullback(d_rows)
    wanted = np.zeros(len(order_R), np.float32)
    wanted[order_R[:used]] = d_rows[:used]
    np.testing.assert_array_equal(d_weights, wanted.reshape(ids.shape))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_within_a_shard_map():
    """Each device routes and sorts its own tokens; the logits of each have the gradients they have alone."""
    shape = Shape(24, 6, 2, 8)
    given = draw(shape)
    x = normal(np.random.default_rng(fresh_seed()), (24, 8), f32)
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def local(logits, valid, x, bias):
        made = route(logits, valid, bias, top_k=2, **PLAIN)
        order = sort_assignments(made.ids_NK, 6)
        weights = dispatch_weights(made.weights_NK, order)
        return combine(dispatch(x, order, 2) * weights[:, None], order, len(x))

    split = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, whole), out_specs=rows)

    def value(function, logits, x):
        return jnp.sum(jnp.square(function(logits, given["valid"], x, given["bias"])))

    found, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(value, function), (0, 1)))(given["logits"], x)
        for function in (split, local)
    )
    assert_close(found, wanted, CPU_TOLERANCE)


def test_no_kernel_is_differentiated(monkeypatch):
    """A call of a Triton kernel refuses to be, of integers too: what becomes of the ids has no gradient."""

    class Opaque:
        @staticmethod
        def triton_call(*operands, out_shape, **options):
            return jax.pure_callback(lambda *arrays: None, out_shape, *operands)  # which has no JVP either

    triton = importlib.import_module("pallas_kernels.routing.triton")
    monkeypatch.setattr(triton, "load_triton", lambda package: (Opaque, mock.MagicMock()))
    monkeypatch.setattr(triton, "require_gpu", lambda platform, least: None)
    shape = CPU["many"]

    def layer(given, x_ND):
        how = {"implementation": "triton", "platform": "gpu"}
        made = route(given["logits"], given["valid"], top_k=shape.top_k, **PLAIN, **how)
        order = sort_assignments(made.ids_NK, shape.experts, **how)
        weights_R = dispatch_weights(made.weights_NK, order)
        rows_RD = dispatch(x_ND, order, shape.top_k, **how) * weights_R[:, None]
        return jnp.sum(combine(rows_RD, order, shape.tokens, **how))

    given = draw(shape)
    gradient = jax.grad(lambda logits, x: layer(given | {"logits": logits}, x), (0, 1))
    found = jax.eval_shape(gradient, given["logits"], jnp.zeros((shape.tokens, 8)))
    assert [of.shape for of in found] == [given["logits"].shape, (shape.tokens, 8)]


# On a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["many", "three", "most"])
def test_choices_on_gpu(name, rule, implementation):
    shape = CPU[name]
    rule = PLAIN if rule.get("groups", 1) > 1 and shape.experts % 4 else rule
    check(draw(shape), shape.top_k, implementation, rule, 1e-4)  # a GPU's exponentials are its own


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", GPU)
def test_sorts_on_gpu(name):
    N, E, K = GPU[name][:3]
    ids = jnp.asarray(np.random.default_rng(fresh_seed()).integers(0, E + 1, (N, K)), jnp.int32)
    found, wanted = (sort_assignments(ids, E, implementation=by) for by in ("triton", "reference"))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("name", ["odd", "most", "qwen3_30b"])
def test_rows_go_there_and_back_on_gpu(name, implementation):
    check_moved(GPU[name], implementation, jnp.bfloat16, GPU_TOLERANCE)


@pytest.mark.gpu
@needs_gpu
def test_ties_on_gpu():
    test_ties_go_to_the_lowest_id("triton")


@pytest.mark.gpu
@needs_gpu
def test_repeats_to_the_bit_on_gpu():
    shape = GPU["odd"]
    given, order, _ = rows_of(shape, jnp.bfloat16)
    used = int(order.sizes_E.sum())
    logits = draw(shape)

    def all_of_it():
        found = moved(given, order, shape.top_k, "triton") | {"routing": run(logits, 4, "triton", **PLAIN)}
        return found | {name: found[name][:used] for name in ("there", "dy")}

    once = all_of_it()
    for _ in range(99):
        jax.tree.map(np.testing.assert_array_equal, all_of_it(), once)


# What is refused


def order_of_zeros(tokens: int) -> Order:
    """Returns the order of tokens that all go to expert 0, twice each."""
    row_R = jnp.arange(2 * tokens, dtype=jnp.int32)
    return Order(row_R, row_R.reshape(tokens, 2), jnp.array([2 * tokens, 0, 0, 0], jnp.int32))


def test_named_runs_or_raises(monkeypatch, caplog):
    monkeypatch.setattr(choices, "_logged", set())
    logits, valid, ids = jnp.zeros((2, 4)), jnp.ones(2, bool), jnp.zeros((2, 2), jnp.int32)
    x, rows, order = jnp.zeros((2, 5)), jnp.zeros((4, 5)), order_of_zeros(2)
    calls = (
        lambda **how: route(logits, valid, top_k=2, **PLAIN, **how),
        lambda **how: sort_assignments(ids, 4, **how),
        lambda **how: dispatch(x, order, 2, **how),
        lambda **how: combine(rows, order, 2, **how),
    )
    with caplog.at_level(logging.INFO, "jaxthru.kernels"):
        for call in calls:
            jax.eval_shape(call)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"kernels: {name} uses xla" for name in ("route", "sort_assignments", "dispatch", "combine")
    ]
    assert OPERATION.names == ("triton", "xla", "reference")
    with pytest.raises(ValueError, match="no implementation 'xal'; there are triton, xla"):
        dispatch(x, order, 2, implementation="xal")
    for call in calls:
        with pytest.raises(choices.Unsupported, match=r"triton: needs an NVIDIA GPU .* found cpu"):
            call(implementation="triton")


def test_arguments_are_checked():
    logits, valid = jnp.zeros((3, 8)), jnp.ones(3, bool)
    order = order_of_zeros(3)
    with pytest.raises(ValueError, match=r"logits \[N, E\] \(3, 8\) and valid \[N\] \(2,\)"):
        route(logits, valid[:2], top_k=2, **PLAIN)
    with pytest.raises(ValueError, match=r"the bias is float32\[8\], got float32\[7\]"):
        route(logits, valid, jnp.zeros(7), top_k=2, **PLAIN)
    with pytest.raises(ValueError, match="logits are float32 and valid is bool, got bfloat16 and bool"):
        route(logits.astype(jnp.bfloat16), valid, top_k=2, **PLAIN)
    with pytest.raises(ValueError, match=r"ids are int32 \[N, K\], got float32\[3, 8\]"):
        sort_assignments(logits, 8)
    with pytest.raises(ValueError, match=r"of 3 tokens with 2 experts each, got x \(4, 5\) and top_k 2"):
        dispatch(jnp.zeros((4, 5)), order, 2)
    with pytest.raises(ValueError, match=r"of 3 tokens with 2 experts each, got y \(5, 5\) and 3 tokens"):
        combine(jnp.zeros((5, 5)), order, 3)
    with pytest.raises(ValueError, match=r"the order is of \(3, 2\), got weights \(2, 2\)"):
        dispatch_weights(jnp.zeros((2, 2)), order)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"score": "tanh"}, "no score 'tanh'; there are softmax, sigmoid, softmax_of_chosen"),
        ({"top_k": 9}, "top_k is 1 to 8, the number of experts, got 9"),
        ({"groups": 3}, "groups divide the 8 experts and top_groups is 1 to groups, got groups 3"),
        ({"groups": 8, "top_groups": 4}, "best two experts, so it has at least 2, got 8 experts in 8 groups"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "1 groups of 2 experts do not hold top_k 3"),
    ],
)
def test_there_has_to_be_such_a_choice(wrong, said):
    with pytest.raises(ValueError, match=said):
        Rule(**{"experts": 8, "top_k": 2, "score": SCORES[0], "normalise": True} | wrong)
