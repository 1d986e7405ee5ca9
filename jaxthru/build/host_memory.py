"""Does a step on CPU devices fit the memory of their host? Asked before anything is compiled."""

import bisect
import dataclasses
from collections.abc import Iterator

from jaxthru.build.defaults import plain
from jaxthru.build.least_offload import BY_PRECISION
from jaxthru.build.memory_estimate import estimate, gib, indispensable
from jaxthru.config import RunConfig
from jaxthru.engine.offload import OffloadConfig
from jaxthru.runtime import distributed, hardware
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.sharding import Layout


def check_host_memory(config: RunConfig, layout: Layout) -> None:
    """Raises InputError, in all processes, where parameters, optimizer and gradients alone are more than the
    memory of a host whose CPU is the device: the system would kill the process, without a word.

    What else a step needs is not counted, so that nothing is refused that would run. Swap space counts, and
    so does `offload.host_gib` if it is more than the machine says that it has.
    """
    devices = list(layout.mesh.devices.flat)
    if devices[0].platform != "cpu":
        return
    config, processes = plain(config), distributed.sharing_memory()
    here = sum(device.process_index in processes for device in devices)
    lack = lacking(config, len(devices), here, memory_of_host(config))
    distributed.refused_anywhere(lack)  # hosts may differ


def memory_of_host(config: RunConfig) -> int:
    """Returns the bytes that all processes of this host may use together."""
    given = round((config.offload.host_gib or 0) * 2**30)
    return max(hardware.host_limit_bytes() + hardware.swap_bytes(), given)


def lacking(config: RunConfig, devices: int, here: int, limit: int) -> str:
    """Returns what is short on a host with `here` of `devices` CPU devices, and what fits; empty if nothing.

    limit: the host's bytes.
    """
    needed = {name: size * here for name, size in indispensable(config, devices).items()}
    total = sum(needed.values())
    if total <= limit:
        return ""
    parts = ", ".join(f"{name} {gib(size)}" for name, size in needed.items() if size)
    others = [*_fitting(config, devices, here, limit)]
    advice = f"{' or '.join(others)} fits" if others else "neither fewer layers nor another optim.state fits"
    asked = [f"{key} = {value!r}" for key, value, _ in _depth(config)]
    asked.append(f"optim.state = {config.optim.state!r}")
    return (
        f"{', '.join(asked)}: needs {gib(total)} GiB at once ({parts}) on {devices} × cpu, and this host has "
        f"{gib(limit)} GiB (if it has more than it shows, set offload.host_gib); {advice}; for a GPU, ask "
        "`python -m jaxthru.plan memory --config F`"
    )


def _fitting(config: RunConfig, devices: int, here: int, limit: int) -> Iterator[str]:
    """Yields settings that fit by the account of a whole step: the most layers, and the first format."""

    def fits(changed: RunConfig) -> bool:
        plan, _ = estimate(dataclasses.replace(changed, offload=OffloadConfig()), devices=devices)
        return plan.peak_device * here <= limit

    for key, _, shallower in _depth(config):
        # The shallowest come last, so that those which fit do.
        first = bisect.bisect_left(shallower, True, key=lambda changed: fits(changed[1]))
        if first < len(shallower):
            yield f"{key} = {shallower[first][0]}"
    for state in BY_PRECISION:
        try:
            changed = dataclasses.replace(config, optim=dataclasses.replace(config.optim, state=state))
        except InputError:  # which other settings of the optimizer forbid
            continue
        if fits(changed):
            yield f"optim.state = {state!r}"
            return


def _depth(config: RunConfig) -> Iterator[tuple[str, int, list[tuple[int, RunConfig]]]]:
    """Yields, if the family has such a key, the one of the layers, its value, and configurations with fewer,
    the deepest first."""
    field = config.model.field("layers")
    if field is None or not isinstance(value := getattr(config.model, field), int):
        return
    shallower = []
    for count in range(value - 1, 0, -1):
        try:
            model = dataclasses.replace(config.model, **{field: count})
            shallower.append((count, dataclasses.replace(config, model=model)))
        except InputError:  # as of a pattern that it does not divide into
            continue
    yield config.model.key("layers"), value, shallower
