"""report.html: one page, in one file, that says where the step went; made for readers new to all of this."""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxthru.profile.account.ledger import LINES, Device, Ledger, Lint
from jaxthru.profile.explain.breakdown import figures, noise_threshold, step_parts
from jaxthru.profile.explain.settings import TITLES
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import nothing_to_win, relation, shares, sustained, verdict
from jaxthru.training.plot import polyline, to_pixels

LEDGER = Path(__file__).parents[3] / "docs" / "ledger.md"
"""A report lies in a run's directory, anywhere: only a whole address leads from there to a checkout."""

DEVICES = 4  # timelines shown
CONFIG_KEY = re.compile(r"[a-z]+\.\w+")
CLASSES = {">": "number", "~": "wide", "<": "name"}

Content = dict[str, Any] | None
"""What a section of the template is drawn of; None where nothing was measured: it is left out."""


def report(ledger: Ledger) -> str:
    """Returns the page."""
    unit = Unit.of(ledger.window.step_seconds)
    sections = (_waterfall, _timeline, _experts, _lint)
    return template("report.html").render(
        ledger=ledger,
        unit=unit,
        titles=TITLES,
        manual=manual,
        figures=figures(ledger),
        parts=step_parts(ledger),
        verdict=verdict(ledger),
        sustained=sustained(ledger),
        said=f"{shares(ledger, unit)} {relation(ledger, unit)}",
        noise_threshold=unit(noise_threshold(ledger)),
        nothing_to_win=nothing_to_win(ledger, unit),
        drawn=plot,
        **{section.__name__.removeprefix("_"): section(ledger, unit) for section in sections},
    )


@functools.cache
def template(name: str):
    """Returns a template of this folder. All that is put into one is escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    made = jinja2.Environment(loader=loader, extensions=["jinja2.ext.do"], **strict)
    made.filters |= {"code": code, "json": json.dumps, "classes": classes, "tera": tera}
    made.filters |= {"share": "{:.1%}".format, "count": "{:,.0f}".format}
    made.tests["setting"] = lambda each: bool(CONFIG_KEY.fullmatch(each.key) and " " not in each.value)
    return made.get_template(name)


def code(text: str) -> str:
    """Returns a sentence as HTML: what stands between backticks is code."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))


def classes(column: str) -> str:
    """Returns the CSS classes of a column, by the signs that its name begins with."""
    return " ".join(kind for sign, kind in CLASSES.items() if sign in column[:2])


def tera(rate: float | None) -> str:
    """Returns a rate in units of 1e12, in three digits."""
    rate = rate and rate / 1e12
    return "–" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def manual(part: str) -> str:
    """Returns the address of a part's heading in docs/ledger.md; none without a checkout."""
    return f"{LEDGER.as_uri()}#{anchor(TITLES[part][0])}" if LEDGER.is_file() else ""


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def bars(ledger: Ledger, unit: Unit, least: float) -> list[tuple[str, float, float, str]]:
    """Returns the parts of the step that take this share of it at least: name, start and width as shares, and
    what is written beside it. Each begins where the one before ends."""
    found, at, step = [], 0.0, ledger.window.step_seconds
    for name, seconds in step_parts(ledger).items():
        if abs(seconds) >= least * step:
            found.append((name, at / step, seconds / step, unit(seconds)))
            at += seconds
    return found


def _waterfall(ledger: Ledger, unit: Unit) -> Content:
    found, drawn = step_parts(ledger), bars(ledger, unit, 5e-5)
    nothing = [TITLES[name][0] for name in found if name not in {bar[0] for bar in drawn}]
    notes = [f"No time went to: {', '.join(nothing).lower()}."] if nothing else []
    if "ideal" not in found:
        notes.append("No peak is known for these devices, so matmuls are not taken apart.")
    matmul = ledger.matmul
    if matmul.headroom_seconds and matmul.maximum_mhz:
        clock, less = f"{matmul.maximum_mhz:,.0f} MHz", unit(matmul.headroom_seconds)
        notes.append(f"At the maximum clock, {clock}, the needed matmuls would take {less} less.")
    total = [(name, start, max(0.0, width)) for name, start, width, _ in drawn]
    return {"bars": drawn, "total": total, "notes": " ".join(notes)}


def _timeline(ledger: Ledger, unit: Unit) -> Content:
    devices = [device for device in ledger.devices if device.strip][:DEVICES]
    if not devices:
        return None
    used = {line for device in devices for _, _, line in device.strip}
    return {
        "strips": [_strip(device, unit) for device in devices],
        "lines": [line for line in LINES if line in used],
        "more": len(ledger.devices) - len(devices),
    }


def _strip(device: Device, unit: Unit) -> tuple:
    """Returns what a band is drawn of: one step of a device, coloured by line."""
    end = max(stop for _, stop, _ in device.strip)
    paths: dict[str, str] = {}
    for start, stop, line in device.strip:
        x, width = 1000 * start / end, 1000 * (stop - start) / end
        paths[line] = f"{paths.get(line, '')}M{x:.2f} 0h{width:.2f}v1h-{width:.2f}z"
    called = f"device {device.device}" if device.device.isdecimal() else device.device
    step = min(device.steps, key=lambda step: abs(step.seconds - end), default=None)
    said = f"{f', step {step.step}' if step else ''}, {unit(end)}"
    spans = [[round(start, 7), round(stop, 7), line] for start, stop, line in device.strip]
    names = {line: TITLES[line][0] for line in paths}
    return called, said, end, paths, names, spans, [unit(end * i / 4) for i in range(5)]


SHADES = 8
"""In which a picture shows numbers: from none to twice the mean and more."""


def _experts(ledger: Ledger, unit: Unit) -> Content:
    """Returns what the picture of tokens by layer (down) and expert (across) is drawn of: a path of cells of
    each shade."""
    counts = ledger.expert_tokens
    if not counts:
        return None
    paths = dict.fromkeys(range(SHADES), "")
    most = 0.0
    for y, layer in enumerate(counts):
        mean = max(sum(layer), 1) / len(layer)
        most = max(most, max(layer) / mean)
        for x, count in enumerate(layer):
            paths[min(SHADES - 1, int(SHADES / 2 * count / mean))] += f"M{x} {y}h1v1h-1z"
    return {
        "paths": [((shade + 0.5) / SHADES, path) for shade, path in paths.items() if path],
        "size": (len(counts[0]), len(counts)),
        "most": f"{most:.2f}",
    }


def plot(
    title: str,
    points: Sequence[tuple[float, float]],
    unit: str,
    x: str,
    ticks: Sequence[str],
    scale: float = 1.0,
    zero: bool = False,
    mark: tuple[float, str] | None = None,
) -> dict[str, Any]:
    """Returns what a line plot is drawn of. x: what a place is called, "#" where its number goes. scale: of
    values. zero: the y axis begins there. mark: a level drawn as a dashed line, and its name."""
    points = [(at, value / scale) for at, value in points]
    xs, ys = zip(*points, strict=True)
    levels = [*ys, *([mark[0]] if mark else []), *([0.0] if zero else [])]
    low, high = min(levels), max(levels)
    # A steady level is to look steady: the axis spans a tenth of it at least.
    short = max(0.0, 0.1 * max(abs(low), abs(high)) - (high - low)) or (1.0 if high == low == 0 else 0.0)
    pad = 0.05 * (high - low) + short / 2
    low, high = (0.0 if zero else low - pad), high + pad
    left, right = min(xs), max(xs)
    down = functools.partial(to_pixels, ends=(low, high), pixels=(100, 0))
    digits = 0 if high - low >= 20 else 1 if high - low >= 2 else 2
    return {
        "title": title,
        "line": polyline(to_pixels(xs, (left, right), (0, 1000)), down(ys)),
        "points": [[round(a, 6), round(b, 3)] for a, b in points],
        "ends": (left, right),
        "labels": [f"{value:,.{digits}f}" for value in (high, low)],
        "unit": unit,
        "x": x,
        "ticks": ticks,
        "mark": mark and (float(down(mark[0])), mark[1]),
    }


def _lint(ledger: Ledger, unit: Unit) -> list[tuple]:
    alike: dict[tuple[str, str, str, bool], list[Lint]] = {}
    for each in ledger.lint:
        alike.setdefault((each.rule, each.scope, each.text, each.advised), []).append(each)
    rows = []
    for (rule, scope, text, advised), found in alike.items():
        seconds = [each.seconds for each in found if each.seconds is not None]
        held = [each.bytes for each in found if each.bytes is not None]
        cells = (
            (rule.replace("_", " "), scope),
            text + (f" ({len(found)} such)" if len(found) > 1 else ""),
            code(f"`{found[0].remedy}`, above") if advised else "none",
            f"{sum(held) / 1e6:,.0f}" if held else "–",
            unit.bare(sum(seconds)) if seconds else "–",
        )
        rows.append((sum(seconds), cells))
    rows.sort(key=lambda row: -row[0])
    return [cells for _, cells in rows]
