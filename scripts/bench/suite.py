"""Measures the rows of a suite that have no record yet, and tells which of their bars are met.

    python scripts/bench/suite.py every_shape --list
    python scripts/bench/suite.py every_shape [--rows A,B] [--output DIR] [--stop-after SECONDS]
    python scripts/bench/suite.py every_shape --table

Each contender of a row runs in a process of its own. A row's record is DIR/<suite>_<row>.json, written after
each of them, so that the same command goes on where one was cut short. With --stop-after nothing is begun
that would not end by then, by its estimate. --tiny runs rows as small ones on a CPU, to see that they work.
"""

import argparse
import importlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path

import blocks
import comparison
import functions_corpus
import harness
from suites.rows import GEMM, Row, Setup, gemm_command

LIMIT = 560.0  # seconds of a block: a command on a GPU machine has 600
SUITES = ("every_shape",)
RESULTS = blocks.HERE / "results"
CORPUS = blocks.ROOT / "build" / "functions"
MARKS = {True: "met", False: "**missed**", None: "not run"}


def path_of(suite: str, name: str, folder: Path) -> Path:
    """Returns the file of a row's record."""
    return folder / f"{suite}_{name}.json"


def new_record(suite: str, name: str, row: Row, setup: Setup) -> dict:
    """Returns the record of a row of which nothing has run."""
    about = {"benchmark": suite, "row": name, "about": row.about, "tiny": setup.tiny}
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
    gpu = blocks.visible(1)[0]
    while left := row.left(record["blocks"]):
        block = left[0]
        if time.monotonic() + block.seconds > ends:
            return False
        command = gemm_command(block.name, setup) if block.name in GEMM else row.command(block.name, setup)
        blocks.keep(record, blocks.block_of(block.name, block.turn, command, gpu, LIMIT))
        complete(record, row, setup)
        harness.write(record, path)
    return True


def run(suite: str, rows: dict[str, Row], setup: Setup, folder: Path, ends: float, retry: bool) -> None:
    """Measures rows until all have their record, or the time is over. retry: failed blocks once more."""
    for name, row in rows.items():
        path, record = path_of(suite, name, folder), new_record(suite, name, row, setup)
        if path.exists():
            new, record = record, json.loads(path.read_text())
            if record["blocks_left"] == 0 and not retry:
                continue
            check_same(record, new, path)
        if retry:
            record["blocks"] = [block for block in record["blocks"] if "line" in block]
        if not measure(record, row, setup, path, ends):
            print(f"{name}: {len(row.left(record['blocks']))} blocks left: run the same command again")
            return


def listed(rows: dict[str, Row]) -> str:
    """Returns the rows with their bars, what runs for them and the seconds that it takes, in Markdown."""
    lines = ["| row | what | bar | contenders | about s |", "|---|---|---|---|---|"]
    total = 0.0
    for name, row in rows.items():
        left = row.left([])
        seconds = sum(block.seconds for block in left)
        total += seconds
        names = ", ".join(dict.fromkeys(block.name for block in left if block.name not in GEMM))
        bars = "; ".join(bar.asked() for bar in row.bars)
        lines.append(f"| {name} | {row.about} | {bars} | {names} | {seconds:,.0f} |")
    return "\n".join([*lines, f"| all | | | | {total:,.0f} |"])


def table(suite: str, rows: dict[str, Row], folder: Path) -> str:
    """Returns what the records in a folder say of the bars, in Markdown."""
    lines = ["| shape | bar | found | A-A | |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        path = path_of(suite, name, folder)
        record = json.loads(path.read_text()) if path.exists() else {}
        found = record.get("found", {})
        for number, bar in enumerate(row.bars):
            value, mark = found.get(bar.what), MARKS[bar.met(found)]
            if value is not None and record.get("blocks_left"):
                mark = f"unfinished: {record['blocks_left']} blocks left"
            if record.get("tiny"):
                mark += ", on a tiny shape"
            cells = ["" if number else row.about, bar.asked(), told(bar.what, value, found)]
            cells += [comparison.shown(found.get("spread"), ".2%"), mark]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


FORMS = {
    "ratio": "{:.3f} ×",
    "tokens_per_second": "{:,.0f} tokens/s",
    "first": "{:.1f} s",
    "second": "{:.1f} s",
}
FORMS |= {"slowest": "{:.3f} ×", "share_of_card": "{:.1%}"}


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
    if not (CORPUS / "mix.toml").exists():
        functions_corpus.write(CORPUS)
    return str(CORPUS / "mix.toml")


def arguments_of(suite_rows: dict[str, dict[str, Row]]) -> tuple[argparse.Namespace, dict[str, Row]]:
    """Returns the arguments and the rows that they choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("suite", choices=SUITES)
    add("--rows", help="names with commas between them; without it, all")
    add("--list", action="store_true", help="the rows with their bars and seconds; nothing is measured")
    add("--table", action="store_true", help="what the records say of the bars; nothing is measured")
    add("--output", type=Path, default=RESULTS, metavar="DIR", help="of the records, default %(default)s")
    add("--commit", help="the hash of what is measured, where git cannot tell it")
    add(
        "--stop-after",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="begin nothing that ends later",
    )
    add("--retry", action="store_true", help="run failed blocks again")
    add("--tiny", action="store_true", help="rows as small ones on a CPU")
    add("--mix", help="of the rows' text, default: functions of the standard library")
    add("--torch-python", default=sys.executable, help="a Python that has PyTorch, if this one has not")
    arguments = parser.parse_args()
    rows = suite_rows[arguments.suite]
    names = blocks.chosen(parser, "--rows", arguments.rows, list(rows)) if arguments.rows else list(rows)
    return arguments, {name: rows[name] for name in names}


def main() -> int:
    began = time.monotonic()
    arguments, rows = arguments_of({name: importlib.import_module(f"suites.{name}").ROWS for name in SUITES})
    suite = arguments.suite
    notes = importlib.import_module(f"suites.{suite}").NOTES
    if arguments.list:
        print(f"{listed(rows)}\n\n{notes}")
        return 0
    if not arguments.table:
        commit = arguments.commit or harness.commit()
        if commit is None or not re.fullmatch("[0-9a-f]{12,40}(-dirty)?", commit):
            sys.exit(
                f"suite.py: --commit {commit}: must be the hash of this tree's commit, 12 digits or more"
            )
        with tempfile.TemporaryDirectory() as folder:
            mix = arguments.mix or corpus()
            setup = Setup(commit, Path(folder), arguments.tiny, mix, arguments.torch_python)
            run(suite, rows, setup, arguments.output, began + arguments.stop_after, arguments.retry)
    print(table(suite, rows, arguments.output))
    print(f"\n{notes}")
    for name in rows if arguments.rows else ():
        path = path_of(suite, name, arguments.output)
        if path.exists():
            record = json.loads(path.read_text())
            told = [rows[name].details(record["found"]), *comparison.remarks(record["blocks"])]
            print("\n".join([f"\n{name}", *filter(None, told)]))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
