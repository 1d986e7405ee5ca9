"""Where the rate of sustained matrix products goes, by clock and the rest, and which levers move the clock.

    python scripts/bench/measure/levers.py [--size N] [--only NAME ...]

Each lever is one way to run the same products for a few seconds. Prints one JSON line: for each the rate that
was observed by the host's clock, and the factors that a trace of the same seconds says it is made of, by the
cycles that CUPTI counts. NVML's clock stands beside them: under a power cap it is higher, for it does not see
the cycles that are left out. The suite `profiler` runs it, once more without memory that is kept.
"""

import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
import timed_loop
from gemm import operands, product
from measure.profiler import capped, gemm_clock, judged

from jaxthru.profile.account import frequency
from jaxthru.profile.collect import clocks
from jaxthru.profile.collect.trace import options
from jaxthru.profile.read import xplane
from jaxthru.runtime import hardware, nvml, xla

REPEATS = 40  # products between two looks at the clock
NARROW = jnp.float8_e4m3fn


@functools.partial(jax.jit, donate_argnums=2, keep_unused=True)
def product_into(a, b, out):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def pass_over(x):
    """Work for the memory alone."""
    return x * jnp.asarray(1.0001, x.dtype)


def many(pair: Sequence[jax.Array]) -> jax.Array:
    for _ in range(REPEATS):
        last = product(*pair)
    return last


class Levers:
    """Each method runs `REPEATS` products and returns the last result; its docstring says what it varies."""

    def __init__(self, size: int):
        self.random = operands(jnp.bfloat16, size)
        self.narrow = [operand.astype(NARROW) for operand in self.random]
        self.ones = [jnp.sign(operand) for operand in self.random]
        self.none = [jnp.zeros_like(operand) for operand in self.random]
        self.out = jnp.zeros_like(self.random[0])
        self.long = jnp.ones((4 * size, size), jnp.bfloat16)

    def bf16(self):
        """bfloat16, random operands: what the others are compared with"""
        return many(self.random)

    def fp8(self):
        """float8 operands, as with precision.matmul=fp8"""
        return many(self.narrow)

    def signs(self):
        """operands of 1 and -1: structured data, of which few bits change"""
        return many(self.ones)

    def zeros(self):
        """operands of zero: what data can do at the most"""
        return many(self.none)

    def same_buffer(self):
        """each result in the memory of the last: memory that does not move"""
        for _ in range(REPEATS):
            self.out = product_into(*self.random, self.out)
        return self.out[0, 0]  # the buffer is the next product's before it is waited for

    def bursts(self):
        """all products, then as many passes over memory"""
        many(self.random)
        for _ in range(REPEATS):
            self.long = pass_over(self.long)
        return self.long[0, 0]

    def steady(self):
        """the same work as bursts, products and passes in turn"""
        for _ in range(REPEATS):
            last = product(*self.random)
            self.long = pass_over(self.long)
        return last


LEVERS = ("bf16", "fp8", "signs", "zeros", "same_buffer", "bursts", "steady")


def measure(run: Callable, flops: float, seconds: tuple[float, float]) -> dict:
    """Returns one lever's rate by the host's clock, NVML's clock, and between which moments it was timed, ns
    since 1970. flops: of a call."""
    with clocks.sampled(nvml.names([0])) as samples:
        timing = timed_loop.timed(run, jax.block_until_ready, *seconds)
        ended = time.time_ns()
    taken = sum(timing.seconds)
    begun = ended - round(1e9 * taken)
    steady = [row for row in samples.devices.get("0", ()) if row[0] > begun]
    rate = len(timing.seconds) / taken
    found = {"tflops": flops * rate / 1e12, "calls": len(timing.seconds), "between": (begun, ended)}
    return found | capped(steady)


def factored(found: dict, gemm: dict, flops: float, speed: float, kind: str) -> dict:
    """Returns the rate as the peak times factors, and a call's seconds lost to the clock and to the rest.

    found: the rate as observed, and NVML's clock meanwhile. gemm: of the trace meanwhile. kind: the device's.
    """
    peak, (reference, _) = hardware.data_sheet_flops(kind), frequency.reference(kind)
    mhz = gemm["mhz"] or found["mhz"]
    if not (peak and reference and mhz and gemm["kernels"]):
        return {}
    call, ideal = gemm["seconds"] / gemm["kernels"] * REPEATS, flops / (peak * speed)
    factors = {
        "frequency": mhz / reference,
        "cycles": ideal * reference / (call * mhz),  # needed, over those counted
        "busy": gemm["seconds"] / gemm["span"],
    }
    predicted = peak * speed * math.prod(factors.values()) / 1e12
    return {
        "cupti_mhz": gemm["mhz"],
        "factors": factors,
        "predicted_tflops": predicted,
        "product": judged("factors", predicted / found["tflops"] - 1),
        "seconds_of_a_call": {
            "ideal": ideal,
            "frequency": call * (1 - mhz / reference),
            "rest": call * mhz / reference - ideal,
        },
    }


def measure_all(arguments) -> dict:
    xla.configure()
    levers, found, flops = Levers(arguments.size), {}, 2.0 * arguments.size**3 * REPEATS
    seconds = arguments.warmup_seconds, arguments.timed_seconds
    with tempfile.TemporaryDirectory() as folder:
        # One trace for all: those after one that samples the clock lack kernels, see `collect.trace`. CUPTI
        # collects as it goes: it is long, and copies nothing.
        jax.profiler.start_trace(folder, profiler_options=options(clock=True))
        for name in arguments.only:
            found[name] = {"what": getattr(levers, name).__doc__}
            try:
                found[name] |= measure(getattr(levers, name), flops, seconds)
            except Exception as error:  # one lever must not cost the others
                found[name] |= {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        jax.profiler.stop_trace()
        trace = xplane.read(Path(folder)) if jax.default_backend() == "gpu" else None
    for name, of in found.items():
        between = of.pop("between", None)
        if between and trace and trace.devices:
            gemm = gemm_clock(trace, (between[0] - trace.begun, between[1] - trace.begun))
            kind = jax.devices()[0].device_kind
            of |= factored(of, gemm, flops, 2.0 if name == "fp8" else 1.0, kind)
        print(name, of, file=sys.stderr, flush=True)
    return {"levers": found}


main = harness.program(
    __doc__,
    measure_all,
    harness.option("--size", type=int, default=8192),
    harness.option("--only", nargs="+", choices=LEVERS, default=LEVERS),
    config=False,
    seconds=(2.0, 3.0),
)


if __name__ == "__main__":
    sys.exit(main())
