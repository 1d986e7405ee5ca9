"""What is timed against what: the collective matrix products of every implementation, and their bounds.

A `Case` is a shape on a mesh in one direction; `contenders` gives a function and its operands for each way of
computing it.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import collective_matmul_check as checks
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from measure import programs

from jaxthru.runtime import xla
from pallas_kernels import dispatch
from pallas_kernels.collective_matmul import OPERATION, automatic, reference, tiles
from pallas_kernels.collective_matmul.shapes import Shape

NAMED = {
    "plain": "reference",
    "ring": "ring",
    "ring_bidirectional": "ring_bidirectional",
    "fused": "mosaic_gpu",
}


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

    @property
    def in_a_row(self) -> int:
        """How many calls a program has."""
        return programs.in_a_row(self.flops)

    def operands(self, seed: int = 0):
        operands, cotangents = checks.draw(self.mesh, self.shape, seed)
        return operands + cotangents if self.backward else operands

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the operands without values."""
        operands, cotangents = self.shape.arrays(self.mesh, jnp.bfloat16)
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

    def implementation(self, name: str, named: bool) -> Callable:
        """As `of`, of an implementation that is asked for by name or not."""
        options = OPERATION.options(name, dispatch.resolve_platform(), named)
        return self.of(OPERATION.load(name), **options)

    def dispatched(self) -> Callable:
        """Returns what runs by "fused": the first that does not refuse."""
        for name in automatic(fused=True):
            with contextlib.suppress(dispatch.Unsupported):
                jax.eval_shape(run := self.implementation(name, named=False), *self.operands())
                return run
        raise dispatch.Unsupported("every implementation refuses")

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


# A warpgroup's tile in JAX's kernel, whether both stand along M or N, and stages: as many as there is room
# for. Together they are the sizes that `tiles.candidates` takes; its clusters JAX's kernel does not have.
JAX_SIZES = (128, 128, "N", 4), (64, 256, "M", 4), (128, 128, "M", 4), (256, 64, "N", 4), (64, 192, "M", 4)


def jax_kernels(case: Case, orders: tuple = tiles.ORDERS) -> dict[str, Callable]:
    """Returns JAX's own kernel in all configurations that its search takes, none where it cannot run."""
    unable = case.backward or not case.gathers or len(case.shape.columns) > 1 or len(case.mesh.shape) > 1
    if unable or case.mesh.size != jax.device_count() or jax.default_backend() != "gpu":
        return {}
    return all_jax_kernels(case, orders)


def all_jax_kernels(case: Case, orders: tuple) -> dict[str, Callable]:
    """Returns {name: JAX's kernel} of those whose tiles divide the shape."""
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu, hopper_matmul_mgpu

    dims, runs, t = hopper_matmul_mgpu.MatmulDimension, {}, case.mesh.size
    for (m, n, split, stages), (minor, width) in itertools.product(JAX_SIZES, orders):
        rows, columns = m * (1 + (split == "M")), n * (1 + (split == "N"))
        if case.shape.rows // t % rows or case.shape.columns[0] // t % columns:
            continue
        config = hopper_matmul_mgpu.TuningConfig(
            tile_m=m,
            tile_n=n,
            tile_k=64,
            max_concurrent_steps=stages,
            grid_minor_dim=dims[minor],
            grid_tile_width=width,
            wg_dimension=dims[split],
        )

        def local(x, w, config=config):
            gather = collective_matmul_mgpu.all_gather_lhs_matmul
            return (gather(x, w, "tensor", config=config, dtype=jnp.bfloat16),)

        runs[f"jax_{rows}x{columns}_{split}_{minor}{width}"] = case._over_shards(local, *case._specs())
    return runs


def search_jax(case: Case) -> tuple[dict[str, tuple[Callable, tuple]], dict[str, list[float]]]:
    """Returns the fastest of JAX's kernels in each regime, with their operands, and what was timed of all:
    each size in one order, and then the fastest in the others."""
    operands, timed, best = case.operands(), {}, set()
    every = {name: (run, operands) for name, run in jax_kernels(case).items()}
    sizes = jax_kernels(case, tiles.ORDERS[:1]).keys()
    for stage in (1, 2):
        if stage == 2:
            fastest = {name.rpartition("_")[0] for name in best}
            sizes = {name for name in every if name.rpartition("_")[0] in fastest} - timed.keys()
        timed |= programs.brief_times({name: every[name] for name in sizes}, case.in_a_row)
        best = {min(timed, key=lambda name: timed[name][regime]) for regime in (0, 1) if timed}
    return {name: every[name] for name in sorted(best)}, timed


def first_run_of_jax(mesh: Mesh) -> None:
    """Runs JAX's own kernel at a tiny shape, and raises RuntimeError where it is wrong."""
    case = Case(checks.TINY["tiny_gather"], mesh, backward=False)
    operands = case.operands()
    wanted = jax.block_until_ready(jax.jit(case.of(reference))(*operands))
    for name, run in jax_kernels(case, tiles.ORDERS[:1]).items():
        with checks.ends_within(60, name):
            found = jax.block_until_ready(checks.compile_safely(jax.jit(run).lower(*operands))(*operands))
            (error,) = (float(e) for e in programs.apart(found, wanted))
        if not error <= programs.TOLERANCE:
            raise RuntimeError(f"{name}: {error:.2g} apart from the plain form")


def contenders(
    case: Case, without_jax: str = "", adds: bool = False
) -> tuple[dict[str, tuple[Callable, tuple]], dict[str, str]]:
    """Returns {name: (function, operands)} and why others cannot run; JAX's own kernel `search_jax` adds.

    without_jax: why that is not to run, if so. adds: whether "fused_adds" is to.
    """
    operands, found, missing = case.operands(), {}, {}
    named = NAMED | ({"fused_adds": "mosaic_gpu_adds"} if adds and case.gathers == case.backward else {})
    runs = {name: functools.partial(case.implementation, of, named=True) for name, of in named.items()}
    runs["dispatched"] = case.dispatched
    for name, make in runs.items():
        try:
            jax.eval_shape(run := make(), *operands)
            found[name] = run, operands
        except dispatch.Unsupported as refusal:
            missing[name] = str(refusal)
    if without_jax:
        missing["jax"] = without_jax
    return found | {"product": case.products(), "collective": case.collective()}, missing


def torch_peer(devices: int, names: list[str], shapes: dict[str, Shape]) -> dict:
    """Returns what PyTorch's operations take, or why not; in processes that cannot make multicast objects."""
    peer = Path(__file__).parents[1] / "peers" / "torch_collective_matmul.py"
    wanted = {name: dataclasses.asdict(shapes[name]) for name in names}
    arguments = [str(peer), "--devices", str(devices), "--shapes", json.dumps(wanted)]
    try:
        said = checks.run_script(arguments, 240, **xla.NO_MULTICAST)
    except RuntimeError as error:
        return {"missing": str(error)[-1000:]}
    return json.loads(said.splitlines()[-1])
