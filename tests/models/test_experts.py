"""The family moe: routers, dropless layers, balance without a loss, and how all of it trains.

Shapes: B rows, T tokens of one, N = B·T, D embed, E experts, K of them a token, M width of an expert.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import named, slow_but_for
from jax.extend.core import jaxprs_in_params

from jaxthru import config as configuration
from jaxthru.engine.inline import hidden as hidden_of
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.walk import cotangents, linearised_block
from jaxthru.models import facts, family, llama, moe
from jaxthru.models.layers import SwiGLU
from jaxthru.models.lora import LoraConfig
from jaxthru.models.ops import Ops
from jaxthru.models.router import BiasUpdate, below_mean, load
from jaxthru.models.stage import module_stage
from jaxthru.optim.optimizer import OptimConfig, Optimizer
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.mesh import MeshConfig, make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.training.layout import to_disk

B, T, D, E, K, M = 2, 24, 16, 8, 2, 12
SHAPE = moe.Config(
    **{"vocabulary": 512, "layers": 3, "embed": D, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 24},
    **{"experts": E, "top_k": K, "expert_mlp": M},
)
ROUTERS = {
    "qwen3": {},
    "olmoe": {"normalise": False},
    "mixtral": {"score": "softmax_of_chosen"},
    "deepseek": {
        **{"score": "sigmoid", "bias_rate": 1e-3, "routed_scale": 2.5, "expert_groups": 4, "top_groups": 2},
    },
}
BALANCED = {"bias_rate": 1e-2, "aux_loss": 1e-2, "router_z_loss": 1e-3, "dense_first": 1}


def ops() -> Ops:
    return Ops(Layout(make_mesh(MeshConfig(), jax.devices()[:1])), jnp.dtype(jnp.float32))


def context_of(segment_ids_BT: np.ndarray):
    """Returns what a layer is given with rows of these documents."""
    model = tiny.bind(SHAPE, ops(), "none")
    return model.context({"segment_ids": segment_ids_BT, "positions": 0 * segment_ids_BT}, 8)


WHOLE = np.ones((B, T), np.int32)
PADDED = np.where(np.arange(T)[None] < np.array([[T - 5], [T]]), WHOLE, 0)


@functools.cache
def layer(router: str = "qwen3", **settings):
    """Returns the feed-forward layer alone, (params, x, context) -> (y, Extras), and params drawn for it."""
    config = dataclasses.replace(SHAPE, **{**ROUTERS[router], **settings})
    stage = module_stage("layer", moe.MixtureOfExperts, config)
    params = stage.init(jax.random.key(3))
    if config.bias_rate:
        params["router"]["bias"] = 0.3 * jax.random.normal(jax.random.key(4), (E,))
    return jax.jit(stage.apply), params


def inputs(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (B * T, D))


def numpy_router(logits_NE: np.ndarray, bias_E: np.ndarray, router: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, weights) [N, K], of float64 and one token after the other."""
    rule = dataclasses.replace(SHAPE, **ROUTERS[router])
    ids, weights = [], []
    for logits in logits_NE.astype(np.float64):
        softmax = np.exp(logits) / np.exp(logits).sum()
        scores = 1 / (1 + np.exp(-logits)) if rule.score == "sigmoid" else softmax
        choice = scores + bias_E
        if rule.top_groups < rule.expert_groups:
            groups = choice.reshape(rule.expert_groups, -1)
            best = np.argsort(-np.sort(groups)[:, -2:].sum(-1), kind="stable")[: rule.top_groups]
            choice = np.where(np.isin(np.arange(E) // groups.shape[1], best), choice, -np.inf)
        chosen = np.argsort(-choice, kind="stable")[:K]
        weight = scores[chosen]
        if rule.normalise or rule.score == "softmax_of_chosen":
            weight = weight / weight.sum()
        ids.append(chosen)
        weights.append(weight * rule.routed_scale)
    return np.array(ids), np.array(weights)


def routing_of(params: dict, x_ND: jax.Array, router: str, context=None):
    config = dataclasses.replace(SHAPE, **ROUTERS[router])
    made = module_stage("router", moe.Router, config).apply
    return jax.jit(made)(params["router"], x_ND, context or context_of(WHOLE))[0]


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_choose_and_weigh_as_their_definitions(router):
    _, params = layer(router)
    x_ND = inputs()
    found = routing_of(params, x_ND, router)
    logits_NE = np.asarray(x_ND, np.float64) @ np.asarray(params["router"]["weight"], np.float64)
    bias_E = np.asarray(params["router"].get("bias", np.zeros(E)), np.float64)
    ids_NK, weights_NK = numpy_router(logits_NE, bias_E, router)
    np.testing.assert_array_equal(found.ids_NK, ids_NK)
    np.testing.assert_allclose(found.weights_NK, weights_NK, rtol=1e-5)
    np.testing.assert_array_equal(found.counts_E, np.bincount(ids_NK.reshape(-1), minlength=E))


def test_a_bias_moves_the_choice_and_not_the_weights():
    _, params = layer("deepseek")
    biased = {**params["router"], "bias": jnp.zeros(E).at[5].set(10.0)}
    found = routing_of({"router": biased}, inputs(), "deepseek")
    assert np.all(found.ids_NK[:, 0] == 5)
    scores_NE = jax.nn.sigmoid(inputs() @ params["router"]["weight"])
    chosen_NK = np.take_along_axis(np.asarray(scores_NE), np.asarray(found.ids_NK), 1)
    wanted_NK = 2.5 * chosen_NK / chosen_NK.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.weights_NK, wanted_NK, rtol=1e-5)


def test_forced_balance_chooses_in_turn_and_weighs_as_the_router_says():
    forced = dataclasses.replace(SHAPE, force_load_balancing=True, bias_rate=1e-3)
    _, params = layer()
    router = params["router"] | {"bias": jnp.arange(E, dtype=jnp.float32)}  # that would choose otherwise
    made = jax.jit(module_stage("router", moe.Router, forced).apply)
    found, extras = made(router, inputs(), context_of(WHOLE))
    ids_NK = np.arange(B * T * K).reshape(-1, K) % E
    np.testing.assert_array_equal(found.ids_NK, ids_NK)
    np.testing.assert_allclose(found.weights_NK, weighed(params, inputs(), ids_NK), rtol=1e-5)
    assert extras.metrics["expert_tokens"].tolist() == [B * T * K // E] * E
    assert SHAPE.warnings == () and forced.warnings[0].endswith("no routing is learned")


def of_all_experts(params: dict, x_ND: jax.Array, ids_NK, weights_NK, one_hot: bool) -> jax.Array:
    """Returns what the layer is defined as: a sum over experts, or an einsum over one-hot choices."""
    chosen_NKE = jax.nn.one_hot(ids_NK, E)
    weights_NE = jnp.einsum("nke,nk->ne", chosen_NKE, weights_NK)
    gate_up, down = params["gate_up"], params["down"]
    if one_hot:
        gate_up_N2EM = jnp.einsum("nd,edgm->ngem", x_ND, gate_up)
        hidden_NEM = jax.nn.silu(gate_up_N2EM[:, 0]) * gate_up_N2EM[:, 1]
        return jnp.einsum("nem,ne,emd->nd", hidden_NEM, weights_NE, down)
    y_ND = jnp.zeros_like(x_ND)
    for expert in range(E):
        hidden_NM = jax.nn.silu(x_ND @ gate_up[expert, :, 0]) * (x_ND @ gate_up[expert, :, 1])
        y_ND += weights_NE[:, expert, None] * (hidden_NM @ down[expert])
    return y_ND


def weighed(params: dict, x_ND: jax.Array, ids_NK: jax.Array) -> jax.Array:
    """Returns Qwen3's weights of a choice that is held."""
    scores_NE = jax.nn.softmax(x_ND @ params["router"]["weight"], axis=-1)
    weights_NK = jnp.take_along_axis(scores_NE, ids_NK, 1)
    return weights_NK / weights_NK.sum(-1, keepdims=True)


@slow_but_for("loop", one_hot={"loop": False, "einsum": True})
def test_no_token_is_dropped(one_hot):
    """Values, and the gradients of x, the router and the experts; twice the same to the bit."""
    apply, params = layer()
    x_ND, context = inputs(), context_of(WHOLE)
    ids_NK = routing_of(params, x_ND, "qwen3").ids_NK
    cotangent_ND = inputs(1)

    def defined(params, x_ND):
        y_ND = of_all_experts(params, x_ND, ids_NK, weighed(params, x_ND, ids_NK), one_hot)
        return jnp.sum(y_ND * cotangent_ND), y_ND

    def sorted_(params, x_ND):
        y_ND, _ = apply(params, x_ND, context)
        return jnp.sum(y_ND * cotangent_ND), y_ND

    of_both = (jax.value_and_grad(of, argnums=(0, 1), has_aux=True) for of in (sorted_, defined))
    programs = [*map(jax.jit, of_both)]
    both = [program(params, x_ND) for program in programs]
    ((_, found), of_found), ((_, wanted), of_wanted) = both
    (_, again), of_again = programs[0](params, x_ND)
    jax.tree.map(np.testing.assert_array_equal, (found, of_found), (again, of_again))
    for ours, theirs in zip(
        jax.tree.leaves((found, of_found)), jax.tree.leaves((wanted, of_wanted)), strict=True
    ):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


@slow_but_for("mixtral", router=named("qwen3", "mixtral"))
def test_equal_experts_are_a_dense_layer_whatever_the_router_does(router):
    """A dense model's feed-forward layer, copied to each expert."""
    apply, params = layer(router)
    dense = module_stage("dense", SwiGLU, dataclasses.replace(SHAPE, mlp=M))
    weights = dense.init(jax.random.key(7))
    gate_up = jnp.stack([weights["gate"], weights["up"]], axis=1)
    upcycled = {
        **{"router": params["router"], "gate_up": jnp.stack([gate_up] * E)},
        "down": jnp.stack([weights["down"]] * E),
    }
    x_ND, context = inputs(), context_of(WHOLE)
    y_ND, _ = apply(upcycled, x_ND, context)
    wanted_ND, _ = jax.jit(dense.apply)(weights, x_ND, context)
    np.testing.assert_allclose(y_ND, wanted_ND, rtol=1e-4, atol=1e-6)


def test_the_router_s_gradient_is_that_of_finite_differences():
    """With the choice held, by a bias that is larger than any score; in float32 to a percent."""
    apply, params = layer("deepseek")
    bias_E = jnp.zeros(E).at[jnp.array([1, 6])].set(10.0)
    x_ND, context, cotangent_ND = inputs(), context_of(WHOLE), inputs(1)

    @jax.jit
    def loss(weight_DE):
        routed = {**params, "router": {"bias": bias_E, "weight": weight_DE}}
        y_ND, extras = apply(routed, x_ND, context)
        return jnp.sum(y_ND * cotangent_ND), extras.metrics["expert_tokens"]

    weight_DE = params["router"]["weight"]
    (_, counts_E), gradient_DE = jax.value_and_grad(loss, has_aux=True)(weight_DE)
    for seed in range(3):
        direction_DE = 1e-2 * jax.random.normal(jax.random.key(seed), weight_DE.shape)
        (above, of_above), (below, of_below) = (loss(weight_DE + sign * direction_DE) for sign in (1, -1))
        assert np.array_equal(of_above, counts_E) and np.array_equal(of_below, counts_E)
        assert (above - below) / 2 == pytest.approx(float(jnp.sum(gradient_DE * direction_DE)), rel=1e-2)


def test_the_order_of_experts_changes_nothing_else():
    """Experts in another order, with what belongs to them: equal to the bit."""
    apply, params = layer("olmoe")
    order = np.random.default_rng(0).permutation(E)
    other = {
        **{"router": {"weight": params["router"]["weight"][:, order]}},
        **{name: params[name][order] for name in ("gate_up", "down")},
    }
    x_ND, context = inputs(), context_of(WHOLE)
    (one_ND, of_one), (other_ND, of_other) = (apply(each, x_ND, context) for each in (params, other))
    np.testing.assert_allclose(one_ND, other_ND, rtol=1e-5, atol=1e-6)  # softmax adds up in another order
    counts_E = of_one.metrics["expert_tokens"]
    np.testing.assert_array_equal(counts_E[order], of_other.metrics["expert_tokens"])


def test_padding_goes_to_no_expert_and_has_no_gradient():
    """Whatever stands in it, NaN as well; and the losses that balance do not see it."""
    apply, params = layer("qwen3", aux_loss=1.0, router_z_loss=1.0)
    padding_N = PADDED.reshape(-1) == 0
    context, cotangent_ND = context_of(PADDED), inputs(1)

    @jax.jit
    def run(x_ND):
        def loss(params, x_ND):
            y_ND, extras = apply(params, x_ND, context)
            total = jnp.sum(y_ND * cotangent_ND) + sum(extras.losses.values())
            return total, (y_ND, extras.metrics["expert_tokens"])

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x_ND)

    x_ND = inputs()
    (_, (y_ND, counts_E)), (d_params, dx_ND) = run(x_ND)
    other_ND = jnp.where(padding_N[:, None], 1e3 * inputs(5), x_ND)
    (_, (again_ND, of_again)), (d_again, dx_again) = run(other_ND)
    assert np.sum(counts_E) == K * np.sum(~padding_N) and np.array_equal(counts_E, of_again)
    assert not np.any(y_ND[padding_N]) and not np.any(dx_ND[padding_N]) and np.any(dx_ND[~padding_N])
    jax.tree.map(np.testing.assert_array_equal, (y_ND, d_params, dx_ND), (again_ND, d_again, dx_again))


def test_balance_is_measured_by_row():
    """Of rows with unequal padding: as each by itself; and 1 where all experts are used alike."""
    apply, params = layer("deepseek", aux_loss=1.0)
    x_ND = inputs()
    _, extras = apply(params, x_ND, context_of(PADDED))
    routing = routing_of(params, x_ND, "deepseek", context_of(PADDED))
    rows = []
    for row, length in enumerate((T - 5, T)):
        own = slice(row * T, row * T + length)
        shares_TE = np.asarray(routing.scores_NE)[own]
        shares_TE = shares_TE / shares_TE.sum(-1, keepdims=True)
        counts_E = np.bincount(np.asarray(routing.ids_NK)[own].reshape(-1), minlength=E)
        rows.append(E * np.sum(counts_E / (K * length) * shares_TE.mean(0)))
    assert float(extras.losses["balance_loss"]) == pytest.approx(np.mean(rows), rel=1e-5)
    even = load(jnp.full((1, E), 7, jnp.int32))
    assert float(even["expert_load_max"][0]) == 1 and float(even["expert_entropy"][0]) == pytest.approx(1)
    one = load(jnp.zeros((1, E), jnp.int32).at[0, 3].set(9))
    assert float(one["expert_load_max"][0]) == E and float(one["expert_entropy"][0]) == 0


def test_a_shared_expert_and_its_gate_are_added():
    apply, params = layer("qwen3", shared_mlp=20, shared_gate=True)
    x_ND, context = inputs(), context_of(WHOLE)
    y_ND, _ = apply(params, x_ND, context)
    routed_ND, _ = layer()[0]({name: params[name] for name in ("router", "gate_up", "down")}, x_ND, context)
    own = params["shared"]
    shared_ND = (jax.nn.silu(x_ND @ own["gate"]) * (x_ND @ own["up"])) @ own["down"]
    gate_N1 = jax.nn.sigmoid(x_ND @ params["shared_gate"])[:, None]
    np.testing.assert_allclose(y_ND, routed_ND + gate_N1 * shared_ND, rtol=1e-4, atol=1e-6)


def primitives(jaxpr) -> list[str]:
    """Returns the names of all primitives of a jaxpr and of those within it."""
    found = []
    for equation in jaxpr.eqns:
        inner = [sub for value in equation.params.values() for sub in jaxprs_in_params({"": value})]
        found += [equation.primitive.name, *itertools.chain(*map(primitives, inner))]
    return found


def test_the_bias_follows_the_counts_exactly():
    counts_E = jnp.array([0, 3, 4, 5, 2, 4, 4, 6], jnp.int32)  # 28: a mean of 3.5
    np.testing.assert_array_equal(below_mean(counts_E), [1, 1, -1, -1, 1, -1, -1, -1])
    np.testing.assert_array_equal(below_mean(jnp.full((E,), 2**24 + 1, jnp.int32)), np.zeros(E))
    large_E = jnp.full((E,), 2**24, jnp.int32).at[0].add(1)  # float32 knows no 2**24 + 1
    np.testing.assert_array_equal(below_mean(large_E), [-1, *[1] * (E - 1)])
    params = {"mlp": {"router": {"bias": jnp.zeros(E), "weight": jnp.ones(3)}}, "norm": jnp.ones(2)}
    moved = BiasUpdate(0.5, ("mlp", "router", "bias"))(params, {"expert_tokens": counts_E})
    np.testing.assert_array_equal(moved["mlp"]["router"]["bias"], 0.5 * below_mean(counts_E))
    assert (
        moved["norm"] is params["norm"]
        and moved["mlp"]["router"]["weight"] is params["mlp"]["router"]["weight"]
    )


SMALL = dataclasses.replace(SHAPE, **BALANCED)
"""A model of a dense layer and two of experts, balanced by a bias and by losses."""


@functools.cache
def trained(way: str, steps: int = 3) -> tuple[list[dict], dict]:
    """Returns the metrics of each step and the state behind them, as on disk."""
    config = {"offloaded": OffloadConfig("parameters"), "at once": OffloadConfig("gradients")}.get(way)
    optim = dataclasses.replace(tiny.OPTIM, clip_rule="previous" if way == "at once" else "exact")
    settings = {
        "scan": {"loop": "scan"},
        "4": {"loop": "unroll", "microbatches": 4},
    }.get(way, {"loop": "unroll", "remat": "projections"})
    made = tiny.make(of=SMALL, optim=optim, **settings)
    compiled, state = (made.compiled, made.fresh()) if config is None else tiny.dispatched(made, config)
    rows = []
    for index in range(steps):
        state, metrics = compiled(state, made.batch(index))
        rows.append(jax.tree.map(np.asarray, metrics))
    return rows, to_disk(state if config is None else compiled.settled(state))


def biases(disk: dict) -> np.ndarray:
    layers = disk["params"]["layers"]
    return np.stack([layers[layer]["mlp"]["router"]["bias"] for layer in ("1", "2")])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["4", "offloaded"])
def test_every_way_of_training_balances_alike(way):
    """Biases and loads equal to the bit, losses to what another order of summing leaves."""
    (rows, disk), (wanted, of_wanted) = trained(way), trained("scan")
    np.testing.assert_array_equal(biases(disk), biases(of_wanted))
    assert np.abs(biases(disk)).max() == pytest.approx(3e-2), "three steps of 1e-2"
    for row, other in zip(rows, wanted, strict=True):
        for name in ("expert_load_max", "expert_entropy"):
            np.testing.assert_array_equal(row[name], other[name])
            assert row[name].shape == (2,)
        for name in ("loss", "balance_loss", "router_z_loss"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), name


def test_a_skipped_update_moves_no_bias():
    made = tiny.make(of=SMALL, loop="scan")
    bad = made.batch(0)
    bad["segment_ids"] = bad["segment_ids"] * 0 + jnp.arange(tiny.SEQUENCE)[None]  # more than the model takes
    state, metrics = made.compiled(made.fresh(), bad)
    assert int(metrics["skipped"]) == 1 and not np.any(biases(to_disk(state)))


@pytest.mark.slow
def test_with_the_previous_norm_the_first_step_moves_nothing():
    """It only measures the norm; and each stage then is updated as soon as its gradient is there."""
    _, disk = trained("at once", 1)
    assert not np.any(biases(disk))
    _, disk = trained("at once", 3)
    assert np.abs(biases(disk)).max() == pytest.approx(2e-2)


def test_counts_are_whole_numbers_and_a_bias_has_nothing_beside_it():
    """Neither moments nor a gradient; the router's gradient is float32 whatever is computed in."""
    made = tiny.make(of=SMALL, loop="scan", compute="bfloat16")
    slots = made.abstract["opt_state"]["slots"]["mu"]["layers"][1][0]["mlp"]["router"]
    assert slots["bias"] is None and slots["weight"] is not None
    params, batch = made.abstract["params"], tiny.batch(0)
    terms, gradients = jax.eval_shape(made.gradients, params, batch)
    router = gradients["layers"][1][0]["mlp"]["router"]
    assert router["bias"] is None and router["weight"].dtype == jnp.float32
    _, of_evaluation = jax.eval_shape(made.loss, params, batch, np.float32(1))
    for each in (terms, of_evaluation):
        assert each["expert_tokens"].dtype == jnp.int32 and each["expert_tokens"].shape == (2, E)


def test_experts_are_chosen_once():
    """Under the policy that keeps the least, the backward pass takes the choice from the forward pass."""
    model = tiny.bind(dataclasses.replace(SMALL, loop="unroll"), ops(), "full")
    stage = model.chain.layers[1]
    context = model.context({name: jnp.asarray(value) for name, value in tiny.batch(0).items()}, 8)

    def backward(params, x_ND, dy_ND):
        link = linearised_block(model, stage, params, x_ND, context)
        return link.pullback(cotangents(link, dy_ND, context))

    x_ND = jax.ShapeDtypeStruct((tiny.ROWS * tiny.SEQUENCE, D), jnp.float32)
    found = primitives(jax.make_jaxpr(backward)(stage.shapes, x_ND, x_ND).jaxpr)
    assert found.count("argmax") == K, "each of a token's experts is looked for once"


@pytest.mark.slow
def test_adapters_leave_routers_and_experts_as_they_are():
    """They are beside attention; no bias of a frozen base moves."""
    shape = dataclasses.replace(SHAPE, qk_norm=True, bias_rate=1e-2)
    made = tiny.make(of=shape, loop="scan", adapters=LoraConfig(rank=2))
    before = jax.tree.map(np.array, to_disk(made.fresh()))["params"]["layers"]["1"]
    state, metrics = made.compiled(made.fresh(), made.batch(0))
    after = to_disk(state)["params"]["layers"]["1"]
    jax.tree.map(np.testing.assert_array_equal, before["mlp"], after["mlp"])
    assert {*after["lora"]} == {"attention"} and np.isfinite(metrics["loss"])
    assert np.any(after["lora"]["attention"]["query"]["b"])


@pytest.mark.slow
def test_a_packed_row_is_its_documents_alone():
    shape = dataclasses.replace(SHAPE, layers=2, bias_rate=1e-3, loop="scan")
    model = tiny.bind(shape, dataclasses.replace(ops(), attention_by="xla"), "none")
    params = model.init(jax.random.key(1))
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 512, (1, T)).astype(np.int32)
    ids = np.where(np.arange(T) < 15, 1, np.where(np.arange(T) < 20, 2, 0))[None].astype(np.int32)
    places = np.where(ids == 2, np.arange(T) - 15, np.arange(T)).astype(np.int32)
    run = jax.jit(lambda tokens, ids, places: hidden_of(model, params, batch_of(tokens, ids, places), 8))
    packed = run(tokens, ids, places)
    for first, length in ((0, 15), (15, 5)):
        alone = np.zeros((1, T), np.int32)
        alone[0, :length] = tokens[0, first : first + length]
        own = (np.arange(T)[None] < length).astype(np.int32)
        found = run(alone, own, np.arange(T, dtype=np.int32)[None] * own)
        np.testing.assert_allclose(packed[first : first + length], found[:length], rtol=1e-5, atol=1e-5)


def batch_of(tokens, segment_ids, positions) -> dict:
    return {"tokens": tokens, "segment_ids": segment_ids, "positions": positions}


@pytest.mark.slow
def test_muon_makes_each_expert_s_update_orthogonal():
    """Gate, up and down of each expert are matrices of their own: alone they are updated as in the stack."""
    stage = module_stage("layer", moe.MixtureOfExperts, SHAPE)
    infos = {name: stage.weights[name] for name in ("gate_up", "down")}
    optimizer = Optimizer(OptimConfig(name="muon", weight_decay=0.0), infos)
    draw = jax.random.normal(jax.random.key(0), (E, D, 2, M)), jax.random.normal(jax.random.key(1), (E, M, D))
    gradients = dict(zip(infos, draw, strict=True))
    params = jax.tree.map(jnp.zeros_like, gradients)
    new, _ = update(optimizer, params, gradients, infos)
    one = {"w": module_stage("dense", SwiGLU, SHAPE).weights["gate"]}
    for expert, name, part in ((0, "gate_up", 0), (3, "gate_up", 1), (5, "down", slice(None))):
        place = (expert, slice(None), part) if name == "gate_up" else (expert,)
        alone = Optimizer(OptimConfig(name="muon", weight_decay=0.0), one)
        wanted, _ = update(alone, {"w": params[name][place]}, {"w": gradients[name][place]}, one)
        np.testing.assert_allclose(new[name][place], wanted["w"], rtol=2e-4, atol=1e-6)


def update(optimizer: Optimizer, params: dict, gradients: dict, infos: dict) -> tuple[dict, dict]:
    weights, slots = optimizer.init_stage(params, infos)
    one = jnp.ones((), jnp.float32)
    how = {"count": jnp.zeros((), jnp.int32), "learning_rate": one, "clip_scale": one, "finite": one > 0}
    return optimizer.update(gradients, weights, slots, infos=infos, **how)


@pytest.mark.slow
def test_8_bit_moments_of_an_expert_know_no_other():
    """One whose gradients are a million times larger does not coarsen those of its neighbours."""
    stage = module_stage("layer", moe.MixtureOfExperts, SHAPE)
    infos = {name: stage.weights[name] for name in ("gate_up", "down")}
    optimizer = Optimizer(OptimConfig(state="int8", weight_decay=0.0), infos)
    draw = jax.random.normal(jax.random.key(0), (E, D, 2, M)), jax.random.normal(jax.random.key(1), (E, M, D))
    gradients = dict(zip(infos, draw, strict=True))
    louder = {name: leaf.at[2].multiply(1e6) for name, leaf in gradients.items()}
    params = jax.tree.map(jnp.zeros_like, gradients)
    (new, slots), (other, of_other) = (update(optimizer, params, each, infos) for each in (gradients, louder))
    rest = np.array([expert for expert in range(E) if expert != 2])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[rest], b[rest]), new, other)
    for name in ("mu", "nu"):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a[rest], b[rest]), slots[name], of_other[name]
        )


SIZES = {
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", SIZES)
def test_published_shapes_have_their_published_sizes(name):
    shape = configuration.load(name).model
    assert moe.parameters(shape) == SIZES[name]


@pytest.mark.parametrize("settings", [{}, BALANCED | {"qk_norm": True, "qk_norm_together": True}], ids=str)
def test_parameters_are_counted(settings):
    shape = dataclasses.replace(SHAPE, **settings, shared_mlp=20, shared_gate=True, window=8, window_from=2)
    assert moe.parameters(shape) == tiny.bind(shape, ops(), "none").parameters


def test_only_active_parameters_need_flops():
    """A mixture of one expert is the dense model of its width, but for the router."""
    one = dataclasses.replace(SHAPE, experts=1, top_k=1, mlp=M)
    dense = {field.name: getattr(one, field.name) for field in dataclasses.fields(llama.Config)}
    dense = llama.train_flops(llama.Config(**dense), 100, 5000)
    router = 6 * 100 * SHAPE.layers * D
    assert moe.train_flops(one, 100, 5000) == pytest.approx(dense + router)
    more = dataclasses.replace(one, experts=5)
    assert moe.train_flops(more, 100, 5000) == pytest.approx(dense + 5 * router)
    twice = dataclasses.replace(more, top_k=2)
    assert (
        moe.train_flops(twice, 100, 0) - moe.train_flops(more, 100, 0) == 6 * 100 * SHAPE.layers * 3 * D * M
    )


def test_layers_are_runs_of_those_alike():
    shape = dataclasses.replace(SHAPE, layers=5, dense_first=2, window=8, window_from=3)
    found = [(group.blocks[0].name, group.repetitions) for group in family.chain(shape).groups]
    assert found == [("dense_block", 2), ("expert_block", 1), ("windowed_expert_block", 2)]
    one, other = (family.chain(dataclasses.replace(SHAPE, bias_rate=1e-3)) for _ in range(2))
    assert one.layers[0] == other.layers[0], "equal stages share a program because they are equal"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 9}, "model.top_k = 9: must be at most model.experts = 8"),
        ({"expert_groups": 3}, "model.expert_groups = 3: must divide model.experts = 8"),
        ({"top_groups": 2}, "model.top_groups = 2: must be at most model.expert_groups = 1"),
        ({"expert_groups": 8, "top_groups": 4}, "must have two, which model.experts = 8 is too few for"),
        ({"expert_groups": 4, "top_groups": 1, "top_k": 3}, "hold 2 experts, fewer than model.top_k = 3"),
        ({"dense_first": 3}, "model.dense_first = 3: must be from 0 to 2"),
        ({"shared_gate": True}, "model.shared_gate = True: .* set model.shared_mlp"),
        ({"aux_loss": -1.0}, "model.aux_loss = -1.0: must be at least 0"),
        ({"qk_norm_together": True}, "says how model.qk_norm norms"),
    ],
)
def test_what_cannot_be_is_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SHAPE, **settings)


def test_the_key_of_a_width_is_the_one_that_set_it():
    assert SHAPE.key("mlp", M) == "model.expert_mlp" and SHAPE.key("mlp", 24) == "model.mlp"
    assert SHAPE.key("experts") == "model.experts" and SHAPE.key("vocab", 512) == "model.vocabulary"
    assert facts.facts(SHAPE, "float32").widths == {"vocabulary": 512, "embed": D, "expert_mlp": M}
