"""Times collective matrix products, forward and backward, against other ways and prints one JSON line.

    python scripts/bench/collective_matmul.py [--devices 2] [--shapes NAME ...] [--torch] [--output FILE]
    python scripts/bench/collective_matmul.py --tiny    # on two forced CPU devices, without the GPU kernels

Contenders take turns, A-B-C-A-B-C, and the median of the turns counts. A program makes several calls in a
row, each after the one before, as a training step does. Before it is timed, a contender's result has to be
within 1e-2 of the plain form's, by norm.

  plain: XLA's collective and then its product, or the other way round; all ratios are over it
  ring, ring_bidirectional: transfers beside products, in as many steps as there are devices
  jax: JAX's own kernel, the best of a few configurations; for forward gathers of one matrix on one axis
  fused: the kernels for Hopper
  default: whatever runs where nothing is named
  product: the matrix products alone, as if all rows were there; no form can be faster
  collective: the transfer alone, by XLA
  torch: PyTorch's symmetric-memory operations, in a process of their own and without multicast

`predicted_microseconds`, of the kernel alone, are those of `tiles.predict`; a backward pass has the products
for the weights' gradients besides.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if "--tiny" in sys.argv:  # before JAX starts
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import collective_matmul_check as checks
import harness
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthru.runtime import xla
from pallas_kernels.collective_matmul import automatic, implementations, reference, tiles
from pallas_kernels.collective_matmul.shapes import GPU, UNTUNED, Shape
from pallas_kernels.dispatch import Unsupported

IN_A_ROW = 4  # calls in a program
TOLERANCE = 1e-2
NAMED = {
    "plain": "reference",
    "ring": "ring",
    "ring_bidirectional": "ring_bidirectional",
    "fused": "mosaic_gpu_alone",
}
SHAPES = ("qkv", "gate", "gate_up", "scatter_6144", "down", *UNTUNED)


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape on a mesh, forward or backward."""

    shape: Shape
    mesh: Mesh
    backward: bool

    @property
    def gathers(self) -> bool:
        return self.shape.operation == "all_gather_matmul"

    @property
    def problem(self) -> tiles.Problem:
        """What the fused kernel is asked for."""
        t, s = self.mesh.shape["tensor"], self.shape
        M, K_split, N_split = s.rows // t, s.contracted // t, tuple(n // t for n in s.columns)
        if self.gathers and self.backward:
            beside = s.contracted if t > 1 else 0
            return tiles.Problem("scatter_transposed", t, M, N_split, (s.contracted,), "bfloat16", beside)
        if self.gathers:
            return tiles.Problem("gather", t, M, (s.contracted,), N_split, "bfloat16")
        if self.backward:
            return tiles.Problem("gather_transposed", t, M, s.columns, (K_split,), "bfloat16")
        return tiles.Problem("scatter", t, M, (K_split,), s.columns, "bfloat16")

    @property
    def flops(self) -> float:
        """Of one device; a backward pass has two products for each matrix."""
        s = self.shape
        return 2.0 * (1 + self.backward) * s.rows * s.contracted * sum(s.columns) / self.mesh.shape["tensor"]

    def operands(self, seed: int = 0):
        operands, cotangents = checks.draw(self.mesh, self.shape, seed)
        return operands + cotangents if self.backward else operands

    def of(self, module, **options) -> Callable:
        """Returns operands -> results for one of the four functions of an implementation."""
        call = getattr(module, self.shape.operation + ("_backward" if self.backward else ""))
        call, n = functools.partial(call, axis_name="tensor", **options), len(self.shape.columns)

        def local(x, *rest):
            if not self.gathers:
                return call(x, *rest) if self.backward else (call(x, *rest),)
            if not self.backward:
                return call(x, rest)
            dx, dws = call(x, rest[:n], rest[n:])
            return dx, *dws

        operands, results = self._specs()
        out = operands[: n + 1] if self.backward else results
        return self._over_shards(local, operands + results if self.backward else operands, out)

    def default(self) -> Callable:
        """Returns what runs where nothing is named: the first that does not refuse."""
        known = implementations(named=False)
        for name in automatic():
            module, options = known[name]
            with contextlib.suppress(Unsupported):
                jax.eval_shape(run := self.of(module, **options), *self.operands())
                return run
        raise Unsupported("every implementation refuses")

    def products(self) -> tuple[Callable, tuple]:
        """Returns the products alone and their operands, of which each device has what it would gather."""

        def dot(a, b, a_dim, b_dim):
            return jax.lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())))

        def local(x, *rest):
            n = len(self.shape.columns)
            ws, dys = rest[:n], rest[n:]
            if not self.backward:
                return tuple(dot(x, w, 1, 0) for w in ws)
            dxs = (dot(dy, w, 1, 1) for dy, w in zip(dys, ws, strict=True))
            return *dxs, *(dot(x, dy, 0, 0) for dy in dys)

        specs, results = self._specs()
        specs = list(specs + results if self.backward else specs)
        if self.gathers or self.backward:  # the rows that are to be gathered are on every device here
            specs[0 if self.gathers else -1] = PartitionSpec(self._others or None)
        placed = tuple(
            jax.device_put(x, NamedSharding(self.mesh, spec))
            for x, spec in zip(self.operands(), specs, strict=True)
        )
        return self._over_shards(local, tuple(specs), PartitionSpec((*self._others, "tensor"))), placed

    def collective(self) -> tuple[Callable, tuple]:
        """Returns the transfers alone: of what is gathered, and of products of the size that is scattered.

        A gather's backward pass has both: x is gathered again, and its gradient is scattered.
        """
        columns = self.shape.contracted if self.gathers else self.shape.columns[0]
        spec, rows = PartitionSpec((*self._others, "tensor")), self.shape.rows * self.mesh.size
        sharding = NamedSharding(self.mesh, spec)
        scatters = self.gathers == self.backward
        whole = [jnp.ones((rows, columns), jnp.bfloat16, device=sharding)] if scatters else []
        split = rows // self.mesh.shape["tensor"]
        parts = (
            [jnp.ones((split, columns), jnp.bfloat16, device=sharding)]
            if self.gathers or self.backward
            else []
        )

        def local(parts, whole):
            gathered = [jax.lax.all_gather(x, "tensor", tiled=True) for x in parts]
            return *gathered, *(jax.lax.psum_scatter(x, "tensor", tiled=True) for x in whole)

        return self._over_shards(local, (spec, spec), spec), (parts, whole)

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(name for name in self.mesh.axis_names if name != "tensor")

    def _specs(self) -> tuple[tuple, tuple]:
        operands, results = self.shape.arrays(self.mesh, jnp.bfloat16)
        return tuple(x.sharding.spec for x in operands), tuple(x.sharding.spec for x in results)

    def _over_shards(self, local, specs, out) -> Callable:
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)


def jax_kernels(case: Case) -> dict[str, Callable]:
    """Returns JAX's own kernel in a few configurations, none where it cannot run."""
    unable = case.backward or not case.gathers or len(case.shape.columns) > 1 or len(case.mesh.shape) > 1
    if unable or case.mesh.size != jax.device_count() or jax.default_backend() != "gpu":
        return {}
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu

    dims = hopper_matmul_mgpu.MatmulDimension
    runs = {}
    for minor, split, width in (
        (dims.M, dims.N, 8),
        (dims.N, dims.N, 8),
        (dims.M, dims.M, 8),
        (dims.M, dims.N, 16),
    ):
        config = hopper_matmul_mgpu.TuningConfig(
            tile_m=128,
            tile_n=128,
            tile_k=64,
            max_concurrent_steps=4,
            grid_minor_dim=minor,
            grid_tile_width=width,
            wg_dimension=split,
        )

        def local(x, w, config=config):
            gather = collective_matmul_mgpu.all_gather_lhs_matmul
            return (gather(x, w, "tensor", config=config, dtype=jnp.bfloat16),)

        runs[f"jax_{minor}_{split}_{width}"] = case._over_shards(local, *case._specs())
    return runs


def first_run_of_jax(mesh: Mesh) -> None:
    """Runs JAX's own kernel at a tiny shape, and raises RuntimeError where it is wrong."""
    case = Case(checks.TINY["tiny_gather"], mesh, backward=False)
    operands = case.operands()
    wanted = jax.block_until_ready(jax.jit(case.of(reference))(*operands))
    for name, run in jax_kernels(case).items():
        with checks.ends_within(60, name):
            found = checks.compile_safely(jax.jit(run).lower(*operands))(*operands)
            (error,) = (float(e) for e in apart(found, wanted))
        if not error <= TOLERANCE:
            raise RuntimeError(f"{name}: {error:.2g} apart from the plain form")


def program(run: Callable, operands, calls: int = IN_A_ROW):
    """Returns the lowered program of several calls, each of which has to wait for the one before.

    All their results are returned: XLA drops a call whose results nothing reads, barrier or not.
    """

    def in_a_row(*operands):
        every = []
        for _ in range(calls):
            results = run(*operands)
            operands, results = jax.lax.optimization_barrier((operands, results))
            every.append(results)
        return every

    return jax.jit(in_a_row).lower(*operands)


WORK = re.compile(
    r" (dot|all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    r'|custom_call_target="([^"]*(?:gemm|matmul|mosaic)[^"]*)"'
)


def work(compiled: jax.stages.Compiled) -> collections.Counter:
    """Returns how many products, collectives and kernels of each kind a compiled program has."""
    return collections.Counter(a or b for a, b in WORK.findall(compiled.as_text()))


def require_every_call(found: collections.Counter, single: collections.Counter, name: str) -> None:
    """Raises RuntimeError unless a program does at least IN_A_ROW times the work of a single call."""
    if not single or found.total() < IN_A_ROW * single.total():
        raise RuntimeError(f"{name}: {IN_A_ROW} calls compile to {dict(found)}, one to {dict(single)}")


def contenders(case: Case, without_jax: str = "") -> tuple[dict[str, tuple[Callable, tuple]], dict[str, str]]:
    """Returns {name: (function, operands)} and why others cannot run.

    without_jax: why JAX's own kernel is not to run, if so.
    """
    operands, found, missing = case.operands(), {}, {}
    known = implementations(jax.default_backend())
    runs = {name: (lambda m=known[of][0], o=known[of][1]: case.of(m, **o)) for name, of in NAMED.items()}
    runs["default"] = case.default
    for name, make in runs.items():
        try:
            jax.eval_shape(run := make(), *operands)
            found[name] = run, operands
        except Unsupported as refusal:
            missing[name] = str(refusal)
    if without_jax:
        missing["jax"] = without_jax
    else:
        found |= {name: (run, operands) for name, run in jax_kernels(case).items()}
    return found | {"product": case.products(), "collective": case.collective()}, missing


@jax.jit
def apart(found, wanted):
    def relative(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)

    return [relative(a, b) for a, b in zip(found, wanted, strict=True)]


def turn(run, operands, calls: int) -> float:
    """Returns the seconds of a call, the mean over programs dispatched without waiting for each other."""
    began = time.perf_counter()
    for _ in range(calls):
        results = run(*operands)
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / (calls * IN_A_ROW)


def compile_all(lowered: dict) -> dict:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(zip(lowered, pool.map(checks.compile_safely, lowered.values()), strict=True))


def compile_in_a_row(runs: dict[str, tuple[Callable, tuple]]) -> dict[str, jax.stages.Compiled]:
    """Returns the programs to be timed, each of which has been seen to make all of its calls."""
    compiled = compile_all({name: program(*run) for name, run in runs.items()})
    singles = compile_all({name: program(*run, calls=1) for name, run in runs.items()})
    for name in compiled:
        require_every_call(work(compiled[name]), work(singles[name]), name)
    return compiled


def measure(case: Case, warmup_turns: int, turns: int, turn_seconds: float, without_jax: str = "") -> dict:
    """Returns the result of a case: each contender's times, errors and ratio over the plain form."""
    runs, missing = contenders(case, without_jax)
    compiled = compile_in_a_row(runs)
    others = case.operands(seed=1)
    errors, (plain, *_) = {}, compiled["plain"](*runs["plain"][1])
    for name in list(compiled):
        if name in ("product", "collective"):
            continue
        jax.block_until_ready(compiled[name](*others))  # so that no buffer still holds the right result
        found = compiled[name](*runs[name][1])
        errors[name] = max(float(e) for results in found for e in apart(results, plain))
        del found
        if not errors[name] <= TOLERANCE:
            missing[name] = f"{errors[name]:.2g} apart from the plain form"
            del compiled[name]
    del plain, others
    rough = {name: turn(run, runs[name][1], 1) for name, run in compiled.items()}
    calls = {name: max(1, round(turn_seconds / (rough[name] * IN_A_ROW))) for name in compiled}
    times = {name: [] for name in compiled}
    for number in range(warmup_turns + turns):
        for name, run in compiled.items():
            seconds = turn(run, runs[name][1], calls[name])
            if number >= warmup_turns:
                times[name].append(seconds)
    best_jax = min(
        (n for n in times if n.startswith("jax_")), key=lambda n: statistics.median(times[n]), default=None
    )
    rows, base = {}, statistics.median(times["plain"])
    for name, seconds in times.items():
        if name.startswith("jax_") and name != best_jax:
            continue
        halves = [statistics.median(half) for half in (seconds[::2], seconds[1::2] or seconds)]
        median = statistics.median(seconds)
        rows["jax" if name == best_jax else name] = {
            "microseconds": round(1e6 * median, 1),
            "microseconds_least_and_most": [round(1e6 * x, 1) for x in (min(seconds), max(seconds))],
            "a_a_spread": round(abs(halves[0] - halves[1]) / median, 4),
            "over_plain": round(base / median, 3),
            "tflops": round(case.flops / median / 1e12, 1),
            **({"apart_from_plain": float(f"{errors[name]:.2g}")} if name in errors else {}),
            **({"configuration": name} if name == best_jax else {}),
        }
    line = {"contenders": rows, "missing": missing}
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


def _gpu() -> tuple[str, int]:
    device = jax.local_devices()[0]
    return (device.device_kind, device.core_count) if device.platform == "gpu" else ("", tiles.SMS)


def torch_peer(devices: int, names: list[str], shapes: dict[str, Shape]) -> dict:
    """Returns what PyTorch's operations take, or why not; in processes that cannot make multicast objects."""
    peer = Path(__file__).with_name("peers") / "torch_collective_matmul.py"
    wanted = {name: dataclasses.asdict(shapes[name]) for name in names}
    arguments = [str(peer), "--devices", str(devices), "--shapes", json.dumps(wanted)]
    try:
        said = checks.run_script(arguments, 240, **xla.NO_MULTICAST)
    except RuntimeError as error:
        return {"missing": str(error)[-1000:]}
    return json.loads(said.splitlines()[-1])


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
    parser.add_argument(
        "--heat-seconds", type=float, default=5.0, help="of products, before anything is timed"
    )
    parser.add_argument("--torch", action="store_true", help="time PyTorch's operations too")
    parser.add_argument(
        "--first-run-of-jax", action="store_true", help="only run JAX's own kernel once, at a tiny shape"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes on CPU devices, to try the script")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.tiny:
        options.shapes, options.heat_seconds, options.turns = ("tiny_gather", "tiny_scatter"), 0.1, 3
    axes = ({"data": options.data} if options.data > 1 else {}) | {"tensor": options.devices}
    harness.keep_stdout()
    xla.configure()
    phase = harness.Phases()
    if not (options.tiny or options.first_run_of_jax):
        with phase("first run, in a child process"):
            checks.in_child([axes], seconds=180)
    if options.first_run_of_jax:
        first_run_of_jax(checks.make_mesh(axes))
        return 0
    without_jax = ""
    if not options.tiny:
        with phase("first run of JAX's kernel, in a child process"):
            same = ["--devices", str(options.devices), "--data", str(options.data)]
            try:
                checks.run_script([__file__, "--first-run-of-jax", *same], 180)
            except RuntimeError as error:
                without_jax = str(error)[-500:]
    peer = None
    if options.torch:
        with phase("torch, in a child process"):
            peer = torch_peer(options.devices, list(options.shapes), shapes)
    mesh = checks.make_mesh(axes)
    results = {}
    with harness.Clocks(mesh.size) as clocks:
        with phase("heat"):
            run, operands = Case(shapes[options.shapes[0]], mesh, backward=True).products()
            hot, began = program(run, operands).compile(), time.perf_counter()
            while time.perf_counter() - began < options.heat_seconds:
                jax.block_until_ready(hot(*operands))
        for name in options.shapes:
            for direction in options.directions:
                with phase(f"{name} {direction}"), checks.ends_within(180, f"{name} {direction}"):
                    case = Case(shapes[name], mesh, direction == "backward")
                    found = measure(
                        case, options.warmup_turns, options.turns, options.turn_seconds, without_jax
                    )
                    results[f"{name}_{direction}"] = dataclasses.asdict(shapes[name]) | found
                print(json.dumps({f"{name}_{direction}": found}), file=sys.stderr, flush=True)
    line = {
        "benchmark": "collective_matmul",
        "axes": axes,
        "dtype": "bfloat16",
        "calls_in_a_program": IN_A_ROW,
        "cases": results,
        **({"torch": peer} if peer else {}),
        "sm_clock_mhz": clocks.mhz,
        "power_watts": clocks.watts,
        "seconds": phase.seconds,
        **harness.provenance(),
    }
    harness.emit(line, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
