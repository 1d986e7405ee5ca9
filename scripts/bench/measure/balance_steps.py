"""Balanced steps against the same steps as they come, on two or more devices: predicted, then timed.

    python scripts/bench/suite.py data --rows balanced_steps

Needs jax-triton on a GPU.

Rows of 32,768 tokens hold whole documents of heavy-tailed length (lognormal(6, 2), best fit), one row for
each device and micro-batch, eight micro-batches. The model is Llama 3 8B with an eighth of its layers and
of its vocabulary, so that attention has the share of the work that it has in the whole: 6 × 0.94 G for each
token and 6 × 4 × 4096 for each token² of a document make a row of one document 57 % dearer than one of
short documents, and 60 to 90 % dearer in time, for attention runs below the rate of matrix products. The
device that has the cheaper row waits.

1. Rows of 1, 2, 4, 16 and 64 documents of equal length, on all devices alike, are timed in the step and in
   one of two micro-batches. Least squares give `seconds = constant + Σ over micro-batches (linear × tokens
   + attention × Σ length²)`; `residual` is the worst relative error of a point. What a micro-batch takes
   whatever is in its row, such as the gathering of parameters, is part of `linear`.
2. A step is predicted to take `constant + Σ over micro-batches of the costliest device's row`. The same
   steps of one plan, each with the same rows, are timed in both orders, by turns, at least twice and until
   each has had its time. The balanced order is made with the coefficients just measured. Batches lie on the
   devices before the clock starts, and each step is dispatched before the one before it is waited for.

What is expected: as they come, the costlier row of a pair makes a step 10 to 14 % longer than the mean of
both devices, balanced 1.4 to 2 %; so 8 to 11 % to be gained. A GPU that waits draws less power and may then
run faster, which makes it less: the clock and the watts of both orders stand in the result. The bars: 80 %
of the predicted gain, and predicted times within 5 %. A row is 190 to 290 TFLOP, 0.3 to 0.5 s, so a step
about 3 s; in all three to four minutes on two H200s: 15 s for the text, 40 s to compile, 20 s of warm-up,
40 s of coefficients, 85 s timed.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import blocks
import comparison
import harness
import jax
import numpy as np
import timed_loop
import turns
from gpu_clocks import mean
from measure import balance_corpus, row_costs

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.build.defaults import replaced
from jaxthru.data.loading.dataset import open_data
from jaxthru.engine.step import Batch
from jaxthru.models import llama
from jaxthru.runtime import hardware, xla
from jaxthru.runtime.errors import require

FEW = 2
"""Micro-batches of the shorter step. One alone would be another program, which adds nothing up."""
ORDERS = ("as they come", "balanced")


def end_of(metrics: dict) -> float:
    """Returns when the step that gives these metrics ended."""
    jax.device_get(metrics)
    return time.perf_counter()


class Runner:
    """Runs steps one behind the other, on one state."""

    def __init__(self, built: Build):
        self.state = built.first_state()

    def times(self, work: Iterable[tuple[Build, Batch]]) -> list[float]:
        """Returns the seconds of each step, the next one dispatched before the last one is waited for.

        A thread of its own sees each step end: on a GPU the dispatch of a step of many kernels returns only
        when most of them have run, long after the step before it has ended.
        """
        began, ends = time.perf_counter(), []
        with concurrent.futures.ThreadPoolExecutor(1) as watching:
            for built, batch in work:
                self.state, metrics = built.compiled(self.state, batch)
                ends.append(watching.submit(end_of, metrics))
                if len(ends) > 1:
                    ends[-2].result()
        return np.diff([began, *(end.result() for end in ends)]).tolist()

    def warm_up(self, work: list[tuple[Build, Batch]], seconds: float) -> None:
        """Runs these steps over and over for some seconds, at least once."""
        until = time.perf_counter() + seconds
        again = itertools.takewhile(lambda _: time.perf_counter() < until, itertools.cycle(work))
        self.times(itertools.chain(work, again))


def summary(predicted: dict[str, np.ndarray], found: dict[str, list[turns.Turn]]) -> dict:
    """Returns each order's row, and what balancing gained of what it was predicted to.

    predicted: {order: seconds of each step}. found: each turn is a pass over the steps. A gain is how much
    longer the steps take as they come; one is claimed only above twice the largest difference between passes
    of one order.
    """
    rows = {}
    for order, one in found.items():
        passes = np.array([turn.seconds for turn in one])
        measured = passes.mean(axis=0)
        rows[order] = {
            "step_seconds": round(float(measured.mean()), 6),
            "step_seconds_median": round(float(np.median(passes)), 6),
            "predicted_step_seconds": round(float(predicted[order].mean()), 6),
            "error": round(float(predicted[order].mean() / measured.mean() - 1), 4),
            "worst_error_of_a_step": round(float(np.abs(predicted[order] / measured - 1).max()), 4),
            "passes": [round(float(seconds), 6) for seconds in passes.mean(axis=1)],
            "spread": round(float(np.ptp(passes.mean(axis=1)) / measured.mean()), 4),
            "sm_clock_mhz": mean(turn.mhz for turn in one),
            "power_watts": mean(turn.watts for turn in one),
        }
    came, balanced = (rows[order] for order in ORDERS)
    gain, forecast = (came[key] / balanced[key] - 1 for key in ("step_seconds", "predicted_step_seconds"))
    return {
        "orders": rows,
        "gain": round(gain, 4),
        "predicted_gain": round(forecast, 4),
        "claimed": gain > 2 * max(comparison.LEAST_SPREAD, *(row["spread"] for row in rows.values())),
        "gain_over_predicted": round(gain / forecast, 3) if forecast > 0 else None,
        "prediction_error": max(abs(row["error"]) for row in rows.values()),
    }


def resolve(arguments: argparse.Namespace) -> configuration.RunConfig:
    """Returns the configuration, its corpus made. Raises InputError."""
    config = configuration.load(arguments.config, [*arguments.overrides, "train.steps=1000000"])
    mesh = config.mesh.shape(len(jax.devices()))
    shards = mesh["data"] * mesh["fsdp"] * mesh["expert"]
    require(shards > 1, f"{shards} device takes all rows: nothing to balance; run it on two or more")
    parts = arguments.microbatches
    require(parts > FEW, f"--microbatches {parts}: must be above {FEW}")
    vocabulary, sequence = min(config.model.vocabulary, 16_384), config.data.sequence
    mix = balance_corpus.make(arguments.folder, arguments.tokens, sequence, vocabulary)
    values = {"train.rows": shards * parts, "train.microbatches": parts}
    values |= {"data.mix": str(mix), "data.store": str(mix.parent / "store")}
    # A group is what a device holds, so that rows of like rank run at the same time.
    return replaced(config, values | {"data.groups": config.data.groups or shards})


def measure(arguments: argparse.Namespace) -> dict:
    """Returns the result."""
    phases = timed_loop.Phases()
    xla.configure()
    with phases("corpus"):
        config = resolve(arguments)
        data = open_data(config.data)
    shape, train = config.data, config.train
    config, plain = (replaced(config, {"data.balance": balance}) for balance in (True, False))
    few = {"train.rows": train.rows // train.microbatches * FEW, "train.microbatches": FEW}
    with phases("compiling"):
        programs = {one.train.microbatches: build_step(one, data) for one in (plain, replaced(plain, few))}
        built = programs[train.microbatches]
        runner = Runner(built)
    orders, placed, predicted = {}, {}, {}

    def plan(order: str, config: configuration.RunConfig) -> None:
        orders[order] = blocks.first_batches(config, arguments.steps, data)
        placed[order] = [(built, built.place(batch, train.rows)) for batch in orders[order]]

    plan(ORDERS[0], plain)
    with phases("warm-up"):
        runner.warm_up(placed[ORDERS[0]][:3], arguments.warmup_seconds)
    with phases("coefficients"):
        points = row_costs.measure(runner.times, programs, orders[ORDERS[0]][0], arguments.rounds)
        costs = row_costs.Costs.fit(points, shape.sequence)
        require(costs.linear > 0, f"the coefficients cannot be told from these times: {points}")
        costs = dataclasses.replace(costs, attention=max(costs.attention, 0.0))
    prices = {"linear_cost": costs.linear, "attention_cost": costs.attention}
    plan(ORDERS[1], replaced(config, {f"data.{key}": of for key, of in prices.items()}))
    devices = built.layout.size("batch")
    tokens = shape.sequence * train.rows // train.microbatches // devices
    parts = shape.groups, train.microbatches, devices
    for order, batches in orders.items():
        spans = (row_costs.by_device(row_costs.spans(batch["segment_ids"]), *parts) for batch in batches)
        predicted[order] = np.array([costs.predict(of, tokens) for of in spans])
    with phases("timed"):
        times = {order: lambda work=work: (runner.times(work), 0, None) for order, work in placed.items()}
        found = turns.steps_in_turns(times, 0.0, arguments.timed_seconds, built.layout.mesh.size)
    counted = llama.train_flops(config.model, 1, 0), llama.train_flops(config.model, 0, 1)
    used = np.mean([(batch["segment_ids"] > 0).mean() for batch in orders[ORDERS[0]]])
    return {
        "lengths": balance_corpus.LENGTHS,
        "sequence": shape.sequence,
        "rows": train.rows,
        "microbatches": train.microbatches,
        "groups": shape.groups,
        "steps": arguments.steps,
        "fill": round(float(used), 4),
        "costs": {
            **prices,
            "constant_seconds": costs.constant,
            "residual": round(costs.residual, 4),
            "whole_row_over_linear": round(costs.attention * shape.sequence / costs.linear, 4),
            "whole_row_over_linear_by_flops": round(counted[1] * shape.sequence / counted[0], 4),
            "points": points,
        },
        **summary(predicted, found),
        "peak_hbm_bytes": hardware.peak_bytes(),
        "phases": phases.seconds,
    }


option = harness.option
main = harness.program(
    __doc__,
    measure,
    option("--microbatches", type=int, default=8, help="of a step: rows for each device"),
    option("--steps", type=int, default=7, help="that are timed in both orders, over and over"),
    option("--rounds", type=int, default=2, help="of the steps that the coefficients are taken from"),
    option("--tokens", type=int, default=8_000_000, help="of the corpus"),
    option("--folder", type=Path, default=Path("build/bench_balance"), help="corpora, kept"),
    seconds=(20.0, 40.0),
)


if __name__ == "__main__":
    sys.exit(main())
