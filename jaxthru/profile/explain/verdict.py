"""The verdict in sentences: how good the step is, and the caveats of its numbers."""

import dataclasses
import re

from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain.breakdown import figures, noise_threshold, step_parts
from jaxthru.profile.explain.settings import TITLES
from jaxthru.profile.explain.unit import Unit

USUAL = 0.02
"""How far the profiled steps may be from others, however alike those are, and still be called typical."""

NOISY = 0.05
"""Of the step; a run with more noise than this hides causes that an idle machine would show."""


@dataclasses.dataclass(frozen=True)
class Sustained:
    """flops: FLOP/s of one device in a loop of large matmuls, at its power limit. good, fair: shares
    of it that a whole step has to reach to be called so."""

    name: str
    flops: float
    good: float
    fair: float

    def word(self, share: float) -> str:
        share = round(share, 2)  # as it is written
        return "good" if share >= self.good else "fair" if share >= self.fair else "low"


H200 = re.compile(r"\bh200\b(?! nvl)", re.I)
BF16 = Sustained("bf16", 690e12, 0.75, 0.60)
FLOAT8 = Sustained("float8", 1293e12, 0.50, 0.40)
"""Measured on an H200 (docs/results.md, One GPU): a loop of 8192³ matmuls, and the share of it that steps
reach, the tuned ones 75 to 84 % in bf16 and 51 to 56 % in float8, a framework's defaults 62 % in bf16. No
default was measured in float8: there "fair" begins as far below "good" as in bf16."""

NARROW = 1.2
"""How much faster than bf16's the peak of a step's matmuls is: above this they count as float8."""


def sustained(ledger: Ledger) -> Sustained | None:
    """Returns what the step is held against, None where it was not measured on such a device."""
    if not H200.search(ledger.run.device_kind):
        return None
    matmul, alone = ledger.matmul, not ledger.seconds("collective_matmul")  # those are of bf16
    if not (alone and matmul.ideal_seconds and matmul.peak_flops):
        return BF16
    at_peak = matmul.model_flops / ledger.run.devices / matmul.peak_flops
    return FLOAT8 if at_peak / matmul.ideal_seconds > NARROW else BF16


def verdict(ledger: Ledger) -> str:
    """Returns in a sentence how good the step is; where nothing tells, that it is not judged."""
    run, found, against = ledger.run, figures(ledger), sustained(ledger)
    if run.platform == "cpu":
        return "A run on a CPU shows that everything works; its speed is not judged."
    if found.flops_per_second is None:
        why = f"the peak of {run.device_kind}" if run.tokens_per_step else "how many tokens a step has"
        return f"Not judged: {why} is not known."
    if against is None:
        return (
            f"{found.mfu:.0%} of the data sheet's peak. Not judged: what {run.device_kind} sustains was not "
            "measured."
        )
    share = found.flops_per_second / against.flops
    device = "this GPU sustains" if run.devices == 1 else "these GPUs sustain"
    return f"{share:.0%} of what {device} in large {against.name} matmuls: {against.word(share)}."


def shares(ledger: Ledger, unit: Unit) -> str:
    """Returns in words what the useful part of the step is, and the largest of the rest."""
    found, step = step_parts(ledger), ledger.window.step_seconds
    useful = "ideal" if "ideal" in found else "matmul"
    lost = {name: seconds for name, seconds in found.items() if name != useful}
    worst = max(lost, key=lost.__getitem__)
    start = f"Of a step of {unit(step)}, the {TITLES[useful][0].lower()} take {found[useful] / step:.0%}."
    if lost[worst] < noise_threshold(ledger):
        return f"{start} No other part rises above the noise."
    name = TITLES[worst][0]
    rest = f"{unit(lost[worst])}, {lost[worst] / step:.1%}"
    return f"{start} Largest of the rest: {name[0].lower()}{name[1:]} ({rest})."


def relation(ledger: Ledger, unit: Unit) -> str:
    """Returns in a sentence how the profiled steps, of which all numbers are, relate to the run's others."""
    window = ledger.window
    if window.closure is None or window.loop_seconds is None:
        return "Too few steps ran without the profiler to say whether those profiled are like them."
    size, others = abs(window.closure), f"the median of the run's others ({unit(window.loop_seconds)})"
    took = f"took {size:.{0 if size >= 0.1 else 1}%} {'more' if window.closure > 0 else 'less'} time than"
    if size < 5e-4:
        took = "took as long as"
    if size <= max(window.noise, USUAL):
        return f"The profiled steps {took} {others}: they are typical."
    return f"The profiled steps {took} {others}: they are not typical, and all numbers here are of them."


def nothing_to_win(ledger: Ledger, unit: Unit) -> str:
    """Returns what is said where no advice has a gain above the noise."""
    least, window = noise_threshold(ledger), ledger.window
    what = "the noise of this run, " if window.loop_seconds else ""  # else it is not known
    size = f"{unit(least)} ({least / window.step_seconds:.1%} of the step)"
    said = f"No setting is expected to win more than {what}{size}."
    if window.noise > NOISY:
        said += " Its steps differ by that much: profile on an idle machine to see smaller gains."
    return said
