"""Breaks runs at random and says whether anything was lost: `python scripts/faults.py endings --count 200`.

`endings`: runs of 1, 2 and 4 processes end at random moments, half of them within a save, by SIGKILL,
SIGTERM, SIGSTOP, a disk that is full for one process, a damaged checkpoint or killed helpers of the data
plane, and are started again until they have finished. Afterwards their losses and tokens are those of an
undisturbed run (`==`), each step has one row, and no file or process is left that such a run has not.
`checkpoints`: the newest of several, in the run directory and on a local disk, are cut, flipped or robbed of
a file, and the newest whole one is to be found. `inputs`: bad configurations and mixes are refused in one
line. Prints its seed, which makes the same cases again; ends with code 1 if anything was wrong.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def endings(count: int, seed: int, folder: Path, arguments: argparse.Namespace) -> dict:
    from faulting import endings

    return endings(count, seed, folder, arguments.processes)


def checkpoints(count: int, seed: int, folder: Path, arguments: argparse.Namespace) -> dict:
    from faulting_checkpoints import damaged

    return damaged(count, seed, folder)


def inputs(count: int, seed: int, folder: Path, arguments: argparse.Namespace) -> dict:
    from faulting_checkpoints import refused

    return refused(count, seed, folder)


WHAT: dict[str, tuple[Callable, int]] = {
    "endings": (endings, 200),
    "checkpoints": (checkpoints, 200),
    "inputs": (inputs, 300),
}
"""What can be broken: the function, and how often by default."""


def origin() -> dict:
    """Returns on what, of which commit and how this was found. It loads JAX: no fork comes after."""
    import harness

    return harness.provenance() | {"command": shlex.join(["python", *sys.argv]), "cores": os.cpu_count()}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=WHAT)
    parser.add_argument(
        "--count", type=int, help="default: " + ", ".join(f"{n} {w}" for w, (_, n) in WHAT.items())
    )
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of the runs that end")
    parser.add_argument("--output", type=Path, help="a JSON file for what was found")
    arguments = parser.parse_args(argv)
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    call, count = WHAT[arguments.what]
    count = arguments.count or count
    print(f"seed {seed}, {count} {arguments.what}", flush=True)
    # Before JAX is imported: what is started here has the same.
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    folders = ("", "tests", "tests/data", "scripts/bench")
    sys.path[:0] = [str(ROOT / name) for name in folders]
    folder = tempfile.mkdtemp(prefix="jaxthru-faults-")  # no TemporaryDirectory: forked children would end it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
    began = time.monotonic()
    found = call(count, seed, Path(folder), arguments)
    if found["wrong"]:
        print(f"the runs are left in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    found = {"benchmark": "faults", "what": arguments.what, "seed": seed, **found}
    found |= {"minutes": (time.monotonic() - began) / 60} | origin()
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
