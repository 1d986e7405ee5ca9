"""Named rematerialisation policies: which activations of a layer are kept for the backward pass."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax

_ATTENTION = ("query", "key", "value", "attention", "attention_statistics", "attention_out")
KEPT = {
    "attention": _ATTENTION,
    "gate": (*_ATTENTION, "gate"),
    "projections": (*_ATTENTION, "gate", "up", "float8"),
}
"""Policy -> the names (`jax.ad_checkpoint.checkpoint_name`) whose values are kept."""


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """policy: `none` keeps everything; `projections` recomputes norms and activations only; `gate` also
    recomputes the up projection, `attention` the gate projection too; `full` keeps each layer's input alone.
    """

    policy: Literal["none", "projections", "gate", "attention", "full"] = "none"


def remat(function: Callable, policy: str) -> Callable:
    """Returns `function` under the named policy. `function` is one layer of the model."""
    if policy == "none":
        return function
    if policy == "full":
        return jax.checkpoint(function)
    keep = jax.checkpoint_policies.save_only_these_names(*KEPT[policy])
    return jax.checkpoint(function, policy=keep)
