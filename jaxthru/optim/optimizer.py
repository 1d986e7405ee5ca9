"""AdamW and learning-rate schedules, composed of Optax parts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101).

    schedule: `cosine` warms up, then decays to `final_ratio` of the peak over the rest of the run;
        `wsd` warms up, stays, and decays linearly over the last `decay_ratio` of the run
        (warm-up-stable-decay, arXiv:2404.06395); `constant` warms up and stays.
    warmup_ratio, decay_ratio: shares of train.steps.
    weight_decay: applies to matrices and embeddings, never to norms and biases.
    clip: bound on the global gradient norm; 0 is off. clip_rule `exact` uses this step's own norm.
    state: number format of the two moments and the master weights.
    """

    name: Literal["adamw"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_ratio: float = 0.02
    decay_ratio: float = 0.2
    final_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    clip_rule: Literal["exact"] = "exact"
    state: Literal["float32"] = "float32"

    def __post_init__(self):
        require(self.learning_rate > 0, f"optim.learning_rate = {self.learning_rate}: must be above 0")
        for name in ("warmup_ratio", "decay_ratio", "final_ratio"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optim.{name} = {value}: must lie between 0 and 1")
        require(
            self.schedule != "wsd" or self.warmup_ratio + self.decay_ratio <= 1,
            f"optim.warmup_ratio + optim.decay_ratio = {self.warmup_ratio + self.decay_ratio}: at most 1",
        )
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name} = {value}: must be at least 0 and below 1")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            require(value >= 0, f"optim.{name} = {value}: must be at least 0")
        require(self.epsilon > 0, f"optim.epsilon = {self.epsilon}: must be above 0")


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the number of updates already made."""
    return _standard_promotion(_schedule(config, steps))


def _schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    peak, final = config.learning_rate, config.learning_rate * config.final_ratio
    warmup = round(config.warmup_ratio * steps)
    warm = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if config.schedule == "constant":
        return optax.join_schedules([warm, optax.constant_schedule(peak)], [warmup])
    if config.schedule == "cosine":
        decay = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final_ratio)
        return optax.join_schedules([warm, decay], [warmup])
    start = steps - round(config.decay_ratio * steps)
    decay = optax.linear_schedule(peak, final, max(steps - start, 1))
    return optax.join_schedules([warm, optax.constant_schedule(peak), decay], [warmup, start])


def make_optimizer(
    config: OptimConfig, schedule: optax.Schedule, decayed: Any
) -> optax.GradientTransformation:
    """Returns clipping by the exact global norm, then AdamW.

    decayed: a tree of bools in the parameters' structure; True where weight decay applies.
    """
    adamw = optax.adamw(
        schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
    chain = optax.chain(clip, adamw)
    return optax.GradientTransformation(chain.init, _standard_promotion(chain.update))


def _standard_promotion(function: Callable) -> Callable:
    """Optax relies on standard promotion (float ** int32), which strict settings refuse."""

    @functools.wraps(function)
    def wrapped(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return function(*arguments)

    return wrapped
