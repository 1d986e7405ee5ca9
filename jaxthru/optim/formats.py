"""The formats of weights and optimizer state (float32, bfloat16, int8 moments), and their bytes.

Norm scales and biases are float32 in all of them. The arithmetic of an update is float32 throughout: a format
says only what is read before it and written after it.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.adamw_8bit import Quantised, block_length, dequantise, quantise

Slot = jax.Array | Quantised


class Bytes(NamedTuple):
    """Bytes per parameter of a matrix. master: beside the weights, what makes them exact in float32."""

    weights: float
    master: float
    moments: float

    @property
    def state(self) -> float:
        """What only the update reads: all but the weights."""
        return self.master + self.moments


@dataclasses.dataclass(frozen=True)
class Format:
    """master: `weight`: the weight is float32. `split`: it is bfloat16, and 16 more bits beside it make the
    exact float32 master. `none`: it is bfloat16 and all there is, so updates are rounded stochastically.
    moments: how the two moments of AdamW, or the one of Muon, are kept.
    """

    master: Literal["weight", "split", "none"]
    moments: Literal["float32", "bfloat16", "int8"]

    @property
    def weights(self) -> jnp.dtype:
        """The dtype of the weights."""
        return jnp.dtype(jnp.float32 if self.master == "weight" else jnp.bfloat16)

    def bytes_per_parameter(self, last: int = 256, moments: int = 2) -> Bytes:
        """Returns the bytes per parameter of a matrix whose last dim is `last`, with so many moments."""
        moment = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / block_length(last)}[self.moments]
        return Bytes(self.weights.itemsize, 2 if self.master == "split" else 0, moments * moment)


FORMATS: dict[str, Format] = {  # bytes per parameter: weights + master + moments
    "float32": Format("weight", "float32"),  # 4 + 0 + 8
    "bfloat16": Format("weight", "bfloat16"),  # 4 + 0 + 4
    "int8": Format("weight", "int8"),  # 4 + 0 + 2.03
    "split_master_float32": Format("split", "float32"),  # 2 + 2 + 8
    "split_master": Format("split", "bfloat16"),  # 2 + 2 + 4
    "split_master_int8": Format("split", "int8"),  # 2 + 2 + 2.03
    "stochastic_rounding": Format("none", "int8"),  # 2 + 0 + 2.03
}
"""What `optim.state` may be."""


def rounding_key(seed: int, count: jax.Array, stage: int | jax.Array) -> jax.Array:
    """Returns the key of one stage's stochastic rounding in one update.

    seed: the run's. count: updates made before. stage: its index, as `engine.model.split_stages` counts them;
    it may be traced.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stage), count)


def encode(moments: str, x: jax.Array, kind: Literal["signed", "unsigned"]) -> Slot:
    """Returns a float32 moment as it is kept. moments: of a Format."""
    if moments == "int8":
        return quantise(x, kind)
    return x.astype(moments)


def decode(slot: Slot) -> jax.Array:
    """Returns a moment as float32."""
    return dequantise(slot) if isinstance(slot, Quantised) else slot.astype(jnp.float32)
