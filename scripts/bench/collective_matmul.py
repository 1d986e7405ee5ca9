"""Times collective matrix products, forward and backward, against other ways and prints one JSON line.

    python scripts/bench/collective_matmul.py [--devices 2] [--shapes NAME ...] [--torch] [--output FILE]
    python scripts/bench/collective_matmul.py --tiny    # on two forced CPU devices, without the GPU kernels

Contenders take turns, each round in another order, and the median of the turns counts. A program makes
several calls in a row, each after the one before, as a training step does. Before it is timed, a contender's
result has to be within 1e-2 of the plain form's, by norm.

An H200 that multiplies without a pause is at its power cap, and slows the more the less it waits; in a short
burst after a rest it runs at its full clock. Both are timed: `contenders` one after another without a pause,
`in_bursts` with a rest before each turn.

  plain: XLA's collective and then its product, or the other way round; all ratios are over it
  ring, ring_bidirectional: transfers beside products, in as many steps as there are devices
  jax: JAX's own kernel, the best of a few configurations; for forward gathers of one matrix on one axis
  fused: the kernels for Hopper
  fused_adds: with --adds, those whose scatters add to the result in place of staging
  dispatched: what `kernels.collective_matmul=fused` takes; where that is the program of plain or fused, it is
    not timed again
  product: the matrix products alone, as if all rows were there; no form can be faster
  collective: the transfer alone, by XLA
  torch: PyTorch's symmetric-memory operations, in a process of their own and without multicast

`predicted_microseconds`, of the kernel alone, are those of `tiles.predict`; a backward pass has the products
for the weights' gradients besides.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

if "--tiny" in sys.argv:  # before JAX starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import collective_matmul_check as checks
import collective_matmul_programs as programs
import comparison
import harness
import jax
from collective_matmul_contenders import Case, contenders, first_run_of_jax, torch_peer
from gpu_clocks import Clocks

from jaxthru.runtime import xla
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED
from pallas_kernels.dispatch import Unsupported

SHAPES = ("qkv", "gate", "gate_up", "scatter_6144", "down", *UNTUNED)


def measure(
    case: Case,
    warmup_turns: int,
    turns: int,
    turn_seconds: float,
    rest: float,
    without_jax: str = "",
    adds: bool = False,
) -> dict:
    """Returns the result of a case: each contender's times, errors and ratio over the plain form.

    rest: seconds before each of the turns `in_bursts`. without_jax, adds: as `contenders` has them.
    """
    runs, missing = contenders(case, without_jax, adds)
    known = [name for name in ("plain", "fused") if {name, "dispatched"} <= runs.keys()]
    same = [name for name in known if programs.same(runs["dispatched"], runs[name])]
    if same:
        del runs["dispatched"]
    compiled, failed = programs.compile_in_a_row(runs, case.in_a_row)
    missing |= failed
    others = case.operands(seed=1)
    errors, (plain, *_) = {}, compiled["plain"](*runs["plain"][1])
    for name in list(compiled):
        if name in ("product", "collective"):
            continue
        jax.block_until_ready(compiled[name](*others))  # so that no buffer still holds the right result
        found = jax.block_until_ready(compiled[name](*runs[name][1]))  # nothing is loaded while it runs
        errors[name] = max(float(e) for results in found for e in programs.apart(results, plain))
        del found
        if not errors[name] <= programs.TOLERANCE:
            missing[name] = f"{errors[name]:.2g} apart from the plain form"
            del compiled[name]
    del plain, others
    placed = {name: (run, runs[name][1]) for name, run in compiled.items()}
    how = warmup_turns, turns, turn_seconds, case.in_a_row
    rows = told(case, programs.in_turns(placed, *how), errors)
    shown = {rows[name].get("configuration", name) for name in rows}
    placed = {name: run for name, run in placed.items() if name in shown}
    bursts = told(case, programs.in_turns(placed, *how, rest), errors)
    if same:
        for regime in (rows, bursts):
            if same[0] in regime:
                regime["dispatched"] = regime[same[0]] | {"same_program_as": same[0]}
    line = {"calls_in_a_program": case.in_a_row, "contenders": rows}
    line |= {"in_bursts": bursts, "missing": missing}
    try:
        chosen, _ = tiles.choose(case.problem, *_gpu())
        fused, plain = tiles.predict(case.problem, chosen, _gpu()[1])
        line["predicted_microseconds"] = {"fused": round(1e6 * fused, 1), "plain": round(1e6 * plain, 1)}
        line["tiles"] = dataclasses.asdict(chosen)
    except Unsupported as refusal:
        line["tiles_missing"] = str(refusal)
    product, transfer = (rows[name]["microseconds"] for name in ("product", "collective"))
    line["ceiling_microseconds"] = max(product, transfer)
    return line


def told(case: Case, times: dict[str, list[float]], errors: dict[str, float]) -> dict[str, dict]:
    """Returns what the record says of each contender; of JAX's configurations only the fastest."""
    base = statistics.median(times["plain"])
    best_jax = min(
        (n for n in times if n.startswith("jax_")), key=lambda n: statistics.median(times[n]), default=None
    )
    rows = {}
    for name, seconds in times.items():
        if name.startswith("jax_") and name != best_jax:
            continue
        median = statistics.median(seconds)
        rows["jax" if name == best_jax else name] = {
            "microseconds": round(1e6 * median, 1),
            "microseconds_least_and_most": [round(1e6 * x, 1) for x in (min(seconds), max(seconds))],
            "a_a_spread": comparison.halves_apart([[each] for each in seconds]),
            "over_plain": round(base / median, 3),
            "tflops": round(case.flops / median / 1e12, 1),
            **({"apart_from_plain": float(f"{errors[name]:.2g}")} if name in errors else {}),
            **({"configuration": name} if name == best_jax else {}),
        }
    return rows


def _gpu() -> tuple[str, int]:
    device = jax.local_devices()[0]
    return (device.device_kind, device.core_count) if device.platform == "gpu" else ("", tiles.SMS)


def main() -> int:
    shapes = GPU | UNTUNED | {"tiny_gather": GPU["qkv"].scaled(64), "tiny_scatter": GPU["down"].scaled(64)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="on the tensor axis")
    parser.add_argument("--data", type=int, default=1, help="devices on another axis beside it")
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=SHAPES)
    parser.add_argument(
        "--directions", nargs="+", choices=("forward", "backward"), default=("forward", "backward")
    )
    parser.add_argument("--warmup-turns", type=int, default=3)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-seconds", type=float, default=0.02, help="of one contender")
    parser.add_argument("--rest-seconds", type=float, default=0.06, help="before each burst")
    parser.add_argument(
        "--heat-seconds", type=float, default=5.0, help="of products, before anything is timed"
    )
    done = "the first run that precedes all others has just passed, in a process of its own"
    parser.add_argument("--first-run-done", action="store_true", help=done)
    parser.add_argument("--adds", action="store_true", help="time the kernels that add to the result too")
    parser.add_argument("--torch", action="store_true", help="time PyTorch's operations too")
    parser.add_argument(
        "--first-run-of-jax", action="store_true", help="only run JAX's own kernel once, at a tiny shape"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes on CPU devices, to try the script")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error(f"--turns {options.turns}: one turn says nothing of its spread")
    if options.warmup_turns < 2:
        parser.error(f"--warmup-turns {options.warmup_turns}: a program's first run loads what it needs")
    if options.tiny:
        options.shapes, options.heat_seconds, options.turns = ("tiny_gather", "tiny_scatter"), 0.1, 3
        options.rest_seconds = 0.0
    axes = ({"data": options.data} if options.data > 1 else {}) | {"tensor": options.devices}
    harness.keep_stdout()
    xla.configure()
    if options.first_run_of_jax:
        first_run_of_jax(checks.make_mesh(axes))
        return 0
    phase = harness.Phases()
    without_jax, peer = "", None
    if not (options.tiny or options.first_run_done):
        with phase("first run, in a child process"):
            checks.in_child([axes], seconds=180)
    if not options.tiny and "forward" in options.directions:
        with phase("first run of JAX's kernel, in a child process"):
            same = ["--devices", str(options.devices), "--data", str(options.data)]
            try:
                checks.run_script([__file__, "--first-run-of-jax", *same], 180)
            except RuntimeError as error:
                without_jax = str(error)[-500:]
    if options.adds:
        with phase("first run of the kernels that add, in a child process"):
            checks.try_adds(axes)
    if options.torch:
        with phase("torch, in a child process"):
            peer = torch_peer(options.devices, list(options.shapes), shapes)
    mesh = checks.make_mesh(axes)
    line = {
        "benchmark": "collective_matmul",
        "axes": axes,
        "dtype": "bfloat16",
        "cases": {},
        **({"torch": peer} if peer else {}),
        **harness.provenance(),
    }
    with Clocks(mesh.size) as clocks:
        with phase("heat"):
            run, operands = Case(shapes[options.shapes[0]], mesh, backward=True).products()
            hot, began = programs.program(run, operands).compile(), time.perf_counter()
            while time.perf_counter() - began < options.heat_seconds:
                jax.block_until_ready(hot(*operands))
        for name, direction in itertools.product(options.shapes, options.directions):
            named = f"{name}_{direction}"
            with phase(named), checks.ends_within(180, named):
                case = Case(shapes[name], mesh, direction == "backward")
                turns = options.warmup_turns, options.turns, options.turn_seconds, options.rest_seconds
                found = measure(case, *turns, without_jax, options.adds)
            line["cases"][named] = dataclasses.asdict(shapes[name]) | found
            harness.write(line, options.output)
            print(json.dumps({named: found}), file=sys.stderr, flush=True)
    line |= {"sm_clock_mhz": clocks.mhz, "power_watts": clocks.watts, "seconds": phase.seconds}
    harness.emit(line, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
