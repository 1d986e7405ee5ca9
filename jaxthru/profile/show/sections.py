"""The sections of the report, each made of a ledger; one for which nothing was measured is empty."""

import re
from collections.abc import Callable
from html import escape

from jaxthru.profile.account.ledger import LINES, Device, Ledger, Lint
from jaxthru.profile.explain.breakdown import TITLES, parts
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import nothing_to_win, unadvised
from jaxthru.profile.show import charts

DEVICES = 4  # timelines shown
SHOWN = 12  # kernels and collectives, before the rest is folded away
SCOPES = 16
CONFIG_KEY = re.compile(r"[a-z]+\.\w+")


def _from_peak(ledger: Ledger, unit: Unit) -> str:
    return _waterfall(ledger, unit) if "ideal" in parts(ledger) else ""


def _without_peak(ledger: Ledger, unit: Unit) -> str:
    return "" if "ideal" in parts(ledger) else _waterfall(ledger, unit)


def _waterfall(ledger: Ledger, unit: Unit) -> str:
    step = ledger.window.step_seconds
    found = parts(ledger)
    shown = {name: seconds for name, seconds in found.items() if abs(seconds) >= 5e-5 * step}
    numbers = {name: (unit(seconds), f"{seconds / step:.1%}") for name, seconds in shown.items()}
    numbers["total"] = unit(step), "100.0%"
    nothing = [TITLES[name][0] for name in found if name not in shown]
    notes = [f"No time went to: {', '.join(nothing).lower()}."] if nothing else []
    if "ideal" not in found:
        notes.append("No peak is known for these devices, so matrix products are not taken apart.")
    matmul = ledger.matmul
    if matmul.headroom_seconds and matmul.maximum_mhz:
        notes.append(
            f"At the maximum clock, {matmul.maximum_mhz:,.0f} MHz, the needed matmuls would take "
            f"{unit(matmul.headroom_seconds)} less."
        )
    note = f'<p class="muted small" style="margin:12px 0 0">{escape(" ".join(notes))}</p>' if notes else ""
    return charts.waterfall(shown, step, numbers, "Observed step") + note


def _advice(ledger: Ledger, unit: Unit) -> str:
    items, known = [], False
    for each in ledger.advice:
        known |= each.gain_seconds is not None
        if CONFIG_KEY.fullmatch(each.key) and " " not in each.value:
            setting = f"<code>--set {escape(each.key)}={escape(each.value)}</code>"
        else:
            setting = f"<code>{escape(each.key)}</code>: <code>{escape(each.value)}</code>"
        gain = "memory only, or not known"
        if each.gain_seconds is not None:
            gain = f"{unit(each.gain_seconds)} ({each.gain_share:.1%})"
        items.append(
            f'<li><div>{setting}</div><div class="number">{escape(gain)}</div><p>{_prose(each.text)}</p></li>'
        )
    nothing = "" if known else f"<p>{escape(nothing_to_win(ledger, unit))}</p>"
    return nothing + (f'<ol class="advice">{"".join(items)}</ol>' if items else "")


def _prose(text: str) -> str:
    """Returns a sentence as HTML: what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _timeline(ledger: Ledger, unit: Unit) -> str:
    devices = [device for device in ledger.devices if device.strip][:DEVICES]
    if not devices:
        return ""
    strips = []
    for device in devices:
        end = max(span[1] for span in device.strip)
        said = f"{_shown(device, end)}, {unit(end)}"
        strips.append(charts.strip(device, said, [unit(end * i / 4) for i in range(5)]))
    lines = {span[2] for device in devices for span in device.strip}
    more = len(ledger.devices) - len(devices)
    mean = unit(ledger.window.step_seconds)
    note = f"A band is one step and ends where that step does; the mean of the profiled steps is {mean}."
    note += f" And {more} devices more." if more else ""
    note = f'<p class="muted small" style="margin:8px 0 0">{escape(note)}</p>'
    return "".join(strips) + charts.legend(line for line in LINES if line in lines) + note


def _shown(device: Device, seconds: float) -> str:
    """Returns which step of a device's has this length, "" where it has none."""
    found = min(device.steps, key=lambda step: abs(step.seconds - seconds), default=None)
    return f", step {found.step}" if found else ""


def _clock(ledger: Ledger, unit: Unit) -> str:
    clock, plots = ledger.clock, []
    if clock.samples:
        reference = ledger.matmul.reference_mhz
        mark = (reference, f"reference, {reference:,.0f} MHz") if reference else None
        plots.append(_over_time("Clock, MHz", clock.samples, "MHz", unit, mark))
    if clock.power:
        plots.append(_over_time("Power, W", clock.power, "W", unit, None))
    if not plots:
        return ""
    reasons = ", ".join(
        f"{reason} for {share:.0%} of the time" for reason, share in clock.cap_reasons.items()
    )
    note = (
        f'<p class="muted small" style="margin:8px 0 0">Held down by: {escape(reasons)}.</p>'
        if reasons
        else ""
    )
    return f'<div class="pair">{"".join(plots)}</div>{note}'


def _over_time(title: str, points, name: str, unit: Unit, mark) -> str:
    ticks = [unit(points[0][0]), unit(points[-1][0])]
    return charts.series(title, points, unit=name, x="after # s", ticks=ticks, mark=mark)


def _memory(ledger: Ledger, unit: Unit) -> str:
    memory = ledger.memory
    if memory is None:
        return ""
    most = max(memory.peak_bytes or 0, *memory.categories.values(), 1)
    name, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    size = lambda count: f"{count / scale:,.2f}\N{NO-BREAK SPACE}{name}"  # noqa: E731
    total = sum(memory.categories.values())
    rows = [
        (escape(category), size(count), f"{count / total:.1%}")
        for category, count in sorted(memory.categories.items(), key=lambda item: -item[1])
        if count
    ]
    program = total - sum(memory.categories.get(rest, 0) for rest in ("fragmentation", "beside"))
    rows.append(("program's peak", size(program), f"{program / total:.1%}"))
    if memory.peak_bytes is not None:
        rows.append(("the runtime's own peak", size(memory.peak_bytes), ""))
    if memory.host_pinned_bytes:
        rows.append(("pinned on the host", size(memory.host_pinned_bytes), ""))
    held = f"<div>{charts.table(['at the peak', '>size', '>share'], rows)}</div>"
    curve = ""
    if len(memory.curve) > 1:
        points = [(at, count / scale) for at, count in memory.curve]
        ticks = ["start of the step", "end"]
        curve = charts.series(
            f"Over the step, {name}", points, unit=name, x="at # of the step", ticks=ticks, zero=True
        )
    body = f'<div class="pair">{curve}{held}</div>'
    if memory.buffers:
        buffers = [
            (_named(each.scope or "–", each.source), escape(each.category), size(each.bytes))
            for each in memory.buffers
        ]
        listed = charts.table(["<buffer", "~category", ">size"], buffers)
        body += f"<details><summary>The largest buffers</summary>{listed}</details>"
    return body


def _named(name: str, note: str | None) -> str:
    """Returns a name in a line, and in another where it comes from: of that the end says the most."""
    return charts.clipped(name) + (charts.clipped(note, "small", end=True) if note else "")


def _scopes(ledger: Ledger, unit: Unit) -> str:
    step = ledger.window.step_seconds
    found = sorted(ledger.scopes, key=lambda scope: -scope.seconds)
    found = [scope for scope in found if scope.seconds >= 5e-5 * step][:SCOPES]
    rows = [
        (
            escape(s.layer),
            escape(s.phase),
            escape(TITLES[s.line][0]),
            unit.bare(s.seconds),
            f"{s.seconds / step:.1%}",
        )
        for s in found
    ]
    return charts.table(["layer", "phase", "~line", f">{unit.name}", ">share"], rows) if rows else ""


def _kernels(ledger: Ledger, unit: Unit) -> str:
    step = ledger.window.step_seconds
    rows = [
        (
            _named(each.name, " · ".join(filter(None, (each.scope, each.source)))),
            f"{each.count:,.0f}",
            unit.bare(each.seconds),
            f"{each.seconds / step:.1%}",
            _rate(each.flops_per_second),
        )
        for each in ledger.kernels
    ]
    columns = ["<kernel, and where it comes from", ">~a step", f">{unit.name}", ">share", ">~TFLOP/s"]
    return _folded(columns, rows)


def _folded(columns: list[str], rows: list[tuple[str, ...]]) -> str:
    """Returns a table whose end is folded away."""
    if not rows:
        return ""
    body = charts.table(columns, rows[:SHOWN])
    if len(rows) > SHOWN:
        more = charts.table(columns, rows[SHOWN:])
        body += f"<details><summary>{len(rows) - SHOWN} more</summary>{more}</details>"
    return body


def _rate(flops_per_second: float | None) -> str:
    if flops_per_second is None:
        return "–"
    rate = flops_per_second / 1e12
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _collectives(ledger: Ledger, unit: Unit) -> str:
    rows = [
        (
            _named(each.kind, each.name),
            "–" if each.bytes is None else f"{each.bytes / 1e6:,.1f}",
            f"{each.count:,.0f}",
            unit.bare(each.seconds),
            unit.bare(each.exposed_seconds),
            unit.bare(each.wait_seconds),
            escape(each.last or "–"),
        )
        for each in sorted(ledger.collectives, key=lambda each: -each.exposed_seconds)
    ]
    names = ["<collective", ">MB", ">~a step", f">~{unit.name}", ">exposed", ">waiting", "~last to come"]
    return _folded(names, rows)


def _lint(ledger: Ledger, unit: Unit) -> str:
    alike: dict[tuple[str, str, str, bool], list[Lint]] = {}
    for each in ledger.lint:
        alike.setdefault((each.rule, each.scope, each.text, each.advised), []).append(each)
    rows = []
    for (rule, scope, text, advised), found in alike.items():
        seconds = [each.seconds for each in found if each.seconds is not None]
        held = [each.bytes for each in found if each.bytes is not None]
        cells = (
            _named(rule.replace("_", " "), scope),
            escape(text) + (f" ({len(found)} such)" if len(found) > 1 else ""),
            f"<code>{escape(found[0].remedy)}</code>, above" if advised else "none",
            f"{sum(held) / 1e6:,.0f}" if held else "–",
            unit.bare(sum(seconds)) if seconds else "–",
        )
        rows.append((sum(seconds), cells))
    rows.sort(key=lambda row: -row[0])
    columns = ["<found", "what it is", "~advice", ">~MB", f">{unit.name}"]
    notes = " ".join(map(_prose, unadvised(ledger, unit)))
    note = f'<p class="muted small" style="margin:8px 0 0">{notes}</p>' if notes else ""
    return charts.table(columns, (cells for _, cells in rows)) + note if rows else ""


Section = Callable[[Ledger, Unit], str]
BARS = (
    "Each bar begins where the one above ends: together they are the mean profiled step. Every moment counts "
    "once, for the first of these that runs."
)
SECTIONS: tuple[tuple[str, str, Section], ...] = (
    ("From the peak to the observed step", BARS, _from_peak),
    ("Where the observed step went", BARS, _without_peak),
    (
        "What to change next",
        "What each is expected to win back of a step, estimated as its text says. Gains from the same part "
        "do not add up. A gain below the noise of the run is not listed.",
        _advice,
    ),
    ("One step, moment by moment", "What each device was doing.", _timeline),
    (
        "Clock and power",
        "A card at its power limit lowers its clock, and all that it computes slows down.",
        _clock,
    ),
    ("Memory", "What fills the device when the program needs the most.", _memory),
    ("By layer and phase", "Recomputation is what the backward pass computes again to save memory.", _scopes),
    ("Top kernels", "By their own durations, also where they run beside others.", _kernels),
    (
        "Collectives",
        "Exposed: nothing was computed meanwhile. Waiting: for the last device to come. Means over devices.",
        _collectives,
    ),
    (
        "Found in the program",
        "What its text shows that one would not expect. Times are the kernels' own, also where they run "
        "beside others: their share of the step may be less.",
        _lint,
    ),
)
