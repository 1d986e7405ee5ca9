"""Whether copy engines move parameters over `fsdp`, and tokens of experts, where `mesh.transfers` is `auto`.

Copies leave the multiprocessors to the matmuls and cost passes over memory. Which of the two is more was
measured on two H200s of one process: with copies a step takes 0.969 of the time with collectives for 8 layers
of Llama 3 8B, 0.983 for Llama-3.2-1B, 1.003 for Qwen3-0.6B and 0.984 for 12 layers of Qwen3-30B-A3B with
expert=2 (docs/results.md, "Training step"). Anywhere else `auto` takes collectives.
"""

from collections.abc import Iterator

from jaxthru.build.checks import has_experts
from jaxthru.build.defaults import float8_setting, replaced, searched
from jaxthru.config import RunConfig
from jaxthru.runtime.sharding import Layout

KEY = "mesh.transfers"
KIND, DEVICES = "NVIDIA H200", 2
TOKENS = {"embed": 16_384, "experts": 32_768}
"""Of a device and micro-batch, at least, by what is split over the devices: with fewer there is less to hide
what moves behind."""
REASON = "copies were measured on two H200s of one process alone (docs/parallelism.md)"
"""Why it is collectives where no copies were tried."""


def settled(config: RunConfig, layout: Layout, kind: str, processes: int) -> RunConfig:
    """Returns a configuration that leaves `mesh.transfers` open only where steps like its own were measured,
    and where what fits is searched for anyway, for copies take more memory.

    kind: of the devices. processes: that share them, of which each has as many.
    """
    if config.mesh.transfers != "auto":
        return config
    micro = config.train.rows_at_once * config.data.sequence // layout.size("batch")
    split = "experts" if has_experts(config) else "embed"
    measured = (
        (kind, layout.mesh.size, layout.size(split), processes) == (KIND, DEVICES, DEVICES, 1)
        and micro >= TOKENS[split]
        and searched(config)
        and _is_like_measured(config)
    )
    return config if measured else replaced(config, {KEY: "collectives"})


def _is_like_measured(config: RunConfig) -> bool:
    """Says whether a step is of the kind that was measured: all of it trained in bfloat16.
    `train.deterministic` promises the same bits on other processes, which cannot copy."""
    return (
        config.precision.compute == "bfloat16"
        and not float8_setting(config)
        and not config.lora.on
        and config.train.objective == "cross_entropy"
        and not config.train.deterministic
    )


def ways(config: RunConfig) -> Iterator[RunConfig]:
    """Yields a configuration that leaves `mesh.transfers` open with copies and, if they take too much memory,
    with collectives. Layers in a loop, and a state on the host, were not measured with copies."""
    if config.mesh.transfers != "auto":
        yield config
        return
    if not config.offload.layered and config.model.loop != "scan":
        yield replaced(config, {KEY: "copies"})
    yield replaced(config, {KEY: "collectives"})
