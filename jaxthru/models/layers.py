"""The layers of a decoder, as Flax NNX modules.

Shapes: B rows, T tokens, N = B·T, D embed, H heads, K kv heads, C head_dim, M mlp, V vocabulary.
Each parameter says what it is (`runtime.weights.WeightInfo`); `Ops` lays it out, casts it and multiplies.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxthru.models import scopes
from jaxthru.models.stage import Context
from jaxthru.runtime.weights import WeightInfo


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """parameters: type of the master weights. compute: type of activations, matmul operands and logits; the
    loss is made of these in float32. matmul: `compute` multiplies in the compute type, `fp8` multiplies the
    layers' linear maps in float8 (arXiv:2209.05433), but never the embedding or the output matrix."""

    parameters: Literal["float32"] = "float32"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    matmul: Literal["compute", "fp8"] = "compute"


class Weight(nnx.Param):
    """A float32 parameter. info: what it is, a WeightInfo."""


def linear(
    rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], deviation: float, inputs: int = 1
) -> Weight:
    """Returns a linear map [*in, *out], of which the first so many dims are its inputs, drawn as `drawn`."""
    return drawn(rngs, WeightInfo(axes, "matrix", tuple(range(inputs))), shape, deviation)


def drawn(rngs: nnx.Rngs, info: WeightInfo, shape: tuple[int, ...], deviation: float) -> Weight:
    """Returns a weight drawn from a normal distribution of this standard deviation, cut at two of them."""
    draw = jax.random.truncated_normal(rngs.params(), -2, 2, shape, jnp.float32)
    # 0.8796: the deviation of a standard normal cut at ±2.
    return Weight(draw * (deviation / 0.87962566), info=info)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last dim, computed in float32."""

    def __init__(self, size: int, epsilon: float):
        self.scale = Weight(jnp.ones((size,), jnp.float32), info=WeightInfo((None,), "norm"))
        self.epsilon = epsilon

    @jax.named_scope(scopes.NORM)
    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        return (x32 * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions, within documents only."""

    def __init__(self, config, rngs: nnx.Rngs):
        d, h, k, c = config.embed, config.heads, config.kv_heads, config.head_dim
        self.query = linear(rngs, ("embed", "heads", "head_dim"), (d, h, c), d**-0.5)
        self.key = linear(rngs, ("embed", "kv_heads", "head_dim"), (d, k, c), d**-0.5)
        self.value = linear(rngs, ("embed", "kv_heads", "head_dim"), (d, k, c), d**-0.5)
        deviation = (h * c * 2 * config.layers) ** -0.5
        self.out = linear(rngs, ("heads", "head_dim", "embed"), (h, c, d), deviation, inputs=2)
        if config.qk_norm:
            self.query_norm = RMSNorm(c, config.norm_epsilon)
            self.key_norm = RMSNorm(c, config.norm_epsilon)
        self.qk_norm = config.qk_norm

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        """context.prepared: of `rotary_angles`."""
        rotary, length = context.prepared, context.positions.shape[1]
        projected = context.ops.column_parallel(x_ND, self.query, self.key, self.value)
        q_BTHC, k_BTKC, v_BTKC = (y.reshape(-1, length, *y.shape[1:]) for y in projected)
        if self.qk_norm:
            q_BTHC, k_BTKC = self.query_norm(q_BTHC), self.key_norm(k_BTKC)
        q_BTHC = checkpoint_name(rotate(q_BTHC, rotary), "query")
        k_BTKC = checkpoint_name(rotate(k_BTKC, rotary), "key")
        v_BTKC = checkpoint_name(v_BTKC, "value")
        o_BTHC = context.attend(q_BTHC, k_BTKC, v_BTKC)
        o_NHC = o_BTHC.reshape(-1, *o_BTHC.shape[2:])
        return checkpoint_name(context.ops.row_parallel(o_NHC, self.out), "attention_out")


class SwiGLU(nnx.Module):
    """Gated feed-forward layer (arXiv:2002.05202)."""

    def __init__(self, config, rngs: nnx.Rngs):
        d, m = config.embed, config.mlp
        self.gate = linear(rngs, ("embed", "mlp"), (d, m), d**-0.5)
        self.up = linear(rngs, ("embed", "mlp"), (d, m), d**-0.5)
        self.down = linear(rngs, ("mlp", "embed"), (m, d), (m * 2 * config.layers) ** -0.5)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        gate_NM, up_NM = context.ops.column_parallel(x_ND, self.gate, self.up)
        gate_NM, up_NM = checkpoint_name(gate_NM, "gate"), checkpoint_name(up_NM, "up")
        return context.ops.row_parallel(jax.nn.silu(gate_NM) * up_NM, self.down)


def rotary_angles(positions_BT: jax.Array, config) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine [B, T, C/2], float32, of each position's rotation (arXiv:2104.09864),
    with Llama-3.1's frequency scaling where configured."""
    pairs = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32)
    # As published weights were trained: theta ** -x rounds otherwise, 8e-3 rad off at position 131k.
    frequency = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    if (scaling := config.rope_scaling) is not None:
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        rotations = scaling.original_sequence * frequency / (2 * jnp.pi)
        kept = jnp.clip((rotations - low) / (high - low), 0.0, 1.0)
        frequency = kept * frequency + (1 - kept) * frequency / scaling.factor
    angle = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHC: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + C/2) of each head, the pairing of published Llama weights."""
    cos, sin = rotary[0][:, :, None, :], rotary[1][:, :, None, :]
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)
