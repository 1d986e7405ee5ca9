"""Whether copy engines move parameters over `fsdp` where `mesh.transfers` is `auto`: where that was measured.

Copies leave the multiprocessors to the matmuls and cost passes over memory. Which of the two is more was
measured on two H200s of one process: with copies a step takes 0.969 of the time with collectives for 8 layers
of Llama 3 8B, 0.981 for Llama-3.2-1B and 1.003 for Qwen3-0.6B (docs/results.md, "Training step"). Anywhere
else `auto` takes collectives.
"""

from jaxthru.build.checks import has_experts
from jaxthru.build.defaults import float8_setting, replaced
from jaxthru.config import RunConfig
from jaxthru.runtime.sharding import Layout

KEY = "mesh.transfers"
KIND, DEVICES = "NVIDIA H200", 2
TOKENS = 16_384
"""Of a device and micro-batch, at least: with fewer there is less to hide what moves behind."""
WHY = "as measured for steps of two H200s of one process: up to 1.03 times as fast as by collectives"


def settled(config: RunConfig, layout: Layout, kind: str, processes: int) -> tuple[RunConfig, str]:
    """Returns a configuration whose parameters are moved by copies, and why; itself and nothing where that is
    not `auto`, or what is like it was not measured: `auto` then is `collectives`.

    kind: of the devices. processes: that share them, of which each has as many.
    """
    if config.mesh.transfers != "auto" or (kind, layout.mesh.size, processes) != (KIND, DEVICES, 1):
        return config, ""
    micro = config.train.rows_at_once * config.data.sequence // layout.size("batch")
    if not _like_measured(config) or layout.size("embed") != DEVICES or micro < TOKENS:
        return config, ""
    return replaced(config, {KEY: "copies"}), WHY


def _like_measured(config: RunConfig) -> bool:
    """Says whether a step is of the kind that was measured: dense, all of it trained in bfloat16, one program
    of unrolled layers. `train.deterministic` promises the same bits on other processes, which cannot copy."""
    return (
        config.precision.compute == "bfloat16"
        and not float8_setting(config)
        and not config.lora.on
        and not has_experts(config)
        and not config.offload.layered
        and config.model.loop != "scan"
        and not config.train.deterministic
    )
