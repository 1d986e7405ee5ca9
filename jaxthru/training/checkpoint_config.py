"""The configuration of checkpoints: how often the state is saved, where, and what is kept."""

import dataclasses
import re

from jaxthru.runtime.errors import require

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
TIME = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?([{''.join(UNITS)}])")
Every = int | str
"""Steps, as 500, or a time, as "90s", "10m" or "2h"."""


def checked(key: str, every: Every) -> Every:
    """Returns an interval as it is, digits as their number. Raises InputError, which names the key."""
    if isinstance(every, str) and every.isascii() and every.isdecimal():
        every = int(every[:20])
    if not isinstance(every, str):
        require(every >= 0, f"{key} = {every}: must be at least 0")
        return every
    said = f"{key} = {every!r}: must be steps, as 500, or a time, as 90s, 10m or 2h; 0 for none"
    require(TIME.fullmatch(every) is not None and len(every) < 20, said)
    require(seconds(every) > 0, f"{key} = {every!r}: must be above 0; 0 for none")
    return every


def seconds(every: Every) -> float | None:
    """Returns the seconds of an interval that is a time, None for one of steps."""
    if not isinstance(every, str):
        return None
    number, unit = TIME.fullmatch(every).groups()
    return float(number) * UNITS[unit]


@dataclasses.dataclass(frozen=True)
class LocalTierConfig:
    """The second tier: each process saves its own part of the state to a disk of its host, which a run that
    is started again on the same hosts goes on from. directory: on that disk, the same name on every host;
    runs have folders of their own in it. every: as checkpoint.every. keep: how many of the newest stay."""

    directory: str
    every: Every = "5m"
    keep: int = 2

    def __post_init__(self):
        require(bool(self.directory), "checkpoint.local.directory: is empty; for none: checkpoint.local=None")
        object.__setattr__(self, "every", checked("checkpoint.local.every", self.every))
        # A kill between two hosts' commits leaves one with a newer checkpoint: the one before is needed.
        require(self.keep >= 2, f"checkpoint.local.keep = {self.keep}: must be at least 2")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """every: steps between checkpoints, as 500, or the time, as 90s, 10m or 2h; 0 for none. last: also save
    after the last step, or the one at which a signal ends the run; without both nothing is saved, as a
    measurement wants it, and a run that is repeated starts anew. keep: how many of the newest stay.
    keep_every: also keep each checkpoint at a multiple of this many steps, for good, and save there where
    `every` is a time; 0 keeps none so. local: a second tier, on disks of the hosts, if it
    is given a directory."""

    every: Every = 100
    last: bool = True
    keep: int = 2
    keep_every: int = 0
    local: LocalTierConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, "every", checked("checkpoint.every", self.every))
        require(self.keep >= 1, f"checkpoint.keep = {self.keep}: must be at least 1")
        require(self.keep_every >= 0, f"checkpoint.keep_every = {self.keep_every}: must be at least 0")
