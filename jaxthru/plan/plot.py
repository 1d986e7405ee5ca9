"""Line plots as SVG, which every browser shows and no package is needed for."""

import dataclasses
from html import escape

import numpy as np

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 260, 56, 30, 200, 30
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Paul Tol's bright scheme, which colour-blind readers can tell apart."""

NAMED = 12
"""So many lines have their names beside the plot."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot. series: {name: (x, y)}, arrays of [points]."""

    title: str
    series: dict[str, tuple[np.ndarray, np.ndarray]]


def svg(panels: list[Panel]) -> str:
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
    x_low, x_high = _range([x for x, _ in panel.series.values()])
    y_low, y_high = _range([y for _, y in panel.series.values()])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<text x="{LEFT}" y="{TOP - 12}" font-size="13">{escape(panel.title)}</text>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{LEFT - 4}" y="{bottom}" text-anchor="end">{y_low:.3g}</text>',
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{y_high:.3g}</text>',
        f'<text x="{LEFT}" y="{bottom + 16}">{x_low:,.0f}</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{x_high:,.0f}</text>',
    ]
    for number, (name, (x, y)) in enumerate(panel.series.items()):
        colour = COLOURS[number % len(COLOURS)]
        across = LEFT + (x - x_low) / (x_high - x_low) * (right - LEFT)
        up = bottom - (y - y_low) / (y_high - y_low) * (bottom - TOP)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if number < NAMED:
            label = name if number < NAMED - 1 or len(panel.series) == NAMED else "and others"
            place = f'x="{right + 12}" y="{TOP + 10 + 16 * number}"'
            parts.append(f'<text {place} fill="{colour}">{escape(label)}</text>')
    return parts


def _range(values: list[np.ndarray]) -> tuple[float, float]:
    low, high = (float(f(np.concatenate(values))) for f in (np.min, np.max))
    return (low, high) if high > low else (low - 0.5, high + 0.5)
