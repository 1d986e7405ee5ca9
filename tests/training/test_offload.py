"""The state lives where it is told to, and nothing of it stays anywhere else."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxthru.engine import offload
from jaxthru.engine.dispatched import DispatchedStep
from jaxthru.engine.model import LAYERS, split_stages
from jaxthru.engine.offload import AHEAD, HOST, Fetched, OffloadConfig, Pace, move, offloaded_state, on_device
from jaxthru.engine.step import first_state
from jaxthru.runtime.errors import InputError
from jaxthru.training.state import sharded_init


def test_fractions_are_spread_evenly_over_the_depth():
    """Of any stretch of the depth, so many stages as the fraction says, to within one."""
    draw = np.random.default_rng(0)
    for fraction in (1.0, 0.5, 0.1, 1 / 3, 0.6, 0.9, *draw.uniform(0.01, 1, 40)):
        for count in (1, 2, 3, 7, 10, 34, 82):
            chosen = OffloadConfig("optimizer", fraction).on_host(count)
            assert len(chosen) == count
            assert sum(chosen) == int(count * fraction + 1e-9)
            before = np.concatenate([[0], np.cumsum(chosen)])
            for start in range(count):
                for end in range(start + 1, count + 1):
                    assert abs(before[end] - before[start] - fraction * (end - start)) < 1 + 1e-6
    assert all(OffloadConfig("parameters").on_host(9))
    assert not any(OffloadConfig("none", activations="inputs").on_host(9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 0.0}, "offload.fraction = 0.0: must be above 0, at most 1"),
        ({"fraction": 1.5}, "offload.fraction = 1.5: must be above 0"),
        ({"host_gib": 0.0}, "offload.host_gib = 0.0: must be above 0"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(InputError, match=message):
        OffloadConfig("optimizer", **settings)


def make(state: str = "split_master_int8", clip_rule: str = "exact", layers: int = 2) -> tiny.Tiny:
    optim = dataclasses.replace(tiny.OPTIM, state=state, clip_rule=clip_rule)
    return tiny.make(optim=optim, loop="unroll", remat="attention", layers=layers)


def leaves_by_stage(state: dict) -> list[tuple[list, list]]:
    """Returns the leaves of the weights and the slots of each stage in the order of the forward pass."""
    columns = [split_stages(state["params"]), *map(split_stages, state["opt_state"]["slots"].values())]
    embedding, head, *layers = zip(*columns, strict=True)
    return [(jax.tree.leaves(of[0]), jax.tree.leaves(of[1:])) for of in (embedding, *layers, head)]


def kinds(leaves: list) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in leaves}


def check_homes(state: dict, config: OffloadConfig) -> None:
    """Fails unless each leaf of a state lies where the configuration says."""
    by_stage = leaves_by_stage(state)
    count = 0
    for chosen, (weights, slots) in zip(config.on_host(len(by_stage)), by_stage, strict=True):
        matrices = [leaf for leaf in slots if leaf.ndim > 1]
        assert len(matrices) >= 3  # remainder, and codes and scales of two moments
        assert kinds(matrices) == {HOST if chosen else "device"}
        assert kinds([leaf for leaf in weights + slots if leaf.ndim < 2]) <= {"device"}
        away = chosen and config.level == "parameters"
        assert kinds([leaf for leaf in weights if leaf.ndim > 1]) <= {HOST if away else "device"}
        count += len(weights) + len(slots)
    scalars = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 0]
    assert kinds(scalars) == {"device"}
    assert count + len(scalars) == len(jax.tree.leaves(state))


def advanced(compiled: DispatchedStep, state: dict, batch: dict) -> tuple[dict, dict]:
    """Returns the state after a step, with all of its updates made, and the step's metrics."""
    state, metrics = compiled(state, batch)
    return compiled.settled(state), metrics


def live_bytes(kind: str) -> int:
    """Returns the size of all arrays that live in memory of this kind."""
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.sharding.memory_kind == kind)


@pytest.mark.parametrize(
    ("clip_rule", "config"),
    [
        pytest.param("exact", OffloadConfig("parameters", 0.4), marks=pytest.mark.slow),
        ("previous", OffloadConfig("gradients", 0.75)),
        pytest.param("previous", OffloadConfig("parameters", activations="names"), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.level}-{value.fraction}",
)
def test_a_step_leaves_the_state_where_it_was_and_nothing_beside_it(clip_rule, config):
    whole = make(clip_rule=clip_rule)
    compiled, state = tiny.dispatched(whole, config)
    check_homes(state, config)
    batches = [whole.batch(index) for index in range(3)]
    state, metrics = advanced(compiled, state, batches[0])  # what is made once is there now
    host, device = live_bytes(HOST), live_bytes("device")
    assert host >= sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == HOST)
    for batch in batches[1:]:
        before = jax.tree.leaves(state)
        away = [leaf for leaf in before if leaf.sharding.memory_kind == HOST]
        state, metrics = advanced(compiled, state, batch)
        assert len(away) > 10 and all(leaf.is_deleted() for leaf in away)
        del before, away
        check_homes(state, config)
        assert live_bytes(HOST) == host
        assert live_bytes("device") == device  # no gradient, and no weight that was fetched
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [AHEAD, 0])
def test_no_more_than_a_few_parts_are_ever_on_the_device(prefetch):
    """Counted whenever a program is dispatched; the clip rule keeps no gradients."""
    most = prefetch + 3
    config = OffloadConfig("parameters", activations="inputs", staging_gib=0.0, prefetch=prefetch)
    whole = make(clip_rule="previous", layers=5)
    compiled, state = tiny.dispatched(whole, config)
    layer = (
        split_stages(whole.state["params"])[LAYERS],
        [split_stages(tree)[LAYERS] for tree in whole.state["opt_state"]["slots"].values()],
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(layer))
    # In float32, which gradients are in here, twice the size of bfloat16 weights.
    size += 4 * sum(leaf.size for leaf in jax.tree.leaves(layer[0]))
    batch, found = whole.batch(0), []
    resident = live_bytes("device")

    def counted(program):
        def call(*arguments):
            found.append(live_bytes("device") - resident)
            return program(*arguments)

        return call

    compiled.forward = [counted(program) for program in compiled.forward]
    compiled.backward = [counted(program) for program in compiled.backward]
    updates = {stage: counted(program) for stage, program in compiled.update.items() if stage >= LAYERS}
    compiled.update |= updates
    compiled(state, batch)
    table = max(leaf.nbytes for leaf in jax.tree.leaves(whole.state["params"]["embedding"]))
    stream = 4 * tiny.ROWS * tiny.SEQUENCE * tiny.SHAPE.embed
    assert len(found) == 15
    assert max(found) < most * size + 6 * table + 20 * stream
    # Of five layers, the last to be updated finds no more there than those in the middle do.
    updates = found[6::2]
    assert updates[-1] <= max(updates[:-1])


@pytest.mark.parametrize("level", [pytest.param("none", marks=pytest.mark.slow), "parameters"])
def test_the_first_state_is_the_whole_ones(level, bit_exact):
    whole = make()
    step = whole.step
    config = OffloadConfig(level, 0.5, "inputs")
    abstract = offloaded_state(whole.abstract, config)
    state = sharded_init(step.objective.model, step.optimizer, abstract, 0)
    whole_init = lambda key: first_state(*step.optimizer.init(step.model.init(key)))  # noqa: E731
    wanted = jax.jit(whole_init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    homes = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (state, abstract))
    assert next(homes) == next(homes)


def test_moving_copies_what_lies_elsewhere_and_nothing_else():
    sharding = tiny.make(loop="unroll", remat="attention").layout.sharding((None, None))
    here = jax.device_put(np.arange(6.0, dtype=np.float32).reshape(2, 3), sharding)
    there = jax.device_put(here, sharding.with_memory_kind(HOST))
    tree = {"here": here, "there": there, "none": None}
    moved = move(tree, on_device(tree))
    assert moved["here"] is here and kinds(jax.tree.leaves(moved)) == {"device"}
    assert not there.is_deleted()
    back = move(moved, {"here": sharding, "there": there.sharding, "none": None}, donate=True)
    assert back["here"] is here and not here.is_deleted()
    assert moved["there"].is_deleted() and back["there"].sharding.memory_kind == HOST
    np.testing.assert_array_equal(back["there"], here)


@pytest.mark.parametrize("ahead", [AHEAD, 0])
def test_fetched_is_ahead_by_so_many_and_keeps_nothing(ahead):
    sharding = tiny.make(loop="unroll", remat="attention").layout.sharding((None,))
    asked, made = [], []

    def trees():
        for index in range(6):
            asked.append(index)
            tree = jax.device_put(jnp.full(3, index), sharding.with_memory_kind(HOST))
            made.append(weakref.ref(tree))
            yield tree, sharding

    coming = Fetched(trees(), prefetch=ahead)
    assert asked == []
    for index in range(6):
        tree = next(coming)
        assert kinds([tree]) == {"device"}
        np.testing.assert_array_equal(tree, np.full(3, index))
        assert len(asked) == min(6, index + 1 + ahead)
        seen = weakref.ref(tree)
        del tree
        gc.collect()
        assert seen() is None  # the queue held the only reference
        # Of those on the host none but the one which the generator itself names.
        assert sum(ref() is not None for ref in made) <= 1
    with pytest.raises(StopIteration):
        next(coming)


@pytest.mark.parametrize("ahead", [AHEAD, 0])
def test_pace_waits_for_results_handed_over_before(monkeypatch, ahead):
    waited = []
    monkeypatch.setattr(offload.jax, "block_until_ready", waited.append)
    pace = Pace(ahead)
    for index in range(6):
        pace(index)
        assert waited == list(range(max(0, index + 1 - ahead)))
