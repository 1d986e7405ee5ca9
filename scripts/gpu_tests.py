"""What is tested nowhere but on a GPU, and when it last passed: the table in CONTRIBUTING.md.

On a machine with a GPU, `run` leaves a report of each file; where the repository is, `write` takes them up:

    python scripts/gpu_tests.py run --commit 0123abc gpu_reports
    python scripts/gpu_tests.py run --commit 0123abc --several gpu_reports    # files with cases for two GPUs
    python scripts/gpu_tests.py run --commit 0123abc --at-once 2 gpu_reports FILE FILE
    python scripts/gpu_tests.py write gpu_reports
"""

import argparse
import ast
import collections
import concurrent.futures
import importlib.metadata
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- by scripts/gpu_tests.py -->", "<!-- end of gpu_tests.py's -->"
HEAD = ("| file | cases | last passed | on |", "|:--|:--|:--|:--|")
NEVER = ("never", "")


class Row(NamedTuple):
    """cases: how many, and how they ended. passed: date and commit. device: and the version of JAX."""

    file: str
    cases: str
    passed: str
    device: str


SEVERAL = "several_gpus"


def files(root: Path, mark: str = "gpu") -> list[str]:
    """Returns the test files that have a case so marked."""

    def marked(path: Path) -> bool:
        text = path.read_text(encoding="utf-8")
        return f"mark.{mark}" in text and any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == f"pytest.mark.{mark}"
            for node in ast.walk(ast.parse(text))
        )

    return [str(path.relative_to(root)) for path in sorted(root.glob("tests/**/test_*.py")) if marked(path)]


def run(folder: Path, commit: str, chosen: list[str], at_once: int = 1) -> int:
    """Runs each file by itself, so that one that is cut short takes no other's report along.

    at_once: how many files run beside each other, for most of their time goes into compiling. Each has a
    share of the GPU's memory, of which some is left for processes that tests start. What a file says is shown
    when it has ended.
    """
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    devices = collections.Counter(listed.splitlines())
    of = " and ".join(f"{count} × {name}" if count > 1 else name for name, count in devices.items())
    told = {"commit": commit, "device": of, "jax": importlib.metadata.version("jax")}
    folder.mkdir(parents=True, exist_ok=True)
    environment, shared = dict(os.environ), at_once > 1
    if shared:
        environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # its old name; JAX refuses both at once
        environment["XLA_CLIENT_MEM_FRACTION"] = f"{0.6 / at_once:.3f}"

    def test(file: str) -> int:
        report = folder / (re.sub(r"\W+", "-", file) + ".xml")
        report.unlink(missing_ok=True)  # of an earlier run
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "gpu", "-ra", "--durations=5"]
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if shared else {}
        ran = subprocess.run([*command, f"--junitxml={report}", file], cwd=ROOT, env=environment, **kept)
        if shared:
            print(ran.stdout, flush=True)
        if report.exists():
            note(report, told)
        return ran.returncode

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        codes = list(pool.map(test, chosen))
    return int(any(codes))  # a process that a signal ended has a negative one


def note(report: Path, told: dict[str, str]) -> None:
    """Adds to pytest's report of what code and on what device it is."""
    tree = ElementTree.parse(report)
    for suite in tree.iter("testsuite"):
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in told.items():
            ElementTree.SubElement(properties, "property", name=name, value=value)
    tree.write(report, encoding="utf-8")


def read(reports: list[Path]) -> list[Row]:
    """Returns the rows of a run's reports: of what passed or failed in a file, and of each reason to skip.
    Only what passed says when."""
    ended: dict[str, collections.Counter] = {}
    told: dict[str, dict[str, str]] = {}
    for suite in (suite for report in reports for suite in ElementTree.parse(report).iter("testsuite")):
        about = {each.get("name"): each.get("value") for each in suite.iter("property")}
        for case in suite.iter("testcase"):
            module = case.get("classname") or case.get("name")  # which could not be imported
            file = module.replace(".", "/") + ".py"
            tags = {each.tag: each.get("message") for each in case}
            how = "failed" if tags.keys() & {"failure", "error"} else tags.get("skipped", "passed")
            ended.setdefault(file, collections.Counter())[how] += 1
            told[file] = about | {"date": suite.get("timestamp")[:10]}
    rows = []
    for file, of in ended.items():
        passed, failed, about = of.pop("passed", 0), of.pop("failed", 0), told[file]
        if failed:
            rows.append(Row(file, f"{failed} of {passed + failed} failed at {about['commit']}", *NEVER))
        elif passed:
            at = f"{about['date']}, {about['commit']}", f"{about['device']}, JAX {about['jax']}"
            rows.append(Row(file, f"{passed} passed", *at))
        rows += [Row(file, f"{count} skipped: {reason}", *NEVER) for reason, count in sorted(of.items())]
    return rows


def last_passed(row: Row, before: list[Row]) -> Row:
    """Returns a row of cases that did not pass with when they last did, by the rows that their file had."""
    reason = row.cases.partition(": ")[2]  # none of a row of those that ran
    same = [old for old in before if old.cases.partition(": ")[2] == reason]
    # Where nothing had been skipped, they were among those that passed.
    of = same or [old for old in before if len(before) == 1 and old.cases.endswith(" passed")]
    return row._replace(passed=of[0].passed, device=of[0].device) if of else row


def updated(before: list[Row], new: list[Row], listed: list[str]) -> list[Row]:
    """Returns the rows of all listed files: as they were, where no report has them."""
    rows = []
    for file in listed:
        had, has = ([row for row in of if row.file == file] for of in (before, new))
        rows += [row if row.passed != "never" else last_passed(row, had) for row in has]
        rows += [] if has else had or [Row(file, "not run", *NEVER)]
    return rows


def parse(text: str) -> list[Row]:
    lines = text.strip().splitlines()[len(HEAD) :]
    return [Row(*(cell.strip() for cell in line.strip("|").split("|"))) for line in lines]


def rewritten(text: str, new: list[Row], listed: list[str]) -> str:
    """Returns CONTRIBUTING.md with the table brought up to date."""
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin and end, f"{KEPT}: no place for the table, between {BEGIN} and {END}"
    rows = [f"| {' | '.join(row)} |" for row in updated(parse(table), new, listed)]
    return "\n".join((f"{before}{BEGIN}", *HEAD, *rows, f"{END}{after}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run what is marked gpu, and leave a report of each file")
    running.add_argument("--commit", required=True, help="of the code, maybe a copy without .git")
    running.add_argument("folder", type=Path, help="for the reports")
    running.add_argument("files", nargs="*", help="or FILE::TEST; by default all")
    several = "by default the files with cases of several GPUs, whose other cases run too"
    running.add_argument("--several", action="store_true", help=several)
    running.add_argument("--at-once", type=int, default=1, help="how many files share the GPU; default 1")
    writing = commands.add_parser("write", help="take up reports into CONTRIBUTING.md")
    writing.add_argument("folder", type=Path, nargs="?", help="of the reports; without, new files are listed")
    given = parser.parse_args()
    if given.command == "run":
        if given.several and given.at_once > 1:
            parser.error("--several: its kernels wait for their peers, so nothing runs beside them")
        chosen = given.files or files(ROOT, SEVERAL if given.several else "gpu")
        return run(given.folder, given.commit, chosen, given.at_once)
    reports = sorted(given.folder.glob("*.xml")) if given.folder else []
    text = rewritten(KEPT.read_text(encoding="utf-8"), read(reports), files(ROOT))
    KEPT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
