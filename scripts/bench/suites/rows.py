"""What the rows of a suite are made of: bars, blocks of contenders, and the kinds of rows.

A row knows which blocks it still needs, the command of each, and what is found from those that ran. A block
is a process of its own; of a row that was cut short, those that ran are kept.
"""

import dataclasses
import json
import sys
from pathlib import Path

import blocks
import harness

from jaxthru import config as configuration

AUTO = "remat.policy=auto model.loop=auto offload.level=auto kernels.attention=auto"
"""Settings of rows that are to run as a user's own do: shipped configurations name some of these."""
TINY = (
    "model.layers=2 model.embed=64 model.heads=4 model.kv_heads=2 model.head_dim=16 model.mlp=128 "
    "model.vocabulary=8192 data.sequence=128 train.rows=2 train.microbatches=1 data.groups=1"
)
"""Settings that make any row one for a CPU."""
TINY_EXPERTS = (
    f"{TINY} model.experts=4 model.top_k=2 model.expert_mlp=64 offload.level=none kernels.attention=auto"
)
"""The same for one of a mixture of experts."""
SEVERAL = ("precision.compute=float32",)
"""And of several devices: on a CPU XLA has no sums of bfloat16 over them."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """what: a key of what a row finds. said: of the value and the row's findings, with the unit. most: the
    value may be at most this, else at least."""

    what: str
    value: float
    said: str
    stretch: float | None = None
    most: bool = False

    def met(self, found: dict) -> bool | None:
        """Says whether it is; None while nothing was found."""
        value = found.get(self.what)
        if value is None:
            return None
        return value <= self.value if self.most else value >= self.value

    def asked(self) -> str:
        """Returns the bar for people."""
        text = f"{'≤' if self.most else '≥'} {self.said.format(self.value)}"
        return text if self.stretch is None else f"{text} (stretch {self.stretch:,g})"


def times(value: float, stretch: float | None = None, of: str = "the fastest peer") -> Bar:
    """Returns a bar of the ratio of tokens per second."""
    return Bar("ratio", value, f"{{:.3g}} × {of}", stretch)


def rate(value: float, stretch: float | None = None) -> Bar:
    """Returns a bar of tokens per second."""
    return Bar("tokens_per_second", value, "{:,.0f} tokens/s", stretch)


@dataclasses.dataclass(frozen=True)
class Block:
    """A process of a row: of which contender, in which round, and about how many seconds it takes. group:
    those of one run at the same time, each on a GPU of its own; without it, on all GPUs of the row."""

    name: str
    turn: int
    seconds: float
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the commands of a run's blocks need to know. folder: for what the blocks share. overrides:
    settings of all rows, under their own. commit: None if it is not known. suite, records: its name, and the
    folder of its records. done: the row's blocks that have run. old: another commit's files, if given."""

    commit: str | None
    folder: Path
    tiny: bool = False
    mix: str = "quickstart"
    torch_python: str = sys.executable
    overrides: tuple[str, ...] = ()
    suite: str = ""
    records: Path = Path()
    done: tuple[dict, ...] = ()
    old: Path | None = None

    def settings(self, row: "Row", *more: str) -> list[str]:
        """Returns a row's settings, as `--set` takes them; of a key that is set twice, the last counts."""
        text = [f"data.mix={self.mix}"] if row.reads else []
        words = [*row.common.split(), *text, *self.overrides, *row.settings.split(), *more]
        tiny = [*row.small.split(), *(SEVERAL if row.gpus > 1 else ())] if self.tiny else []
        return harness.set_words([*words, *tiny])[1::2]

    def config(self, row: "Row", *more: str) -> configuration.RunConfig:
        """Returns a row's configuration. Raises InputError."""
        return configuration.load(config_file(row.config), self.settings(row, *more))

    def path(self, name: str) -> Path:
        """Returns the file of a row's record."""
        return self.records / f"{self.suite}_{name}.json"

    def kept(self, name: str) -> Path:
        """Returns a row's folder beside its record, for what is to be looked at later; it may not exist."""
        return self.path(name).with_suffix("").absolute()

    def blocks(self, name: str) -> list[dict]:
        """Returns the blocks of another row that have run."""
        path = self.path(name)
        return json.loads(path.read_text())["blocks"] if path.exists() else []

    def words(self, row: "Row", *more: str) -> list[str]:
        """Returns a row's configuration as words of a command line."""
        return ["--config", str(config_file(row.config)), *harness.set_words(self.settings(row, *more))]

    def seconds(self, warmup: float, timed: float) -> list[str]:
        """Returns the seconds of a block as words of a command line."""
        warmup, timed = (0.1, 0.3) if self.tiny else (warmup, timed)
        return ["--warmup-seconds", f"{warmup:g}", "--timed-seconds", f"{timed:g}"]

    def steps(self, warmup: int, timed: int) -> tuple[str, str]:
        """Returns how many steps to warm up with and to time, as words of a command line."""
        return ("1", "3") if self.tiny else (str(warmup), str(timed))

    def file(self, row: "Row", packed: bool) -> Path:
        """Returns a file of the row's rows of tokens, or of its packed batches; it is made if it is not
        there."""
        config = self.config(row)
        path = self.folder / f"{config.train.rows}x{config.data.sequence}{'.npz' if packed else '.npy'}"
        if not path.exists():
            causal = max(16, min(blocks.BATCHES, 2**19 // config.data.sequence))
            count = 2 if self.tiny else blocks.PACKED_BATCHES if packed else causal
            (blocks.write_batches if packed else blocks.write_tokens)(config, path, count)
        return path


def config_file(name: str) -> Path:
    """Returns the file of a shipped configuration."""
    return blocks.ROOT / "configs" / f"{name}.py"


@dataclasses.dataclass(frozen=True)
class Row:
    """about: the row, for people. config: in configs/; common, settings: over it. bars: that it is held to.
    gpus: that it takes. named: it runs only where it is named. reads: it takes the mix of the rows' text.
    small: settings that make it one for a CPU."""

    about: str
    config: str
    settings: str = ""
    bars: tuple[Bar, ...] = ()
    common: str = AUTO
    gpus: int = 1
    named: bool = False
    reads, small = True, TINY

    def wanted(self, done: list[dict]) -> list[Block]:
        """Returns all blocks of the row, as far as can be told from those that ran, in their order."""
        raise NotImplementedError

    def command(self, name: str, setup: Setup) -> list[str]:
        """Returns the command line of a contender's block."""
        raise NotImplementedError

    def found(self, setup: Setup, done: list[dict]) -> dict:
        """Returns what the blocks that ran show: what bars ask for, and `spread`, the A-A spread."""
        raise NotImplementedError

    def details(self, found: dict) -> str:
        """Returns what there is to show of the row beside its bars, in Markdown."""
        return ""

    def check(self, setup: Setup) -> None:
        """Raises InputError for settings that cannot be."""
        setup.config(self)

    def refuses(self, setup: Setup) -> str:
        """Returns why the row is not to run now, empty if it is."""
        return ""

    def left(self, done: list[dict]) -> list[Block]:
        """Returns the blocks that are still to run; one that failed is not run again."""
        ran = {(each["contender"], each["round"]) for each in done}
        gemm = [Block(name, 1, 30.0) for name in GEMM if name in self.products]
        return [each for each in (*gemm, *self.wanted(done)) if (each.name, each.turn) not in ran]

    @property
    def products(self) -> tuple[str, ...]:
        """The sustained products that are measured beside the row."""
        return tuple(GEMM)[: 2 if "fp8" in self.settings else 1]


GEMM = {"gemm_bf16": "bf16", "gemm_fp8": "fp8"}


def gemm_command(name: str, setup: Setup) -> list[str]:
    """Returns the command line of a sustained product."""
    words = ["--dtype", GEMM[name], *setup.seconds(5, 10), *(["--size", "256"] if setup.tiny else [])]
    return [sys.executable, str(blocks.HERE / "gemm.py"), *words]


def lines_of(done: list[dict], name: str) -> list[dict]:
    """Returns what a contender's blocks printed."""
    return [each["line"] for each in done if each["contender"] == name and "line" in each]


def rates(done: list[dict], name: str) -> list[float]:
    """Returns the tokens per second of a contender's blocks."""
    return [line["tokens_per_second"] for line in lines_of(done, name) if line.get("tokens_per_second")]
