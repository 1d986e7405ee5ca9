"""Says how long copies between host and GPU kept the GPU from computing, from a trace.

    python -m jaxthru.train --config F --set profile.at=6 --set profile.steps=3 --run-dir DIR
    python scripts/bench/exposed_copies.py DIR/profile/6 [--output FILE]

A moment is exposed if no kernel runs on the GPU and a copy from or to host memory does. Prints one JSON line:
shares of the time from the first step's first program to the last step's, so that whole steps count; the GB/s
of the copies while any of their direction runs.
"""

import argparse
import sys
from pathlib import Path

import harness
import numpy as np
from jax.profiler import ProfileData

DIRECTIONS = {"to_device": "MemcpyH2D", "to_host": "MemcpyD2H"}


def events(path: Path) -> tuple[np.ndarray, list[str], dict[str, np.ndarray], dict[str, int]]:
    """Returns the kernels of a GPU as [start, end] in ns and their programs, and the copies by direction and
    their bytes."""
    kernels, programs = [], []
    copies, sizes = {name: [] for name in DIRECTIONS}, dict.fromkeys(DIRECTIONS, 0)
    planes = [plane for plane in ProfileData.from_file(str(path)).planes if plane.name == "/device:GPU:0"]
    for line in (line for plane in planes for line in plane.lines if line.name.startswith("Stream")):
        for event in line.events:
            span = event.start_ns, event.start_ns + event.duration_ns
            direction = next((name for name, copy in DIRECTIONS.items() if copy in event.name), None)
            if direction is None:
                kernels.append(span)
                programs.append(str(dict(event.stats).get("hlo_module", "")))
                continue
            copies[direction].append(span)
            details = str(dict(event.stats).get("memcpy_details", ""))
            sizes[direction] += int(details.partition("size:")[2].split()[0]) if "size:" in details else 0
    return (
        np.array(kernels).reshape(-1, 2),
        programs,
        {name: np.array(spans).reshape(-1, 2) for name, spans in copies.items()},
        sizes,
    )


def union(spans: np.ndarray) -> np.ndarray:
    """Returns spans [N, 2] joined where they touch, in order."""
    joined: list[list[float]] = []
    for start, end in spans[np.argsort(spans[:, 0], kind="stable")]:
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return np.array(joined).reshape(-1, 2)


def clipped(spans: np.ndarray, first: float, last: float) -> np.ndarray:
    """Returns what of the spans lies between two moments."""
    spans = np.clip(spans, first, last)
    return spans[spans[:, 1] > spans[:, 0]]


def length(spans: np.ndarray) -> float:
    return float(np.sum(spans[:, 1] - spans[:, 0]))


def common(a: np.ndarray, b: np.ndarray) -> float:
    """Returns how long spans of both run, each joined before."""
    return length(a) + length(b) - length(union(np.concatenate([a, b])))


def measure(path: Path) -> dict:
    """Returns what the trace of some steps says. Exits if it has no two steps."""
    kernels, programs, copies, sizes = events(path)
    starts = sorted(
        span[0]
        for index, span in enumerate(kernels)
        if programs[index].startswith("jit_begin") and (index == 0 or programs[index - 1] != programs[index])
    )
    if len(starts) < 2:
        sys.exit(f"exposed_copies.py: {path}: holds no whole layered step; trace at least two")
    first, last = starts[0], starts[-1]
    busy = union(clipped(kernels, first, last))
    idle = np.stack([np.r_[first, busy[:, 1]], np.r_[busy[:, 0], last]], axis=1)
    idle = idle[idle[:, 1] > idle[:, 0]]
    directions = {name: union(clipped(spans, first, last)) for name, spans in copies.items()}
    moving = union(np.concatenate(list(directions.values())))
    span = last - first
    return {
        "steps": len(starts) - 1,
        "step_seconds": round(span / (len(starts) - 1) / 1e9, 6),
        "computing": round(length(busy) / span, 4),
        "copying": round(length(moving) / span, 4),
        "exposed_copies": round(common(idle, moving) / span, 4),
        "idle_without_copies": round((length(idle) - common(idle, moving)) / span, 4),
        "gb_per_second_while_copying": {
            name: round(sizes[name] / length(union(copies[name])), 1) if len(copies[name]) else None
            for name in DIRECTIONS
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="a .xplane.pb or a folder with one")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    path = arguments.trace
    if path.is_dir():
        path = next(iter(sorted(path.rglob("*.xplane.pb"))), path)
    if not path.is_file():
        parser.error(f"{path}: no .xplane.pb there")
    line = {"benchmark": "exposed_copies", "trace": path.name, **measure(path)}
    harness.emit(line | {"command": " ".join(["python", *sys.argv])}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
