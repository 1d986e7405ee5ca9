"""Line plots as SVG, which every browser shows and no package is needed for.

The profile's report draws its lines by the same `to_pixels` and `polyline`, in the style of its page.
"""

import dataclasses
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxthru.runtime.atomic import write_atomically

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 260, 56, 30, 200, 30
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart."""

NAMED = 12
"""So many lines have their names beside the plot."""

Pair = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot. series: {name: (x, y)}, arrays of [points]; what is NaN is left out. logarithmic: the axes
    that are, of "xy"; what is not above 0 there is left out."""

    title: str
    series: dict[str, tuple[np.ndarray, np.ndarray]]
    logarithmic: Literal["", "x", "y", "xy"] = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Picture:
    """Plots, one under the other: a notebook shows them, `save` writes them."""

    panels: tuple[Panel, ...]

    def save(self, path: Path | str) -> None:
        """Writes the plots as SVG, and makes the folder. Raises InputError if that is not possible."""
        write_atomically(Path(path), svg(self.panels))

    def _repr_svg_(self) -> str:
        return svg(self.panels)

    def __repr__(self) -> str:
        titles = "; ".join(panel.title for panel in self.panels)
        return f"<plots of {titles}: a notebook shows them, save(FILE) writes them as SVG>"


def svg(panels: Sequence[Panel]) -> str:
    """Returns the panels, one under the other, as one document."""
    height = HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {number * HEIGHT})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    scale_x, scale_y = (_log if axis in panel.logarithmic else np.asarray for axis in "xy")
    series = {name: _known(scale_x(x), scale_y(y)) for name, (x, y) in panel.series.items()}
    panel = dataclasses.replace(panel, series=series)
    x_low, x_high = _range([x for x, _ in panel.series.values()])
    y_low, y_high = _range([y for _, y in panel.series.values()])
    x_first, x_last = (10.0**end if "x" in panel.logarithmic else end for end in (x_low, x_high))
    y_first, y_last = (10.0**end if "y" in panel.logarithmic else end for end in (y_low, y_high))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<text x="{LEFT}" y="{TOP - 12}" font-size="13">{escape(panel.title)}</text>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{LEFT - 4}" y="{bottom}" text-anchor="end">{y_first:.3g}</text>',
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{y_last:.3g}</text>',
        f'<text x="{LEFT}" y="{bottom + 16}">{x_first:,.0f}</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{x_last:,.0f}</text>',
    ]
    for power in range(math.floor(x_low) + 1, math.ceil(x_high)) if "x" in panel.logarithmic else ():
        (place,) = to_pixels([power], (x_low, x_high), (LEFT, right))
        if min(place - LEFT, right - place) > 40:  # else it would touch the axis' ends
            parts.append(f'<text x="{place:.0f}" y="{bottom + 16}" text-anchor="middle">{10**power:,}</text>')
    for number, (name, (x, y)) in enumerate(panel.series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = polyline(
            to_pixels(x, (x_low, x_high), (LEFT, right)), to_pixels(y, (y_low, y_high), (bottom, TOP))
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if number < NAMED:
            label = name if number < NAMED - 1 or len(panel.series) == NAMED else "and others"
            place = f'x="{right + 12}" y="{TOP + 10 + 16 * number}"'
            parts.append(f'<text {place} fill="{colour}">{escape(label)}</text>')
    return parts


def to_pixels(values: ArrayLike, ends: Pair, pixels: Pair) -> np.ndarray:
    """Returns where values lie along an axis. ends: its first and last value; pixels: where these are."""
    (low, high), (first, last) = ends, pixels
    return first + (np.asarray(values, float) - low) / (high - low or 1.0) * (last - first)


def polyline(across: np.ndarray, down: np.ndarray) -> str:
    """Returns the points of a line as SVG has them."""
    return " ".join(f"{x:.1f},{y:.2f}" for x, y in zip(across, down, strict=True))


def _range(values: list[np.ndarray]) -> tuple[float, float]:
    known = np.concatenate(values)
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _log(values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, float)
    return np.log10(values, where=values > 0, out=np.full(values.shape, np.nan))


def _known(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]
