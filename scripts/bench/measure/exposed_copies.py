"""Says how long copies between host and GPU kept the GPU from computing, from a profile.

    python -m jaxthru.train --config F --set profile.at=6 --set profile.steps=3 --run-dir DIR
    python scripts/bench/measure/exposed_copies.py DIR/profile/6 [--output FILE]

A moment is exposed if no kernel runs on the GPU and a copy from or to host memory does: the ledger's line
"exposed host copies", of the first GPU. Prints one JSON line: shares of the profiled steps; the GB/s of the
copies while any of their direction runs.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness

from jaxthru.profile.account.measured import Measured
from jaxthru.profile.account.timeline import HOST_COPIES, assign_owners
from jaxthru.profile.read.xplane import Event
from jaxthru.runtime.errors import require

IDLE = ("data_wait", "host_gap", "dependency")


def running(events: list[Event], start: int, end: int) -> int:
    """Returns for how many nanoseconds between two moments at least one of the events runs."""
    spans = [(event.start, event.end, "exposed_host_copies") for event in events]
    intervals, _ = assign_owners(spans, start, end)
    return sum(piece.end - piece.start for piece in intervals)


def measure(folder: Path) -> dict:
    """Returns what the profile of some steps says. Raises ValueError if it is not one."""
    taken = json.loads((folder / "collected.json").read_text())["passes"]["production"]
    measured = Measured(folder, "production", "step.hlo.txt", taken)
    windows = [window for window in measured.windows if window.device == measured.trace.devices[0]]
    start, end = windows[0].start, windows[-1].end
    lines: dict[str, int] = {}
    for window in windows:
        for piece in window.intervals:
            lines[piece.line] = lines.get(piece.line, 0) + piece.end - piece.start
    exposed, idle = lines.get("exposed_host_copies", 0), sum(lines.get(line, 0) for line in IDLE)
    own = [event for event in measured.trace.events if event.device == windows[0].device]
    own = [event for event in own if start <= event.start < end]
    copies = {name: [event for event in own if event.kind == name] for name in HOST_COPIES}
    moving = sorted((event for of in copies.values() for event in of), key=lambda event: event.start)
    span = end - start
    return {
        "steps": len(windows),
        "step_seconds": round(span / len(windows) / 1e9, 6),
        "computing": round((span - exposed - idle) / span, 4),
        "copying": round(running(moving, start, end) / span, 4),
        "exposed_copies": round(exposed / span, 4),
        "idle_without_copies": round(idle / span, 4),
        "gb_per_second_while_copying": {
            name: round(sum(event.bytes for event in of) / running(of, of[0].start, of[-1].end), 1)
            if of
            else None
            for name, of in copies.items()
        },
    }


def read(arguments) -> dict:
    folder = arguments.profile
    require((folder / "collected.json").is_file(), f"{folder}: no profile there")
    return {"trace": folder.name, **measure(folder)}


profile = harness.option("profile", type=Path, help="a run's profile/<step>")
main = harness.program(__doc__, read, profile, config=False, elsewhere=True)


if __name__ == "__main__":
    sys.exit(main())
