"""The same step in plain JAX, without jaxthru's model, optimizer or kernels: prints one JSON line.

    PYTHONPATH=scripts/bench:. python -m peers.plain_jax [--tokens FILE]

What one writes in an afternoon: unrolled layers with named residuals saved, JAX's own cuDNN attention, a loss
in chunks, AdamW by hand. What jaxthru adds must show against this.

Shapes: B rows, T tokens, D embed, H heads, K kv heads, C head_dim, V vocabulary.
"""

import functools
import sys

import harness
import jax
import jax.numpy as jnp
import timed_loop
from jax.ad_checkpoint import checkpoint_name

from jaxthru.runtime import hardware, xla

CHUNKS = 8
SAVED = ("q", "k", "v", "attention", "attention_out", "gate", "up")


def first_params(shape: harness.Shape, key: jax.Array) -> dict:
    """Returns float32 parameters; `layers` is a list, so that the loop over it is unrolled."""
    D, F, C = shape.embed, shape.mlp, shape.head_dim
    sizes = {"gate": (D, F), "up": (D, F), "down": (F, D), "q": (D, shape.heads, C), "o": (shape.heads, C, D)}
    sizes |= {"k": (D, shape.kv_heads, C), "v": (D, shape.kv_heads, C)}
    keys = iter(jax.random.split(key, len(sizes) * shape.layers + 2))

    def normal(size):
        return 0.02 * jax.random.normal(next(keys), size, jnp.float32)

    layers = [
        {name: normal(size) for name, size in sizes.items()} | {"norm1": jnp.ones(D), "norm2": jnp.ones(D)}
        for _ in range(shape.layers)
    ]
    table, output = normal((shape.vocabulary, D)), normal((D, shape.vocabulary))
    return {"table": table, "layers": layers, "norm": jnp.ones(D), "output": output}


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotate(x_BTHC):
    T, C = x_BTHC.shape[1], x_BTHC.shape[3]
    frequency = harness.ROPE_THETA ** (-jnp.arange(0, C, 2, dtype=jnp.float32) / C)
    angle = jnp.arange(T, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    left, right = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x_BTHC.dtype)


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*SAVED))
def block(x_BTD, layer):
    weight = {name: value.astype(jnp.bfloat16) for name, value in layer.items() if value.ndim > 1}
    y = rms_norm(x_BTD, layer["norm1"])
    q, k, v = (jnp.einsum("btd,dhc->bthc", y, weight[name]) for name in "qkv")
    q, k, v = checkpoint_name(rotate(q), "q"), checkpoint_name(rotate(k), "k"), checkpoint_name(v, "v")
    by = "cudnn" if jax.default_backend() == "gpu" else "xla"
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=by)
    o = checkpoint_name(o, "attention")
    x_BTD = x_BTD + checkpoint_name(jnp.einsum("bthc,hcd->btd", o, weight["o"]), "attention_out")
    y = rms_norm(x_BTD, layer["norm2"])
    gate, up = checkpoint_name(y @ weight["gate"], "gate"), checkpoint_name(y @ weight["up"], "up")
    return x_BTD + (jax.nn.silu(gate) * up) @ weight["down"]


def loss_of(params, tokens, targets, mask):
    """Returns the mean cross-entropy; a chunk's logits are made again in the backward pass."""
    x = params["table"].astype(jnp.bfloat16)[tokens]
    for layer in params["layers"]:
        x = block(x, layer)
    x = rms_norm(x, params["norm"])
    output = params["output"].astype(jnp.bfloat16)

    @jax.checkpoint
    def add_chunk(total, chunk):
        hidden, targets, mask = chunk
        logits = (hidden @ output).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return total + jnp.sum((jax.nn.logsumexp(logits, axis=1) - chosen) * mask), None

    chunks = (x.reshape(CHUNKS, -1, x.shape[-1]), targets.reshape(CHUNKS, -1), mask.reshape(CHUNKS, -1))
    total, _ = jax.lax.scan(add_chunk, jnp.float32(0), chunks)
    return total / jnp.sum(mask)


def step(state, tokens, targets, mask):
    """Returns the next state and (loss, gradient norm, skipped updates)."""
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens, targets, mask)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients)))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    scale = 1.0 / jnp.maximum(norm / harness.MAX_NORM, 1.0)
    count = state["count"] + finite.astype(jnp.float32)
    beta1, beta2 = harness.BETAS

    def update(param, mean, square, gradient):
        gradient = gradient * scale
        new_mean = beta1 * mean + (1 - beta1) * gradient
        new_square = beta2 * square + (1 - beta2) * gradient**2
        denominator = jnp.sqrt(new_square / (1 - beta2**count)) + harness.EPSILON
        change = new_mean / (1 - beta1**count) / denominator + harness.WEIGHT_DECAY * param
        new = (param - harness.LEARNING_RATE * change, new_mean, new_square)
        return tuple(jnp.where(finite, a, b) for a, b in zip(new, (param, mean, square), strict=True))

    trees = (state["params"], state["mean"], state["square"])
    new = jax.tree.map(update, *trees, gradients)
    params, mean, square = jax.tree.transpose(
        jax.tree.structure(gradients), jax.tree.structure((0, 0, 0)), new
    )
    skipped = state["skipped"] + 1.0 - finite
    state = {"params": params, "mean": mean, "square": square, "count": count, "skipped": skipped}
    return state, (loss, norm, skipped)


def main() -> int:
    arguments = harness.peer_parser(__doc__.splitlines()[0]).parse_args()
    xla.configure()
    shape = harness.Shape.of(arguments)
    shape.need_none_of("tied_embeddings", "qk_norm", peer="plain_jax.py")
    rows = harness.rows_of(arguments)

    @jax.jit
    def first_state():
        params = first_params(shape, jax.random.key(0))
        mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return {
            "params": params,
            "mean": mean,
            "square": square,
            "count": jnp.zeros(()),
            "skipped": jnp.zeros(()),
        }

    options = xla.for_matmuls(jax.default_backend())
    state, compiled = first_state(), jax.jit(step, donate_argnums=0, compiler_options=options)
    batches = harness.causal_batches(rows)

    def dispatch():
        nonlocal state
        state, metrics = compiled(state, *next(batches))
        return metrics

    timing = timed_loop.timed(dispatch, jax.device_get, arguments.warmup_seconds, arguments.timed_seconds)
    device = jax.devices()[0]
    line = {
        **timing.line(rows[0].size),
        "attention_span_per_token": rows.shape[2],
        "loss": [float(timing.values[0][0]), float(timing.values[-1][0])],
        "skipped_updates": int(timing.values[-1][2]),
        "peak_hbm_bytes": hardware.peak_bytes(),
        "settings": {"saved": SAVED, "loss_chunks": CHUNKS},
        "device": {"kind": device.device_kind, "count": 1},
        "versions": harness.versions("jax", "jaxlib"),
    }
    harness.emit(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
