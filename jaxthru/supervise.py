"""python -m jaxthru.supervise: a training command, started again after what a restart can mend."""

import argparse
import itertools
import logging
import math
import re
import sys
from pathlib import Path

from jaxthru.runtime import bucket, command_line
from jaxthru.runtime.bucket import AnyPath
from jaxthru.runtime.errors import InputError, exit_code, require
from jaxthru.training.supervisor import End, Failures, Supervisor, judge

PROG = "python -m jaxthru.supervise"
EXAMPLE = "-- jaxthru train --config quickstart --run-dir mine"
COUNTS = "failures.json"
"""In the run directory: how often each step has failed, as one call of `--after` leaves it to the next."""


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code: 0 once the run has finished, else that of its last end."""
    words = sys.argv[1:] if argv is None else argv
    own, command = words, []
    if "--" in words:
        split = words.index("--")
        own, command = words[:split], words[split + 1 :]
    arguments = _parser(prog).parse_args(own)
    command_line.log_to_stderr(logging.INFO)
    return exit_code(lambda: _supervise(arguments, command, prog))


def _supervise(arguments: argparse.Namespace, command: list[str], prog: str) -> int:
    require(bool(command), f"supervise: give the command after --: {prog} {EXAMPLE}")
    require(arguments.tries >= 1, f"--tries {arguments.tries}: must be at least 1")
    pause = arguments.pause
    require(0 <= pause < math.inf, f"--pause {pause}: must be at least 0, and finite")
    where = run_directory(command)
    retry = (*numbers("--retry-on", arguments.retry_on), *stopped_exit_codes(command))
    if arguments.after is not None:
        return _after(arguments.after, where, arguments.tries, retry)
    counts = numbers("--processes", arguments.processes)
    fewer = all(count > after for count, after in itertools.pairwise(counts))
    wrong = f"--processes {arguments.processes}: must be a number above 0, or several, each below the last"
    require(fewer and min(counts, default=0) >= 1, wrong)
    return Supervisor(tuple(command), _place(where), counts, arguments.tries, pause, retry).run()


def _after(code: int, where: str, tries: int, retry: tuple[int, ...]) -> int:
    """Says whether a run that has ended is to be started again; returns 0 if so, else its exit code."""
    require(
        1 <= code <= 255, f"--after {code}: must be the exit code of a run that has not finished, 1 to 255"
    )
    run_dir = _place(where)
    failures = Failures(run_dir / COUNTS)
    judged = judge(End(code), run_dir, failures, tries, retry)
    print(f"supervise: {judged.line}", file=sys.stderr, flush=True)
    if not judged.again:
        failures.forget()
    return 0 if judged.again else code


def _place(where: str) -> AnyPath:
    """Returns the run directory, on a disk or in a bucket. Raises InputError if that cannot be reached."""
    return bucket.address(where) if bucket.is_url(where) else Path(where)


def run_directory(command: list[str]) -> str:
    """Returns the run directory that a training command names. Raises InputError if none can be resumed."""
    found = ""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == "--run-dir":
            found = following
        elif word.startswith("--run-dir="):
            found = word.partition("=")[2]
        fresh = (word, following) == ("--resume", "never") or word == "--resume=never"
        require(not fresh, "supervise: a restart resumes the run: leave out --resume never")
    missing = "supervise: the command has no --run-dir DIR: without one, each start would begin a fresh run"
    require(found != "", missing)
    return found


def stopped_exit_codes(command: list[str]) -> tuple[int, ...]:
    """Returns the code of a stop that a training command sets: its first start may be told to stop before
    there is a config.json that says it."""
    found = (re.search(r"^(?:--set=)?train\.stopped_exit_code=(\d+)$", word) for word in command)
    return tuple(int(one[1]) for one in found if one)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Returns whole numbers, given with commas between them. Raises InputError."""
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError as error:
        raise InputError(f"{option} {text}: must be whole numbers with commas between them") from error


def _parser(prog: str) -> argparse.ArgumentParser:
    description = (
        "Starts a training command, and starts it again after a crash, a hang, a lost process or\n"
        "a stop; after bad input, or what a restart cannot mend, it does not. Options come before --."
    )
    parser = command_line.parser(prog, description, EXAMPLE)
    parser.usage = f"{prog} [-h] [OPTIONS] -- COMMAND"
    add = parser.add_argument
    processes = (
        "of one run on this host, which share its GPUs; 4,2,1: with fewer, once a step has failed too often "
        "with the number before; default %(default)s"
    )
    add("--processes", default="1", metavar="N[,N...]", help=processes)
    tries = "failures of one step after which the run is given up; default %(default)s"
    add("--tries", type=int, default=3, metavar="N", help=tries)
    pause = "before the first restart, doubled while no progress is made; default %(default)s"
    add("--pause", type=float, default=5.0, metavar="SECONDS", help=pause)
    retry = "exit codes after which to start again, beside 70, 143, 160 and those of signals; 1, say"
    add("--retry-on", default="", metavar="CODE[,CODE...]", help=retry)
    after = "start nothing: say whether a command that ended so is to be started again; 0 if it is"
    add("--after", type=int, metavar="CODE", help=after)
    return parser


if __name__ == "__main__":
    sys.exit(main())
