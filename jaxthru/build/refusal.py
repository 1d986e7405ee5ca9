"""The line that says what is short where nothing fits that `auto` may stand for, and what would."""

import functools

from jaxthru.build.defaults import get, plain, replaced, searched
from jaxthru.build.least_offload import LEVELS, narrower, propose, ruling_out
from jaxthru.build.memory_estimate import Room, estimate, gib
from jaxthru.build.proposals import left_open, one_stage_at_a_time
from jaxthru.config import RunConfig
from jaxthru.runtime.errors import InputError


class NothingFits(InputError):
    """Nothing that `auto` may stand for fits, see `nothing_fits`. config: what was to be settled."""

    def __init__(self, config: RunConfig, room: Room, devices: int = 1, segments: int = 1):
        super().__init__("nothing fits")
        self.config = config
        self._said = functools.partial(nothing_fits, config, room, devices, segments)

    def __str__(self) -> str:
        return self._said()  # not before, for it takes a second


def nothing_fits(config: RunConfig, room: Room, devices: int = 1, segments: int = 1) -> str:
    """Returns a line that says what is short, at the least that a configuration can take, and what fits."""
    asked = ", ".join(f"{key} = 'auto'" for key in searched(config))
    ruling = [f"{key} = {value!r}" for key, value in ruling_out(config).items()]
    most = {"model.loop": "unroll", "remat.policy": "full", "offload.level": LEVELS[0 if ruling else -1]}
    tried = plain(replaced(config, {key: value for key, value in most.items() if get(config, key) == "auto"}))
    if config.offload.level == "auto":
        tried = one_stage_at_a_time(tried)
    how = {"devices": devices, "segments": segments}
    plan, _ = estimate(tried, **how)
    left = config.offload.level == "auto"
    levels = LEVELS if left and not ruling else (tried.offload.level,)
    formats = narrower(config.optim.state)
    others = [found.state for found in propose(tried, room, **how, formats=formats, levels=levels)]
    advice = (
        f"optim.state = {' or '.join(map(repr, others))} fits" if others else "no narrower optim.state fits"
    )
    if _fits_unclipped(tried, room, levels, how):
        advice = f"with optim.clip_rule = 'previous' it fits, as gradients do not wait; {advice}"
    if found := left_open(config, room, devices, segments):
        values = " and ".join(f"{key} = {value!r}" for key, value in found.items())
        advice = f"with {values} it fits; {advice}"
    without = f" and without offload, which {' and '.join(ruling)} rules out" if left and ruling else ""
    return (
        f"{asked}: nothing fits with optim.state = {config.optim.state!r}{without}; at the least it needs "
        f"{gib(plan.peak_device)} GiB on the device, of {gib(room.device)}, and {gib(plan.peak_host)} on the "
        f"host, of {gib(room.full.host)}; {advice}"
    )


def _fits_unclipped(tried: RunConfig, room: Room, levels: tuple[str, ...], how: dict[str, int]) -> bool:
    """Says whether a configuration would fit whose gradients need not wait for their norm. tried: the least
    that it can take as it is. levels: of offload, that it may have."""
    if tried.optim.clip_rule != "exact" or not tried.optim.clip:
        return False
    other = replaced(tried, {"optim.clip_rule": "previous"})
    if len(levels) > 1:
        return bool(propose(other, room, formats=(tried.optim.state,), **how))
    return room.full.holds(estimate(other, **how)[0])
