"""Times loading and writing an 8B folder of published weights, and measures the host memory of both.

Beside it stands plain reading and writing of the same bytes.

    python scripts/bench/published_weights.py --folder EMPTY_DISK --output FILE
    python scripts/bench/published_weights.py --tiny --folder /tmp/somewhere

The weights are random: one block of bfloat16 numbers over and over. All files are in the page cache. Loading
comes three times: `first` compiles what transposes, in this process; of the others the fastest counts. Host
memory is what is anonymous (RssAnon) above the start of each phase, looked at every 5 ms; where a GPU's
runtime pins memory that the system counts elsewhere, VmLck and VmPin beside it say so.
"""

import argparse
import concurrent.futures
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

SHAPE = {
    **{"vocabulary": 128_256, "layers": 32, "embed": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128},
    **{"mlp": 14_336},
}
TINY = {"vocabulary": 1024, "layers": 2, "embed": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 512}
CHUNK = 64 << 20
FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")


def host_memory() -> dict[str, int]:
    """Returns kinds of this process's memory, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 for words in lines if words and words[0][:-1] in FIELDS}


def measured(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what `work` does, its seconds and the most memory that it added, by kind."""
    gc.collect()
    before, peak, stop = host_memory(), {}, threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            for name, size in host_memory().items():
                peak[name] = max(peak.get(name, 0), size - before[name])

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    stop.set()
    thread.join()
    growth = {name: round(size / 2**30, 3) for name, size in peak.items()}
    return result, {"seconds": round(seconds, 3), "growth_gib": growth}


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
        shape = shapes[tensor.path]
        return np.resize(block, shape)

    write_folder(folder, model, read, lambda tensor: "bfloat16", {"config.json": b"{}"})
    return Weights(folder, model)


def abstract(model: ModelConfig, layout: Layout, dtype: str) -> Any:
    """Returns parameters as they are to lie on the devices."""
    whole = bound(RunConfig(model=model), layout, "auto")
    shapes = jax.eval_shape(whole.init, jax.random.key(0))

    def placed(info, tree):
        return jax.ShapeDtypeStruct(tree.shape, jnp.dtype(dtype), sharding=layout.sharding(info.axes))

    return jax.tree.map(placed, whole.weights, shapes)


def load(weights: Weights, like: Any) -> Any:
    return jax.block_until_ready(on_disk.assembled(like, weights.array))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="where 32 GB may be written, in a folder that is removed")
    add("--tiny", action="store_true", help="a model of few numbers, to try the script")
    add("--dtypes", default="bfloat16,float32", help="of the parameters in memory")
    add("--loop", default="scan", choices=("scan", "unroll"))
    add("--rounds", type=int, default=3)
    add("--output", type=Path)
    arguments = parser.parse_args()
    xla.configure()
    model = ModelConfig(**(TINY if arguments.tiny else SHAPE), loop=arguments.loop)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        record = bench(home, model, arguments)
    finally:
        shutil.rmtree(home)
    harness.emit(record, arguments.output)
    return 0


def bench(home: Path, model: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    phases = harness.Phases()
    with phases("make"):
        weights = make(home / "source", model)
    files = [reader.path for reader in weights.folder.files.values()]
    size = sum(path.stat().st_size for path in files)
    largest = sorted(info.nbytes for info in weights.folder.tensors.values())[-2:]
    rounds = range(arguments.rounds)
    with phases("plain reading"):
        plain = {threads: min(read_plainly(files, threads) for _ in rounds) for threads in (1, 4, 8)}
    line = {
        "benchmark": "published_weights",
        "bytes": size,
        "files": len(files),
        "two_largest_gib": round(sum(largest) / 2**30, 3),
        "plain_read_seconds": {str(threads): round(seconds, 3) for threads, seconds in plain.items()},
        "loads": {},
    }
    layout = Layout(make_mesh(RunConfig().mesh))
    jax.block_until_ready(jax.device_put(np.zeros(1), jax.devices()[0]))
    for dtype in arguments.dtypes.split(","):
        like, loads, params = abstract(model, layout, dtype), [], None
        for _ in rounds:
            params = None
            with phases(f"load {dtype}"):
                # Opening and accounting for each tensor are part of it.
                params, found = measured(lambda: load(Weights(home / "source", model), like))  # noqa: B023
            loads.append(found)
        best = min(found["seconds"] for found in loads)
        against = {threads: round(best / seconds, 3) for threads, seconds in plain.items()}
        line["loads"][dtype] = {"rounds": loads, "seconds": best, "against_plain_read": against}
        del params
        if dtype != "bfloat16":
            continue
        with phases("plain writing"):
            line["plain_write_seconds"] = round(write_plainly(home / "plain", size), 3)
        line["write"] = written(home, model, weights, phases)
    print(line, file=sys.stderr, flush=True)  # whatever else fails
    return line | harness.provenance()


def written(home: Path, model: ModelConfig, weights: Weights, phases: harness.Phases) -> dict[str, Any]:
    """Returns how long it takes to write what is read, and whether it is the same files."""
    shapes = {tensor.path: shape for tensor, _, shape in family.published_weights(model)}
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read(tensor) -> jax.Array:
        like = jax.ShapeDtypeStruct(shapes[tensor.path], jnp.bfloat16, sharding=where)
        return weights.array(tensor.path, like)

    def write() -> None:
        write_folder(home / "target", model, read, weights.dtype_of, {}, like=weights.folder)

    with phases("write"):
        _, found = measured(write)
    source, target = ([home / name / file for file in weights.folder.files] for name in ("source", "target"))
    same = all(same_bytes(one, other) for one, other in zip(source, target, strict=True))
    return found | {"byte_identical": same}


def same_bytes(one: Path, other: Path) -> bool:
    with one.open("rb") as a, other.open("rb") as b:
        while part := a.read(CHUNK):
            if part != b.read(CHUNK):
                return False
        return not b.read(1)


if __name__ == "__main__":
    sys.exit(harness.run(main))
