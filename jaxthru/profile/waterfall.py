"""The step as parts that add up, from what the peak allows to what was observed; and the figures above them.

`summary`, `report` and `compare` speak of the same parts by the same names.
"""

import dataclasses

from jaxthru.profile.ledger import LINES, Ledger
from jaxthru.runtime.hardware import data_sheet_flops

TITLES = {
    "ideal": (
        "Needed matmuls at peak",
        "what the model's matrix products take at the reference clock; in float8 its peak is twice bf16's",
    ),
    "recomputation": ("Recomputation, padding", "matrix products computed beyond those the model needs"),
    "frequency": (
        "Clock below reference",
        "the matrix products' share of a clock held down, mostly by power",
    ),
    "inefficiency": ("Matmul inefficiency", "what matrix products take beyond FLOPs and clock"),
    "matmul": ("Matrix products", "kernels that multiply matrices"),
    "attention": ("Attention", "attention kernels, forward and backward"),
    "collective_matmul": ("Collective matmul", "kernels that multiply and communicate at once"),
    "other_kernels": ("Other kernels", "norms, activations, the loss, the optimizer, copies on the device"),
    "unclassified": ("Unclassified", "kernels that the profiler does not know"),
    "exposed_communication": ("Exposed communication", "collectives while nothing is computed"),
    "exposed_host_copies": ("Exposed host copies", "copies to and from the host while nothing else runs"),
    "data_wait": ("Data wait", "the device idle while the loop waits for its batch"),
    "host_gap": ("Host gap", "the device idle because the host dispatched too late"),
    "dependency": ("Dependency", "the device idle between kernels for another reason"),
}
"""Part -> its title, and what it is in a few words."""

MATMUL_PARTS = ("ideal", "recomputation", "frequency", "inefficiency")
LEAST_NOISE = 0.002
"""A share of the step below which no cause is named, however quiet the other steps were: the parts of one
window are no more certain than that."""

USUAL = 0.02
"""How far the profiled steps may be from others, however alike those are, before it is said."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """tokens_per_second: of all devices, by unprofiled steps where there are any. mfu: needed FLOPs over the
    data sheet's dense bf16 ones, in float8 too. sustained: the same at the clock that the devices ran at."""

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    sustained: float | None


def parts(ledger: Ledger) -> dict[str, float]:
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


def floor(ledger: Ledger) -> float:
    """Returns the seconds of a step below which no cause is named."""
    return max(ledger.window.noise, LEAST_NOISE) * ledger.window.step_seconds


def figures(ledger: Ledger) -> Figures:
    """Returns the figures of the headline."""
    run, matmul = ledger.run, ledger.matmul
    step = ledger.window.loop_seconds or ledger.window.step_seconds
    peak = matmul.peak_flops or data_sheet_flops(run.device_kind)
    mfu = None
    if peak and ledger.model:
        span = run.attention_span_per_token * run.tokens_per_step
        mfu = ledger.model.flops(run.tokens_per_step, span) / step / (peak * run.devices)
    slower = None
    if ledger.clock.mean_mhz and matmul.reference_mhz:
        slower = ledger.clock.mean_mhz / matmul.reference_mhz
    sustained = mfu / slower if mfu is not None and slower else None
    return Figures(step, run.tokens_per_step / step, mfu, sustained)


def doubts(ledger: Ledger) -> str:
    """Returns in a sentence why the profiled steps may not be what a step usually is; "" if they are."""
    window = ledger.window
    if window.closure is None:
        return "Too few steps ran without the profiler to say whether those profiled are like them."
    if abs(window.closure) <= max(window.noise, USUAL):
        return ""
    more = "more" if window.closure > 0 else "less"
    return (
        f"The steps profiled took {abs(window.closure):.0%} {more} time than the median of the others: "
        "this tells of them, and not of what a step usually takes."
    )
