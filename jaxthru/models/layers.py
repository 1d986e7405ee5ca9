"""The layers of a decoder, as Flax NNX modules: RMSNorm, attention, SwiGLU.

Shapes: B rows, T tokens, N = B·T, D embed, H heads, K kv heads, C head_dim, M mlp, V vocabulary.
Each parameter says what it is (`runtime.weights.WeightInfo`); `Ops` lays it out, casts it and multiplies.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxthru.models import scopes
from jaxthru.models.rotary import Rotary, rotate
from jaxthru.models.rotary import rotary_angles as rotary_angles
from jaxthru.models.stage import Context
from jaxthru.runtime.sharding import Axes
from jaxthru.runtime.weights import WeightInfo
from pallas_kernels.rms_norm import PARTITIONED, rms_norm, rms_norm_residual, rms_norm_rotary


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """parameters: type of the master weights. compute: type of activations, matmul operands and logits; the
    loss is made of these in float32. matmul: `compute` multiplies in the compute type, `fp8` multiplies the
    blocks' linear layers in float8 (arXiv:2209.05433), but never the embedding or the LM head, and no
    experts; `fp8_experts` those of a mixture too, all but the gradients of their weights, on Hopper; `auto`
    takes `fp8` where a step gains by it (build/matmul_choice.py), on a CPU `compute`. A run keeps what was
    taken, wherever it goes on."""

    parameters: Literal["float32"] = "float32"
    compute: Literal["bfloat16", "float32"] = "bfloat16"
    matmul: Literal["auto", "compute", "fp8", "fp8_experts"] = "compute"

    @property
    def float8(self) -> bool:
        """Whether the blocks' linear layers are multiplied in float8."""
        return self.matmul in ("fp8", "fp8_experts")

    @property
    def float8_experts(self) -> bool:
        """Whether experts are, too."""
        return self.matmul == "fp8_experts"


class Weight(nnx.Param):
    """A float32 parameter. info: what it is, a WeightInfo."""


def linear(
    rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], deviation: float, inputs: int = 1
) -> Weight:
    """Returns the weight of a linear layer [*in, *out], whose first so many dims are its inputs, drawn as
    `drawn`."""
    return drawn(rngs, WeightInfo(axes, "matrix", tuple(range(inputs))), shape, deviation)


def drawn(rngs: nnx.Rngs, info: WeightInfo, shape: tuple[int, ...], deviation: float) -> Weight:
    """Returns a weight drawn from a normal distribution of this standard deviation, cut at two of them."""
    draw = jax.random.truncated_normal(rngs.params(), -2, 2, shape, jnp.float32)
    # 0.8796: the deviation of a standard normal cut at ±2.
    return Weight(draw * (deviation / 0.87962566), info=info)


def bias(axes: tuple[str, ...], shape: tuple[int, ...]) -> Weight:
    """Returns a bias, zero at first."""
    return Weight(jnp.zeros(shape, jnp.float32), info=WeightInfo(axes, "bias"))


TOKENS: Axes = ("tokens", None)
"""How the residual stream lies, of which norms are made."""
HEADS: Axes = ("batch", "sequence", "heads", "head_dim")
"""The same of queries; keys' heads are split as theirs are."""


class RMSNorm(nnx.Module):
    """Root-mean-square norm (arXiv:1910.07467) over the last dim, computed in float32.

    offset: what stands in the scale's place is the scale less this, as Gemma stores 1 + its weights.

    Each of its calls takes the run's context, by whose kernels it is made; without one XLA makes it. On
    several devices it also makes what is no [N, D] over tokens, and no [B, T, H, C] that is then rotated.
    """

    def __init__(self, size: int, epsilon: float, offset: float = 0.0):
        first = jnp.full((size,), 1.0 - offset, jnp.float32)
        self.scale = Weight(first, info=WeightInfo((None,), "norm"))
        self.epsilon, self.offset = epsilon, offset

    @jax.named_scope(scopes.NORM)
    def __call__(self, x: jax.Array, context: Context | None = None) -> jax.Array:
        return self._made(rms_norm, TOKENS, context, x)

    @jax.named_scope(scopes.NORM)
    def branch(self, x: jax.Array, context: Context | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns x, for the residual stream, and its norm, for the branch that starts here: of both together
        the backward pass is one."""
        return self._made(rms_norm_residual, TOKENS, context, x)

    @jax.named_scope(scopes.NORM)
    def rotated(self, x_BTHC: jax.Array, rotary: Rotary, context: Context | None = None) -> jax.Array:
        """Returns the norm of each head, rotated as `rotate` does."""
        return self._made(rms_norm_rotary, HEADS, context, x_BTHC, *rotary)

    def _made(self, norm: Callable, axes: Axes, context: Context | None, x: jax.Array, *rotary: jax.Array):
        """Returns a norm of x, whose dims carry these logical axes, as an operation of `rms_norm` has it."""
        made = functools.partial(norm, epsilon=self.epsilon, offset=self.offset)
        arrays = x, self.scale[...], *rotary
        if context is None:
            return made(*arrays, implementation=PARTITIONED)
        layout, by = context.ops.layout, context.ops.norm_by
        if layout.mesh.size == 1:
            return made(*arrays, implementation=by)
        if by == PARTITIONED or x.ndim != len(axes):
            return made(*arrays, implementation=PARTITIONED)
        # A kernel is a call, of which XLA's partitioner would gather all operands.
        made = functools.partial(made, implementation=by)
        of_x, of_rows = layout.spec(axes), layout.spec(axes[:1])
        specs = of_x, PartitionSpec(), *[of_rows] * len(rotary)
        return layout.shard_map(made, specs, of_x, check_vma=True)(*arrays)


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions, within documents only.

    biases: query, key and value have biases. window: see `Context.attend`. norm_offset: of the norms of
    queries and keys, see RMSNorm. heads_together: these norms are over all heads at once, as OLMoE has them.
    """

    def __init__(
        self,
        config: Any,
        rngs: nnx.Rngs,
        *,
        biases: bool = False,
        window: int | None = None,
        norm_offset: float = 0.0,
        heads_together: bool = False,
    ):
        d, h, k, c = config.embed, config.heads, config.kv_heads, config.head_dim
        self.query = linear(rngs, ("embed", "heads", "head_dim"), (d, h, c), d**-0.5)
        self.key = linear(rngs, ("embed", "kv_heads", "head_dim"), (d, k, c), d**-0.5)
        self.value = linear(rngs, ("embed", "kv_heads", "head_dim"), (d, k, c), d**-0.5)
        deviation = (h * c * 2 * config.layers) ** -0.5
        self.out = linear(rngs, ("heads", "head_dim", "embed"), (h, c, d), deviation, inputs=2)
        if biases:
            self.query_bias = bias(("heads", "head_dim"), (h, c))
            self.key_bias = bias(("kv_heads", "head_dim"), (k, c))
            self.value_bias = bias(("kv_heads", "head_dim"), (k, c))
        if config.qk_norm:
            widths = (h * c, k * c) if heads_together else (c, c)
            self.query_norm = RMSNorm(widths[0], config.norm_epsilon, norm_offset)
            self.key_norm = RMSNorm(widths[1], config.norm_epsilon, norm_offset)
        self.qk_norm, self.biases, self.window = config.qk_norm, biases, window
        self.heads_together = heads_together

    def __call__(
        self, x_ND: jax.Array, context: Context, rotary: tuple[Rotary, Rotary] | None = None
    ) -> jax.Array:
        """rotary: the cosine and sine that queries, and those that keys, are rotated by; None is
        context.prepared for both."""
        of_query, of_key = rotary or (context.prepared, context.prepared)
        length = context.positions.shape[1]
        projected = context.ops.column_parallel(x_ND, self.query, self.key, self.value)
        if self.biases:
            biases = self.query_bias, self.key_bias, self.value_bias
            pairs = zip(projected, biases, strict=True)
            projected = [y + each[...].astype(y.dtype)[None] for y, each in pairs]
        if self.qk_norm and self.heads_together:
            norms = (self.query_norm, self.key_norm)
            whole = context.ops.layout.size("heads") == 1  # or no device has a row of its own
            projected[:2] = [
                norm(y.reshape(len(y), -1), context if whole else None).reshape(y.shape)
                for norm, y in zip(norms, projected[:2], strict=True)
            ]
        q_BTHC, k_BTKC, v_BTKC = (y.reshape(-1, length, *y.shape[1:]) for y in projected)
        if self.qk_norm and not self.heads_together:
            q_BTHC = self.query_norm.rotated(q_BTHC, of_query, context)
            k_BTKC = self.key_norm.rotated(k_BTKC, of_key, context)
        else:
            q_BTHC, k_BTKC = rotate(q_BTHC, of_query), rotate(k_BTKC, of_key)
        q_BTHC, k_BTKC = checkpoint_name(q_BTHC, "query"), checkpoint_name(k_BTKC, "key")
        v_BTKC = checkpoint_name(v_BTKC, "value")
        o_BTHC = context.attend(q_BTHC, k_BTKC, v_BTKC, window=self.window)
        o_NHC = o_BTHC.reshape(-1, *o_BTHC.shape[2:])
        return checkpoint_name(context.ops.row_parallel(o_NHC, self.out), "attention_out")


class SwiGLU(nnx.Module):
    """Gated feed-forward layer (arXiv:2002.05202). activation: of the gate."""

    def __init__(
        self, config: Any, rngs: nnx.Rngs, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    ):
        d, m = config.embed, config.mlp
        self.gate = linear(rngs, ("embed", "mlp"), (d, m), d**-0.5)
        self.up = linear(rngs, ("embed", "mlp"), (d, m), d**-0.5)
        self.down = linear(rngs, ("mlp", "embed"), (m, d), (m * 2 * config.layers) ** -0.5)
        self.activation = activation

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        gate_NM, up_NM = context.ops.column_parallel(x_ND, self.gate, self.up)
        gate_NM, up_NM = checkpoint_name(gate_NM, "gate"), checkpoint_name(up_NM, "up")
        return context.ops.row_parallel(self.activation(gate_NM) * up_NM, self.down)
