"""Token workers that are killed at random: the same tokens to the bit, and memory over time.

    python scripts/bench/measure/worker_kills.py --workers processes ray --output kills.json

The same requests go to the pool over each backend, 16 of them at a time and results in their order, as a
dataloader does. Meanwhile, at random times, one process gets SIGKILL: of `processes` a worker; of `ray`, in
turn, an actor, the raylet (the node), the GCS (the head) and the driver, of a cluster of this machine. What
comes back is compared with what the tokenizer gives for the documents. Private memory is read every few
requests: of this process, which stands for the one that trains, of the token workers, and of Ray's own.

What is expected: equal tokens whatever dies, for tasks are repeated and taken in order; and memory that does
not grow, for a worker has two tasks, and Ray's objects of them go when the tokens have been copied.
"""

import argparse
import collections
import hashlib
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np
import psutil

from jaxthru.data.loading.token_workers import TokenWorkers
from jaxthru.data.store import text_store, token_store
from jaxthru.data.store.chunks import Chunk
from jaxthru.data.store.tokenizer import Tokenizer, train

AT_ONCE, CHUNKS = 16, 64
WORDS = [f"w{number}" for number in range(300)]
RAY = ("ray::Actor", "raylet/raylet", "gcs_server", "ray_driver")
KILLED = {"processes": ("loading.worker",), "ray": RAY}
NAMES = {"ray::Actor": "worker", "loading.worker": "worker", "raylet/raylet": "raylet", "gcs_server": "head"}


def corpus(folder: Path, documents: int = 2000) -> tuple[Path, list[np.ndarray]]:
    """Writes a text store of two sources and their tokenizer; returns its path and each document's tokens."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(50, 1500))) + "\n" for _ in range(documents)]
    train(iter(texts[:100]), 400, folder / "tokenizer.json")
    tokenizer = Tokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode(texts)
    parts = [Chunk(text.encode(), len(each), True) for text, each in zip(texts, ids, strict=True)]
    record = text_store.write_shard(folder / "pages", 0, {"train": parts, "held_out": []}, {})
    token_store.write_manifest(folder / "pages", {"kind": text_store.KIND, "shards": [record]})
    return tokenizer.path, [each.astype(np.int32) for each in ids]


def family() -> dict[str, list[psutil.Process]]:
    """Returns the processes that this one has started, by what they are."""
    found = collections.defaultdict(list)
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        kinds = (kind for kinds in KILLED.values() for kind in kinds if kind in line)
        found[next(kinds, "others")].append(process)
    return found


def megabytes(processes: list[psutil.Process]) -> float:
    """Returns the private memory of processes."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().uss
        except psutil.Error:  # it has just ended
            continue
    return total / 1e6


def measured(backend: str, arguments: argparse.Namespace, folder: Path) -> dict:
    """Returns what one backend did."""
    tokenizer, ids = corpus(folder)
    split = text_store.TextStore(folder / "pages").train
    draw, asked = random.Random(1), collections.deque()
    killing = random.Random(arguments.seed)
    at = sorted(killing.sample(range(AT_ONCE, arguments.requests), arguments.kills))
    kinds = [KILLED[backend][turn % len(KILLED[backend])] for turn in range(arguments.kills)]
    kills, memory, digest, wrong = dict(zip(at, kinds, strict=True)), [], hashlib.sha256(), 0
    began, done = time.perf_counter(), collections.Counter()
    with TokenWorkers(arguments.count, ("a", "b"), tokenizer, backend=backend) as workers:

        def take() -> int:
            chunks, tokens = asked.popleft()
            found = tokens.result()
            digest.update(found.tobytes())
            return not np.array_equal(found, np.concatenate([ids[chunk] for chunk in chunks]))

        for number in range(arguments.requests):
            chunks = draw.sample(range(len(ids)), CHUNKS)
            asked.append((chunks, workers.request("ab"[number % 2], split, np.array(chunks))))
            if len(asked) == AT_ONCE:
                wrong += take()
            if number % 20 == 0:
                workers.expect({"a": draw.random(), "b": draw.random()})
            if number in kills and (victims := family()[kills[number]]):
                time.sleep(killing.random() * 0.2)
                killing.choice(victims).send_signal(signal.SIGKILL)
                done[NAMES.get(kills[number], "driver")] += 1
            if number % (arguments.requests // 20) == 0:
                now = family()
                makers = now.pop("loading.worker", []) + now.pop("ray::Actor", [])
                line = {"requests": number, "trainer_mb": megabytes([psutil.Process()])}
                line |= {"workers": len(makers), "workers_mb": megabytes(makers)}
                memory.append(line | {"ray_mb": megabytes([each for kind in now.values() for each in kind])})
                print({key: round(value) for key, value in memory[-1].items()}, file=sys.stderr, flush=True)
        while asked:
            wrong += take()
        restarts, seconds = workers.restarts, time.perf_counter() - began
        started = [each for kind in family().values() for each in kind]
    _, left = psutil.wait_procs(started, timeout=20)
    return {
        "backend": backend,
        "requests": arguments.requests,
        "wrong": wrong,
        "sha256": digest.hexdigest(),
        "killed": dict(done),
        "restarts": restarts,
        "seconds": seconds,
        "left_behind": len(left),
        "memory": memory,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", choices=tuple(KILLED), default=["processes", "ray"])
    parser.add_argument("--count", type=int, default=2, help="token workers")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of when and whom to kill")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs = []
    for backend in arguments.workers:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(measured(backend, arguments, Path(folder)))
    equal = len({run["sha256"] for run in runs}) == 1 and not any(run["wrong"] for run in runs)
    line = {"benchmark": "worker_kills", "equal": equal, "runs": runs}
    packages = ("numpy", "tokenizers", "ray")
    harness.emit(line | harness.provenance() | {"versions": harness.versions(*packages)}, arguments.output)
    return not equal


if __name__ == "__main__":
    sys.exit(harness.run(main))
