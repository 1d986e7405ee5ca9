"""The optimizer: Optax's arithmetic, on any part of the tree, and nothing where a step is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small

from jaxthru.optim.formats import FORMATS, decode, rounding_key
from jaxthru.optim.optimizer import OptimConfig, Optimizer
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.adamw_8bit import join


def arguments(optimizer, infos=None, **changed):
    given = {
        "count": jnp.int32(0),
        "learning_rate": jnp.float32(1e-2),
        "clip_scale": jnp.float32(1),
        "finite": jnp.bool(True),
        "infos": optimizer.infos if infos is None else infos,
        "key": rounding_key(0, jnp.int32(0), 0),
    }
    return given | changed


def gradients(seed=1):
    return jax.tree.map(lambda x: x * 0.1, small.init(seed))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8), a, b)


# None is a default, and epsilon is large enough to be felt.
SETTINGS = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.97, "epsilon": 1e-3, "weight_decay": 0.2}


def test_float32_adamw_is_that_of_optax():
    config = OptimConfig(**SETTINGS)
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            config.learning_rate,
            config.b1,
            config.b2,
            config.epsilon,
            weight_decay=config.weight_decay,
            mask={name: info.decays for name, info in small.INFOS.items()},
        ),
    )
    optimizer = Optimizer(config, small.INFOS)
    params = small.init(0)
    wanted, chain_state = params, chain.init(params)
    weights, opt_state = optimizer.init(params)
    for index in range(5):
        given = gradients(index)
        norm = optax.tree.norm(given)
        assert norm > 1
        with jax.numpy_dtype_promotion("standard"):
            updates, chain_state = chain.update(given, chain_state, wanted)
            wanted = optax.apply_updates(wanted, updates)
        changed = {"count": jnp.int32(index), "clip_scale": optimizer.clip_scale(norm)}
        weights, slots = optimizer.update(
            given, weights, opt_state["slots"], **arguments(optimizer, **changed)
        )
        opt_state = {"slots": slots}
        assert_close(weights, wanted)
    assert_close(slots["mu"], optax.tree.get(chain_state, "mu"))
    assert_close(slots["nu"], optax.tree.get(chain_state, "nu"))


@pytest.mark.parametrize("state", ["int8", "split_master_int8"])
def test_8_bit_adamw_is_that_of_the_books(state):
    """Two updates, each by hand in float64 from the moments that the codes before it stand for."""
    config = OptimConfig(**SETTINGS, state=state)
    optimizer = Optimizer(config, {"w": WeightInfo((None, None), "table")})
    weights, opt_state = optimizer.init({"w": small.init(0)["up"]})
    slots = opt_state["slots"]

    def wide(weights, slots):
        remainder = slots["remainder"]["w"]
        master = weights["w"] if remainder is None else join(weights["w"], remainder)
        moments = (decode(slots[name]["w"]) for name in ("mu", "nu"))
        return [np.asarray(x, np.float64) for x in (master, *moments)]

    for count in range(2):
        gradient = small.init(1 + count)["up"]
        before, mu, nu = wide(weights, slots)
        g = np.asarray(gradient, np.float64) / 1.7
        mu, nu = (old + (1 - b) * (new - old) for b, old, new in ((0.8, mu, g), (0.97, nu, g**2)))
        direction = mu / (1 - 0.8 ** (count + 1)) / (np.sqrt(nu / (1 - 0.97 ** (count + 1))) + 1e-3)
        changed = {"count": jnp.int32(count), "clip_scale": jnp.float32(1.7)}
        weights, slots = optimizer.update({"w": gradient}, weights, slots, **arguments(optimizer, **changed))
        after, *_ = wide(weights, slots)
        # How far, not where to: without its decay of 0.2 a weight moves a few hundredths less far.
        np.testing.assert_allclose(after - before, -1e-2 * (direction + 0.2 * before), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_is_not_finite_leaves_all_as_it_was(name, state):
    optimizer = Optimizer(OptimConfig(name=name, state=state), small.INFOS)
    weights, opt_state = optimizer.init(small.init(0))
    kept = optimizer.update(gradients(), weights, opt_state["slots"], **arguments(optimizer))
    assert not np.array_equal(kept[0]["up"], weights["up"])
    bad = jax.tree.map(lambda x: x * jnp.nan, gradients())
    assert_same(optimizer.update(bad, *kept, **arguments(optimizer, finite=jnp.bool(False))), kept)


@pytest.mark.parametrize("state", FORMATS)
def test_a_part_alone_comes_out_as_with_its_neighbours(state):
    """Norms keep float32 in every format; gradients may be of a narrower type."""
    optimizer = Optimizer(OptimConfig(state=state), small.INFOS)
    weights, opt_state = optimizer.init(small.init(0))
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gradients())
    names = ("down", "embedding")  # the first of the leaves, so that their indices are the same
    whole, slots = optimizer.update(given, weights, opt_state["slots"], **arguments(optimizer))

    def part(tree):
        return {name: tree[name] for name in names}

    alone, part_slots = optimizer.update(
        part(given),
        part(weights),
        {name: part(tree) for name, tree in opt_state["slots"].items()},
        **arguments(optimizer, infos=part(optimizer.infos)),
    )
    assert_same(alone, part(whole))
    assert_same(part_slots, {name: part(tree) for name, tree in slots.items()})
    assert whole["norm"].dtype == slots["nu"]["norm"].dtype == jnp.float32
    assert whole["up"].dtype == FORMATS[state].weights
    assert (slots["remainder"]["up"] is None) == (FORMATS[state].master != "split")


def test_clipping():
    clip_scale = Optimizer(OptimConfig(clip=2.0), {}).clip_scale
    assert clip_scale(jnp.float32(1)) == 1 and clip_scale(jnp.float32(8)) == 4
    assert Optimizer(OptimConfig(clip=0.0), {}).clip_scale(jnp.float32(100)) == 1


def test_muon_keeps_one_momentum_and_trains():
    optimizer = Optimizer(OptimConfig(name="muon"), small.INFOS)
    slots = optimizer.init(small.init(0))[1]["slots"]
    assert {name for name, slot in slots["nu"].items() if slot is None} == {"up", "down"}
    assert small.final_loss(learning_rate=1e-3, name="muon") < 3.0, "it starts at 4.4"


@pytest.mark.slow
def test_muon_in_8_bits_ends_where_float32_does():
    narrow = small.final_loss(learning_rate=1e-3, name="muon", state="split_master_int8")
    assert narrow == pytest.approx(small.final_loss(learning_rate=1e-3, name="muon"), rel=5e-3)


def test_muon_makes_each_linear_map_orthogonal():
    """A stack of maps with two output dims is orthogonalised map by map, over its two sides."""
    optimizer = Optimizer(
        OptimConfig(name="muon", weight_decay=0.0),
        {"w": WeightInfo((None,) * 4, "matrix", inputs=(1,), stack=(0,))},
    )
    gradient = jax.random.normal(jax.random.key(0), (3, 16, 4, 8))
    weights, opt_state = optimizer.init({"w": jnp.zeros((3, 16, 4, 8))})
    stepped, _ = optimizer.update(
        {"w": gradient}, weights, opt_state["slots"], **arguments(optimizer, learning_rate=jnp.float32(1))
    )
    for layer in np.asarray(stepped["w"]).reshape(3, 16, 32):
        values = np.linalg.svd(layer / (0.2 * 32**0.5), compute_uv=False)
        assert values.min() > 0.5 and values.max() < 1.4
        assert np.sqrt(np.mean(layer**2)) == pytest.approx(0.2, rel=0.3)


def test_stochastic_rounding_asks_for_its_key():
    optimizer = Optimizer(OptimConfig(state="stochastic_rounding"), small.INFOS)
    weights, opt_state = optimizer.init(small.init(0))
    with pytest.raises(ValueError, match="stochastic_rounding': an update needs a key"):
        optimizer.update(gradients(), weights, opt_state["slots"], **arguments(optimizer, key=None))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"momentum": 1.0}, "optim.momentum = 1.0: must be at least 0 and below 1"),
        ({"clip_rule": "previous", "clip": 0.0}, "optim.clip_rule = 'previous': needs optim.clip above 0"),
        ({"state": "int8", "b2": 0.999}, "optim.b2 = 0.999: at most 0.99 with the int8 moments of"),
        ({"state": "split_master", "b2": 0.999}, "optim.b2 = 0.999: at most 0.99 with the bfloat16 moments"),
    ],
)
def test_impossible_combinations_are_one_line(config, message):
    with pytest.raises(InputError, match=message):
        OptimConfig(**config)
    OptimConfig(state="split_master_float32", b2=0.999)
