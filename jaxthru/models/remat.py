"""Activation checkpointing (remat) by named policies: what a layer keeps for the backward pass."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import jax

PARAMETERS, STATISTICS = "parameters", "attention_statistics"
FLOAT8, REST, LOW_RANK, LEFT_OUT = "float8", "rest", "low_rank", "left_out"
"""Kept where nothing is computed again, see `stage.Stage`: inputs of matmuls, in float8 or not, what adapters
make of them, and which of them dropout leaves out."""
ROUTING, EXPERT_HIDDEN, EXPERT_ROWS = "routing", "moe_hidden", "expert_rows"
"""Of a mixture of experts: which tokens go where, which no policy computes again, or another choice might
come out; what gate and up give of each assignment of a token to an expert; and, kept where nothing is
computed again, what the matmuls of its expert read."""
BY_ROW = (ROUTING, EXPERT_HIDDEN, EXPERT_ROWS)
"""Those of which there is one for each row that a device has room for, see `stage.Mixture`."""
_ATTENTION = ("query", "key", "value", "attention", STATISTICS, "attention_out", LOW_RANK, ROUTING)
KEPT = {
    "full": (ROUTING,),
    "attention": _ATTENTION,
    "gate": (*_ATTENTION, "gate"),
    "projections": (*_ATTENTION, "gate", "up", EXPERT_HIDDEN, FLOAT8),
}
"""Policy -> the names (`jax.ad_checkpoint.checkpoint_name`) whose values are kept. So are PARAMETERS, a name
that `Ops` gives where they are to be."""


@dataclasses.dataclass(frozen=True)
class RematConfig:
    """policy: `none` keeps everything; `projections` recomputes norms and activations only; `gate` also
    recomputes the up projection, `attention` the gate projection too; `full` keeps each layer's input alone.
    `auto` takes the fastest that fits the device by the compiled step (build/choices.py), on a CPU `none`.
    keep_parameters: keep each layer's matrices as its matmuls take them, in the compute dtype and gathered
    over `fsdp`, for the backward pass too, as `none` does. It then casts none and gathers none again, at the
    price of their bytes (the opposite of FSDP2's `reshard_after_forward`).
    """

    policy: Literal["auto", "none", "projections", "gate", "attention", "full"] = "auto"
    keep_parameters: bool = False


def remat(function: Callable, policy: str, in_loop: bool = False) -> Callable:
    """Returns `function` under the named policy. `function` is one layer of the model.

    in_loop: whether the backward pass is a loop of its own over layers. XLA takes nothing from one loop into
    another, so that no barrier has to keep it from taking the forward pass's results; and with one it would
    copy each slice of what is stacked before it is used.
    """
    if policy == "none":
        return function
    keep = jax.checkpoint_policies.save_only_these_names(PARAMETERS, *KEPT[policy])
    return jax.checkpoint(function, policy=keep, prevent_cse=not in_loop)


def kept_bytes(
    kept: Mapping[str, int], policy: str, item: int, float8: bool = False, rows: float = 1.0
) -> int:
    """Returns the bytes per token that a policy keeps of a stage beside its input.

    kept: of the Stage. item: bytes of a number in the compute dtype; of statistics and routing 4, of
    dropout's masks 1. float8: whether matmuls are made in float8, whose inputs are then kept in that, where
    the stage has them so. rows: for which there is room, of each that experts fill.
    """
    names = kept if policy == "none" else KEPT[policy]
    bytes_of = {STATISTICS: 4, ROUTING: 4, FLOAT8: 1, LEFT_OUT: 1}
    left_out = REST if float8 and FLOAT8 in kept else FLOAT8
    sizes = {name: kept.get(name, 0) * bytes_of.get(name, item) for name in names if name != left_out}
    return round(sum(size * (rows if name in BY_ROW else 1) for name, size in sizes.items()))


def recomputed(matmul_flops: Mapping[str, int], policy: str) -> int:
    """Returns the FLOPs per token of a stage's matmuls that a policy has computed again. matmul_flops: of the
    Stage."""
    kept = matmul_flops if policy == "none" else KEPT[policy]
    return sum(flops for name, flops in matmul_flops.items() if name not in kept)
