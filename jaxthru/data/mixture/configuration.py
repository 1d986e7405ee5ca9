"""The configuration of a mixture: each source's weight over the run, its caps, and what happens at its end.

A mix says it in TOML; a checkpoint keeps it as JSON of the same form, so that one function reads both.
"""

import dataclasses
import sys
from typing import Any, Literal, get_args

import numpy as np

from jaxthru.runtime.errors import did_you_mean, require

Points = tuple[tuple[float, float], ...]
"""(where, weight) in rising order. Before the first point its weight holds, after the last the last's."""

Interpolate, Unit = Literal["linear", "staged"], Literal["steps", "tokens"]
Count, Exhausted = Literal["tokens", "documents"], Literal["repeat", "drop", "stop"]
MIXTURE_KEYS = ("interpolate", "unit", "count")
SHARE_KEYS = ("weight", "max_epochs", "max_tokens", "exhausted")


@dataclasses.dataclass(frozen=True)
class Share:
    """What one source gives.

    points: its weight; (0, weight) alone if it is constant. max_epochs, max_tokens: it has no more after so
    many since the run began; None is no cap. exhausted: what happens then. `drop` leaves its share to the
    others, `stop` ends the run; `repeat`, for uncapped sources, goes on with it in a new order.
    """

    points: Points
    max_epochs: float | None = None
    max_tokens: float | None = None
    exhausted: Exhausted = "repeat"


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The shares of all sources over a run.

    interpolate: between points; `staged` holds a weight until the next point. unit: what points are counted
    in, completed updates or tokens; a step counts as train.rows × data.sequence tokens, padding included.
    count: what weights are shares of.
    """

    shares: dict[str, Share]
    interpolate: Interpolate = "linear"
    unit: Unit = "steps"
    count: Count = "tokens"

    @classmethod
    def plain(cls, weights: dict[str, float]) -> "Mixture":
        """Returns constant weights without caps."""
        return cls({name: Share(((0.0, float(value)),)) for name, value in weights.items()})

    @classmethod
    def from_tree(cls, tree: dict[str, Any], where: str = "") -> "Mixture":
        """Returns the mixture of `{interpolate, unit, count, sources: {name: {weight, max_epochs, max_tokens,
        exhausted}}}`, all but `sources` and `weight` optional.

        where: begins messages. Raises InputError.
        """
        mixture = cls(
            {name: _share(table, f"{where}sources.{name}.") for name, table in tree["sources"].items()},
            interpolate=_choice(f"{where}interpolate", tree.get("interpolate", "linear"), Interpolate),
            unit=_choice(f"{where}unit", tree.get("unit", "steps"), Unit),
            count=_choice(f"{where}count", tree.get("count", "tokens"), Count),
        )
        mixture.check(where)
        return mixture

    def check(self, where: str = "") -> None:
        """Raises InputError unless there is a weight above 0 at all times, and none below 0."""
        for name, share in self.shares.items():
            lowest = min(weight for _, weight in share.points)
            require(lowest >= 0, f"{where}source {name} has the weight {lowest:g}: must be at least 0")
        points = np.array(self.points())
        totals = sum(self._weights(share, points) for share in self.shares.values())
        for at, total in zip(points, totals, strict=True):
            when = f" at {self.unit} {at:g}" if self.changes else ""
            require(total > 0, f"{where}the weights of the sources sum to 0{when}")

    def to_tree(self) -> dict[str, Any]:
        """Returns plain JSON values that `from_tree` understands."""
        sources = {}
        for name, share in self.shares.items():
            points = [list(point) for point in share.points]
            caps = {"max_epochs": share.max_epochs, "max_tokens": share.max_tokens}
            sources[name] = {
                "weight": points[0][1] if len(points) == 1 else points,
                **{key: value for key, value in caps.items() if value is not None},
                "exhausted": share.exhausted,
            }
        return {"interpolate": self.interpolate, "unit": self.unit, "count": self.count, "sources": sources}

    def normalised(self) -> "Mixture":
        """Returns the same with weights that sum to 1, if they are all constant."""
        if self.changes:
            return self
        total = sum(share.points[0][1] for share in self.shares.values())
        shares = {
            name: dataclasses.replace(share, points=((0.0, share.points[0][1] / total),))
            for name, share in self.shares.items()
        }
        return dataclasses.replace(self, shares=shares)

    @property
    def changes(self) -> bool:
        """Whether any weight has more than one point."""
        return any(len(share.points) > 1 for share in self.shares.values())

    def weights(self, step: float, tokens_per_step: int) -> dict[str, float]:
        """Returns {source: weight} after `step` completed updates, not normalised."""
        found = self.weights_over(np.array([float(step)]), tokens_per_step)
        return {name: float(weight[0]) for name, weight in found.items()}

    def weights_over(self, steps: np.ndarray, tokens_per_step: int) -> dict[str, np.ndarray]:
        """Returns {source: weights after each of `steps` completed updates}, float64 [steps] both."""
        at = steps * (tokens_per_step if self.unit == "tokens" else 1)
        return {name: self._weights(share, at) for name, share in self.shares.items()}

    def points(self) -> list[float]:
        """Returns where a weight has a point, in `unit`, rising."""
        return sorted({at for share in self.shares.values() for at, _ in share.points})

    def _weights(self, share: Share, at: np.ndarray) -> np.ndarray:
        where, weights = np.array(share.points).T
        if self.interpolate == "linear":
            return np.interp(at, where, weights)
        return weights[np.maximum(0, np.searchsorted(where, at, side="right") - 1)]


def _share(table: dict[str, Any], key: str) -> Share:
    """Returns the share that a source's table describes."""
    require("weight" in table, f"{key}weight is missing: a number >= 0, or a list of [when, weight]")
    points = _points(table["weight"], f"{key}weight")
    epochs, tokens = (_cap(table.get(name), key + name) for name in ("max_epochs", "max_tokens"))
    capped = epochs is not None or tokens is not None
    exhausted = _choice(f"{key}exhausted", table.get("exhausted", "drop" if capped else "repeat"), Exhausted)
    require(
        not (capped and exhausted == "repeat"),
        f"{key}exhausted = 'repeat': contradicts its cap; choose 'drop' or 'stop', or take the cap away",
    )
    if exhausted != "repeat" and not capped:
        epochs = 1.0
    return Share(points, epochs, tokens, exhausted)


def _points(value: Any, key: str) -> Points:
    if not isinstance(value, list):
        require(is_number(value), f"{key} = {value}: must be a number >= 0, or a list of [when, weight]")
        return ((0.0, float(value)),)
    valid = bool(value) and all(
        isinstance(point, list) and len(point) == 2 and all(map(is_number, point)) for point in value
    )
    require(valid, f"{key} = {value}: must be a list of [when, weight], each a number >= 0")
    where = [point[0] for point in value]
    require(where == sorted(set(where)), f"{key} = {value}: its points must rise, each after the one before")
    return tuple((float(at), float(weight)) for at, weight in value)


def _cap(value: Any, key: str) -> float | None:
    require(value is None or (is_number(value) and value > 0), f"{key} = {value}: must be a number > 0")
    return None if value is None else float(value)


def is_number(value: Any) -> bool:
    """Says whether a value that TOML or JSON has is a finite number >= 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value <= sys.float_info.max  # an integer may be larger than any float


def _choice(key: str, value: Any, literal: Any) -> Any:
    valid = get_args(literal)
    require(value in valid, lambda: f"{key} = {value!r}{did_you_mean(str(value), valid)}")
    return value
