"""Experts that change places change no number that a model gives, and share out the tokens."""

import contextlib
import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
import tiny

from jaxthru.engine.expert_placement import MOST, Exchange, ExpertPlacement, busiest, evened
from jaxthru.engine.model import split_stages
from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import moe
from jaxthru.models.router import TOKENS
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.runtime.mesh import MeshConfig

SHAPE = moe.Config(
    **{"vocabulary": tiny.VOCABULARY, "layers": 3, "embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8},
    **{"experts": 8, "top_k": 2, "expert_mlp": 16, "dense_first": 1, "mlp": 32, "bias_rate": 1e-2},
)
GROUPED = dataclasses.replace(SHAPE, expert_groups=4, top_groups=2)


@functools.cache
def made(mesh: tuple[int, ...], **settings) -> tiny.Tiny:
    return tiny.make(mesh, of=SHAPE, **settings)


def after_a_step(of: tiny.Tiny) -> tuple[dict, dict]:
    return of.compiled(of.fresh(), of.batch(0))


def filled(of: tiny.Tiny) -> dict:
    """Returns a state of drawn numbers, moments too, which no step has been compiled for."""
    draw = np.random.default_rng(0)

    def drawn(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(draw.integers(0, 100, leaf.shape).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(drawn, of.abstract)


def experts_of(state: dict) -> np.ndarray:
    """Returns a matrix of each expert of the last layer, which tells it from the others."""
    (matrices,) = jax.tree.leaves(split_stages(state["params"])[-1]["mlp"]["down"])
    return np.asarray(matrices)[..., 0, 0].reshape(-1, 8)[-1]


def test_a_pair_that_evens_devices_out_changes_places():
    counts = np.array([9, 8, 1, 1, 1, 1, 1, 2])
    order = evened(counts, 2)
    assert sorted(order) == [*range(8)]
    assert np.count_nonzero(order != np.arange(8)) == 2
    assert counts[order].reshape(2, 4).sum(axis=1).tolist() == [12, 12]


def test_where_no_device_has_less_to_do_then_experts_stay():
    for counts in (np.full(8, 5), np.array([6, 2, 2, 2, 3, 3, 3, 3]), np.zeros(8, int)):
        np.testing.assert_array_equal(evened(counts, 2), np.arange(8))
    for devices in (2, 8):  # of which one has a single busy expert, or each has one expert
        np.testing.assert_array_equal(evened(np.array([100, 0, 0, 0, 0, 0, 0, 1]), devices), np.arange(8))


def test_no_device_is_given_more_than_its_share_of_experts():
    counts = np.array([100, 9, 1, 1, 1, 1, 1, 1])
    order = evened(counts, 4)
    assert sorted(order) == [*range(8)]
    assert busiest(counts[order][None], 4) == pytest.approx(101 / (115 / 4))


def test_experts_of_a_group_stay_together():
    counts = np.array([9, 9, 8, 8, 1, 1, 2, 2])
    order = evened(counts, 2, together=2)
    assert sorted(map(tuple, order.reshape(-1, 2).tolist())) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert counts[order].reshape(2, 4).sum(axis=1).tolist() == [20, 20]


@pytest.mark.parametrize(("experts", "devices"), [(16, 2), (128, 2), (128, 8), (64, 4)])
def test_few_change_places_for_what_dealing_all_of_them_anew_would_reach(experts, devices):
    """Source of what it is held against: longest processing time first, Graham 1969."""
    rng = np.random.default_rng(experts + devices)
    pairs, dealt, moved = [], [], []
    for _ in range(20):
        counts = rng.multinomial(10**6, rng.dirichlet(np.full(experts, rng.uniform(0.5, 5))))
        given, room = np.zeros(devices, int), np.full(devices, experts // devices)
        for count in -np.sort(-counts):
            to = min(np.flatnonzero(room), key=given.__getitem__)
            given[to] += count
            room[to] -= 1
        dealt.append(given.max() / given.mean())
        order = evened(counts, devices)
        pairs.append(busiest(counts[order][None], devices))
        moved.append(np.count_nonzero(order != np.arange(experts)))
    assert np.mean(pairs) < np.mean(dealt) + 0.001
    assert np.mean(moved) < experts / 4


def test_what_a_device_gives_and_takes():
    order = np.arange(64)
    order[[0, 17, 34]] = order[[17, 34, 0]]  # in a ring over three of four devices
    exchange = Exchange.of(np.array([order, np.arange(64)]), 4)
    none = [*range(16, 16 + MOST)]  # past a device's 16 experts
    assert exchange.place_LDK.tolist() == [[[0, *none[1:]], [1, *none[1:]], [2, *none[1:]], none], [none] * 4]
    assert exchange.source_LDK[0, :3, 0].tolist() == [MOST, 2 * MOST, 0]
    assert Exchange.of(np.arange(64)[None, ::-1], 4).place_LDK.shape[-1] == 16  # all of them


@pytest.mark.parametrize(
    ("counts", "least"), [([[4, 4], [4, 4]], 1.0), ([[8, 0], [4, 4]], 1.5), ([[0, 0], [0, 0]], 0.0)]
)
def test_how_busy_the_busiest_is(counts, least):
    assert busiest(np.array(counts), 2) == least


def test_when_it_looks():
    due = ExpertPlacement(made((1, 1, 1, 2)).step.model, 1000).due
    looks = [step for step in range(1, 4000) if due(step)]
    assert looks[:13] == [1, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    assert [step for step in looks if step >= 1024] == [1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584]
    of_model = functools.partial(ExpertPlacement, made((1, 1, 1, 2)).step.model)
    assert [step for step in range(1, 100) if of_model(3).due(step)] == [1, *range(3, 100, 3)]
    default = of_model(MeshConfig().place_experts_every)
    assert [step for step in range(400, 800) if default.due(step)] == [448, 600, 700]
    assert not any(map(ExpertPlacement(made((1, 1, 1, 2)).step.model, 0).due, range(3000)))
    assert not any(map(ExpertPlacement(made((1, 1, 1, 1)).step.model, 1000).due, range(3000)))


@pytest.mark.parametrize(("devices", "on"), [(2, True), (4, True), (8, False)])
def test_groups_are_dealt_whole_or_not_at_all(devices, on):
    placement = ExpertPlacement(tiny.make((1, 1, 1, devices), of=GROUPED).step.model, 1000)
    assert (placement.together, placement.due(1)) == (2, on)


def test_experts_that_are_chosen_in_turn_stay():
    forced = dataclasses.replace(SHAPE, force_load_balancing=True)
    assert not ExpertPlacement(tiny.make((1, 1, 1, 2), of=forced).step.model, 1000).due(1)


@pytest.mark.parametrize(
    ("mesh", "loop"),
    [
        ((1, 1, 1, 2), "unroll"),
        pytest.param((1, 2, 2, 2), "scan", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 4), "unroll", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_next_steps_are_the_same(mesh, loop):
    of = made(mesh, loop=loop)
    placement = ExpertPlacement(of.step.model, 1000)
    order = np.array([np.random.default_rng(at).permutation(8) for at in range(2)])
    losses, counts = {}, {}
    for places in (False, True):
        state, _ = after_a_step(of)
        if places:
            before, homes = experts_of(state), jax.tree.map(lambda leaf: leaf.sharding, state)
            state = placement.placed(state, order)
            np.testing.assert_array_equal(experts_of(state), before[order[-1]])
            assert jax.tree.map(lambda leaf: leaf.sharding, state) == homes
        losses[places], counts[places] = [], []
        for index in (0, 1, 2):
            state, metrics = of.compiled(state, of.batch(index))
            losses[places] += [float(metrics["loss"]), float(metrics["grad_norm"])]
            counts[places].append(np.asarray(metrics[TOKENS]))
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-5)
    for placed, as_it_was in zip(counts[True], counts[False], strict=True):
        np.testing.assert_array_equal(placed, np.take_along_axis(as_it_was, order, axis=1))


def test_where_it_is_worth_it_devices_have_about_as_many_tokens(caplog):
    """Of the weights that they were counted with, which no update has changed."""
    caplog.set_level("INFO", "jaxthru")
    of = made((1, 1, 1, 2), loop="unroll")
    _, metrics = after_a_step(of)
    counts = np.asarray(metrics[TOKENS])
    state = ExpertPlacement(of.step.model, 1000)(of.fresh(), metrics)
    _, metrics = of.compiled(state, of.batch(0))
    placed = np.asarray(metrics[TOKENS])
    order = np.array([evened(each, 2) for each in counts])
    np.testing.assert_array_equal(placed, np.take_along_axis(counts, order, axis=1))
    assert 1 <= busiest(placed, 2) < busiest(counts, 2) - 0.01
    assert (
        f"has {busiest(placed, 2):.3f} times the mean of tokens, for {busiest(counts, 2):.3f}" in caplog.text
    )


@pytest.mark.parametrize(
    "found", [{TOKENS: np.full((2, 8), 7)}, {"skipped_in_a_row": np.int32(1)}], ids=["balanced", "skipped"]
)
def test_where_it_is_not_or_an_update_was_skipped_nothing_moves(found, caplog):
    caplog.set_level("INFO", "jaxthru")
    of = made((1, 1, 1, 2), loop="unroll")
    state, metrics = after_a_step(of)
    assert ExpertPlacement(of.step.model, 1000)(state, {**metrics, **found}) is state
    assert not caplog.text


def check_moved(before: dict, after: dict, order: np.ndarray, least: int) -> None:
    """Checks that of every array of experts, of which there are so many at least, each layer's are in this
    order, [layers, experts], and that all else is as it was."""
    trees = [jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0] for tree in (before, after)]
    moved = 0
    for (path, one), (_, other) in zip(*trees, strict=True):
        name = jax.tree_util.keystr(path)
        found = re.search(r"\['layers'\]((?:\[\d\])+)\['mlp'\]\['(?:router|gate_up|down)'\]", name)
        if found and order.shape[1] in one.shape:
            dim = one.shape.index(order.shape[1])
            _, _, *layer = map(
                int, re.findall(r"\d", found[1])
            )  # of unrolled ones, where stacked ones have none
            at = np.expand_dims(order[layer[0]] if layer else order, [*range(dim + 1, one.ndim)])
            at = np.expand_dims(at, [*range(0 if layer else 1, dim)])
            one = np.take_along_axis(one, at, axis=dim)
            moved += 1
        np.testing.assert_array_equal(one, other, err_msg=name)
    assert moved >= least


@pytest.mark.parametrize("kept", ["split_master_int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_what_the_optimizer_keeps_moves_along(kept):
    optim = OptimConfig(learning_rate=1e-2, state=kept)
    of = made((1, 2, 1, 2), optim=optim)
    state, order = filled(of), np.array([np.random.default_rng(at).permutation(8) for at in range(2)])
    before = jax.device_get(state)
    check_moved(before, ExpertPlacement(of.step.model, 1000).placed(state, order), order, least=8)


@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_a_pair_of_one_layer_moves_alone_and_any_other_by_the_same_programs(loop):
    """A device has 12 experts and gives 8 places for them."""
    of = tiny.make((1, 1, 1, 2), of=dataclasses.replace(SHAPE, experts=24), loop=loop)
    state, placement = filled(of), ExpertPlacement(of.step.model, 1000)
    for pair in ((3, 20), (11, 12)):
        order, before = np.tile(np.arange(24), (2, 1)), jax.device_get(state)
        order[1, pair] = order[1, pair[::-1]]
        assert Exchange.of(order, 2).place_LDK.shape[-1] == MOST
        with jax.no_tracing() if pair == (11, 12) else contextlib.nullcontext():
            state = placement.placed(state, order)
        check_moved(before, state, order, least=8)


@pytest.mark.parametrize("level", ["optimizer", pytest.param("parameters", marks=pytest.mark.slow)])
def test_a_state_in_host_memory_stays_there(level):
    check_in_host_memory(level)


@pytest.mark.gpu
@pytest.mark.several_gpus
def test_on_several_gpus_experts_change_places_in_device_and_host_memory():
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    with jax.default_matmul_precision("highest"):
        check_in_host_memory("optimizer", attention="xla")


def check_in_host_memory(level: str, **settings):
    of = made((1, 1, 1, 2), loop="unroll", remat="projections", **settings)
    order = np.tile(np.arange(8)[::-1], (2, 1))
    losses = {}
    for places in (False, True):
        step, state = tiny.dispatched(of, OffloadConfig(level=level))
        state, metrics = step(state, of.batch(0))
        state = step.settled(state)
        if places:
            homes, before = jax.tree.map(lambda leaf: leaf.sharding, state), jax.device_get(state)
            state = ExpertPlacement(of.step.model, 1000).placed(state, order)
            check_moved(before, state, order, least=8)
            assert jax.tree.map(lambda leaf: leaf.sharding, state) == homes
            assert "pinned_host" in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}
        state, metrics = step(state, of.batch(1))
        losses[places] = float(metrics["loss"])
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_with_state_in_host_memory_they_move_where_a_step_is_saved():
    of = made((1, 1, 1, 2), loop="unroll", remat="projections")
    step, state = tiny.dispatched(of, OffloadConfig(level="optimizer"))
    state, metrics = step(state, of.batch(0))
    state, placement = step.settled(state), ExpertPlacement(of.step.model, 1000)
    for more, moves in ((48, False), (52, True)):  # of 400; the next look is 8 steps away
        counts = [100 + more, 100, 100, 100, 100 - more, 100, 100, 100]
        assert (placement(state, metrics | {TOKENS: np.tile(counts, (2, 1))}) is not state) == moves
