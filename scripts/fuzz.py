"""Tries thousands of made-up configurations, or mixes of data: `python scripts/fuzz.py config --cases 10000`.

Each must be taken, or refused in one plain line; the tests try sixty. Ends with code 1 and the cases that
were neither, which `--seed` makes again.
"""

import argparse
import collections
import importlib
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
MODULES = {
    "config": "fuzz_configs",
    "data": "fuzz_mixes",
}  # each has `cases(count, seed)`, `check(case, folder)`
SLOW = 10.0  # seconds


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=MODULES)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    sys.path[:0] = [str(TESTS), str(TESTS / "data"), str(TESTS.parent)]
    module = importlib.import_module(MODULES[arguments.what])
    ended, failed = collections.Counter(), 0
    for number, case in enumerate(module.cases(arguments.cases, arguments.seed)):
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = module.check(case, Path(folder))
            assert time.monotonic() - started < SLOW, f"took {time.monotonic() - started:.0f} s"
            ended["accepted" if found == "accepted" else "refused in one line"] += 1
        except Exception:
            failed += 1
            print(f"case {number} of seed {arguments.seed}: {str(case)[:300]}")
            traceback.print_exc(limit=-5, file=sys.stdout)
    print(", ".join(f"{count} {how}" for how, count in ended.items()), f"and {failed} neither")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
