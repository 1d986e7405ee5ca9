"""Rotary positions (RoPE, arXiv:2104.09864): the angles of each position, as published weights were trained.

Shapes: B rows, T tokens, H heads, C head_dim.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.runtime.errors import require
from pallas_kernels.rms_norm import rotate as rotate

Rotary = tuple[jax.Array, jax.Array]
"""Cosine and sine [B, T, C/2] of each position's rotation."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretches the wavelengths of rotary positions, for rows longer than a model was first trained on.

    factor: stretches wavelengths: of `llama3` those beyond `original_sequence / low_frequency_factor`, of
        `linear` all, of `yarn` those that turn fewer than `beta_slow` times in `original_sequence` tokens.
    low_frequency_factor: of `llama3`: decides which wavelengths are stretched in full.
    high_frequency_factor: of `llama3`: wavelengths below `original_sequence / high_frequency_factor` stay as
        they are; those between the two bounds are blended.
    original_sequence: tokens in a row that the model was first trained on; `linear` does not ask.
    kind: `llama3` as Llama 3.1, `linear` (arXiv:2306.15595), `yarn` (arXiv:2309.00071).
    beta_fast: of `yarn`: wavelengths that turn more often than this in `original_sequence` tokens stay as
        they are; those between it and `beta_slow` are blended. beta_slow: of `yarn`: see there.
    truncate: of `yarn`: blending begins and ends at whole pairs of a head's dims.
    attention_factor: of `yarn`: multiplies cosines and sines; None is 0.1 × ln(factor) + 1.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence: int = 8192
    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self):
        key = "model.rope_scaling"
        require(self.factor >= 1, f"{key}.factor = {self.factor}: must be at least 1")
        require(
            0 < self.low_frequency_factor < self.high_frequency_factor,
            f"{key}.low_frequency_factor = {self.low_frequency_factor}: must be above 0 and "
            f"below high_frequency_factor = {self.high_frequency_factor}",
        )
        require(
            self.original_sequence >= 1,
            f"{key}.original_sequence = {self.original_sequence}: must be at least 1",
        )
        require(
            0 < self.beta_slow < self.beta_fast,
            f"{key}.beta_slow = {self.beta_slow}: must be above 0 and below beta_fast = {self.beta_fast}",
        )
        factor = self.attention_factor
        require(factor is None or factor > 0, f"{key}.attention_factor = {factor}: must be above 0")

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied with."""
        if self.kind != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor


def check_theta(theta: float, scaling: RopeScaling | None, key: str = "model.rope_theta") -> None:
    """Raises InputError unless wavelengths can be made of this base."""
    require(theta > 0, f"{key} = {theta}: must be above 0")
    yarn = scaling is not None and scaling.kind == "yarn"
    require(not yarn or theta > 1, f"{key} = {theta}: must be above 1 for yarn")


def angles(
    positions_BT: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Rotary:
    """Returns the cosine and sine [B, T, C/2], float32, of each position's rotation.

    theta: base of the wavelengths.
    """
    frequency = jnp.asarray(frequencies(head_dim, theta, scaling))
    angle = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]
    if scaling is None or scaling.amplitude == 1:
        return jnp.cos(angle), jnp.sin(angle)
    return scaling.amplitude * jnp.cos(angle), scaling.amplitude * jnp.sin(angle)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns the radians per position of each pair of dims, float32 [C/2].

    Made on the host, in the float32 arithmetic that published weights were trained with, and rounded as it
    is: a device's power is a bit or two off, and at position 4,096 that is 5e-4 radians.
    """
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float64)
    power = (np.float64(np.float32(theta)) ** exponents).astype(np.float32)
    frequency = np.float32(1) / power
    if scaling is None:
        return frequency
    kept, factor = _kept(frequency, head_dim, theta, scaling), np.float32(scaling.factor)
    stretched = np.float32(1) / (factor * power) if scaling.kind == "yarn" else frequency / factor
    return kept * frequency + (1 - kept) * stretched


def _kept(frequency: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns the share of each frequency, float32 [C/2], that is not stretched."""
    if scaling.kind == "linear":
        return np.zeros_like(frequency)
    if scaling.kind == "llama3":
        low, high = np.float32(scaling.low_frequency_factor), np.float32(scaling.high_frequency_factor)
        wavelengths = np.float32(2 * math.pi) / frequency
        rotations = np.float32(scaling.original_sequence) / wavelengths
        return np.clip((rotations - low) / (high - low), np.float32(0), np.float32(1))

    def pair(rotations: float) -> float:
        """Returns the pair of dims, as a fraction too, that turns so often in the original row."""
        turns = scaling.original_sequence / (2 * math.pi * rotations)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # a step instead of a ramp
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)
    return (1 - np.clip(ramp, 0, 1)).astype(np.float32)


def rotary_angles(positions_BT: jax.Array, config) -> Rotary:
    """Returns `angles` as a configuration's head_dim, rope_theta and rope_scaling say."""
    return angles(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling)
