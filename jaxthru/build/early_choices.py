"""What `auto` stands for by arithmetic and by what was measured, before data or a compiler is asked.

One call for runs and for plans, so that a plan is of the step that a run would take.
"""

import jax

from jaxthru.build import loss_chunk_choice, matmul_choice, state_choice, transfers_choice
from jaxthru.build.attention_choice import capability_of
from jaxthru.config import RunConfig
from jaxthru.runtime.sharding import Layout


def of_run(config: RunConfig, layout: Layout) -> tuple[RunConfig, dict[str, str]]:
    """Returns `for_devices` of the devices of a layout."""
    kind = layout.mesh.devices.flat[0].device_kind
    return for_devices(config, layout, kind, capability_of(layout), jax.process_count())


def for_devices(
    config: RunConfig, layout: Layout, kind: str, capability: tuple[int, int] | None, processes: int = 1
) -> tuple[RunConfig, dict[str, str]]:
    """Returns a configuration with `precision.matmul` and `optim.state` settled, and `train.loss_chunk` and
    `mesh.transfers` where that needs no compile, and what is to be said of these, by key. kind, capability:
    of the devices; None of what is no NVIDIA GPU. processes: that share them."""
    why = {}
    config, why[matmul_choice.KEY] = matmul_choice.settled(config, layout, kind, capability)
    config, why[state_choice.KEY] = state_choice.settled(config, capability)
    config = loss_chunk_choice.settled(config, capability)
    return transfers_choice.settled(config, layout, kind, processes), why
