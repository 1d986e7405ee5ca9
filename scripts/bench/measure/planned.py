"""Records what `python -m jaxthru.plan network` or `limits` predicts, before it is measured.

    JAX_PLATFORMS=cpu python scripts/bench/measure/planned.py --config llama3_8b_8layer --plan network

A step's collectives, hundreds of lines, are left out: the command itself prints them.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from jaxthru.runtime.errors import InputError


def measure(arguments) -> dict:
    """Returns what the command prints. Raises InputError with the line that it refuses with."""
    words = [arguments.plan, "--config", arguments.config, *harness.set_words(arguments.overrides)]
    words += ["--fabric", arguments.fabric, "--json", *shlex.split(arguments.words)]
    command = [sys.executable, "-m", "jaxthru.plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(done.stderr.strip().rpartition("\n")[2].removeprefix("jaxthru: "))
    said = json.loads(done.stdout)
    said.pop("collectives", None)
    return said


main = harness.program(
    __doc__,
    measure,
    harness.option("--plan", choices=("network", "limits"), required=True, help="the command"),
    harness.option("--fabric", default="infiniband_400g", help="as the command has it"),
    harness.option("--words", default="", help="further arguments of the command, in one word"),
)


if __name__ == "__main__":
    sys.exit(main())
