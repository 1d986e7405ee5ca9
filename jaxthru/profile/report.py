"""report.html: one page, in one file, that says where the step went; made for readers new to all of this."""

from html import escape
from pathlib import Path
from string import Template

from jaxthru.profile.ledger import Ledger
from jaxthru.profile.sections import SECTIONS, Unit
from jaxthru.profile.waterfall import TITLES, doubts, figures, floor, parts

TEMPLATE = Path(__file__).with_name("report.template.html")


def report(ledger: Ledger) -> str:
    """Returns the page."""
    unit = Unit.of(ledger.window.step_seconds)
    made = ((title, said, section(ledger, unit)) for title, said, section in SECTIONS)
    sections = (
        f'<section><h2>{title}</h2><p class="muted small">{said}</p>{body}</section>'
        for title, said, body in made
        if body  # what was not measured has no section
    )
    return Template(TEMPLATE.read_text()).substitute(
        title=escape(f"{ledger.run.config}: where the step went"),
        heading=escape(f"Where the step of {ledger.run.config} went"),
        subtitle=escape(_subtitle(ledger)),
        verdict=f"{_verdict(ledger, unit)} {escape(doubts(ledger))}".strip(),
        figures="".join(_figures(ledger, unit)),
        sections="\n".join(sections),
        footer=escape(_footer(ledger, unit)),
    )


def _subtitle(ledger: Ledger) -> str:
    run, window = ledger.run, ledger.window
    last = window.first_step + window.steps - 1
    steps = f"step {window.first_step}" if window.steps == 1 else f"steps {window.first_step} to {last}"
    hosts = f", {run.processes} processes" if run.processes > 1 else ""
    return f"{run.devices} × {run.device_kind}{hosts}; {steps}; {run.tokens_per_step:,.0f} tokens a step"


def _verdict(ledger: Ledger, unit: Unit) -> str:
    found, step = parts(ledger), ledger.window.step_seconds
    useful = "ideal" if "ideal" in found else "matmul"
    lost = {name: seconds for name, seconds in found.items() if name != useful}
    worst = max(lost, key=lost.__getitem__)
    start = f"Of a step of {unit(step)}, the {TITLES[useful][0].lower()} take {found[useful] / step:.0%}."
    if lost[worst] < floor(ledger):
        return f"{start} Nothing else rises above the noise."
    name = TITLES[worst][0]
    rest = f"{unit(lost[worst])}, {lost[worst] / step:.1%}"
    return escape(f"{start} Largest of the rest: {name[0].lower()}{name[1:]} ({rest}).")


def _figures(ledger: Ledger, unit: Unit) -> list[str]:
    found, window = figures(ledger), ledger.window
    percent = lambda value: "–" if value is None else f"{value:.1%}"  # noqa: E731
    clock = ledger.clock.mean_mhz
    rows = [
        ("tokens/s", f"{found.tokens_per_second:,.0f}", "of all devices"),
        ("MFU", percent(found.mfu), "of the data sheet's bf16 peak" if found.mfu else "peak not known"),
        (
            "share of the sustained peak",
            percent(found.sustained),
            f"of the bf16 peak at {clock:,.0f} MHz" if found.sustained else "clock not known",
        ),
        (
            "a step",
            unit(found.step_seconds),
            "profile not checked" if window.closure is None else f"{window.closure:+.1%} while profiled",
        ),
    ]
    return [
        f'<div class="figure"><span class="muted small">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="muted small">{escape(said)}</span></div>'
        for name, value, said in rows
    ]


def _footer(ledger: Ledger, unit: Unit) -> str:
    window, versions = ledger.window, ledger.run.versions
    noise = f"{window.noise:.1%} between unprofiled steps" if window.loop_seconds else "not known"
    said = [f"Noise: {noise}; no cause below {unit(floor(ledger))} is named."]
    if window.attribution_seconds:
        said.append(
            f"Kernels were named in a pass without CUDA graphs, {unit(window.attribution_seconds)} a step."
        )
    said.append(f"Clock: {ledger.clock.source}.")
    said.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return " ".join(said)
