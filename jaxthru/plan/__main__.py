"""python -m jaxthru.plan: what a configuration will do, before hardware is used."""

import argparse
import sys
from pathlib import Path

import rich.console

from jaxthru import config as configuration
from jaxthru.data.loader import open_data
from jaxthru.plan.data import forecast
from jaxthru.plan.plot import svg
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code: 2 for bad input."""
    arguments = _parser().parse_args(argv)
    try:
        config = configuration.load(arguments.config, arguments.overrides)
        require(arguments.samples >= 1, f"--samples {arguments.samples}: must be at least 1")
        with open_data(config.data) as data:
            found = forecast(config, data, arguments.samples)
        write_atomically(Path(arguments.plot), svg(found.panels()))
    except InputError as error:
        print(f"jaxthru: {error}", file=sys.stderr)
        return 2
    console = rich.console.Console()
    console.print(found.table())
    for line in found.lines():
        console.print(line, highlight=False)
    console.print(f"Plot: {arguments.plot}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxthru.plan", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="tokens and epochs of each source, padding, balance")
    data.add_argument("--config", required=True, metavar="FILE", help="a .py or a resolved .json")
    data.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE", help="repeatable"
    )
    data.add_argument("--samples", type=int, default=300, help="steps to plan in full, default %(default)s")
    data.add_argument("--plot", default="plan_data.svg", metavar="FILE", help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
