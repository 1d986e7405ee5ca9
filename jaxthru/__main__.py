"""The `jaxthru` command: train, generate, export, plan and more, each as `python -m jaxthru.NAME` is."""

import contextlib
import importlib
import importlib.metadata
import sys
from pathlib import Path

from jaxthru.runtime.errors import InputError, did_you_mean, exit_code

COMMANDS = {
    "train": ("jaxthru.train", "start", "train a model, or continue a run"),
    "supervise": ("jaxthru.supervise", "main", "train, and start again after what a restart can mend"),
    "generate": ("jaxthru.generate", "main", "text from a run's checkpoint, or from published weights"),
    "export": ("jaxthru.export", "main", "a run's weights as a Hugging Face folder"),
    "evaluate": ("jaxthru.evaluate", "main", "a model's scores on the tasks of lm-eval, or on your own"),
    "plan": ("jaxthru.plan.__main__", "main", "what a run will read, and whether it fits, before it starts"),
    "data": ("jaxthru.data.__main__", "main", "prepare the token stores of a mix, or look into them"),
    "profile": ("jaxthru.profile.__main__", "main", "where a run's time went, and what changed between two"),
    "compare": ("jaxthru.training.curves", "main", "losses and settings of several runs, side by side"),
    "config": ("jaxthru.config_reference", "main", "every key of a configuration: type, default, meaning"),
}
"""Name -> the module, its function of (arguments, how the command was called), and a line of help. A module
is imported when its command is asked for."""

HELP = """\
usage: {prog} COMMAND [ARGUMENTS]

Trains transformer language models on JAX/XLA, and says where the time went.

commands:
{commands}

options:
  -h, --help     this page; after a command, that command's own
  --version      the version

first run: {prog} train --config quickstart
settings:  {prog} config
pages:     docs/index.md
"""


def main(argv: list[str] | None = None, prog: str = "jaxthru") -> int:
    """Runs the command that the arguments begin with; returns its exit code, 2 if there is no such command.

    prog: how it was called, as usage lines say it.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        _import_from_here()
        module, function, _ = COMMANDS[name]
        return exit_code(lambda: getattr(importlib.import_module(module), function)(rest, f"{prog} {name}"))
    if name == "--version":
        print(f"jaxthru {_version()}")
        return 0
    if name in ("", "-h", "--help"):
        lines = "\n".join(f"  {command:<13}  {line}" for command, (*_, line) in COMMANDS.items())
        print(HELP.format(prog=prog, commands=lines), end="", file=sys.stdout if name else sys.stderr)
        return 0 if name else 2
    return exit_code(lambda: _refuse(name))


def _refuse(name: str) -> None:
    what = "option" if name.startswith("-") else "command"
    raise InputError(f"unknown {what} {name!r}{did_you_mean(name, [*COMMANDS, '--help', '--version'])}")


def _import_from_here() -> None:
    """Lets modules be found in the current folder, as `python -m` does: a model family may be one's own."""
    with contextlib.suppress(OSError):  # of a folder that is gone
        if not sys.flags.safe_path and (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)


def _version() -> str:
    try:
        return importlib.metadata.version("jaxthru")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main(prog="python -m jaxthru"))
