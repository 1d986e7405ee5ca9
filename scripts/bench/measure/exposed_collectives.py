"""Says how long collectives kept GPUs from computing, and slowed what they ran beside, from a trace.

    python -m jaxthru.train --config F --set profile.at=20 --set profile.steps=3 --run-dir DIR
    python scripts/bench/measure/exposed_collectives.py DIR/profile/20/production [--output FILE]

A moment is exposed if no kernel computes and a collective runs. Kernels beside a collective are compared with
the median of those of the same name and launch that have none beside them. Prints one JSON line: shares of
the time from the first kernel to the last, for each GPU of this host. That is more than the profiled steps: a
trace takes the next one too, and part of another that has been dispatched by then (4.8 steps for three).
"""

import collections
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import numpy as np
from jax.profiler import ProfileData

from jaxthru.runtime.errors import require

COLLECTIVES = ("nccl", "MemcpyP2P", "MemcpyD2D")  # a permute may be a copy
COPIES = ("Memcpy", "Memset")  # the others wait for the host or take next to nothing


def events(path: Path) -> dict[str, tuple[list, list]]:
    """Returns, for each GPU, (start, end) in ns of its collectives, and those of its other kernels with what
    tells alike ones: (start, end, kind)."""
    found = {}
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        collectives, kernels = found[plane.name.removeprefix("/device:")] = [], []
        for event in (
            event for line in plane.lines if line.name.startswith("Stream") for event in line.events
        ):
            span = event.start_ns, event.start_ns + event.duration_ns
            if event.name.startswith(COLLECTIVES):
                collectives.append(span)
            elif not event.name.startswith(COPIES):
                kernels.append((*span, f"{event.name} {dict(event.stats).get('kernel_details', '')}"))
    return found


def measure(collectives: list[tuple[float, float]], kernels: list[tuple[float, float, str]]) -> dict:
    """Returns shares of the time of one GPU."""
    spans = np.array([kernel[:2] for kernel in kernels], np.float64)
    moves = np.array(collectives, np.float64)
    edges = np.unique([*spans.flat, *moves.flat])
    computing, moving = covered(edges, spans), covered(edges, moves)
    widths, whole = np.diff(edges), edges[-1] - edges[0]
    moved = np.concatenate([[0.0], np.cumsum(widths * moving)])  # until each edge
    takes = spans[:, 1] - spans[:, 0]
    shared = np.diff(np.interp(spans, edges, moved), axis=1)[:, 0]  # of each kernel, beside a collective
    alone = collections.defaultdict(list)
    for (*_, kind), took in zip(np.array(kernels, object)[shared == 0], takes[shared == 0], strict=True):
        alone[kind].append(took)
    beside = [(kernels[at][2], takes[at]) for at in np.flatnonzero(shared > 0.5 * takes)]
    compared = [(took, np.median(alone[kind])) for kind, took in beside if kind in alone]
    share = lambda time: round(float(time) / whole, 4)  # noqa: E731
    return {
        "seconds": round(whole / 1e9, 6),
        "computing": share(widths @ computing),
        "collectives": share(widths @ moving),
        "exposed_collectives": share(widths @ (moving & ~computing)),
        "idle": share(widths @ ~(moving | computing)),
        "beside_collectives": share(sum(took for _, took in beside)),
        "of_which_compared": share(sum(took for took, _ in compared)),
        "slowed_by": share(sum(took - usual for took, usual in compared)),
    }


def covered(edges: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Returns bool [edges - 1], between which edges any of the spans runs."""
    begun, ended = (np.bincount(np.searchsorted(edges, of), minlength=len(edges)) for of in spans.T)
    return np.cumsum(begun - ended)[:-1] > 0


def read(arguments) -> dict:
    path = arguments.trace
    if path.is_dir():
        path = next(iter(sorted(path.rglob("*.xplane.pb"))), path)
    require(path.is_file(), f"{path}: no .xplane.pb there")
    devices = {name: measure(*found) for name, found in events(path).items() if all(found)}
    require(devices, f"{path}: no GPU there ran both collectives and kernels")
    return {"trace": path.name, "devices": devices} | of_run(path)


def of_run(trace: Path) -> dict:
    """Returns the device and the versions of the run whose trace it is; nothing of one that was moved."""
    runs = (folder.parent for folder in trace.absolute().parents if folder.name == "profile")
    known = next(runs, trace) / "environment.json"
    return harness.made_on(json.loads(known.read_text())) if known.is_file() else {}


trace = harness.option("trace", type=Path, help="a .xplane.pb or a folder with one")
main = harness.program(__doc__, read, trace, config=False, elsewhere=True)


if __name__ == "__main__":
    sys.exit(main())
