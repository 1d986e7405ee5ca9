"""python -m jaxthru.train: one command from a configuration to a trained model."""

import argparse
import json
import sys

from jaxthru import config as configuration
from jaxthru.runtime.errors import InputError


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m jaxthru.train", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a .py or a resolved .json")
    parser.add_argument(
        *("--set", "-s"),
        action="append",
        default=[],
        metavar="GROUP.KEY=VALUE",
        dest="overrides",
        help="change one key of the configuration; may be repeated",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="default: a fresh runs/<config>/<n>")
    parser.add_argument(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="auto continues what DIR holds; never refuses a DIR that holds a run",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse_arguments(argv)
    try:
        config = configuration.load(arguments.config, arguments.overrides)
    except InputError as error:
        print(f"jaxthru: {error}", file=sys.stderr)
        return 2
    print(json.dumps(configuration.to_dict(config), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
