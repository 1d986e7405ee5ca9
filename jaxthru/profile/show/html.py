"""report.html: one page, in one file, that says where the step went; made for readers new to all of this."""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxthru.profile.account.ledger import LINES, Device, Ledger, Lint
from jaxthru.profile.explain.breakdown import TITLES, figures, floor, parts
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import (
    nothing_to_win,
    relation,
    shares,
    thresholds,
    unadvised,
    verdict,
)

LEDGER = Path(__file__).parents[3] / "docs" / "ledger.md"
"""A report lies in a run's directory, anywhere: only a whole address leads from there to a checkout."""

DEVICES = 4  # timelines shown
SHOWN = 12  # kernels and collectives, before the rest is folded away
SCOPES = 16
CONFIG_KEY = re.compile(r"[a-z]+\.\w+")
CLASSES = {">": "number", "~": "wide", "<": "name"}

Content = dict[str, Any] | None
"""What a section of the template is drawn of; None where nothing was measured: it is left out."""


def report(ledger: Ledger) -> str:
    """Returns the page."""
    unit = Unit.of(ledger.window.step_seconds)
    sections = (_waterfall, _advice, _timeline, _clock, _memory, _scopes, _kernels, _collectives, _lint)
    return template("report.html").render(
        titles=TITLES,
        manual=manual,
        names=lambda lines: {line: TITLES[line][0] for line in lines},
        step=unit(ledger.window.step_seconds),
        title=f"{ledger.run.config}: where the step went",
        heading=f"Where the step of {ledger.run.config} went",
        subtitle=_subtitle(ledger),
        verdict=verdict(ledger),
        said=f"{shares(ledger, unit)} {relation(ledger, unit)}",
        figures=_figures(ledger, unit),
        footer=_footer(ledger, unit),
        **{section.__name__.removeprefix("_"): section(ledger, unit) for section in sections},
    )


@functools.cache
def template(name: str):
    """Returns a template of this folder. All that is put into one is escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    made.filters |= {"code": code, "share": "{:.1%}".format, "json": json.dumps, "classes": classes}
    return made.get_template(name)


def code(text: str) -> str:
    """Returns a sentence as HTML: what stands between backticks is code."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(markupsafe.escape(text))))


def classes(column: str) -> str:
    """Returns the CSS classes of a column, by the signs that its name begins with."""
    return " ".join(kind for sign, kind in CLASSES.items() if sign in column[:2])


def manual(part: str) -> str:
    """Returns the address of a part's heading in docs/ledger.md; none without a checkout."""
    return f"{LEDGER.as_uri()}#{anchor(TITLES[part][0])}" if LEDGER.is_file() else ""


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _subtitle(ledger: Ledger) -> str:
    run, window = ledger.run, ledger.window
    last = window.first_step + window.steps - 1
    steps = f"step {window.first_step}" if window.steps == 1 else f"steps {window.first_step} to {last}"
    hosts = f", {run.processes} processes" if run.processes > 1 else ""
    return f"{run.devices} × {run.device_kind}{hosts}; {steps}; {run.tokens_per_step:,.0f} tokens a step"


def _figures(ledger: Ledger, unit: Unit) -> list[tuple[str, str, str]]:
    """Returns name, value and explanation of each figure that has a value."""
    found, window, share = figures(ledger), ledger.window, parts(ledger)
    step = window.step_seconds
    mean = f"mean of {window.steps} profiled" if window.steps > 1 else "as profiled"
    rows = [
        ("a step", unit(step), mean),
        ("tokens/s", f"{found.tokens_per_second:,.0f}", "of all devices, in profiled steps"),
    ]
    if found.mfu is not None:
        rows.append(("MFU", f"{found.mfu:.1%}", "of the data sheet's bf16 peak"))
    if found.mfu_at_clock is not None:
        at = f"of the bf16 peak at {ledger.clock.mean_mhz:,.0f} MHz"
        rows.append(("MFU at the clock that ran", f"{found.mfu_at_clock:.1%}", at))
    if "matmul" in share:
        rows.append((TITLES["matmul"][0].lower(), f"{share['matmul'] / step:.1%}", "of the step"))
    return rows


def _footer(ledger: Ledger, unit: Unit) -> str:
    window, versions = ledger.window, ledger.run.versions
    noise = f"{window.noise:.1%} between unprofiled steps" if window.loop_seconds else "not known"
    said = [thresholds(ledger), f"Noise: {noise}; no cause below {unit(floor(ledger))} is named."]
    if window.attribution_seconds:
        graphs = f"{unit(window.attribution_seconds)} a step"
        said.append(f"Kernels were named in a pass without CUDA graphs, {graphs}.")
    if ledger.clock.source != "none":
        said.append(f"Clock: {ledger.clock.source}.")
    said.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return " ".join(filter(None, said))


def _waterfall(ledger: Ledger, unit: Unit) -> Content:
    step, found = ledger.window.step_seconds, parts(ledger)
    bars, at = [], 0.0
    for name, seconds in found.items():
        if abs(seconds) >= 5e-5 * step:
            bars.append((name, at / step, seconds / step, unit(seconds)))
            at += seconds
    shown = {name for name, *_ in bars}
    nothing = [TITLES[name][0] for name in found if name not in shown]
    notes = [f"No time went to: {', '.join(nothing).lower()}."] if nothing else []
    if "ideal" not in found:
        notes.append("No peak is known for these devices, so matrix products are not taken apart.")
    matmul = ledger.matmul
    if matmul.headroom_seconds and matmul.maximum_mhz:
        clock, less = f"{matmul.maximum_mhz:,.0f} MHz", unit(matmul.headroom_seconds)
        notes.append(f"At the maximum clock, {clock}, the needed matmuls would take {less} less.")
    total = [(name, start, max(0.0, width)) for name, start, width, _ in bars]
    return {"bars": bars, "total": total, "notes": " ".join(notes), "parts": found}


def _advice(ledger: Ledger, unit: Unit) -> Content:
    items, known = [], False
    for each in ledger.advice:
        gain = "memory only, or not known"
        if each.gain_seconds is not None:
            gain, known = f"{unit(each.gain_seconds)} ({each.gain_share:.1%})", True
        items.append((each, CONFIG_KEY.fullmatch(each.key) and " " not in each.value, gain))
    return {"items": items, "nothing": "" if known else nothing_to_win(ledger, unit)}


def _timeline(ledger: Ledger, unit: Unit) -> Content:
    devices = [device for device in ledger.devices if device.strip][:DEVICES]
    if not devices:
        return None
    used = {line for device in devices for _, _, line in device.strip}
    more = len(ledger.devices) - len(devices)
    mean = unit(ledger.window.step_seconds)
    said = f"A band is one step and ends where that step does; the mean of the profiled steps is {mean}."
    said += f" And {more} devices more." if more else ""
    strips = [_strip(device, unit) for device in devices]
    return {"strips": strips, "lines": [line for line in LINES if line in used], "note_": said}


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
    return called, said, end, paths, spans, [unit(end * i / 4) for i in range(5)]


def _clock(ledger: Ledger, unit: Unit) -> Content:
    clock, reference = ledger.clock, ledger.matmul.reference_mhz
    mark = (reference, f"reference, {reference:,.0f} MHz") if reference else None
    drawn = ("Clock, MHz", clock.samples, "MHz", mark), ("Power, W", clock.power, "W", None)
    plots = [
        plot(title, points, name, "after # s", [unit(points[0][0]), unit(points[-1][0])], mark=level)
        for title, points, name, level in drawn
        if points
    ]
    reasons = (f"{reason} for {share:.0%} of the time" for reason, share in clock.cap_reasons.items())
    said = f"Held down by: {', '.join(reasons)}." if clock.cap_reasons else ""
    return {"plots": plots, "notes": said} if plots else None


def plot(
    title: str,
    points: Sequence[tuple[float, float]],
    unit: str,
    x: str,
    ticks: Sequence[str],
    zero: bool = False,
    mark: tuple[float, str] | None = None,
) -> dict[str, Any]:
    """Returns what a line plot is drawn of. x: what a place is called, "#" where its number goes. zero: the y
    axis begins there. mark: a level drawn as a dashed line, and its name."""
    xs, ys = zip(*points, strict=True)
    levels = [*ys, *([mark[0]] if mark else []), *([0.0] if zero else [])]
    low, high = min(levels), max(levels)
    # A steady level is to look steady: the axis spans a tenth of it at least.
    short = max(0.0, 0.1 * max(abs(low), abs(high)) - (high - low)) or (1.0 if high == low == 0 else 0.0)
    pad = 0.05 * (high - low) + short / 2
    low, high = (0.0 if zero else low - pad), high + pad
    left, right = min(xs), max(xs)
    up = lambda value: 100 * (1 - (value - low) / (high - low))  # noqa: E731
    digits = 0 if high - low >= 20 else 1 if high - low >= 2 else 2
    return {
        "title": title,
        "line": " ".join(f"{1000 * (a - left) / (right - left or 1.0):.1f},{up(b):.2f}" for a, b in points),
        "points": [[round(a, 6), round(b, 3)] for a, b in points],
        "ends": (left, right),
        "labels": [f"{value:,.{digits}f}" for value in (high, low)],
        "unit": unit,
        "x": x,
        "ticks": ticks,
        "mark": mark and (up(mark[0]), mark[1]),
    }


def _memory(ledger: Ledger, unit: Unit) -> Content:
    memory = ledger.memory
    if memory is None:
        return None
    most = max(memory.peak_bytes or 0, *memory.categories.values(), 1)
    name, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    size = lambda count: f"{count / scale:,.2f}\N{NO-BREAK SPACE}{name}"  # noqa: E731
    total = sum(memory.categories.values())
    program = total - sum(memory.categories.get(rest, 0) for rest in ("fragmentation", "beside"))
    known = sorted(memory.categories.items(), key=lambda item: -item[1])
    rows = [(category, size(count), f"{count / total:.1%}") for category, count in known if count]
    rows.append(("program's peak", size(program), f"{program / total:.1%}"))
    beyond = ("the runtime's own peak", memory.peak_bytes), ("pinned on the host", memory.host_pinned_bytes)
    rows += [(what, size(count), "") for what, count in beyond if count]
    points, ends = [(at, count / scale) for at, count in memory.curve], ["start of the step", "end"]
    title = f"Over the step, {name}"
    curve = plot(title, points, name, "at # of the step", ends, zero=True) if len(points) > 1 else None
    buffers = [((each.scope or "–", each.source), each.category, size(each.bytes)) for each in memory.buffers]
    return {"curve": curve, "rows": rows, "largest": buffers}


def _table(columns: list[str], rows: list, **more) -> Content:
    return {"columns": columns, "rows": rows, **more} if rows else None


def _scopes(ledger: Ledger, unit: Unit) -> Content:
    step = ledger.window.step_seconds
    found = sorted(ledger.scopes, key=lambda scope: -scope.seconds)[:SCOPES]
    rows = [
        (each.layer, each.phase, TITLES[each.line][0], unit.bare(each.seconds), f"{each.seconds / step:.1%}")
        for each in found
        if each.seconds >= 5e-5 * step
    ]
    return _table(["layer", "phase", "~line", f">{unit.name}", ">share"], rows)


def _kernels(ledger: Ledger, unit: Unit) -> Content:
    rows = [
        (
            (each.name, " · ".join(filter(None, (each.scope, each.source)))),
            f"{each.count:,.0f}",
            unit.bare(each.seconds),
            f"{each.seconds / ledger.window.step_seconds:.1%}",
            _rate(each.flops_per_second),
        )
        for each in ledger.kernels
    ]
    columns = ["<kernel, and where it comes from", ">~a step", f">{unit.name}", ">share", ">~TFLOP/s"]
    return _table(columns, rows, shown=SHOWN)


def _rate(flops_per_second: float | None) -> str:
    rate = (flops_per_second or 0.0) / 1e12
    return "–" if flops_per_second is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _collectives(ledger: Ledger, unit: Unit) -> Content:
    rows = [
        (
            (each.kind, each.name),
            "–" if each.bytes is None else f"{each.bytes / 1e6:,.1f}",
            f"{each.count:,.0f}",
            *map(unit.bare, (each.seconds, each.exposed_seconds, each.wait_seconds)),
            each.last or "–",
        )
        for each in sorted(ledger.collectives, key=lambda each: -each.exposed_seconds)
    ]
    names = ["<collective", ">MB", ">~a step", f">~{unit.name}", ">exposed", ">waiting", "~last to come"]
    return _table(names, rows, shown=SHOWN)


def _lint(ledger: Ledger, unit: Unit) -> Content:
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
    columns = ["<found", "what it is", "~advice", ">~MB", f">{unit.name}"]
    return _table(columns, [cells for _, cells in rows], notes=" ".join(unadvised(ledger, unit)))
