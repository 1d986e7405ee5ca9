"""Measures the rows of a suite that have no record yet, and tells which of their bars are met.

    python scripts/bench/suite.py every_shape --list
    python scripts/bench/suite.py every_shape [--rows A,B] [--output DIR] [--stop-after SECONDS]
    python scripts/bench/suite.py every_shape --table

A suite is a file of suites/ with ROWS. Each contender of a row runs in a process of its own. A row's record
is DIR/<suite>_<row>.json, written after each of them, so that the same command goes on where one was cut
short. With --stop-after nothing is begun that would not end by then, by its estimate. What blocks compile and
tune is kept in a folder (--compiled), so that of two blocks of a contender the second starts warm. --tiny
runs rows as small ones on a CPU, to see that they work. On a host with several GPUs, CUDA_VISIBLE_DEVICES
says which a command takes: two commands with other --rows, and one --output, share the work.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import blocks
import comparison
import data_corpus
import harness
from suites.rows import GEMM, Block, Row, Setup, gemm_command

from jaxthru.runtime import xla

LIMIT = 560.0  # seconds of a block: a command on a GPU machine has 600
LATE = "took more than"  # how `blocks.run_block` begins to tell of one that was ended
SUITES = sorted(path.stem for path in (blocks.HERE / "suites").glob("*.py") if "ROWS" in path.read_text())
RESULTS = blocks.HERE / "results"
CORPUS = blocks.ROOT / "build" / "functions"
COMPILED = blocks.ROOT / "build" / "compiled"
CACHES = {
    "JAX_COMPILATION_CACHE_DIR": "jax",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",  # DeepSpeed's CPUAdam
    "CUDA_CACHE_PATH": "cuda",
}
"""{a variable that names a cache of compiled programs: its folder in --compiled}."""
KEPT = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
MARKS = {True: "met", False: "**missed**", None: "not run"}


def new_record(name: str, row: Row, setup: Setup) -> dict:
    """Returns the record of a row of which nothing has run."""
    about = {"benchmark": setup.suite, "row": name, "about": row.about, "tiny": setup.tiny}
    return about | {"commit": setup.commit, "settings": setup.settings(row), "blocks": []}


def check_same(record: dict, new: dict, path: Path) -> None:
    """Exits if a record that is to go on is of another commit, size or shape than the new one."""
    for key in ("commit", "tiny", "settings"):
        if record[key] != new[key]:
            said = f"{path}: unfinished, and its {key} is {record[key]!r}, not {new[key]!r}"
            sys.exit(f"suite.py: {said}; move it away, or give another --output")


def complete(record: dict, row: Row, setup: Setup) -> None:
    """Adds to a record what its blocks show, and where they come from."""
    done = record["blocks"]
    for line in (block["line"] for block in done if "line" in block):
        for key in ("device", "versions"):
            if key in line:
                record.setdefault(key, line[key])
    record["command"] = harness.command()
    products = [block for block in done if block["contender"] in GEMM and "line" in block]
    record["sustained_tflops"] = {block["contender"]: block["line"]["tflops"] for block in products}
    record["found"] = found = row.found(setup, done)
    record["blocks_left"] = len(row.left(done))
    record["bars"] = [
        {"asked": bar.asked(), "found": found.get(bar.what), "met": bar.met(found), "said": bar.said}
        for bar in row.bars
    ]


def measure(record: dict, row: Row, setup: Setup, path: Path, ends: float) -> bool:
    """Runs the blocks that a record lacks, and writes it after each; says whether none is left.

    ends: on the clock of `time.monotonic`, when all has to have ended.
    """
    gpus = blocks.visible(row.gpus)
    while left := row.left(record["blocks"]):
        group = [block for block in left if block.group and block.group == left[0].group] or left[:1]
        if time.monotonic() + max(block.seconds for block in group) > ends:
            return False
        on = gpus if group[0].group else [",".join(gpus)]
        here = dataclasses.replace(setup, done=tuple(record["blocks"]))
        # Made one after the other: those of a group may write the same file for what they read.
        commands = [
            gemm_command(block.name, here) if block.name in GEMM else row.command(block.name, here)
            for block, _ in zip(group, on, strict=False)
        ]

        limit = min(LIMIT, ends - time.monotonic())

        def run(block: Block, command: list[str], gpu: str, limit: float = limit) -> dict:
            return blocks.block_of(block.name, block.turn, command, gpu, limit)

        with concurrent.futures.ThreadPoolExecutor(len(on)) as pool:
            each = pool.map if len(on) > 1 else map  # in this thread a signal ends a block
            try:
                ran = list(each(run, group, commands, on))  # of a group, as many at once as there are GPUs
            except (SystemExit, KeyboardInterrupt):
                if len(on) > 1:  # the pool's threads would wait for blocks, which end with this process
                    harness.end(143)
                raise
        # What has had less time than a block may have has not failed: the next command runs it.
        late = [block for block in ran if limit < LIMIT and block.get("error", "").startswith(LATE)]
        for block in ran:
            if block not in late:
                blocks.keep(record, block)
        complete(record, row, setup)
        harness.write(record, path)
        if late:
            return False
    return True


def run(rows: dict[str, Row], setup: Setup, ends: float, retry: bool) -> None:
    """Measures rows until all have their record, or the time is over. retry: failed blocks once more."""
    for name, row in rows.items():
        path, record = setup.path(name), new_record(name, row, setup)
        if path.exists():
            new, record = record, json.loads(path.read_text())
            if record["blocks_left"] == 0 and not retry:
                continue
            check_same(record, new, path)
        if why := row.refuses(setup):
            print(f"{name}: left out, {why}")
            continue
        if retry:
            record["blocks"] = [block for block in record["blocks"] if "line" in block]
        if not measure(record, row, setup, path, ends):
            print(f"{name}: {len(row.left(record['blocks']))} blocks left: run the same command again")
            return


def keep_compiled(folder: Path) -> None:
    """Has blocks keep what they compile in `folder`, apart for each kind of processor, but for the caches
    that the environment names."""
    own = folder.absolute() / xla.processor()
    for variable, value in (KEPT | {key: str(own / name) for key, name in CACHES.items()}).items():
        os.environ.setdefault(variable, value)


def listed(rows: dict[str, Row]) -> str:
    """Returns the rows with their bars, what runs for them and the seconds that it takes, in Markdown."""
    lines, total = [], 0.0
    for name, row in rows.items():
        left = row.left([])
        seconds = sum(block.seconds for block in left)
        total += seconds
        names = ", ".join(dict.fromkeys(block.name for block in left if block.name not in GEMM))
        bars = "; ".join(bar.asked() for bar in row.bars)
        lines.append([name, row.about, bars, names, f"{seconds:,.0f}"])
    head = ("row", "what", "bar", "contenders", "about s")
    return comparison.markdown(head, [*lines, ["all", "", "", "", f"{total:,.0f}"]])


def table(rows: dict[str, Row], setup: Setup) -> str:
    """Returns what the records in a folder say of the bars, in Markdown."""
    lines = []
    for name, row in rows.items():
        path = setup.path(name)
        record = json.loads(path.read_text()) if path.exists() else {}
        found = record.get("found", {})
        for number, bar in enumerate(row.bars):
            value, mark = found.get(bar.what), MARKS[bar.met(found)]
            if value is not None and record.get("blocks_left"):
                mark = f"unfinished: {record['blocks_left']} blocks left"
            if record and not record["commit"]:
                mark += ", of a commit that is not known"
            if record.get("tiny"):
                mark += ", on a tiny shape"
            if once := found.get("once"):
                mark += f"; 1 block: {', '.join(once)}"
            cells = ["" if number else row.about, bar.asked(), told(bar.what, value, found)]
            cells += [comparison.shown(found.get("spread"), ".2%"), mark]
            lines.append(cells)
    return comparison.markdown(("shape", "bar", "found", "A-A", ""), lines)


FORMS = {
    "ratio": "{:.3f} ×",
    "tokens_per_second": "{:,.0f} tokens/s",
    "over_guide": "{:.3f} ×",
    "first": "{:.1f} s",
    "second": "{:.1f} s",
}
FORMS |= {"slowest": "{:.3f} ×", "share_of_card": "{:.1%}", "slower": "{:.1%} slower", "mfu": "{:.1%}"}
FORMS |= {"peak_hbm_gib": "{:.1f} GiB", "host_gib": "{:.1f} GiB", "falls": "{:.3f}"}
FORMS |= {"gain_over_predicted": "{:.1%}", "prediction_error": "{:.1%}", "data_wait": "{:.2%}"}


def told(what: str, value: float | None, found: dict) -> str:
    """Returns what was found of a bar, for people; a ratio in bold is claimed."""
    if value is None:
        return ""
    text = FORMS.get(what, "{:g}").format(value)
    if what != "ratio":
        return text
    other = found.get("fastest_peer") or found.get("fastest_point")
    text = f"**{text}**" if found.get("claimed") else text
    return f"{text} {other}, {found['tokens_per_second']:,.0f} tokens/s"


def corpus() -> str:
    """Returns the mix of the rows' text, functions of the standard library; it is written if it is not
    there."""
    return str(data_corpus.once(CORPUS, data_corpus.functions) / "mix.toml")


def arguments() -> argparse.Namespace:
    """Returns the arguments, with the rows that they choose and the suite's notes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("suite", choices=SUITES)
    add("--rows", help="names with commas between them; without it, all but those to be named")
    add("--list", action="store_true", help="the rows with their bars and seconds; nothing is measured")
    add("--table", action="store_true", help="what the records say of the bars; nothing is measured")
    add("--output", type=Path, default=RESULTS, metavar="DIR", help="of the records, default %(default)s")
    add("--commit", help="the hash of what is measured, where git cannot tell it; blocks record it as it is")
    kept = "keep what is compiled and tuned there, for the next block or command, default %(default)s"
    add("--compiled", type=Path, default=COMPILED, metavar="DIR", help=kept)
    stop = "begin nothing that ends later"
    add("--stop-after", type=float, default=float("inf"), metavar="SECONDS", help=stop)
    add("--retry", action="store_true", help="run failed blocks again")
    add("--tiny", action="store_true", help="rows as small ones on a CPU")
    add("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE", help="of all rows")
    add("--mix", help="of the rows' text, default: functions of the standard library")
    add("--gpus", type=int, help="of this host, for rows that take several")
    add("--old", type=Path, metavar="FOLDER", help="another commit's files, for the suite commits")
    torch = "a Python that has PyTorch (and nvidia-ml-py, for the clocks), if this one has not"
    add("--torch-python", default=sys.executable, help=torch)
    found = parser.parse_args()
    module = importlib.import_module(f"suites.{found.suite}")
    every, found.notes, found.in_full = module.ROWS, module.NOTES, bool(found.rows)
    usual = [name for name, row in every.items() if found.list or not row.named]
    names = blocks.chosen(parser, "--rows", found.rows, list(every)) if found.rows else usual
    found.rows = {name: every[name] for name in names}
    if found.gpus:
        several = {name: row for name, row in found.rows.items() if row.gpus > 1}
        found.rows |= {name: dataclasses.replace(row, gpus=found.gpus) for name, row in several.items()}
    return found


def commit_of(given: str | None) -> str | None:
    """Returns the commit that is measured, None where nobody tells it. Exits if it is no hash."""
    commit = given or harness.commit()
    if commit and not re.fullmatch("[0-9a-f]{12,40}(-dirty)?", commit):
        sys.exit(f"suite.py: --commit {commit}: must be the hash of this tree's commit, 12 digits or more")
    return commit


def main() -> int:
    began, given = time.monotonic(), arguments()
    rows, notes = given.rows, given.notes
    if given.list:
        print(f"{listed(rows)}\n\n{notes}")
        return 0
    setup = Setup("", Path(), suite=given.suite, records=given.output)
    if not given.table:
        commit = commit_of(given.commit)
        if given.commit:
            harness.tell(commit)
        keep_compiled(given.compiled)
        with tempfile.TemporaryDirectory() as folder:
            setup = dataclasses.replace(
                setup,
                commit=commit,
                folder=Path(folder),
                tiny=given.tiny,
                mix=given.mix or (corpus() if any(row.reads for row in rows.values()) else ""),
                torch_python=given.torch_python,
                overrides=tuple(given.overrides),
                old=given.old,
            )
            for row in rows.values():
                row.check(setup)  # so that a bad key shows before anything runs
            run(rows, setup, began + given.stop_after, given.retry)
    print(table(rows, setup))
    print(f"\n{notes}")
    for name, row in rows.items():
        if (given.in_full or not row.bars) and setup.path(name).exists():
            record = json.loads(setup.path(name).read_text())
            said = [row.details(record["found"]), *comparison.remarks(record["blocks"])]
            print("\n".join([f"\n{name}", *filter(None, said)]))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that blocks are ended too
    sys.exit(harness.run(main))
