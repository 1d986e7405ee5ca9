"""Times the training step of a configuration on packed rows of real documents and prints one JSON line.

    python scripts/bench/step.py --config configs/llama3_8b_8layer.py [--set a.b=v ...] [--output FILE]

At least 20 s of warm-up under load and 40 s timed; the median step counts. Clipping, loss mask and the check
for finite values are part of the step. The SM clock and the power are means over the timed steps.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax

from jaxthru import config as configuration
from jaxthru.data.loader import open_data
from jaxthru.data.state import DataState
from jaxthru.models import flops
from jaxthru.runtime import hardware, xla
from jaxthru.train import build
from jaxthru.training.run_directory import environment


class Clocks:
    """Samples the first GPU's SM clock (MHz) and power (W) while the block runs; None without a GPU."""

    def __enter__(self):
        query = ["nvidia-smi", "--id=0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        self.process = None
        if shutil.which("nvidia-smi"):
            self.process = subprocess.Popen([*query, "-lms", "200"], stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        self.mhz = self.watts = None
        if self.process is None:
            return
        self.process.terminate()
        lines = [line.split(",") for line in self.process.communicate()[0].splitlines()]
        samples = [
            (float(clock), float(power)) for clock, power in (line for line in lines if len(line) == 2)
        ]
        if samples:
            self.mhz, self.watts = (
                round(statistics.fmean(values), 1) for values in zip(*samples, strict=True)
            )


def timed(built, warmup_seconds: float, timed_seconds: float) -> dict:
    """Returns what the steps took and did; the loop dispatches a step before it waits for the one before."""
    data_state = DataState(0, ((0, built.data.weights),), built.data.keys)
    batches, state, previous = built.batches(data_state), built.first_state(), None

    def run_for(seconds: float) -> list[tuple[float, dict]]:
        nonlocal state, previous
        done, began, clock = [], time.perf_counter(), time.perf_counter()
        while time.perf_counter() - began < seconds or len(done) < 3:
            state, metrics = built.compiled(state, next(batches))
            if previous is not None:
                values = jax.device_get(previous)
                now = time.perf_counter()
                done.append((now - clock, values))
                clock = now
            previous = metrics
        return done

    run_for(warmup_seconds)
    with Clocks() as clocks:
        steps = run_for(timed_seconds)
    shape = built.config.model
    seconds = statistics.median(took for took, _ in steps)
    tokens = statistics.fmean(int(values["tokens"]) for _, values in steps)
    span = statistics.fmean(float(values["attention_span"]) for _, values in steps)
    rate = flops.train_flops(shape, tokens, span) / seconds
    causal = flops.train_flops(shape, tokens, tokens * built.config.data.sequence) / seconds
    peak = hardware.peak_flops(list(built.layout.mesh.devices.flat))
    return {
        "tokens_per_second": round(tokens / seconds, 1),
        "model_tflops": float(f"{rate / 1e12:.4g}"),
        "mfu": round(rate / peak, 4) if peak else None,
        "mfu_if_full_causal": round(causal / peak, 4) if peak else None,
        "step_seconds": round(seconds, 5),
        "step_seconds_quartiles": [round(q, 5) for q in statistics.quantiles([t for t, _ in steps])],
        "steps_timed": len(steps),
        "tokens_per_step": tokens,
        "attention_span_per_token": round(span / tokens, 1),
        "loss": [float(steps[0][1]["loss"]), float(steps[-1][1]["loss"])],
        "skipped_updates": int(steps[-1][1]["skipped"]),
        "peak_hbm_bytes": hardware.peak_bytes(),
        "sm_clock_mhz": clocks.mhz,
        "power_watts": clocks.watts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    parser.add_argument("--warmup-seconds", type=float, default=20.0)
    parser.add_argument("--timed-seconds", type=float, default=40.0)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    config = configuration.load(arguments.config, [*arguments.overrides, "train.steps=1000000"])
    xla.configure()
    jax.config.update("jax_enable_compilation_cache", False)  # compile_seconds is that of a first start
    built = build(config, open_data(config.data))
    where = environment()
    line = {
        "benchmark": "step",
        "config": Path(arguments.config).stem,
        "set": arguments.overrides,
        **timed(built, arguments.warmup_seconds, arguments.timed_seconds),
        "compile_seconds": round(built.compile_seconds, 2),
        "device": where["devices"],
        "versions": where["versions"] | {"python": where["python"], "backend": where["backend"]},
        "commit": where["commit"],
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(line), flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(line, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
