"""Do two commits compute the same numbers? `python scripts/golden.py compare OLD NEW` (`.`: files as here).

Trains each configuration of tests/recording.py for 20 steps with either commit, on eight CPU devices of this
machine, and compares losses, gradients and weights. `keep` writes what tests/training/test_golden.py expects.
"""

import argparse
import contextlib
import fnmatch
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # behind the commit that PYTHONPATH names

from conftest import EIGHT_DEVICES, UNOPTIMISED  # noqa: E402
from recording import (  # noqa: E402
    CASES,
    KEPT,
    STEPS,
    Arrays,
    first_gradients,
    kept,
    precision,
    train,
    words_of,
)

REASONS: dict[str, str] = {
    "*": "first gradients and norm are ==; XLA fuses the update of the embedding otherwise, and rounds a "
    "multiply-add once instead of twice"
}
"""Pattern of names (`fnmatch`) -> why these may differ in their last bits. A difference without one fails."""


def record(path: Path, names: list[str]) -> None:
    """Writes what each case gives to an .npz, as `case|kind|name`, and where the code lies."""
    # An editable install would find in its own tree what another commit does not have.
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
    import jaxthru

    found: Arrays = {"from": np.asarray(jaxthru.__file__)}
    for name in names:
        began = time.monotonic()
        words = words_of(name)
        losses, norms, weights = train(words, STEPS, (0, STEPS))
        kinds = {
            "losses": {"": losses},
            "norms": {"": norms},
            "first weights": weights[0],
            "weights": weights[STEPS],
            "gradients": first_gradients(words),
        }
        found |= {f"{name}|{kind}|{leaf}": a for kind, leaves in kinds.items() for leaf, a in leaves.items()}
        print(f"{time.monotonic() - began:6.1f} s  {losses[-1]:.4f}  {name}", flush=True)
    np.savez(path, **found)


def difference(old: np.ndarray, new: np.ndarray) -> float:
    """Returns the greatest difference in units of the greatest value; infinity if one is not finite."""
    if np.array_equal(old, new):
        return 0.0
    if old.shape != new.shape or not (np.isfinite(old).all() and np.isfinite(new).all()):
        return math.inf
    greatest = float(np.abs(old).max())
    return float(np.abs(old - new).max()) / greatest if greatest else math.inf


ROUNDED = {"first weights": 1e-6, "gradients": 1e-5, "losses": 1e-4}
BARS = {
    "float32": {"first weights": 1e-6, "losses 1-3": 1e-6, "loss 20": 1e-5},
    "state": ROUNDED,
    "products": ROUNDED,
}
"""`precision` of a case -> the greatest relative differences that pass, with a reason. Of other kinds any
passes."""
SHOWN = ("losses 1-3", "loss 20", "losses", "norms", "first weights", "gradients", "weights")


def differences(name: str, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the greatest relative difference of each kind, by one leaf or by one step."""
    found = dict.fromkeys(SHOWN, 0.0)
    keys = [key for key in {*old, *new} if key.startswith(f"{name}|")]
    for key in keys:
        kind = key.split("|")[1]
        both = key in old and key in new
        found[kind] = max(found[kind], difference(old[key], new[key]) if both else math.inf)
    losses = [side[f"{name}|losses|"] for side in (old, new)]
    by_step = [difference(*(side[step : step + 1] for side in losses)) for step in range(STEPS)]
    return found | {"losses 1-3": max(by_step[:3]), "loss 20": by_step[-1], "losses": max(by_step)}


def judged(name: str, found: dict[str, float]) -> dict[str, Any]:
    """Returns a row of the table: the differences, the reason for them, and what is wrong, if anything."""
    kind_of_case = precision(words_of(name))
    bars = BARS[kind_of_case].items()
    wrong = [f"{kind} {found[kind]:.1e} > {bar:.0e}" for kind, bar in bars if found[kind] > bar]
    reason = None
    if any(found.values()):
        reason = next((why for pattern, why in REASONS.items() if fnmatch.fnmatchcase(name, pattern)), None)
        wrong += [] if reason else ["REASONS has none for it"]
    return {"name": name, "precision": kind_of_case, **found, "reason": reason, "wrong": wrong}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown."""
    lines = ["| configuration | " + " | ".join(SHOWN) + " | |", "|:--|" + "--:|" * len(SHOWN) + ":--|"]
    for row in rows:
        cells = ["==" if not row[kind] else f"{row[kind]:.1e}" for kind in SHOWN]
        said = "FAIL: " + ", ".join(row["wrong"]) if row["wrong"] else row["reason"] or "=="
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {said} |")
    return "\n".join(lines)


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextlib.contextmanager
def tree_of(commit: str, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields where the files of a commit lie, and its full name. `.` is the working tree."""
    if commit == ".":
        changed = git("status", "--porcelain", "--", "jaxthru", "pallas_kernels")
        yield ROOT, git("rev-parse", "HEAD") + (" and changes since" if changed else "")
        return
    full = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    git("worktree", "add", "--detach", str(folder), full)
    try:
        yield folder, full
    finally:
        git("worktree", "remove", "--force", str(folder))


def recorded(tree: Path, folder: Path, names: list[str]) -> Arrays:
    """Returns what `record` writes with the code of a tree. folder: for what is made on the way."""
    path = folder / "recorded.npz"
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "XLA_FLAGS": "",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # never what the other side has compiled
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, __file__, "record", str(path), "--only", *names]
    subprocess.run(command, env=environment, cwd=folder, check=True)
    with np.load(path) as file:
        found = dict(file)
    used = Path(str(found.pop("from")))
    assert used.is_relative_to(tree), f"asked for {tree}, imported {used}"
    return found


def compare(old: str, new: str, names: list[str], path: Path | None) -> int:
    """Prints how two commits differ and writes it as JSON; returns 1 if they differ by more than may be."""
    sides, commits, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, commit in enumerate((old, new)):
            made = Path(folder, str(number))
            made.mkdir()
            began = time.monotonic()
            with tree_of(commit, made / "tree") as (tree, full):
                print(f"{commit} ({full})", flush=True)
                sides.append(recorded(tree, made, names))
            commits.append(full)
            seconds.append(round(time.monotonic() - began, 1))
    rows = [judged(name, differences(name, *sides)) for name in names]
    failed = [row["name"] for row in rows if row["wrong"]]
    equal = sum(not any(row[kind] for kind in SHOWN) for row in rows)
    print(table(rows))
    within = len(rows) - equal - len(failed)
    print(f"{len(rows)} configurations: {equal} ==, {within} within bars, {len(failed)} failed")
    if path:
        about = {
            "benchmark": "golden",
            "device": {"kind": f"8 CPU devices on {os.cpu_count()} cores, {platform.machine()}"},
            "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "numpy": np.__version__}
            | {"python": platform.python_version()},
            "old_commit": commits[0],
            "commit": commits[1],
            "command": shlex.join(["python", *sys.argv]),
            "seconds": seconds,
        }
        rows = [{k: str(v) if v == math.inf else v for k, v in row.items()} for row in rows]
        path.write_text(json.dumps(about | {"bars": BARS, "failed": failed, "rows": rows}, indent=1) + "\n")
    return int(bool(failed))


def keep(names: list[str]) -> None:
    """Writes KEPT anew for these cases."""
    found = dict(np.load(KEPT)) if KEPT.exists() else {}
    found = {key: array for key, array in found.items() if key.split("|")[0] in CASES}
    for name in names:
        print(name, flush=True)
        found |= {f"{name}|{key}": array for key, array in kept(name).items()}
    np.savez_compressed(KEPT, **found)


def on_cpu_devices(flags: str) -> None:
    """Gives this process eight CPU devices, and XLA these flags: before the first is touched."""
    os.environ["XLA_FLAGS"] = flags
    jax.config.update("jax_platforms", "cpu")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    add = commands.add_parser(
        "record", parents=[only], help="write what the imported jaxthru gives to an .npz"
    )
    add.add_argument("file", type=Path)
    add = commands.add_parser(
        "compare", parents=[only], help="record two commits in turn; code 1 if they differ"
    )
    add.add_argument("old")
    add.add_argument("new")
    add.add_argument("--json", type=Path)
    commands.add_parser("keep", parents=[only], help=f"write {KEPT.relative_to(ROOT)}, compiled as tests are")
    given = parser.parse_args(argv)
    if given.command == "compare":
        return compare(given.old, given.new, given.only, given.json)
    if given.command == "record":
        on_cpu_devices(EIGHT_DEVICES)
        record(given.file, given.only)
    else:
        on_cpu_devices(f"{EIGHT_DEVICES} {UNOPTIMISED}")
        keep(given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
