"""What generating text costs: calls for one token, calls for many, and the step of the loop between them.

It imports neither JAX nor PyTorch, so that jaxthru and its peers are timed by one clock.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import harness
import timed_loop

option = harness.option
OPTIONS = (
    *harness.shape_options(),
    option("--batch", type=int, default=1, help="rows"),
    option("--prompt", type=int, default=128, help="tokens of a prompt"),
    option("--generate", type=int, default=256, help="tokens generated in a call"),
)
"""Of what generates text."""


def timed(
    generate: Callable[[int], Any], finish: Callable[[Any], Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Returns what a token takes: that of whole calls less that of calls for one token, which are a prefill.

    generate: makes so many tokens; `finish` waits for them. tokens_per_second is of the means, all tokens
    over all seconds; the median step stands beside it.
    """
    took = {}
    for count, share in ((1, 0.1), (arguments.generate, 1.0)):
        seconds = share * arguments.warmup_seconds, share * arguments.timed_seconds
        took[count] = timed_loop.timed(lambda count=count: generate(count), finish, *seconds)
    prefill, whole = took.values()

    def step(average: Callable) -> float:
        return (average(whole.seconds) - average(prefill.seconds)) / (arguments.generate - 1)

    mean = step(statistics.fmean)
    return {
        "rows": arguments.batch,
        "prompt": arguments.prompt,
        "tokens": arguments.generate,
        "prefill_seconds": round(statistics.fmean(prefill.seconds), 5),
        "tokens_per_second": round(arguments.batch / mean, 1) if mean > 0 else None,  # too few calls
        "step_seconds": round(mean, 6),
        "step_seconds_median": round(step(statistics.median), 6),
        "calls_timed": len(whole.seconds),
        "seconds": [round(each, 4) for each in whole.seconds],
        "sm_clock_mhz": whole.mhz,
        "power_watts": whole.watts,
    }
