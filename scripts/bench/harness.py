"""What every benchmark here shares: its arguments, the rows, the line that is printed.

It imports neither JAX nor PyTorch, so that each process loads only the one that it measures.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama's or Qwen3's shape, as peers take it; the defaults are Llama 3 8B cut to 8 layers. Flags are 0
    or 1 on a command line."""

    layers: int = 8
    embed: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14_336
    vocabulary: int = 128_256
    tied_embeddings: int = 0
    qk_norm: int = 0
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5

    @classmethod
    def of(cls, fields: Any) -> "Shape":
        """Returns the shape with the attributes of `fields`: parsed arguments or a ModelConfig."""
        values = {field.name: field.type(getattr(fields, field.name)) for field in dataclasses.fields(cls)}
        return cls(**values)

    def flags(self) -> list[str]:
        """Returns the shape as command-line arguments of a peer."""
        named = dataclasses.asdict(self).items()
        return [word for name, value in named for word in (f"--{name.replace('_', '-')}", str(value))]

    def need_none_of(self, *names: str, peer: str) -> None:
        """Ends a peer that lacks these with one line if the shape has one. names: of fields."""
        if lacking := [name for name in names if getattr(self, name)]:
            sys.exit(f"{peer}: has no {' and no '.join(lacking)}; run peers.hugging_face for this shape")


TINY = Shape(layers=2, embed=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocabulary=512)
ROOT = Path(__file__).resolve().parents[2]
ROPE_THETA = Shape.rope_theta
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


def need(*packages: str) -> None:
    """Ends the script with one line if a package is not installed."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        sys.exit(f"{Path(sys.argv[0]).name}: not installed: {', '.join(missing)}")


def keep_stdout() -> None:
    """Leaves stdout to the result: what else is printed to it, by C code too, goes to stderr."""
    result = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(result, "w")


def set_words(settings: Iterable[str]) -> list[str]:
    """Returns settings, as `group.key=value`, as words of a command line that takes each key once: of those
    that are set several times, the last counts."""
    latest = {text.partition("=")[0].strip(): text for text in settings}
    return [word for text in latest.values() for word in ("--set", text)]


def add_seconds(parser: argparse.ArgumentParser, warmup: float = 20.0, timed: float = 40.0) -> None:
    """Adds --warmup-seconds and --timed-seconds."""
    parser.add_argument("--warmup-seconds", type=float, default=warmup)
    parser.add_argument("--timed-seconds", type=float, default=timed)


def config_parser(doc: str, config: object = None) -> argparse.ArgumentParser:
    """Returns the arguments of a script that measures a configuration. doc: the script's, whose first line
    counts; config: the default, without which one has to be given, or False for none at all."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if config is not False:
        default = {"required": True} if config is None else {"default": str(config)}
        parser.add_argument("--config", **default)
        parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="GROUP.KEY=VALUE")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    return parser


def option(*names: str, **how: Any) -> tuple:
    """Returns an argument of `program`, as `add_argument` takes it."""
    return names, how


def program(
    doc: str,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    *options: tuple,
    config: object = None,
    seconds: tuple[float, float] | None = None,
    elsewhere: bool = False,
) -> Callable[[], int]:
    """Returns the `main` of a script that measures something of a configuration and prints one line of JSON.

    doc: the script's, whose first line counts. measure: arguments -> what it found; an InputError is one line
    and exit code 2. config: as `config_parser` has it, False where there is none. seconds: of warm-up and
    timed, by default. elsewhere: what is found says itself on what device it was found.
    """

    def main() -> int:
        parser = config_parser(doc, config)
        if seconds:
            add_seconds(parser, *seconds)
        for names, how in options:
            parser.add_argument(*names, **how)
        arguments = parser.parse_args()
        line = {"benchmark": Path(sys.argv[0]).stem}
        if config is not False:
            line |= {"config": Path(arguments.config).stem, "set": arguments.overrides}
        line |= measure(arguments)
        emit(line | ({"command": command()} if elsewhere else provenance()), arguments.output)
        return 0

    return functools.partial(run, main)


def shape_options() -> list[tuple]:
    """Returns the arguments of what takes a shape by its numbers, each as `program` takes it."""
    return [
        option(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
        for field in dataclasses.fields(Shape)
    ]


def peer_parser(description: str) -> argparse.ArgumentParser:
    """Returns the arguments that all peers take."""
    parser = argparse.ArgumentParser(description=description)
    add_seconds(parser)
    for names, how in shape_options():
        parser.add_argument(*names, **how)
    parser.add_argument("--tokens", type=Path, help="an .npy of rows; without it they are random")
    parser.add_argument("--rows", type=int, default=2, help="of a random batch")
    parser.add_argument("--sequence", type=int, default=8192, help="of a random batch")
    return parser


def rows_of(arguments: argparse.Namespace) -> np.ndarray:
    """Returns int32 [batches, rows, sequence]: tokens from the file, or random ones."""
    if arguments.tokens:
        return np.load(arguments.tokens)
    shape = (8, arguments.rows, arguments.sequence)
    return np.random.default_rng(0).integers(0, arguments.vocabulary, shape, np.int32)


def causal_batches(rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields (tokens, targets, loss mask) for ever; each row is one document, whose last token has no
    target."""
    for tokens in itertools.cycle(rows):
        targets = np.roll(tokens, -1, axis=1)
        mask = np.ones(tokens.shape, np.float32)
        targets[:, -1], mask[:, -1] = 0, 0.0
        yield tokens, targets, mask


def versions(*packages: str) -> dict[str, str]:
    """Returns the installed versions."""
    return {package: importlib.metadata.version(package) for package in packages}


class Peak:
    """The most of each number that `read` tells while the block runs, looked at every so many seconds.

    most: {name: the largest so far}.
    """

    def __init__(self, read: Callable[[], dict[str, float]], every: float):
        self.most: dict[str, float] = {}
        self._read, self._every = read, every
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self):
        self._sampler.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(self._every):
            for name, value in self._read().items():
                self.most[name] = max(self.most.get(name, value), value)

    def __exit__(self, *_):
        self._ended.set()
        self._sampler.join()


@contextlib.contextmanager
def session(command: list[str], **settings) -> Iterator[subprocess.Popen]:
    """Runs a command in a session of its own; at the block's end it is killed with all that it started. It is
    killed with this process, too, where there is `setpriv`: else it would hold the GPUs.

    settings: of `subprocess.Popen`.
    """
    if setpriv := shutil.which("setpriv"):
        command = [setpriv, "--pdeathsig", "KILL", *command]
    process = subprocess.Popen(command, start_new_session=True, **settings)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing else is in its group
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may hold on to it
            process.wait(10)


TOLD = "JAXTHRU_BENCH_COMMIT"
"""Environment variable: the commit of a tree, and that tree, where a suite was told it."""


def tell(commit: str) -> None:
    """Has `commit` say this here and in processes that are started, of this tree."""
    os.environ[TOLD] = f"{commit} {ROOT}"


def ask(*command: str) -> str | None:
    """Returns what a command prints, None if it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str | None:
    """Returns the commit of the tree that is measured, with "-dirty" behind it if files differ from it.

    None if that cannot be known: of a copy without history, whatever checkout it lies in, and where the
    jaxthru that is imported belongs to another tree. Results do not count as files. Of a copy's own history,
    which may be another, nothing is asked where TOLD names this tree.
    """
    tree = ROOT
    git = ("git", "-C", str(tree))
    package = importlib.util.find_spec("jaxthru")
    if not package or Path(package.origin).resolve().parents[1] != tree:
        return None
    told, _, where = os.environ.get(TOLD, "").partition(" ")
    if where == str(tree):
        return told
    if ask(*git, "rev-parse", "--show-toplevel") != str(tree):
        return None
    changed = ask(*git, "status", "--porcelain", "--untracked-files=no", ":/", ":!/scripts/bench/results")
    return f"{ask(*git, 'rev-parse', 'HEAD')}{'-dirty' if changed else ''}"


def command() -> str:
    """Returns what to type to run this again, with the XLA_FLAGS that it was given."""
    own = getattr(sys.modules.get("jaxthru.runtime.xla"), "OWN_FLAGS", ())  # none where JAX was not loaded
    flags = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag not in own)
    return (f"XLA_FLAGS={shlex.quote(flags)} " if flags else "") + shlex.join(["python", *sys.argv])


def provenance() -> dict[str, Any]:
    """Returns where a result of jaxthru's own comes from: device, versions, commit and command."""
    from jaxthru.training.run_directory import environment  # here, for it loads JAX

    return made_on(environment()) | {"commit": commit(), "command": command()}


def made_on(environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the device and the versions of a process, of what its environment.json has."""
    versions = environment["versions"] | {name: environment[name] for name in ("python", "backend")}
    return {"device": environment["devices"], "versions": versions}


def run(main: Callable[[], int]) -> int:
    """Returns the exit code of a script's `main`: 2, and one line, for input that cannot work."""
    from jaxthru.runtime.errors import InputError  # here, for not all peers have jaxthru

    try:
        return main()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


def end(code: int) -> NoReturn:
    """Ends the process at once: threads that read ahead would keep it."""
    sys.stdout.flush()
    os._exit(code)


def emit(line: dict[str, Any], output: Path | None = None) -> None:
    """Prints a result as one line of JSON, and writes it to `output` if given."""
    print(json.dumps(line), flush=True)
    write(line, output)


def write(line: dict[str, Any], output: Path | None) -> None:
    """Writes a result to `output` if given: of what may hang or be killed, whatever has been measured so far,
    and never a part of a file."""
    if output:
        from jaxthru.runtime.atomic import write_atomically  # here, for not all peers have jaxthru

        write_atomically(output, json.dumps(line, indent=2) + "\n")
