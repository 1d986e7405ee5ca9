"""Kills a run at random moments, and compares the account of its hours with a clock outside of it.

    python scripts/bench/measure/goodput_kills.py -- python -m jaxthru.train --config quickstart --run-dir DIR

The run is started anew after each kill, and then left to end. Prints the seed, each kill, and what of the
wall time is accounted for; the exit code is 1 if more than 1 % of it is not, or if the account of what lay
between the starts is off the clock's by more than that.
"""

import argparse
import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness

from jaxthru.supervise import run_directory
from jaxthru.training import goodput
from jaxthru.training.supervisor import steps_done

BOUND = 0.01
AT_START = 0.25
"""Share of the kills that fall on any moment of a start; the others fall on steps."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """What the clock says and what the account says, in seconds.

    wall: from the first start until the run last wrote a file; leaving: from then until its process had gone.
    between: the ends of starts that took the run up and the starts that did so next. unknown: of the wall
    time, what no category has.
    """

    seed: int
    kills: int
    wall: float
    wall_booked: float
    leaving: float
    between: float
    between_booked: float
    unknown: float
    starts: int
    goodput: float
    seconds: Mapping[str, float]

    @property
    def off(self) -> dict[str, float]:
        """Returns by which shares of the wall time the account is off."""
        return {
            "wall": abs(self.wall_booked - self.wall) / self.wall,
            "between": abs(self.between_booked - self.between) / self.wall,
            "unknown": abs(self.unknown) / self.wall,
        }


def killed(
    command: Sequence[str], kills: int, seed: int, environment: Mapping[str, str] | None = None
) -> Closed:
    """Returns what came of a run that was killed so often. command: that trains in a fresh run directory."""
    run, draw = Path(run_directory(list(command))), random.Random(seed)
    up: list[tuple[float, float]] = []  # of starts that took the run up: (began, ended)
    usual, first = 10.0, time.time()
    for number in range(kills + 1):
        began, steps, known = time.time(), _rows(run), _starts(run)
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if number < kills:
            if draw.random() < AT_START:
                _wait(process, draw.uniform(0.0, usual))
            else:
                while _rows(run) == steps and process.poll() is None:
                    time.sleep(0.005)
                usual = time.time() - began
                _wait(process, draw.uniform(0.0, 0.3 * usual))
            process.kill()
        said = process.communicate()[1].decode(errors="replace")
        ended = time.time()
        if process.returncode not in (0, -9):
            raise RuntimeError(f"exit code {process.returncode}: {said[-2000:]}")
        if _starts(run) > known:
            up.append((began, ended))
        if number < kills:
            print(
                f"kill {number + 1}: {ended - began:.1f} s after the start, step {steps_done(run)}",
                flush=True,
            )
        if process.returncode == 0:
            break
    account = goodput.account(run)
    wrote = max(path.stat().st_mtime for path in run.iterdir() if path.is_file())
    between = sum(after[0] - before[1] for before, after in itertools.pairwise(up))
    return Closed(
        seed=seed,
        kills=number,
        wall=wrote - (up[0][0] if up else first),
        wall_booked=account.wall,
        leaving=ended - wrote,
        between=between,
        between_booked=account.seconds.get(goodput.RECOVERY, 0.0),
        unknown=account.seconds.get(goodput.OTHER, 0.0),
        starts=len(account.starts),
        goodput=account.goodput,
        seconds={name: round(seconds, 2) for name, seconds in account.seconds.items()},
    )


def _wait(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _rows(run: Path) -> tuple[int, int] | None:
    """Returns what changes with each row, and as a run that is resumed replaces the file."""
    try:
        stat = (run / "metrics.jsonl").stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size


def _starts(run: Path) -> int:
    try:
        return (run / goodput.FILE).read_bytes().count(b'"event": "start"')
    except OSError:
        return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="default %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the line there")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)), help="default: a new one")
    arguments, command = parser.parse_args(words[:split]), words[split + 1 :]
    if not command:
        parser.error("give the training command after --")
    print(f"seed {arguments.seed}", flush=True)
    found = killed(command, arguments.kills, arguments.seed)
    line = {"benchmark": "goodput_kills"} | dataclasses.asdict(found) | {"off": found.off}
    versions = {"versions": harness.versions("jax", "jaxlib", "numpy", "orbax-checkpoint")}
    harness.emit(line | harness.provenance() | versions, arguments.output)
    return 1 if max(found.off.values()) > BOUND else 0


if __name__ == "__main__":
    sys.exit(main())
