"""What opening data costs a process, and its first batch: seconds, private memory, files; one JSON line.

    python scripts/bench/measure/opening.py FOLDER --documents 1e9 [--sequence 4096] [--packing split]
    python scripts/bench/measure/opening.py FOLDER --sources 3000

--documents: one source of so many documents in shards as `prepare` writes them, simulated: all shards are
one real file, whose tokens take no room on disk. --sources: of a mix, each a small store of its own. FOLDER
is made if missing; the packing is made once, before anything is timed, and what that took is said. Each
opening is a process of its own that has imported what it needs; the median of --turns counts. Private memory
is what no other process has: at the import, once opened, and with the first batch, of which the pages of
files that are mapped are part; anonymous memory, after --steps batches, is that without them.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np
from measure.loading import processor

from jaxthru.data.loading.dataset import DataConfig, open_data, prepare_data
from jaxthru.data.store import flat_file, token_store

SHARD_TOKENS = 1 << 24
"""About what 64 MB of text are, of which `prepare` makes a shard."""
MEAN = 960
"""Tokens of a document, on average: as of pages of the web."""
RECORDS = 24
"""In a source of a mix of many."""


def one_source(folder: Path) -> tuple[str, str]:
    """Writes the mix of one small real source, prepares it, and returns the head of the mix and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = (
        json.dumps({"text": f"record {number} of a small source " * (1 + number % 9)})
        for number in range(RECORDS)
    )
    (folder / "one.jsonl").write_text("\n".join(texts) + "\n")
    head = "held_out = 0.1\n[tokenizer]\nvocabulary = 300\n"
    write_mix(folder / "one.toml", head, 1)
    [key] = prepare_data(DataConfig(str(folder / "one.toml"), 64, store=str(folder / "store"))).values()
    return head, key


def write_mix(path: Path, head: str, sources: int) -> None:
    keys = 'recipe = "local_jsonl"\npaths = ["one.jsonl"]\nweight = '
    path.write_text(head + "".join(f"[sources.s{at}]\n{keys}{1 + at % 5}\n" for at in range(sources)))


def make_sources(folder: Path, sources: int) -> None:
    """Makes a mix of so many sources, each with files of its own."""
    head, key = one_source(folder)
    for number in range(1, sources):
        shutil.copytree(folder / "store" / f"s0-{key}", folder / "store" / f"s{number}-{key}")
    write_mix(folder / "mix.toml", head, sources)
    (folder / "keys.json").write_text(json.dumps({f"s{number}": key for number in range(sources)}))


def make_documents(folder: Path, documents: int) -> None:
    """Makes a store of at least so many documents."""
    head, key = one_source(folder)
    store = folder / "store" / f"s0-{key}"
    manifest = token_store.read_manifest(store)
    shutil.rmtree(store)
    store.mkdir()
    draw = np.random.default_rng(0)
    lengths = np.maximum(2, draw.lognormal(np.log(MEAN) - 0.5, 1.0, SHARD_TOKENS // MEAN)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tobytes()
    size = np.dtype(manifest["dtype"]).itemsize * int(lengths.sum())
    block, rest = flat_file.BLOCK, size % flat_file.BLOCK
    crc32 = [zlib.crc32(bytes(block))] * (size // block) + ([zlib.crc32(bytes(rest))] if rest else [])
    with (store / "tokens").open("wb") as file:
        file.truncate(size)
    for name, content in {"offsets": offsets, "none": b"", "empty": bytes(8)}.items():
        (store / name).write_bytes(content)
    train = {"documents": len(lengths), "tokens": int(lengths.sum()), "tokens_crc32": crc32}
    train |= {"offsets_crc32": zlib.crc32(offsets)}
    held_out = {"documents": 0, "tokens": 0, "tokens_crc32": [], "offsets_crc32": zlib.crc32(bytes(8))}
    record = {"read": len(lengths), "bytes": 64_000_000, "damaged": 0, "damage": []}
    record |= {"splits": {"train": train, "held_out": held_out}}
    shards = -(-documents // len(lengths))
    links = {"train-{:05d}.tokens": "tokens", "train-{:05d}.offsets": "offsets"}
    links |= {"held_out-{:05d}.tokens": "none", "held_out-{:05d}.offsets": "empty"}
    for number in range(shards):
        for name, target in links.items():
            (store / name.format(number)).symlink_to(target)
    token_store.write_manifest(store, manifest | {"shards": [record] * shards})
    write_mix(folder / "mix.toml", head, 1)
    (folder / "keys.json").write_text(json.dumps({"s0": key}))


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = arguments.folder
    how = {"sequence": arguments.sequence, "packing": arguments.packing}
    return {"mix": str(folder / "mix.toml"), "store": str(folder / "store")} | how


def kilobytes(file: str, name: str) -> int:
    """Returns a number of this process that the system gives in kB."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def opened(arguments: argparse.Namespace) -> dict[str, Any]:
    """Opens the data in this process, builds a batch, and returns what both cost."""
    import psutil

    process = psutil.Process()
    imported = process.memory_full_info().uss
    cpu, began = time.process_time(), time.perf_counter()
    keys = json.loads((arguments.folder / "keys.json").read_text())
    data = open_data(DataConfig(**config(arguments)), prepare=False, begun=keys)
    opened_cpu, opened_at, memory = time.process_time(), time.perf_counter(), process.memory_full_info().uss
    planner = data.planner(((0, data.mixture),), seed=0, rows=arguments.rows, cost=(12 * 4096, 1))
    plan = planner.plan(0)
    batch = data.builder.build(plan.source, plan.row)
    first_cpu, first, private = time.process_time(), time.perf_counter(), process.memory_full_info().uss
    assert batch["tokens"].shape == (arguments.rows, arguments.sequence)
    for step in range(1, arguments.steps):
        plan = planner.plan(step)
        data.builder.build(plan.source, plan.row)
    took = time.perf_counter() - first
    return {
        "open_seconds": opened_at - began,
        "open_cpu_seconds": opened_cpu - cpu,
        "first_batch_seconds": first - began,
        "first_batch_cpu_seconds": first_cpu - cpu,
        "later_batch_ms": 1e3 * took / max(arguments.steps - 1, 1),
        "imported_mb": imported / 1e6,
        "opened_mb": memory / 1e6,
        "private_mb": private / 1e6,
        "anonymous_mb": kilobytes("smaps_rollup", "Anonymous") / 1e3,
        "open_files": process.num_fds(),
        "memory_maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "documents": sum(packed.documents for _, packed in data.train),
        "rows": sum(packed.rows for _, packed in data.train),
        "tokens": sum(data.tokens.values()),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the median of what openings cost."""
    harness.need("psutil")
    if arguments.one:
        return opened(arguments)
    if arguments.tiny:
        arguments.documents, arguments.sources = min(arguments.documents, 1e5), min(arguments.sources, 20)
        arguments.turns = 1
    made = arguments.folder / "keys.json"
    if not made.is_file():
        if arguments.documents:
            make_documents(arguments.folder, int(arguments.documents))
        else:
            make_sources(arguments.folder, arguments.sources)
    cpu, began = time.process_time(), time.perf_counter()
    open_data(DataConfig(**config(arguments)), prepare=False, begun=json.loads(made.read_text())).close()
    packing = {"made_seconds": time.perf_counter() - began, "made_cpu_seconds": time.process_time() - cpu}
    files = (arguments.folder / "store").glob(f"*/*.{arguments.packing}-{arguments.sequence}.columns")
    kept = sum(path.stat().st_size for path in files)
    turns = []
    for _ in range(arguments.turns):
        told = subprocess.run([sys.executable, *sys.argv, "--one"], stdout=subprocess.PIPE, check=True)
        turns.append(json.loads(told.stdout))
    numbers = {name: values for name, values in turns[0].items() if isinstance(values, int | float)}
    found = {name: statistics.median(turn[name] for turn in turns) for name in numbers}
    versions, device = harness.versions("jaxthru", "numpy"), {"kind": processor(), "count": os.cpu_count()}
    about = {
        "device": device,
        "sequence": arguments.sequence,
        "packing": arguments.packing,
        "turns": arguments.turns,
    }
    about |= {"cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg(), "versions": versions}
    return about | found | packing | {"kept_bytes": kept, "commit": harness.commit()}


option = harness.option
main = harness.program(
    __doc__,
    measure,
    option("folder", type=Path),
    option("--documents", type=float, default=0, help="of one source"),
    option("--sources", type=int, default=0, help="of a mix"),
    option("--sequence", type=int, default=4096),
    option("--packing", choices=("split", "best_fit"), default="split"),
    option("--rows", type=int, default=64, help="of a batch"),
    option("--steps", type=int, default=50, help="batches that are built"),
    option("--turns", type=int, default=3, help="processes that open it, one after the other"),
    option("--one", action="store_true", help="open it in this process"),
    option("--tiny", action="store_true", help="a small one: does it run?"),
    config=False,
    elsewhere=True,
)


if __name__ == "__main__":
    sys.exit(main())
