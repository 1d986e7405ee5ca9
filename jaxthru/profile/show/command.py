"""The command `jaxthru profile`: a report of one profiled run, or what changed between two."""

import os
import sys
from pathlib import Path

import rich.console

from jaxthru.profile.explain.compare import compare
from jaxthru.profile.show.publish import config, opened, present, profiled
from jaxthru.profile.show.terminal import comparison
from jaxthru.runtime import command_line
from jaxthru.runtime.bucket import is_url
from jaxthru.runtime.errors import exit_code
from jaxthru.training.run_directory import RunDirectory


def main(argv: list[str] | None = None, prog: str = "python -m jaxthru.profile") -> int:
    """Runs the command; returns its exit code: 2 for bad input, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    comparing = argv[:1] == ["compare"]
    return exit_code(lambda: _compare(argv[1:], f"{prog} compare") if comparing else _report(argv, prog))


def _report(argv: list[str], prog: str) -> int:
    parser = command_line.parser(
        prog,
        "Writes ledger.json and report.html of a profiled run, and prints a summary.\n"
        f"{prog} compare RUN_A RUN_B says what changed between two runs.",
        "runs/quickstart/1",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="runs/<config>/<n>, or gs://BUCKET/RUN")
    parser.add_argument("--step", type=int, help="where it was profiled (profile.at); default: the last")
    arguments = parser.parse_args(argv)
    run = RunDirectory(arguments.run)
    present(profiled(run.path, arguments.step))
    run.send()
    return 0


def _compare(argv: list[str], prog: str) -> int:
    parser = command_line.parser(
        prog,
        "Says what changed from one profiled run to another, by how much, and the likely\ncause.",
        "runs/quickstart/1 runs/quickstart/2",
    )
    for name, which in (("run_a", "before"), ("run_b", "after")):
        parser.add_argument(name, metavar=name.upper(), help=f"the run {which}")
    parser.add_argument("--step", type=int, help="where both were profiled; default: the last of each")
    arguments = parser.parse_args(argv)
    given = arguments.run_a, arguments.run_b
    runs = [RunDirectory(each).path for each in given]
    ledgers = [opened(run, arguments.step) for run in runs]
    found = compare(*ledgers, *map(config, runs))
    rich.console.Console().print(comparison(found, _names(*given)))
    return 0


def _names(*runs: str) -> tuple[str, str]:
    """Returns how two runs are called: the shortest ends of their paths that differ."""
    plain = (run if is_url(run) else os.path.abspath(run) for run in runs)  # noqa: PTH100 - keeps links
    parts = [Path(run).parts for run in plain]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if names[0] != names[1]:
            return names[0], names[1]
    return "before", "after"
