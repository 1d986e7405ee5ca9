"""What a checkpoint costs: how long the loop stands still, and how fast it is written, for each tier.

    python scripts/bench/measure/save_cost.py [--megabytes 300] [--saves 5] [--folder DIR]

A state of so many megabytes, parameters and two moments of layers, is saved in turns to the run directory and
to the local tier, both below the folder, and its bytes as one file beside them, which says what the disk
gives. Prints one JSON line.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp

from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer, LocalTierConfig

LAYERS = 16


def state(megabytes: int, step: int) -> dict:
    """Returns a state of so many bytes: of each layer a matrix, and its two moments."""
    side = round((megabytes * 1e6 / 4 / 3 / LAYERS) ** 0.5)
    matrices = lambda seed: {  # noqa: E731
        f"layer_{number}": jnp.full((side, side), float(seed + number + step)) for number in range(LAYERS)
    }
    moments = {"mu": matrices(100), "nu": matrices(200)}
    return jax.block_until_ready({"step": jnp.int32(step), "params": matrices(0), "opt_state": moments})


def plain(path: Path, content: bytes) -> float:
    """Returns the seconds that it takes to have bytes on the disk as one file."""
    began = time.monotonic()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - began


def told(seconds: list[float], size: int) -> dict:
    """Returns median, best and worst of times, and the bandwidth of the median."""
    middle = statistics.median(seconds)
    return {
        "seconds": round(middle, 4),
        "best": round(min(seconds), 4),
        "worst": round(max(seconds), 4),
        "megabytes_per_second": round(size / middle / 1e6, 1),
    }


def measure(arguments) -> dict:
    stood, wrote, loop = ({"shared": [], "local": []} for _ in range(3))
    files = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        folder = Path(place)
        local = LocalTierConfig(str(folder / "local"))
        config = CheckpointConfig(local=local)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state(arguments.megabytes, 0)))
        with Checkpointer(folder / "shared", config, local=folder / "local") as checkpointer:
            tiers = {"shared": checkpointer._shared, "local": checkpointer._local}
            for number in range(arguments.saves + 1):
                for name, tier in tiers.items():
                    now = state(arguments.megabytes, 2 * number + (name == "local") + 1)
                    began, cpu = time.monotonic(), time.thread_time()
                    checkpointer.save(int(now["step"]), now, {"step": number}, tier)
                    stands, cpu = time.monotonic() - began, time.thread_time() - cpu
                    checkpointer.wait()
                    if number:  # the first makes Orbax's threads
                        stood[name].append(stands)
                        loop[name].append(cpu)
                        wrote[name].append(time.monotonic() - began)
                if number:
                    files.append(plain(folder / "file", os.urandom(1 << 20) * (size >> 20)))
    tiers = {
        name: {
            "stands_still_seconds": round(statistics.median(stood[name]), 4),
            "stands_still_worst": round(max(stood[name]), 4),
            "stands_still_cpu_seconds": round(statistics.median(loop[name]), 4),
            "until_committed": told(wrote[name], size),
        }
        for name in stood
    }
    return {
        "megabytes": round(size / 1e6, 1),
        "arrays": 3 * LAYERS + 1,
        "saves": arguments.saves,
        "tiers": tiers,
        "one_file": told(files, size),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


main = harness.program(
    __doc__,
    measure,
    harness.option("--megabytes", type=int, default=300, help="of the state"),
    harness.option("--saves", type=int, default=5, help="to each tier, after one that does not count"),
    harness.option("--folder", type=Path, default=None, help="on the disk to measure; default: that of /tmp"),
    config=False,
)


if __name__ == "__main__":
    sys.exit(main())
