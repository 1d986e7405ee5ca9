"""Chooses the offload level, state format and fraction that fit, by arithmetic; resolves `auto`."""

import bisect
import dataclasses
import functools
import logging

import jax

from jaxthru.build.memory_estimate import MemoryPlan, Room, estimate, gib, host_room
from jaxthru.config import RunConfig
from jaxthru.data.loader import open_data
from jaxthru.data.mix import load_mix
from jaxthru.engine.offload import OffloadConfig
from jaxthru.models import family
from jaxthru.runtime import distributed, hardware
from jaxthru.runtime import pinned as pinned_memory
from jaxthru.runtime.errors import InputError

log = logging.getLogger("jaxthru")

LEVELS = ("none", "optimizer", "gradients", "parameters")

BY_PRECISION = (
    *("float32", "split_master_float32", "bfloat16", "split_master"),
    *("int8", "split_master_int8", "stochastic_rounding"),
)
"""Formats, the one nearest to float32 first: of two that cost the same, the first is proposed."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """moved: bytes over PCIe a step, both directions together."""

    level: str
    state: str
    fraction: float
    plan: MemoryPlan
    moved: int


def pinned(config: RunConfig) -> int:
    """Returns the bytes that this process will keep in pinned host memory, by arithmetic. 0 where that is not
    known before devices are: with level auto, several processes, or -1 along `data` or `tensor`.

    There is a copy of the state for each replica. Else state and activations are split, and the devices of a
    replica together hold the same, however many they are.
    """
    offload, mesh = config.offload, config.mesh
    if offload.level == "auto" or -1 in (mesh.data, mesh.tensor) or jax.distributed.is_initialized():
        return 0
    mesh = dataclasses.replace(mesh, fsdp=1)
    config = dataclasses.replace(config, mesh=mesh)
    devices = mesh.data * mesh.tensor
    return estimate(config, devices=devices)[0].peak_host


def saved_at_once(config: RunConfig) -> int:
    """Returns the bytes of pinned memory that a save takes at most, for what of the state is on the device:
    two arrays as large as the largest (see `Checkpointer`)."""
    if config.offload.level == "none":
        return 0
    return 8 * max(stage.largest for stage in family.chain(config.model).stages)


def ready(config: RunConfig) -> RunConfig:
    """Returns a configuration as this machine is to run it, and has XLA pin what it needs. Call it before
    the first device is touched. Raises InputError."""
    if config.offload.layered:
        # A process is taken to have its host to itself, here and in `resolve_here`; where several share one,
        # offload.host_gib has to be the share of each.
        kept = pinned(config)
        pinned_memory.limit(kept and kept + saved_at_once(config), host_room(config))
        kind = hardware.devices()[0].device_kind
        if hardware.has_unified_memory(kind):
            log.info("%s reaches its host's memory over NVLink-C2C: docs/memory.md, Unified memory", kind)
    return resolve_here(config)


def reserve(config: RunConfig, devices: list[jax.Device]) -> None:
    """Has this process pin at once what a configuration keeps in host memory, if it runs on GPUs: else steps
    would wait while the system pins more.

    devices: of all processes, that share the step.
    """
    offload, here = config.offload, [device for device in devices if device in jax.local_devices()]
    if not offload.layered or devices[0].platform != "gpu":
        return
    plan, _ = estimate(config, devices=len(devices))
    kept = plan.peak_host * len(here) // len(devices) + saved_at_once(config)
    pinned_memory.reserve(min(pinned_memory.spared(kept), host_room(config)))


def propose(
    config: RunConfig,
    room: Room,
    *,
    resident: MemoryPlan | None = None,
    devices: int = 1,
    segments: int = 1,
) -> list[Proposal]:
    """Returns for each format the level and fraction that fit and move the least, the cheapest format first.

    One that fits at no level is left out, or that the optimizer's other settings forbid. resident, devices,
    segments: as of `estimate`.
    """
    found = []
    for state in BY_PRECISION:
        try:
            dataclasses.replace(config.optim, state=state)
        except InputError:
            continue
        levels = ("none",) if config.remat.keep_parameters else LEVELS  # the others keep none
        fitting: list[Proposal] = []
        for level in levels:
            if proposal := _least(config, level, state, room, resident, devices, segments):
                fitting.append(proposal)
                if not proposal.moved:
                    break  # none moves less
        if fitting:
            found.append(min(fitting, key=lambda proposal: proposal.moved))
    return sorted(found, key=lambda proposal: proposal.moved)


def _least(config, level, state, room, resident=None, devices=1, segments=1) -> Proposal | None:
    """Returns a level with the least fraction that fits, if any does."""
    optim = dataclasses.replace(config.optim, state=state)

    @functools.cache
    def planned(step: int) -> tuple[MemoryPlan, int]:
        offload = dataclasses.replace(config.offload, level=level, fraction=step / count or 1.0)
        tried = dataclasses.replace(config, offload=offload, optim=optim)
        return estimate(tried, resident=resident, devices=devices, segments=segments)

    # Embedding and head are parts too. The more of them are on the host, the less is on the device.
    count = len(family.chain(config.model).layers) + 2
    steps = range(1, count + 1) if level != "none" else range(1)
    if planned(steps[-1])[0].peak_device > room.device:
        return None  # not even with all of them
    least = bisect.bisect_left(steps, True, key=lambda step: planned(step)[0].peak_device <= room.device)
    if not room.holds(planned(steps[least])[0]):
        return None
    return Proposal(level, state, steps[least] / count, *planned(steps[least]))


def resolve_here(config: RunConfig) -> RunConfig:
    """Returns what `resolve` does for this process's devices and host, the same in all processes."""
    if config.offload.level != "auto":
        return config
    host = host_room(config)
    hardware.devices()  # or it says why there are none
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", host)  # a CPU's is the host's
    # A plan's host bytes are those of all devices, a host's room is for its own.
    room = Room(memory, host * jax.device_count() // jax.local_device_count())

    def chosen() -> dict:
        segments, _, _ = documents(config)
        return dataclasses.asdict(resolve(config, room, jax.device_count(), segments).offload)

    found = distributed.from_first(chosen)
    log.info("offload.level = auto: %s, offload.fraction = %g", found["level"], found["fraction"])
    return dataclasses.replace(config, offload=OffloadConfig(**found))


DOCUMENTS = 32
"""Most documents assumed in a row where the corpus is not prepared: they size tables and workspaces."""


def documents(config: RunConfig) -> tuple[int, int, tuple[str, ...]]:
    """Returns the most documents in a row and the sources of the mix, and a note where they are assumed.
    Raises InputError for a mix that is none."""
    load_mix(config.data.mix, config.data.tokenizer)
    try:
        with open_data(config.data, prepare=False) as data:
            return data.segments, len(data.names), ()
    except InputError:
        note = f"the corpus is not prepared: {DOCUMENTS} documents a row assumed (--segments)"
        return DOCUMENTS, 1, (note,)


def resolve(config: RunConfig, room: Room, devices: int = 1, segments: int = 1) -> RunConfig:
    """Returns a configuration with `offload.level = "auto"` replaced by the first level that fits, with the
    least fraction, by arithmetic; any other as it is. segments: most documents in a row.

    Raises InputError, with what is short, where none fits.
    """
    if config.offload.level != "auto":
        return config
    room = dataclasses.replace(room, device=round(room.device * CERTAIN))
    of = {"devices": devices, "segments": segments}
    fits = (_least(config, level, config.optim.state, room, **of) for level in LEVELS)
    first = next((proposal for proposal in fits if proposal), None)
    if first is None:
        most, _ = estimate(
            dataclasses.replace(config, offload=dataclasses.replace(config.offload, level=LEVELS[-1])), **of
        )
        others = [proposal.state for proposal in propose(config, room, **of)]
        advice = f"optim.state = {' or '.join(map(repr, others))} fits" if others else "no optim.state fits"
        raise InputError(
            f"offload.level = 'auto': no level fits with optim.state = {config.optim.state!r}; with all on "
            f"the host it needs {gib(most.peak_device)} GiB on the device, of {gib(room.device)}, and "
            f"{gib(most.peak_host)} on the host, of {gib(room.host)}; {advice}"
        )
    fraction = first.fraction or 1.0
    offload = dataclasses.replace(config.offload, level=first.level, fraction=fraction)
    return dataclasses.replace(config, offload=offload)


CERTAIN = 0.90
"""Share of the device that a plan by arithmetic may fill: it is up to 3 % below the compiled peak (4 % on
several devices), what was measured up to 5 % above that, and this is not all either (first steps,
evaluation, holes in the memory). Of kernels only cuDNN's attention has its workspace in the plan: what
attention "xla" and "reference" need, which grows with the square of the sequence, is not in it."""
