"""A next-token model of three matrices and a norm, trained for 1,000 steps in seconds."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxthru.optim.formats import rounding_key
from jaxthru.optim.optimizer import OptimConfig, Optimizer
from jaxthru.optim.schedules import make_schedule
from jaxthru.runtime.weights import WeightInfo

VOCABULARY, EMBED, MLP, ROWS, STEPS = 64, 32, 64, 128, 1000
INFOS = {
    "embedding": WeightInfo((None, None), "table"),
    "norm": WeightInfo((None,), "norm"),
    "up": WeightInfo((None, None), "matrix", inputs=(0,)),
    "down": WeightInfo((None, None), "matrix", inputs=(0,)),
    "out": WeightInfo((None, None), "table"),
}


def init(seed: int):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {
        "embedding": (VOCABULARY, EMBED),
        "up": (EMBED, MLP),
        "down": (MLP, EMBED),
        "out": (EMBED, VOCABULARY),
    }
    drawn = {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return drawn | {"norm": jnp.ones(EMBED)}


def tokens(seed: int, step, rows: int):
    """Returns pairs drawn from a fixed random Markov chain, whose entropy keeps the loss from zero."""
    logits = 2 * jax.random.normal(jax.random.key(99), (VOCABULARY, VOCABULARY))
    first, second = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
    inputs = jax.random.randint(first, (rows,), 0, VOCABULARY)
    return inputs, jax.random.categorical(second, logits[inputs])


def loss(params, inputs, targets):
    x = params["embedding"][inputs]
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * params["norm"][None]
    x = x + jax.nn.silu(normed @ params["up"]) @ params["down"]
    log_p = jax.nn.log_softmax(x @ params["out"])
    return -jnp.mean(jnp.take_along_axis(log_p, targets[:, None], 1))


def wide(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def update(optimizer, schedule, gradients, weights, opt_state):
    count = opt_state["count"]
    weights, slots = optimizer.update(
        gradients,
        weights,
        opt_state["slots"],
        count=count,
        learning_rate=schedule(count),
        clip_scale=optimizer.clip_scale(optax.tree.norm(gradients)),
        finite=jnp.bool(True),
        infos=optimizer.infos,
        key=rounding_key(0, count, 0),
    )
    return weights, {"count": count + 1, "slots": slots}


@functools.cache
def final_loss(seed: int = 0, **config) -> float:
    """Returns the loss on 16,384 fresh tokens after STEPS updates."""
    optim = OptimConfig(**{"learning_rate": 1e-2, **config})
    optimizer, schedule = Optimizer(optim, INFOS), make_schedule(optim, STEPS)

    @jax.jit
    def run():
        def step(state, index):
            gradients = jax.grad(loss)(wide(state[0]), *tokens(seed, index, ROWS))
            return update(optimizer, schedule, gradients, *state), None

        (weights, _), _ = jax.lax.scan(step, optimizer.init(init(seed)), jnp.arange(STEPS))
        return loss(wide(weights), *tokens(1234, 0, 16_384))

    return float(run())
