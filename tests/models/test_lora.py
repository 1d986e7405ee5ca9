"""Adapters beside a frozen base: what they compute, what they leave alone, on every mesh and executor."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxthru.engine.inline import hidden
from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import family, llama, lora
from jaxthru.models.lora import LORA, SCALES, LoraConfig
from jaxthru.models.remat import LOW_RANK
from jaxthru.runtime.errors import InputError

RANK = LoraConfig(rank=4)
BASES = ("compute", "fp8", "int8")


def make(base: str = "compute", adapters: LoraConfig = RANK, **how):
    how = {"loop": "unroll"} | how
    return tiny.make(adapters=dataclasses.replace(adapters, base=base), float8=base == "fp8", **how)


def base_only(params):
    """Returns the params of the model alone."""
    layers = tuple(
        tuple(
            tuple({name: leaf for name, leaf in tree.items() if name != LORA} for tree in trees)
            for trees in of
        )
        for of in params["layers"]
    )
    return params | {"layers": layers}


def steps(made, count: int, config: OffloadConfig | None = None):
    """Returns the losses of some steps, and the state after them."""
    run, state = (made.compiled, made.fresh()) if config is None else tiny.dispatched(made, config)
    losses = []
    for index in range(count):
        state, metrics = run(state, made.batch(index))
        losses.append(float(metrics["loss"]))
    return losses, state if config is None else run.settled(state)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_at_first_the_model_is_the_base_to_the_bit(compute):
    adapted, plain = make(compute=compute), tiny.make(loop="unroll", compute=compute)
    params = adapted.state["params"]
    of = functools.partial(hidden, batch=adapted.batch(0), max_segments=8)
    ours = jax.jit(lambda params: of(adapted.step.model, params))(params)
    theirs = jax.jit(lambda params: of(plain.step.model, params))(base_only(params))
    np.testing.assert_array_equal(ours, theirs)


def test_a_step_changes_adapters_alone_and_they_alone_have_state():
    made = make()
    before = jax.tree.map(np.array, made.state["params"])
    losses, state = steps(made, 3)
    assert losses[2] != pytest.approx(tiny.make(loop="unroll").losses(3)[2]) and losses[0] != losses[2]
    changed = jax.tree.map(lambda old, new: bool(np.any(old != np.array(new))), before, state["params"])
    by_place = {jax.tree_util.keystr(path): at for path, at in jax.tree_util.tree_leaves_with_path(changed)}
    assert all(at == (LORA in path) for path, at in by_place.items())
    slots = jax.tree_util.tree_leaves_with_path(state["opt_state"]["slots"]["mu"])
    assert len(slots) == 2 * 7 * 2 and all(LORA in jax.tree_util.keystr(path) for path, _ in slots)


@pytest.mark.parametrize("base", ["compute", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_loop_micro_batches_and_remat_change_nothing(base):
    expected, _ = steps(make(base), 3)
    scanned, _ = steps(make(base, loop="scan", remat="projections"), 3)
    assert scanned == pytest.approx(expected, rel=1e-3 if base == "fp8" else 1e-6)


def test_the_base_stays_on_the_host_and_is_never_stored_again():
    expected, _ = steps(make(), 3)
    made, config = make(remat="attention"), OffloadConfig("parameters", activations="inputs")
    run, state = tiny.dispatched(made, config)
    bases = [leaf for leaf in jax.tree.leaves(base_only(state["params"])) if leaf.ndim > 1]
    losses = []
    for index in range(3):
        state, metrics = run(state, made.batch(index))
        losses.append(float(metrics["loss"]))
    state = run.settled(state)
    assert losses == pytest.approx(expected, rel=1e-6)
    after = [leaf for leaf in jax.tree.leaves(base_only(state["params"])) if leaf.ndim > 1]
    assert all(one is other for one, other in zip(bases, after, strict=True)), "the very arrays"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "mesh", "collectives"),
    [
        *((base, (2, 2, 2), ("auto", "none")) for base in BASES),
        ("fp8", (1, 8, 1), ("auto",)),  # nothing is moved along an axis of one device
    ],
)
def test_every_mesh_gives_the_same(base, mesh, collectives):
    expected, _ = steps(make(base), 3)
    for collective in collectives:
        found, _ = steps(make(base, mesh=mesh, loop="scan", collective_matmul=collective), 3)
        assert found == pytest.approx(expected, rel=1e-3 if base == "fp8" else 2e-6)


@pytest.mark.slow
def test_parameters_moved_by_copies_give_the_same():
    expected, _ = steps(make(), 3)
    found, _ = steps(make(mesh=(1, 2, 2), remat="attention", ops=("copies",)), 3)
    assert found == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("base", BASES[1:])
def test_a_quantised_base_takes_a_byte_a_weight(base):
    state = make(base).abstract["params"]
    block = state["layers"][0][0][0]
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves((block["mlp"], block["attention"]))} == {1}
    shape = block[SCALES]["mlp"]["gate"].shape
    assert shape == (() if base == "fp8" else (tiny.SHAPE.mlp,))


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES[1:])
def test_a_quantised_base_loses_little(base):
    (plain, *_), (ours, *_) = (steps(make(each), 1)[0] for each in ("compute", base))
    assert ours == pytest.approx(plain, rel=2e-3) and ours != plain


def test_switched_off_it_is_the_base_again():
    made = make()
    _, state = steps(made, 3)
    model = dataclasses.replace(made.step.model, chain=lora.off(made.step.model.chain))
    of = functools.partial(hidden, batch=made.batch(0), max_segments=8)
    ours = jax.jit(lambda params: of(model, params))(state["params"])
    plain = tiny.make(loop="unroll").step.model
    theirs = jax.jit(lambda params: of(plain, params))(base_only(state["params"]))
    np.testing.assert_array_equal(ours, theirs)
    on = jax.jit(lambda params: of(made.step.model, params))(state["params"])
    assert float(jnp.max(jnp.abs(on - ours))) > 1e-3


@pytest.mark.slow
def test_dropout_is_a_function_of_seed_step_and_layer_and_off_in_evaluation():
    made = make(adapters=dataclasses.replace(RANK, dropout=0.5))
    params, batch = made.fresh()["params"], made.batch(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.05 if jax.tree_util.keystr(path).endswith("['b']") else leaf, params
    )
    run = jax.jit(lambda params, draws: made.gradients(params, batch, draws)[0]["loss"])
    first, again, other = (float(run(params, jnp.asarray([draw], jnp.int32))) for draw in (3, 3, 4))
    assert first == again != other
    still = float(run(params, None))
    plain = make().gradients(without_seeds(params), batch)[0]["loss"]
    assert still == pytest.approx(float(plain), rel=1e-6) and still not in (first, other)
    seeds = [np.array(tree[LORA]["seed"]).tolist() for tree in tiny.layers(params)]
    assert seeds[0] != seeds[1]
    inline, _ = steps(made, 3)
    dispatched, _ = steps(made, 3, OffloadConfig("none", activations="inputs"))
    assert dispatched == pytest.approx(inline, rel=1e-6), "every executor draws the same"


def without_seeds(params):
    strip = lambda tree: tree | {LORA: {name: leaf for name, leaf in tree[LORA].items() if name != "seed"}}  # noqa: E731
    layers = tuple(tuple(tuple(map(strip, trees)) for trees in of) for of in params["layers"])
    return params | {"layers": layers}


def test_needed_flops_leave_out_gradients_of_the_base():
    chain = make().step.model.chain
    adapters = lora.adapter_parameters(chain)
    by_hand = sum((each.info and each.shape[0]) and 4 * (i + o) for each, i, o in sizes(chain))
    assert adapters == 2 * by_hand
    shape = dataclasses.replace(tiny.SHAPE)
    of_model = functools.partial(llama.train_flops, shape)
    tokens, span = 100.0, 100.0 * 64
    found = lora.needed_flops(of_model, adapters, tokens, span)
    attention = 6 * shape.layers * shape.heads * shape.head_dim * span
    assert found == pytest.approx(
        4 * llama.matmul_parameters(shape) * tokens + 6 * adapters * tokens + attention
    )


def sizes(chain):
    """Yields each target of a block with its inputs and outputs."""
    for target in chain.layers[0].apply.targets:
        inputs = int(np.prod([target.shape[dim] for dim in target.info.inputs]))
        yield target, inputs, int(np.prod(target.shape)) // inputs


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        ((), {"query", "key", "value", "out", "gate", "up", "down"}),
        (("q_proj", "v_proj"), {"query", "value"}),
        (("mlp.down_proj", "attention.out"), {"down", "out"}),
        (("self_attn.k_proj", "up"), {"key", "up"}),
    ],
)
def test_targets_go_by_published_names_and_by_jaxthrus(targets, paths):
    chain = make(adapters=dataclasses.replace(RANK, targets=targets)).step.model.chain
    assert {each.path[-1] for each in chain.layers[0].apply.targets} == paths
    assert len({id(stage) for stage in chain.layers}) == 1, "equal blocks are one stage"


@pytest.mark.parametrize("target", ["q_pro", "lm_head", "embed_tokens", "attention", "proj"])
def test_a_target_that_matches_nothing_is_one_line_that_names_what_there_is(target):
    adapters = dataclasses.replace(RANK, targets=(target,))
    with pytest.raises(
        InputError, match=rf"lora.targets: '{target}' matches nothing.*layers are down_proj, gate_proj, k_p"
    ):
        lora.adapted(
            family.chain(tiny.SHAPE), adapters, jnp.dtype("float32"), tiny.names_in_block(tiny.SHAPE)
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rank": -1}, "lora.rank = -1: must be at least 0"),
        ({"base": "fp8"}, "lora.base = 'fp8': is of adapters, and lora.rank is 0; choose a rank"),
        ({"targets": ("q_proj",)}, "lora.targets = .* lora.rank is 0"),
        ({"rank": 4, "alpha": 0.0}, "lora.alpha = 0.0: must be above 0"),
        ({"rank": 4, "dropout": 1.0}, "lora.dropout = 1.0: must be at least 0 and below 1"),
    ],
)
def test_what_cannot_be_is_one_line(keys, message):
    with pytest.raises(InputError, match=message):
        LoraConfig(**keys)


def test_rslora_divides_by_the_root_of_the_rank():
    assert LoraConfig(rank=16, alpha=32).scale == 2.0
    assert LoraConfig(rank=16, alpha=32, rslora=True).scale == 8.0


def test_a_linear_layer_that_goes_past_ops_is_no_silent_loss(monkeypatch):
    made = make()
    stage = made.step.model.chain.layers[0]
    past = dataclasses.replace(stage.apply.stage, apply=lambda params, x, context: (x, lora.Extras()))
    apply = dataclasses.replace(stage.apply, stage=past)
    with pytest.raises(ValueError, match="7 linear layers of a block are multiplied by neither"):
        apply(tiny.layers(made.state["params"])[0], None, made.step.model.context(made.batch(0), 8))


def test_what_adapters_make_small_has_the_name_that_policies_keep():
    made = make()
    params = made.abstract["params"]
    forward = lambda params: hidden(made.step.model, params, tiny.batch(0), 8)  # noqa: E731
    assert f"name[name={LOW_RANK}]" in str(jax.make_jaxpr(forward)(params))
