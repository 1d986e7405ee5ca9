"""The host memory that a configuration pins: how much, and that it is there before the first step."""

import dataclasses
import math

import jax

from jaxthru.build.memory_estimate import estimate, host_room
from jaxthru.config import RunConfig
from jaxthru.models import family
from jaxthru.runtime import allocator, distributed, hardware, pinned
from jaxthru.runtime.errors import InputError


def limit(config: RunConfig) -> None:
    """Lets XLA pin what a configuration needs, or may come to need. Call it before the first device is
    touched. Raises InputError."""
    if config.offload.layered or (config.offload.level == "auto" and not allocator.on_cpus_alone()):
        # A process is taken to have its host to itself, here and in `choices`; where several share one,
        # offload.host_gib has to be the share of each.
        kept = needed(config)
        pinned.limit(kept and kept + saved_at_once(config), host_room(config))


def needed(config: RunConfig) -> int:
    """Returns the bytes that this process will keep in pinned host memory, by arithmetic. 0 where that is not
    known before devices are: with level auto, several processes, or -1 along another axis than `fsdp`.

    There is a copy of the state for each replica. Else state and activations are split, and the devices of a
    replica together hold the same, however many they are.
    """
    mesh, level = config.mesh, config.offload.level
    beside = mesh.data, mesh.expert, mesh.tensor
    if level == "auto" or -1 in beside or jax.distributed.is_initialized():
        return 0
    config = dataclasses.replace(config, mesh=dataclasses.replace(mesh, fsdp=1))
    return estimate(config, devices=math.prod(beside))[0].peak_host


def saved_at_once(config: RunConfig) -> int:
    """Returns the bytes of pinned memory that a save takes at most, for what of the state is on the device:
    two arrays as large as the largest (see `Checkpointer`)."""
    if config.offload.level in ("none", "auto"):
        return 0
    return 8 * max(stage.largest for stage in family.chain(config.model).stages)


def reserve(config: RunConfig, devices: list[jax.Device]) -> None:
    """Has this process pin at once what a configuration keeps in host memory, if it runs on GPUs: else steps
    would wait while the system pins more.

    devices: of all processes, that share the step. Raises InputError, in all processes, where a host has no
    room left for it, and where XLA's pool may not hold it.
    """
    here = [device for device in devices if device in jax.local_devices()]
    if not config.offload.layered or devices[0].platform != "gpu":
        return
    plan, _ = estimate(config, devices=len(devices))
    kept = plan.peak_host * len(here) // len(devices)
    size = min(pinned.spared(kept + saved_at_once(config)), host_room(config))
    distributed.refused_anywhere(_lacking(config, kept, size))  # hosts may differ
    pinned.reserve(size)


def _lacking(config: RunConfig, kept: int, size: int) -> str:
    """Returns what is short on this host for a pool of `size` bytes, `kept` of them arrays; empty if nothing,
    or if `offload.host_gib` says how much there is, as it does where memory grows when it is used."""
    try:
        pinned.limit(min(kept, size), size)
    except InputError as error:
        return str(error)
    wanted, free = sum(pinned.missing(size)), hardware.host_free_bytes() / 2**30
    if config.offload.host_gib or pinned.COST * wanted <= free:
        return ""
    return (
        f"{wanted} GiB of host memory are to be pinned, which takes {pinned.COST:.0%} of that, and "
        f"{free:.1f} are free; end what else runs here, or set offload.host_gib to what may be pinned"
    )
