"""What `auto` stands for by arithmetic and by what was measured, before data or a compiler is asked.

One call for runs and for plans, so that a plan is of the step that a run would take.
"""

import jax

from jaxthru.build import matmul_choice, transfers_choice
from jaxthru.config import RunConfig
from jaxthru.runtime.sharding import Layout
from pallas_kernels.dispatch import nvidia_compute_capability

KEYS = (matmul_choice.KEY, transfers_choice.KEY)


def of_run(config: RunConfig, layout: Layout) -> tuple[RunConfig, dict[str, str]]:
    """Returns `for_devices` of the devices of a layout."""
    device = layout.mesh.devices.flat[0]
    capability = nvidia_compute_capability() if device.platform == "gpu" else None
    return for_devices(config, layout, device.device_kind, capability, jax.process_count())


def for_devices(
    config: RunConfig, layout: Layout, kind: str, capability: tuple[int, int] | None, processes: int = 1
) -> tuple[RunConfig, dict[str, str]]:
    """Returns a configuration with each of KEYS settled that is `auto`, and why, by key; empty where nothing
    was to be said. kind, capability: of the devices; None of what is no NVIDIA GPU. processes: that share
    them."""
    config, of_matmuls = matmul_choice.settled(config, layout, kind, capability)
    config, of_transfers = transfers_choice.settled(config, layout, kind, processes)
    return config, dict(zip(KEYS, (of_matmuls, of_transfers), strict=True))
