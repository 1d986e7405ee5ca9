"""The charts of the report, as HTML and SVG that scale with the page; all text is HTML, so it never does."""

import json
from collections.abc import Iterable, Sequence
from html import escape

from jaxthru.profile.account.ledger import Device
from jaxthru.profile.explain.breakdown import TITLES
from jaxthru.profile.show.manual import more

Point = tuple[float, float]


def waterfall(parts: dict[str, float], step: float, numbers: dict[str, tuple[str, str]], total: str) -> str:
    """Returns bars that begin where the one before ends, and one of the whole step. A part below zero, as
    the frequency's above the reference clock, goes back.

    numbers: part -> (seconds, share) as they are to be read. total: the last bar's name.
    """
    rows, whole, at = [], [], 0.0
    for name, seconds in parts.items():
        title, said = TITLES[name]
        note = f'<span class="said">{escape(said)} {more(title)}</span>'
        rows.append(_bar(title, note, [(name, at / step, seconds / step)], numbers[name]))
        whole.append((name, at / step, max(0.0, seconds) / step))
        at += seconds
    rows.append(_bar(total, "", whole, numbers["total"], "total"))
    return f'<div class="fall">{"".join(rows)}</div>'


def _bar(
    title: str, note: str, bars: Iterable[tuple[str, float, float]], numbers: tuple[str, str], kind: str = ""
) -> str:
    drawn = "".join(
        f'<div class="bar" style="left:{100 * min(start, start + width):.3f}%;width:{100 * abs(width):.3f}%;'
        f'background:var(--{name})"></div>'
        for name, start, width in bars
    )
    cells = "".join(f'<div class="number {kind}">{escape(number)}</div>' for number in numbers)
    return (
        f'<div class="row"><div class="title {kind}"><span class="part">{escape(title)}</span>{note}</div>'
        f'<div class="track">{drawn}</div>{cells}</div>'
    )


def strip(device: Device, said: str, ticks: Sequence[str]) -> str:
    """Returns one step of a device as a band, coloured by line. said: which step it is. ticks: written under
    it, evenly spaced."""
    end = max(span[1] for span in device.strip)
    paths: dict[str, list[str]] = {}
    for start, stop, line in device.strip:
        x, width = 1000 * start / end, 1000 * (stop - start) / end
        paths.setdefault(line, []).append(f"M{x:.2f} 0h{width:.2f}v1h-{width:.2f}z")
    drawn = "".join(f'<path d="{"".join(path)}" fill="var(--{line})"/>' for line, path in paths.items())
    spans = json.dumps([[round(a, 7), round(b, 7), line] for a, b, line in device.strip])
    called = f"device {device.device}" if device.device.isdecimal() else device.device
    names = json.dumps({line: TITLES[line][0] for line in paths})
    return (
        f'<div class="timeline"><svg class="strip" viewBox="0 0 1000 1" preserveAspectRatio="none" '
        f'role="img" aria-label="Timeline of {escape(called)}" data-end="{end}" '
        f'data-names="{escape(names)}" data-spans="{escape(spans)}">{drawn}</svg>{axis(ticks)}'
        f'<div class="readout">{escape(called)}{escape(said)}: point at the band to read it</div></div>'
    )


def legend(lines: Iterable[str]) -> str:
    keys = (
        f'<li><span class="key" style="background:var(--{line})"></span>{escape(TITLES[line][0])}</li>'
        for line in lines
    )
    return f'<ul class="legend">{"".join(keys)}</ul>'


def series(
    title: str,
    points: Sequence[Point],
    *,
    unit: str,
    x: str,
    ticks: Sequence[str],
    zero: bool = False,
    mark: tuple[float, str] | None = None,
) -> str:
    """Returns a line plot. x: what a place is called, "#" where its number goes. zero: the y axis begins
    there. mark: a level drawn as a dashed line, and its name."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    levels = [*ys, *([mark[0]] if mark else []), *([0.0] if zero else [])]
    low, high = min(levels), max(levels)
    # A steady level is to look steady: the axis spans a tenth of it at least.
    short = max(0.0, 0.1 * max(abs(low), abs(high)) - (high - low)) or (1.0 if high == low == 0 else 0.0)
    pad = 0.05 * (high - low) + short / 2
    low, high = (0.0 if zero else low - pad), high + pad
    left, right = min(xs), max(xs)
    across = [1000 * (value - left) / (right - left or 1.0) for value in xs]
    up = [100 * (1 - (value - low) / (high - low)) for value in ys]
    line = " ".join(f"{a:.1f},{b:.2f}" for a, b in zip(across, up, strict=True))
    drawn = f'<polyline points="{line}" fill="none" stroke="var(--line)" {STROKE} stroke-width="1.6"/>'
    said = "point at the line to read it"
    if mark:
        level = 100 * (1 - (mark[0] - low) / (high - low))
        drawn += f'<path d="M0 {level:.2f}H1000" stroke="var(--muted)" {STROKE} stroke-dasharray="5 4"/>'
        said = f"dashed: {mark[1]}; {said}"
    read = json.dumps([[round(a, 6), round(b, 3)] for a, b in points])
    labels = "".join(f"<span>{value:,.{_digits(high - low)}f}</span>" for value in (high, low))
    return (
        f'<figure style="margin:0"><h3>{escape(title)}</h3><div class="plot"><div class="y">{labels}</div>'
        f'<svg class="series" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}" data-points="{escape(read)}" data-low="{left}" data-high="{right}" '
        f'data-unit="{escape(unit)}" data-x="{escape(x)}">{drawn}</svg>{axis(ticks)}</div>'
        f'<div class="readout">{escape(said)}</div></figure>'
    )


STROKE = 'vector-effect="non-scaling-stroke"'


def _digits(span: float) -> int:
    """Returns the decimals with which an axis of this length can be read."""
    return 0 if span >= 20 else 1 if span >= 2 else 2


def axis(ticks: Sequence[str]) -> str:
    """Returns texts under a band, each in the middle of its place, the outer ones within the band. Of more
    than three, every other has no room on a narrow page."""
    last, spans = len(ticks) - 1, []
    for i, tick in enumerate(ticks):
        kind = "wide" if last > 2 and i % 2 else ""
        back = {0: 0, last: 100}.get(i, 50)  # percent of its own width
        place = f"left:{100 * i / last:g}%;transform:translateX(-{back}%)"
        spans.append(f'<span class="{kind}" style="{place}">{escape(tick)}</span>')
    return f'<div class="axis">{"".join(spans)}</div>'


SIGNS = {">": "number", "~": "wide", "<": "name"}


def clipped(name: str, kind: str = "", end: bool = False) -> str:
    """Returns a name as HTML that stays in one line of its cell; pointing at it shows all of it. end: where
    there is no room for all, its end is shown, as of a path."""
    kinds = " ".join(filter(None, ("clip", kind, "end" if end else "")))
    text = f"<bdi>{escape(name)}</bdi>" if end else escape(name)
    return f'<span class="{kinds}" title="{escape(name)}">{text}</span>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of HTML cells. columns: their names; ">" before one aligns its numbers, "~" hides it
    on narrow pages, "<" gives it the room that the others leave: of `clipped` names, the most that fits."""

    def cell(tag: str, column: str, text: str) -> str:
        kinds = [kind for sign, kind in SIGNS.items() if sign in column[:2]]
        return f'<{tag} class="{" ".join(kinds)}">{text}</{tag}>' if kinds else f"<{tag}>{text}</{tag}>"

    head = "".join(cell("th", column, escape(column.lstrip("<>~"))) for column in columns)
    body = "".join(
        f"<tr>{''.join(cell('td', column, text) for column, text in zip(columns, row, strict=True))}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
