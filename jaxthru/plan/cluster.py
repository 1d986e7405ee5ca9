"""Devices and what joins them, as `plan limits` counts with them: rates of a device on a described fabric."""

import dataclasses
import functools

import numpy as np

from jaxthru.plan.fabric import Fabric
from jaxthru.plan.network_flows import simulate
from jaxthru.plan.network_traffic import Collective
from jaxthru.plan.walls import Latency
from jaxthru.runtime.aot import Target


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and what joins them. rate: FLOP/s that a device holds in matmuls. memory: bytes of one.
    bandwidth: bytes/s of it. domain: devices joined by NVLink. nvlink, network: bytes/s that a device reaches
    each way. contention: {devices of a job: by how much its switches slow the network}. most: devices that
    there are, None without a bound. said: where the numbers come from, a line each."""

    device: str
    rate: float
    memory: float
    bandwidth: float
    domain: int = 8
    nvlink: float = 275e9
    network: float = 40e9
    latency: Latency = Latency()
    contention: dict[int, float] = dataclasses.field(default_factory=dict)
    most: int | None = None
    said: tuple[str, ...] = ()


def described(
    fabric: Fabric, target: Target, rate: float, share: float, source: str, devices: int
) -> Cluster:
    """Returns devices of a kind on a fabric. rate: FLOP/s of a device, from `source`. share: of its memory
    that a step may take. devices: to which the switches are looked at."""
    domain = fabric.gpus_per_host * fabric.nvlink_hosts
    network = fabric.nic * fabric.nics_per_host / fabric.gpus_per_host
    slowed = {}
    most = min(devices, fabric.devices)
    for count in (*(1 << power for power in range(1, most.bit_length())), most):
        if count > domain:
            slowed[count] = contention(fabric, count)
    said = (
        f"{target.name}: {rate / 1e12:,.0f} TFLOP/s, {source}",
        f"{fabric.name}: {fabric.devices:,} GPUs, {domain} in an NVLink domain at "
        f"{fabric.nvlink / 1e9:,.0f} GB/s each way; network {network / 1e9:,.3g} GB/s a GPU, which switches "
        f"slow by up to {max(slowed.values(), default=1.0):.2f} ×",
    )
    return Cluster(
        device=target.name,
        rate=rate,
        memory=target.memory * share,
        bandwidth=target.bandwidth,
        domain=domain,
        nvlink=fabric.nvlink,
        network=network,
        contention=slowed,
        most=fabric.devices,
        said=said,
    )


@functools.lru_cache(maxsize=256)
def contention(fabric: Fabric, devices: int) -> float:
    """Returns by how much the switches slow rings through the hosts of a job, one by each GPU of a host, as
    `plan network` simulates them: 1 where the NICs are all that binds."""
    whole = -(-devices // fabric.gpus_per_host) * fabric.gpus_per_host
    if whole > fabric.devices:
        return 1.0
    rings = np.arange(whole).reshape(-1, fabric.gpus_per_host).T
    one = Collective("rings", "all-gather", 1.0, rings)
    (found,) = simulate([one], fabric, whole, trials=DRAWS)
    return max(1.0, float(found.links.network.mean() / found.links.nic)) if found.links.nic else 1.0


DRAWS = 3
"""Of the switches' hash, for `contention`."""
