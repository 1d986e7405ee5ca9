"""Which formats of weights and optimizer state `optim.state = auto` stands for: split masters, or float32.

`split_master_float32` keeps every bit that `float32` does, in as many bytes, but so that half of each master
is the bfloat16 weight that matmuls take: no step casts matrices, or holds the cast ones beside the masters.
Under AdamW in bfloat16, steps were 1.004 to 1.015 times as fast by it on one H200 and on two, of dense models
and of a mixture, with up to 5 GB less at their peak (docs/results.md), and 1.006 times in float8. Weights are
rounded twice there, to bfloat16 first; four pairs of runs had the same losses within their spread. Muon's
steps were not faster: these, like all that was not timed, have `float32`.
"""

from jaxthru.build.defaults import AUTO, replaced
from jaxthru.config import RunConfig

KEY = "optim.state"
SPLIT = "split_master_float32"


def settled(config: RunConfig, capability: tuple[int, int] | None) -> tuple[RunConfig, str]:
    """Returns a configuration with `optim.state` settled, and why; itself and nothing where it is not `auto`.
    capability: of the devices; None of what is no NVIDIA GPU."""
    if config.optim.state != "auto":
        return config, ""
    if unlike := _unlike_faster(config, capability):
        return replaced(config, {KEY: AUTO[KEY]}), f"as split masters were not found to be faster {unlike}"
    return replaced(config, {KEY: SPLIT}), "whose bfloat16 weights need no cast, with exact float32 masters"


def _unlike_faster(config: RunConfig, capability: tuple[int, int] | None) -> str:
    """Returns by what a step differs from those that were faster; empty where by nothing."""
    if capability is None:
        return "without an NVIDIA GPU"
    if config.precision.compute != "bfloat16":
        return f"with precision.compute = {config.precision.compute!r}"
    if config.optim.name != "adamw":
        return f"with optim.name = {config.optim.name!r}"
    if config.precision.float8_experts:
        return f"with precision.matmul = {config.precision.matmul!r}"
    return "with adapters" if config.lora.on else ""
