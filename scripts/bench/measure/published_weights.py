"""Times loading and writing an 8B folder of published weights, and measures the host memory of both.

Beside it stands plain reading and writing of the same bytes.

    TMPDIR=DISK python scripts/bench/suite.py published --rows weights
    python scripts/bench/measure/published_weights.py write --tiny

The weights are random: one block of bfloat16 numbers over and over. All files are in the page cache. Loading
comes three times: the first compiles what transposes, in this process; the fastest counts. Up to 32 GB are
written where TMPDIR says, in a folder that is removed. Host memory is what is anonymous (RssAnon) above the
start of each phase, looked at every 5 ms; where a GPU's runtime pins memory that the system counts elsewhere,
VmLck and VmPin beside it say so.
"""

import argparse
import concurrent.futures
import dataclasses
import filecmp
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxthru.build.step import bound
from jaxthru.config import ModelConfig, RunConfig
from jaxthru.huggingface.weights import Weights
from jaxthru.huggingface.write import write_folder
from jaxthru.models import family
from jaxthru.runtime import xla
from jaxthru.runtime.mesh import make_mesh
from jaxthru.runtime.sharding import Layout
from jaxthru.training import layout as on_disk

CHUNK = 64 << 20
FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
KINDS = {"anonymous": "RssAnon", "locked": "VmLck", "pinned": "VmPin"}


def host_memory() -> dict[str, int]:
    """Returns kinds of this process's memory, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words and words[0][:-1] in FIELDS}


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what `work` returns, its seconds and the most memory that it added, by kind."""
    gc.collect()
    before = host_memory()

    def growth() -> dict[str, float]:
        return {name: round((size - before[name]) / 2**30, 3) for name, size in host_memory().items()}

    began = time.perf_counter()
    with harness.Peak(growth, 0.005) as peak:
        result = work()
        seconds = time.perf_counter() - began
    return result, {"seconds": round(seconds, 3), "growth_gib": peak.most}


def read_plainly(paths: list[Path], threads: int) -> float:
    """Returns the seconds that it takes to read files, each thread into a buffer of its own."""

    def read(path: Path, first: int, behind: int) -> None:
        buffer = memoryview(bytearray(min(CHUNK, behind - first)))
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            while first < behind:
                first += file.readinto(buffer[: behind - first])

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        jobs = []
        for path in paths:
            size = path.stat().st_size
            step = -(-size // threads)
            jobs += [pool.submit(read, path, at, min(at + step, size)) for at in range(0, size, step)]
        for job in jobs:
            job.result()
    return time.perf_counter() - began


def write_plainly(path: Path, size: int) -> float:
    """Returns the seconds that it takes to write so many bytes and to have them on the disk."""
    content = np.random.default_rng(0).integers(0, 255, CHUNK, np.uint8)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, CHUNK):
            file.write(content[: size - at])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def make(folder: Path, model: ModelConfig) -> Weights:
    """Makes a folder of random weights."""
    block = (np.random.default_rng(0).standard_normal(1 << 24) * 0.02).astype(ml_dtypes.bfloat16)
    shapes = {tensor.path: shape for tensor, _, shape in family.published_weights(model)}

    def read(tensor) -> np.ndarray:
        return np.resize(block, shapes[tensor.path])

    write_folder(folder, model, read, lambda tensor: "bfloat16", {"config.json": b"{}"})
    return Weights(folder, model)


def abstract(model: ModelConfig, layout: Layout, dtype: str) -> Any:
    """Returns parameters as they are to lie on the devices."""
    whole = bound(RunConfig(model=model), layout, "auto")
    shapes = jax.eval_shape(whole.init, jax.random.key(0))

    def placed(info, tree):
        return jax.ShapeDtypeStruct(tree.shape, jnp.dtype(dtype), sharding=layout.sharding(info.axes))

    return jax.tree.map(placed, whole.weights, shapes)


def loaded(home: Path, model: ModelConfig, files: list[Path], what: str, rounds: int) -> dict[str, Any]:
    """Returns how long it takes to load what is in the files with this dtype, over and over."""
    plain = {threads: min(read_plainly(files, threads) for _ in range(rounds)) for threads in (1, 4, 8)}
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[0]))
    like, loads = abstract(model, Layout(make_mesh(RunConfig().mesh)), what), []

    def load() -> Any:  # opening and accounting for each tensor are part of it
        return jax.block_until_ready(on_disk.assembled(like, Weights(home, model).array))

    for _ in range(rounds):
        loads.append(measured(load)[1])  # what was loaded goes before the next
    best = min(loads, key=lambda found: found["seconds"])
    return {
        "plain_read_seconds": {str(threads): round(seconds, 3) for threads, seconds in plain.items()},
        "rounds": loads,
        "first_seconds": loads[0]["seconds"],
        "seconds": best["seconds"],
        "over_plain": round(best["seconds"] / plain[1], 3),
        "over_four_threads": round(best["seconds"] / plain[4], 3),
        "over_eight_threads": round(best["seconds"] / plain[8], 3),
        **{f"{kind}_gib": best["growth_gib"].get(name) for kind, name in KINDS.items()},
    }


def written(home: Path, model: ModelConfig, files: list[Path]) -> dict[str, Any]:
    """Returns how long it takes to write what is read, and whether it is the same files."""
    weights, target = Weights(home, model), home / "target"
    shapes = {tensor.path: shape for tensor, _, shape in family.published_weights(model)}
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read(tensor) -> jax.Array:
        like = jax.ShapeDtypeStruct(shapes[tensor.path], jnp.bfloat16, sharding=where)
        return weights.array(tensor.path, like)

    plain = write_plainly(home / "plain", sum(path.stat().st_size for path in files))
    _, found = measured(lambda: write_folder(target, model, read, weights.dtype_of, {}, like=weights.folder))
    return {
        "plain_write_seconds": round(plain, 3),
        **found,
        "over_plain": round(found["seconds"] / plain, 3),
        **{f"{kind}_gib": found["growth_gib"].get(name) for kind, name in KINDS.items()},
        "byte_identical": int(all(filecmp.cmp(path, target / path.name, shallow=False) for path in files)),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what is found of loading, or of writing."""
    xla.configure()
    shape = harness.TINY if arguments.tiny else harness.Shape(layers=32)
    keys = {key: value for key, value in dataclasses.asdict(shape).items() if value}
    model = ModelConfig(**keys, loop=arguments.loop)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "source"
        weights = make(home, model)
        files = [reader.path for reader in weights.folder.files.values()]
        sizes = sorted(info.nbytes for info in weights.folder.tensors.values())
        about = {"what": arguments.what, "bytes": sum(path.stat().st_size for path in files)}
        about |= {"files": len(files), "two_largest_gib": round(sum(sizes[-2:]) / 2**30, 3)}
        if arguments.what == "write":
            return about | written(home, model, files)
        return about | loaded(home, model, files, arguments.what, arguments.rounds)


main = harness.program(
    __doc__,
    measure,
    harness.option("what", choices=("bfloat16", "float32", "write"), help="load as this dtype, or write"),
    harness.option("--tiny", action="store_true", help="a model of few numbers, to try the script"),
    harness.option("--loop", default="scan", choices=("scan", "unroll")),
    harness.option("--rounds", type=int, default=3, help="of loading"),
    config=False,
)


if __name__ == "__main__":
    sys.exit(main())
