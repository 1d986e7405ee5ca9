"""python -m jaxthru.export: a run's weights as a folder that Hugging Face's transformers and vLLM read."""

import argparse
import sys

from jaxthru.build.export_weights import DTYPES, export_weights
from jaxthru.runtime import command_line
from jaxthru.runtime.errors import exit_code

PROG = "python -m jaxthru.export"
EXAMPLE = "runs/quickstart/1 my-model --dtype bfloat16"


def parse_arguments(argv: list[str] | None = None, prog: str = PROG) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = command_line.parser(prog, "Writes a run's weights as a Hugging Face folder.", EXAMPLE)
    add = parser.add_argument
    add("run", metavar="RUN", help="a run directory, or a folder of published weights")
    add("folder", metavar="FOLDER", help="where to; must be new, or empty")
    add("--step", type=int, metavar="N", help="which checkpoint; default: the newest")
    own = "default: that of the weights the run started from, or what it kept"
    add("--dtype", choices=DTYPES, help=own)
    form = parser.add_mutually_exclusive_group()
    alone = "of a run of adapters: these alone, in PEFT's form"
    form.add_argument("--adapter", action="store_true", default=None, help=alone)
    merged = "of a run of adapters: the base's weights with them in it"
    form.add_argument("--merged", action="store_false", dest="adapter", default=None, help=merged)
    command_line.add_overrides(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, 2 for bad input."""
    arguments = parse_arguments(argv, prog)
    command_line.log_to_stderr()
    options = {name: getattr(arguments, name) for name in ("step", "dtype", "adapter", "overrides")}
    return exit_code(lambda: print(export_weights(arguments.run, arguments.folder, **options)))


if __name__ == "__main__":
    sys.exit(main())
