"""What a run costs: the configuration of prices, and joules and dollars of steps and of whole runs."""

import dataclasses
import math
from collections.abc import Sequence

from jaxthru.runtime.errors import require
from jaxthru.training.rows import Row

HOUR = 3600
FIELDS = ("joules", "joules_per_token", "dollars", "dollars_per_million_tokens")
"""What a row of metrics.jsonl has of the cost of its step."""


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """What a device costs: nothing is assumed, and what is not given is left out.

    dollars_per_device_hour: the price of a device with its share of the host; without it no step has dollars.
    watts_beside: a device's share of the host, network and fans, watts beside what the device itself counts.
    pue: power usage effectiveness, what the building draws over what its machines do, from 1. Both are part
    of the joules of a step, where given.
    """

    dollars_per_device_hour: float | None = None
    watts_beside: float | None = None
    pue: float | None = None

    def __post_init__(self):
        for name in ("dollars_per_device_hour", "watts_beside"):
            value = getattr(self, name)
            fits = value is None or (math.isfinite(value) and value >= 0)
            require(fits, f"cost.{name} = {value}: must be at least 0")
        fits = self.pue is None or (math.isfinite(self.pue) and self.pue >= 1)
        require(fits, f"cost.pue = {self.pue}: must be at least 1")

    def joules(self, counted: float | None, device_seconds: float) -> float | None:
        """Returns joules with what devices do not count. counted: by the devices; None is not known."""
        if counted is None:
            return None
        return (counted + (self.watts_beside or 0.0) * device_seconds) * (self.pue or 1.0)

    def dollars(self, device_seconds: float) -> float | None:
        """Returns what devices cost for so many seconds, all of them added up; None without a price."""
        price = self.dollars_per_device_hour
        return None if price is None else price * device_seconds / HOUR

    def of_step(self, counted: float | None, device_seconds: float, tokens: int) -> Row:
        """Returns FIELDS of a step."""
        joules, dollars = self.joules(counted, device_seconds), self.dollars(device_seconds)
        each = lambda value, per=1: value / tokens * per if value is not None and tokens else None  # noqa: E731
        return dict(zip(FIELDS, (joules, each(joules), dollars, each(dollars, 10**6)), strict=True))


@dataclasses.dataclass(frozen=True)
class Total:
    """Of steps together: what is known of all of them. joules, dollars: None where a step's is not known."""

    tokens: int
    joules: float | None
    dollars: float | None

    @property
    def joules_per_token(self) -> float | None:
        return self._each(self.joules)

    @property
    def dollars_per_million_tokens(self) -> float | None:
        return self._each(self.dollars, 10**6)

    def _each(self, value: float | None, per: int = 1) -> float | None:
        return value / self.tokens * per if value is not None and self.tokens else None


def total(rows: Sequence[Row]) -> Total:
    """Returns the sums of rows of metrics.jsonl, exact, so that they do not depend on where a run was killed
    and resumed."""
    sums = {}
    for name in ("joules", "dollars"):
        values = [row.get(name) for row in rows]
        sums[name] = math.fsum(values) if values and None not in values else None
    return Total(sum(row.get("tokens") or 0 for row in rows), **sums)
