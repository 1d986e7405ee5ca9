"""The breakdown of a step: parts that add up, from the roofline to what was observed; and the figures above.

`summary`, `report` and `compare` speak of the same parts by the same names.
"""

import dataclasses

from jaxthru.profile.account.ledger import LINES, Ledger
from jaxthru.runtime.hardware import data_sheet_flops

MATMUL_PARTS = ("ideal", "recomputation", "frequency", "inefficiency")
LEAST_NOISE = 0.002
"""A share of the step below which no cause is named, however quiet the other steps were: the parts of one
window are no more certain than that."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of the profiled steps, as all else in a report. tokens_per_second: of all devices. flops_per_second:
    needed FLOPs, of one device. mfu: those over the data sheet's dense bf16 ones, in float8 too.
    mfu_at_clock: the same at the clock that the devices ran at."""

    tokens_per_second: float
    flops_per_second: float | None
    mfu: float | None
    mfu_at_clock: float | None


def step_parts(ledger: Ledger) -> dict[str, float]:
    """Returns the seconds of each part; they add up to the profiled step. The line "matmul" is taken apart
    where the devices' peak is known, and is one part where it is not."""
    found: dict[str, float] = {}
    for line in LINES:
        split = {name: getattr(ledger.matmul, f"{name}_seconds") for name in MATMUL_PARTS}
        if line == "matmul" and split["ideal"] is not None:
            found |= {name: seconds for name, seconds in split.items() if seconds is not None}
        else:
            found[line] = ledger.seconds(line)
    return found


def noise_threshold(ledger: Ledger) -> float:
    """Returns the seconds of a step below which no cause is named."""
    return max(ledger.window.noise, LEAST_NOISE) * ledger.window.step_seconds


def figures(ledger: Ledger) -> Figures:
    """Returns the figures of the headline; None what the devices' data sheet or clock would have to tell."""
    run, matmul, step = ledger.run, ledger.matmul, ledger.window.step_seconds
    peak = matmul.peak_flops or data_sheet_flops(run.device_kind)
    rate = mfu = at_clock = None
    if peak and ledger.model and run.tokens_per_step:  # no tokens: they were not recorded
        span = run.attention_span_per_token * run.tokens_per_step
        rate = ledger.model.flops(run.tokens_per_step, span) / step / run.devices
        mfu = rate / peak
    if mfu is not None and ledger.clock.mean_mhz and matmul.reference_mhz:
        at_clock = mfu * matmul.reference_mhz / ledger.clock.mean_mhz
    return Figures(run.tokens_per_step / step, rate, mfu, at_clock)
