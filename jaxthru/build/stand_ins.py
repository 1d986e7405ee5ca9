"""What takes the place of kernels in a program that is planned for a GPU which is not here.

Stand-ins have a kernel's operands and results, and so its memory; a program that runs one fails.
"""

import dataclasses
from typing import Any

from jaxthru.build.attention_shapes import shapes_of
from jaxthru.build.checks import attention_by
from jaxthru.config import RunConfig
from jaxthru.runtime.sharding import Layout
from pallas_kernels.attention import STAND_IN, automatic, cudnn_packed
from pallas_kernels.cast_transpose import STAND_IN as CAST_STAND_IN
from pallas_kernels.grouped_matmul import STAND_IN as STAND_IN_OF_ROWS
from pallas_kernels.rms_norm import STAND_IN as NORM_STAND_IN

LOWERED_ON_A_GPU = "linear_cross_entropy", "adamw_8bit", "routing"
"""Operations whose Triton kernels have no stand-in; without their GPU they cannot be lowered."""

PORTABLE = "xla", "reference", "ragged"
"""Implementations that are lowered anywhere."""


def without_triton(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns a configuration that can be traced where there is no GPU, and notes: XLA's form of these
    operations takes as much memory or a little more."""
    kernels = config.kernels
    named = {key: by for key in LOWERED_ON_A_GPU if (by := getattr(kernels, key)).startswith("triton")}
    notes = tuple(f"planned with XLA's form in place of kernels.{key} = {by!r}" for key, by in named.items())
    other = dataclasses.replace(kernels, **dict.fromkeys(named, "auto"))
    return dataclasses.replace(config, kernels=other), notes


def stand_ins(config: RunConfig) -> dict[str, Any]:
    """Returns what `assemble` takes in the place of what would run on a GPU, but for attention."""
    return {
        "norm": norm_stand_in(config),
        "experts": experts_stand_in(config),
        "cast": cast_stand_in(config),
    }


def cast_stand_in(config: RunConfig) -> str | tuple[str, ...]:
    """Returns what takes the memory of casts to float8 which would run on Hopper, as much as XLA's take on
    other GPUs: refuses what was asked for by name, and otherwise gives way to XLA, as they do."""
    chosen = config.kernels.named("cast_transpose") or (CAST_STAND_IN, "xla")
    return CAST_STAND_IN if chosen == "triton" else chosen


def experts_stand_in(config: RunConfig) -> tuple[str | None, str | None]:
    """Returns what takes the memory of the grouped matmul, and of the activation between two of them, which
    would run on a GPU."""
    chosen = (config.kernels.named(key) or "triton" for key in ("grouped_matmul", "weighted_swiglu"))
    product, activation = (STAND_IN_OF_ROWS if by not in PORTABLE else by for by in chosen)
    return product, activation


def norm_stand_in(config: RunConfig) -> str:
    """Returns what takes the memory of the norm which would run on a GPU: a loop over layers stacks for XLA's
    backward pass what its forward pass made in float32, and for the kernels' a norm's input alone."""
    chosen = config.kernels.named("rms_norm") or "triton"  # as NVIDIA's GPUs have it
    return NORM_STAND_IN if chosen == "triton" else chosen


def attention_stand_in(config: RunConfig, layout: Layout, segments: int) -> tuple[str, int]:
    """Returns the attention that takes the memory of the one which would run on a GPU, and the bytes that its
    backward pass works in there. segments: most documents in a row."""
    rows, shapes = shapes_of(config, layout)
    heads, _, head_dim = max((shape[:3] for shape in shapes), default=(0, 0, 0))  # a window takes no other
    elements = rows * config.data.sequence * heads // layout.size("heads") * head_dim
    chosen = attention_by(config, "gpu")
    if chosen == "auto":
        # The first is the same on a CPU, and to ask for a GPU starts a backend.
        chosen = automatic(elements, segments, "cpu", width=head_dim)[0]
    workspace = cudnn_packed.workspace_bytes(elements, segments) if chosen == "cudnn_packed" else 0
    return STAND_IN.get(chosen, chosen), workspace
