"""Times collective matrix products, forward and backward, against other ways and prints one JSON line.

    python scripts/bench/collective_matmul.py [--devices 2] [--shapes NAME ...] [--torch] [--output FILE]
    python scripts/bench/collective_matmul.py --tiny    # on two forced CPU devices, without the GPU kernels
    python scripts/bench/collective_matmul.py --same-as build/old    # are these another commit's programs?

Contenders take turns, each round in another order, and the median of the turns counts. A program makes
several calls in a row, each after the one before, as a training step does. Before it is timed, a contender's
result has to be within 1e-2 of the plain form's, by norm.

An H200 that multiplies without a pause is at its power cap, and slows the more the less it waits; in a short
burst after a rest it runs at its full clock. Both are timed: `contenders` one after another without a pause,
`in_bursts` with a rest before each turn. With --cap-rounds some also run for --cap-seconds each,
`at_the_cap`, so that each has the clock that its own work leaves it, and NVML's counter says how many joules
a call takes, on all GPUs together.

  plain: XLA's collective and then its product, or the other way round; all ratios are over it
  ring, ring_bidirectional: transfers beside products, in as many steps as there are devices
  jax: JAX's own kernel, the best that `search_jax` finds; for forward gathers of one matrix on one axis
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
import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

if {"--tiny", "--same-as", "--digests"} & {*sys.argv}:  # before JAX starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import collective_matmul_check as checks
import comparison
import harness
import jax
import timed_loop
from commit_trees import Tree
from gpu_clocks import Clocks
from measure import programs
from measure.collectives import Case, contenders, first_run_of_jax, search_jax, torch_peer

from jaxthru.runtime import xla
from pallas_kernels.collective_matmul import tiles
from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED, Shape
from pallas_kernels.dispatch import Unsupported

SHAPES = ("qkv", "gate", "gate_up", "scatter_6144", "down", *UNTUNED)


AT_THE_CAP = ("plain", "fused", "fused_adds", "product")  # and the fastest of JAX's


def measure(case: Case, how: argparse.Namespace, without_jax: str = "") -> dict:
    """Returns the result of a case: each contender's times, errors and ratio over the plain form.

    how: the command's options. without_jax: as `contenders` has it.
    """
    runs, missing = contenders(case, without_jax, how.adds)
    runs = {name: run for name, run in runs.items() if name not in how.leave_out}
    searched = {}
    if not without_jax:
        found, searched = search_jax(case)
        runs |= found
    known = [name for name in ("plain", "fused") if {name, "dispatched"} <= runs.keys()]
    same = [name for name in known if programs.same(runs["dispatched"], runs[name])][:1]
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
    turns = how.warmup_turns, how.turns, how.turn_seconds, case.in_a_row
    rows = told(case, programs.in_turns(placed, *turns), errors)
    shown = {rows[name].get("configuration", name) for name in rows}
    placed = {name: run for name, run in placed.items() if name in shown}
    bursts = told(case, programs.in_turns(placed, *turns, how.rest_seconds), errors)
    if same:
        for regime in (rows, bursts):
            if same[0] in regime:
                regime["dispatched"] = regime[same[0]] | {"same_program_as": same[0]}
    line = {"calls_in_a_program": case.in_a_row, "contenders": rows}
    line |= {"in_bursts": bursts, "missing": missing}
    if how.cap_rounds:
        chosen = (*AT_THE_CAP, rows.get("jax", {}).get("configuration"))
        kept = {name: run for name, run in placed.items() if name in chosen}
        cap = programs.at_the_cap(kept, how.cap_rounds, how.cap_seconds, case.in_a_row, case.mesh.size)
        line["at_the_cap"] = told_of_energy(cap, case.mesh.size)
    if searched:
        line["jax_searched"] = searched
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


def told_of_energy(found: dict[str, dict[str, list]], gpus: int) -> dict[str, dict]:
    """Returns what the record says of each contender at the power cap. watts: of a GPU; joules: of a call, on
    all of them; None where no counter was read."""
    rows = {}
    for name, of in found.items():
        seconds = statistics.median(of["seconds"])
        watts = [each for each in of["watts"] if each]
        power = statistics.fmean(watts) if watts else None
        rows["jax" if name.startswith("jax_") else name] = {
            "microseconds": round(1e6 * seconds, 1),
            "a_a_spread": comparison.halves_apart([[each] for each in of["seconds"]]),
            "watts": round(power, 1) if power else None,
            "watts_least_and_most": [min(watts), max(watts)] if watts else None,
            "joules": round(power * seconds * gpus, 5) if power else None,
        }
    for row in rows.values():
        row["over_plain"] = round(rows["plain"]["microseconds"] / row["microseconds"], 3)
        row["joules_over_plain"] = (
            round(row["joules"] / rows["plain"]["joules"], 3) if row["joules"] else None
        )
    return rows


def of_commit(tree: Tree, module: str) -> Callable:
    """Returns what makes a case's function by the kernels of another commit's tree, for a GPU."""

    def make(case: Case) -> Callable:
        def run(*operands):
            with tree():
                kernels = importlib.import_module(f"pallas_kernels.collective_matmul.{module}")
                asked = {}
                if module == "mosaic_gpu":
                    names = inspect.signature(kernels.tiles_for).parameters
                    asked = {"platform": "gpu"} | {
                        name: True for name in ("named", "always") if name in names
                    }
                return case.of(kernels, **asked)(*operands)

        return run

    return make


def digests(folder: Path, shapes: dict[str, Shape]) -> dict[str, str]:
    """Returns {"shape direction form": digest of its program, lowered for CUDA} by a tree's kernels."""
    jax.config.update("jax_traceback_in_locations_limit", 0)  # lines move where nothing else changes
    mesh, found = checks.make_mesh({"tensor": 2}), {}
    forms = {"fused": "mosaic_gpu", "plain": "reference", "ring": "ring"}
    makers = {form: of_commit(Tree(folder), module) for form, module in forms.items()}
    every = itertools.product(shapes.items(), ("forward", "backward"), makers.items())
    for (name, shape), direction, (form, make) in every:
        case = Case(shape, mesh, direction == "backward")
        text = jax.jit(make(case)).trace(*case.abstract()).lower(lowering_platforms=("cuda",)).as_text()
        text = re.sub(r'kernel_hash = "[^"]*"', "", text).replace(str(folder), "")
        found[f"{name} {direction} {form}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def same_programs(old: Path, names: list[str]) -> dict:
    """Returns the digests of this commit's programs, and the names of those that another's differ from.

    A kernel's program holds its number in its process and the name of the file that it comes from: each tree
    has a process of its own, and a link to it whose name is as long as the other's, and is left out.
    """
    trees, found = {"old": old.resolve(), "new": Path(__file__).resolve().parents[2]}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, tree in trees.items():
            (link := Path(folder) / name).symlink_to(tree, target_is_directory=True)
            said = checks.run_script([__file__, "--digests", str(link), "--shapes", *names], 600)
            found[name] = json.loads(said.splitlines()[-1])
    new = found["new"]
    return {"programs": new, "different": [name for name in new if found["old"][name] != new[name]]}


def _gpu() -> tuple[str, int]:
    device = jax.local_devices()[0]
    return (device.device_kind, device.core_count) if device.platform == "gpu" else ("", tiles.SMS)


def main() -> int:
    shapes = GPU | UNTUNED | {"tiny_gather": GPU["qkv"].scaled(64), "tiny_scatter": GPU["down"].scaled(64)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", type=int, default=2, help="on the tensor axis")
    add("--shapes", nargs="+", choices=shapes)
    add("--directions", nargs="+", choices=("forward", "backward"), default=("forward", "backward"))
    add("--warmup-turns", type=int, default=3)
    add("--turns", type=int, default=12)
    add("--turn-seconds", type=float, default=0.02, help="of one contender")
    add("--rest-seconds", type=float, default=0.06, help="before each burst")
    add("--cap-rounds", type=int, default=0, help="at the power cap, for joules a call")
    add("--cap-seconds", type=float, default=0.4, help="of one contender in such a round")
    add("--old-commit", default="", help="the name of --same-as, for the record")
    of_same = "only say which programs are not those of another commit's files, as lowered for a GPU"
    add("--digests", type=Path, help=argparse.SUPPRESS)
    add("--same-as", type=Path, metavar="FOLDER", help=of_same)
    add("--stop-after", type=float, default=1e9, metavar="SECONDS", help="begin no case after")
    add("--heat-seconds", type=float, default=5.0, help="of products, before anything is timed")
    done = "the first run that precedes all others has just passed, in a process of its own"
    add("--first-run-done", action="store_true", help=done)
    add("--adds", action="store_true", help="time the kernels that add to the result too")
    left = ("ring", "ring_bidirectional")
    add("--leave-out", nargs="*", choices=left, default=(), help="contenders that are not to run")
    add("--torch", action="store_true", help="time PyTorch's operations too")
    add("--first-run-of-jax", action="store_true", help="only run JAX's own kernel once, at a tiny shape")
    add("--tiny", action="store_true", help="small shapes on CPU devices, to try the script")
    add("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error(f"--turns {options.turns}: one turn says nothing of its spread")
    if options.warmup_turns < 2:
        parser.error(f"--warmup-turns {options.warmup_turns}: a program's first run loads what it needs")
    if options.tiny:
        options.shapes, options.heat_seconds, options.turns = ("tiny_gather", "tiny_scatter"), 0.1, 3
        options.rest_seconds, options.cap_seconds = 0.0, 0.05
    if options.digests or options.same_as:
        names = list(options.shapes or GPU | UNTUNED)
        if options.digests:
            line = digests(options.digests, {name: shapes[name] for name in names})
        else:
            line = {"benchmark": "collective_matmul_same", "old_commit": options.old_commit}
            line |= same_programs(options.same_as, names) | harness.provenance()
        harness.emit(line, options.output)
        return 0
    options.shapes = options.shapes or SHAPES
    axes = {"tensor": options.devices}
    harness.keep_stdout()
    xla.configure()
    if options.first_run_of_jax:
        first_run_of_jax(checks.make_mesh(axes))
        return 0
    phase, started = timed_loop.Phases(), time.monotonic()
    without_jax, peer = "", None
    if not (options.tiny or options.first_run_done):
        with phase("first run, in a child process"):
            checks.in_child([axes], seconds=180)
    if not options.tiny and "forward" in options.directions:
        with phase("first run of JAX's kernel, in a child process"):
            same = [__file__, "--first-run-of-jax", "--devices", str(options.devices)]
            try:
                checks.run_script(same, 180)
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
            if time.monotonic() - started > options.stop_after:
                line.setdefault("left_out", []).append(named)
                continue
            with phase(named), checks.ends_within(180, named):
                case = Case(shapes[name], mesh, direction == "backward")
                found = measure(case, options, without_jax)
            line["cases"][named] = dataclasses.asdict(shapes[name]) | found
            harness.write(line, options.output)
            print(json.dumps({named: found}), file=sys.stderr, flush=True)
    line |= {"sm_clock_mhz": clocks.mhz, "power_watts": clocks.watts, "seconds": phase.seconds}
    harness.emit(line, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
