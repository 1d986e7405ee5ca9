"""report.html: one page, in one file, that says where the step went; made for readers new to all of this."""

from html import escape
from pathlib import Path
from string import Template

from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain.breakdown import TITLES, figures, floor, parts
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import relation, shares, thresholds, verdict
from jaxthru.profile.show.sections import SECTIONS

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
        verdict=escape(verdict(ledger)),
        said=escape(f"{shares(ledger, unit)} {relation(ledger, unit)}"),
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


def _figures(ledger: Ledger, unit: Unit) -> list[str]:
    """Returns a tile for each figure that has a value."""
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
    return [
        f'<div class="figure"><span class="muted small">{escape(name)}</span><b>{escape(value)}</b>'
        f'<span class="muted small">{escape(said)}</span></div>'
        for name, value, said in rows
    ]


def _footer(ledger: Ledger, unit: Unit) -> str:
    window, versions = ledger.window, ledger.run.versions
    noise = f"{window.noise:.1%} between unprofiled steps" if window.loop_seconds else "not known"
    said = [thresholds(ledger), f"Noise: {noise}; no cause below {unit(floor(ledger))} is named."]
    if window.attribution_seconds:
        said.append(
            f"Kernels were named in a pass without CUDA graphs, {unit(window.attribution_seconds)} a step."
        )
    if ledger.clock.source != "none":
        said.append(f"Clock: {ledger.clock.source}.")
    said.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return " ".join(filter(None, said))
