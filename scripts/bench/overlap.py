"""Everything that GPUs have to show of overlapped collectives, in the order of what matters most.

    python scripts/bench/overlap.py --output DIR [--devices 2] [--stop-after SECONDS] [--rows a,b,...]
    python scripts/bench/overlap.py --output DIR --tiny      # on two forced CPU devices, to try it

Each row (overlap_rows.py) runs in a process of its own, which is killed with all that it started when its
time is up, and is written to DIR/ROW.json when it ends. The same command goes on with rows that failed or
have not run; none is started that is not expected to end before SECONDS, and none goes on after. Where a
safety row has not passed, those with kernels that wait for their peers are left out, and the others run.
Those of them that failed come last the next time. `tune` leaves its table in DIR as well, and until `tuned`
has run a call puts it in place: it may be in another copy of the tree, on another machine.
Prints what the bars (overlap_bars.py) make of the finished rows.
"""

import argparse
import concurrent.futures
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

import blocks
import harness
from overlap_bars import table
from overlap_rows import Row, rows_for

from pallas_kernels.collective_matmul.tiles import TABLE_FILE


def kept(folder: Path, name: str) -> dict:
    """Returns what a row's file says, empty without one."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def said(folder: Path, name: str) -> list[dict] | None:
    """Returns what a row's processes printed; of one that did not end well, the cases measured."""
    cases = folder / f"collective_matmul_{name}.json"
    return kept(folder, name).get("said") or ([json.loads(cases.read_text())] if cases.exists() else None)


def refuses(name: str, rows: dict[str, Row], folder: Path) -> str:
    """Returns why a row is not to run now, empty if it is."""
    row = rows[name]
    if row.instead_of:
        other, waits = kept(folder, row.instead_of), refuses(row.instead_of, rows, folder)
        return "" if "error" in other or waits else f"{row.instead_of} stands for it"
    before = list(rows)[: list(rows).index(name)]
    failed = [of for of in before if rows[of].safety and "said" not in kept(folder, of)]
    return f"{', '.join(failed)} did not pass" if row.waits and failed else ""


def run(row: Row, devices: int, tiny: bool, limit: float) -> dict:
    """Runs a row for so many seconds at most; returns {"said": what each of its processes printed last} or
    {"error": ...}."""
    alone = row.alone or len(row.commands) > 1
    setup = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}'
    # Where CUDA loads all code at its start, that takes more.
    setup += "; export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.9}"
    if tiny:
        forced = f"--xla_force_host_platform_device_count={1 if alone else devices}"
        # Where other work keeps the cores busy, programs of two devices wait for each other for ever in as
        # few threads as there are cores: NPROC is how many XLA makes.
        setup += f"; export NPROC=16 JAX_PLATFORMS=cpu XLA_FLAGS={forced}"

    def block(number: int) -> dict:
        names = blocks.visible(devices)
        gpus = names[number] if alone else ",".join(names)
        return blocks.run_block(["bash", "-c", f"{setup}; {row.commands[number]}"], gpus, limit)

    with concurrent.futures.ThreadPoolExecutor(len(row.commands)) as pool:
        outcomes = list(pool.map(block, range(len(row.commands))))
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    return {"error": "; ".join(errors)} if errors else {"said": [outcome["line"] for outcome in outcomes]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="a file for each row; those of finished ones stay",
    )
    add("--devices", type=int, default=2, help="GPUs of this host")
    add("--rows", help="only these, with commas between them")
    add("--stop-after", type=float, default=float("inf"), metavar="SECONDS")
    add("--config", default=str(blocks.ROOT / "configs" / "llama3_8b_8layer.py"))
    add(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="GROUP.KEY=VALUE",
        help="for all training",
    )
    add("--tiny", action="store_true", help="small, on CPU devices")
    arguments = parser.parse_args()
    devices, folder = arguments.devices, arguments.output
    rows = rows_for(devices, arguments.tiny, arguments.config, arguments.settings, folder)
    names = blocks.chosen(parser, "--rows", arguments.rows or ",".join(rows), list(rows))
    folder.mkdir(parents=True, exist_ok=True)
    table_found = folder / TABLE_FILE.name
    if table_found.exists() and "said" not in kept(folder, "tuned"):
        shutil.copy(table_found, TABLE_FILE)
    # What hung may hang again.
    names.sort(key=lambda name: rows[name].waits and not rows[name].safety and "error" in kept(folder, name))
    began = time.monotonic()
    for name in names:
        row, now = rows[name], time.monotonic() - began
        if "said" in kept(folder, name):
            continue
        if why := refuses(name, rows, folder):
            print(f"{now:4.0f} s  {name}: left out, {why}", flush=True)
            continue
        if now + row.seconds > arguments.stop_after:
            print(f"{now:4.0f} s  {name}: not started, takes about {row.seconds:.0f} s", flush=True)
            continue
        print(f"{now:4.0f} s  {name} ...", flush=True)
        outcome = run(row, devices, arguments.tiny, min(row.limit, arguments.stop_after - now))
        took = time.monotonic() - began - now
        outcome |= {"seconds": round(took, 1), "commands": row.commands, "commit": harness.commit()}
        harness.write(outcome, folder / f"{name}.json")
        if name in ("tune", "tune_model"):  # also what an attempt that was cut short has found
            shutil.copy(TABLE_FILE, folder)
        print(f"        {name}, {took:.0f} s: {outcome.get('error', 'done')}", flush=True)
    print(table({name: said(folder, name) for name in rows}, devices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
