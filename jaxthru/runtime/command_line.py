"""Command lines: the parser of a command, and what the help of each ends with."""

import argparse
import logging
from typing import Any


def parser(prog: str, description: str, example: str) -> argparse.ArgumentParser:
    """Returns the parser of a command. prog: how it was called. example: arguments to show in its help."""
    return argparse.ArgumentParser(prog=prog, description=description, **ending(prog, example))


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Gives a command `--set`, as `overrides`."""
    change = "change one key; may be given several times"
    settings = {"default": [], "dest": "overrides", "metavar": "GROUP.KEY=VALUE", "help": change}
    parser.add_argument("--set", action="append", **settings)


def log_to_stderr(level: int = logging.WARNING) -> None:
    """Has what jaxthru logs from this level on printed to stderr, and nowhere else."""
    log = logging.getLogger("jaxthru")
    log.handlers, log.propagate = [logging.StreamHandler()], False
    log.setLevel(level)


def ending(prog: str, example: str) -> dict[str, Any]:
    """Returns the keyword arguments of a parser whose help ends with an example and with where to go next."""
    lines = (
        f"example:  {prog} {example}",
        "settings: jaxthru config, or python -m jaxthru.config, explains every key",
        "pages:    docs/index.md",
    )
    return {"epilog": "\n".join(lines), "formatter_class": argparse.RawDescriptionHelpFormatter}
