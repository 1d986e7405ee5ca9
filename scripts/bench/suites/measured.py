"""Rows of programs that print their numbers: rounds of all contenders, their medians, and ratios of two."""

import dataclasses
import shlex
import statistics
import sys

import blocks
import comparison
from suites.rows import TINY, Bar, Block, Row, Setup

RATE = "tokens_per_second"
UNEQUAL = 0.05
"""Rates that differ by more are not equal."""
ORIGIN = ("benchmark", "device", "versions", "commit", "command")
"""Of what a program prints: where it comes from, which the record says once."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A contender's number over another's. at: rates that have to be equal for it, as the memory of two."""

    one: str
    other: str
    of: str = RATE
    at: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.one} / {self.other}"

    def judged(self, rows: dict[str, dict]) -> dict:
        """Returns the ratio, whether it may be claimed, and whether the rates are equal."""
        one, other = (rows[name] | {"spread": rows[name]["spreads"].get(self.of)} for name in self.pair)
        unequal = [abs(one[rate] / other[rate] - 1) for rate in self.at]
        told = comparison.ratio(one, other, self.of) | {"of": self.of}
        return told | ({"rates_equal": max(unequal) <= UNEQUAL} if unequal else {})

    @property
    def pair(self) -> tuple[str, str]:
        return self.one, self.other


class Over(Bar):
    """A bar of a ratio, whose name `what` is; missed where the rates are not equal."""

    def met(self, found: dict) -> bool | None:
        met = super().met(found)
        return met and found["ratios"][self.what].get("rates_equal", True)


@dataclasses.dataclass(frozen=True)
class Measured(Row):
    """contenders: {name: its program and its words, as one types them here; `given` says what {key} stands
    for}; the bars are of the first's numbers, or of ratios. rounds: of all contenders. seconds: of a block,
    about. timed: seconds of warm-up and timed. within: the key of a line whose values are the contenders.
    columns: {heading: (number, format)} of the table. tiny, small: words and settings that make it one for a
    CPU."""

    config: str = ""
    common: str = ""
    contenders: dict[str, str] = dataclasses.field(default_factory=dict)
    rounds: int = 1
    seconds: float = 60.0
    timed: tuple[float, float] = (20.0, 40.0)
    ratios: tuple[Ratio, ...] = ()
    within: str = ""
    columns: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    tiny: str = "--tiny"
    small: str = TINY
    products, reads = (), False

    def wanted(self, done: list[dict]) -> list[Block]:
        turns = range(1, self.rounds + 1)
        return [Block(name, turn, self.seconds) for turn in turns for name in self.contenders]

    def given(self, setup: Setup) -> dict[str, list[str]]:
        """Returns the words that {key} stands for in a command."""
        return {"seconds": setup.seconds(*self.timed), "config": setup.words(self) if self.config else []}

    def command(self, name: str, setup: Setup) -> list[str]:
        given = {key: shlex.join(words) for key, words in self.given(setup).items()}
        typed = f"{self.contenders[name]} {self.tiny if setup.tiny else ''}".format(**given)
        program, *words = shlex.split(typed)
        if program.startswith("peers."):
            return [setup.torch_python, "-m", program, *words]
        on_cpu = ["env", "JAX_PLATFORMS=cpu", f"XLA_FLAGS=--xla_force_host_platform_device_count={self.gpus}"]
        python = [*(on_cpu if setup.tiny else []), sys.executable]
        return [*python, str(blocks.HERE / "measure" / program), *words]

    def check(self, setup: Setup) -> None:
        if self.config:
            super().check(setup)

    def found(self, setup: Setup, done: list[dict]) -> dict:
        ran = comparison.ran([block for block in done if block["contender"] in self.contenders])
        rows = {name: medians(lines) | about for name, (lines, about) in ran.items()}
        own = rows.get(next(iter(self.contenders)), {})
        if self.within:
            lines = [line[self.within] for lines, _ in ran.values() for line in lines]
            rows = {name: medians([line[name] for line in lines]) for name in (lines[0] if lines else ())}
        known = [of for of in self.ratios if all(rows.get(name, {}).get(of.of) for name in of.pair)]
        compared = {(name, ratio.of) for ratio in known for name in ratio.pair}
        spreads = [rows[name]["spreads"][of] for name, of in compared] or [own.get("spreads", {}).get(RATE)]
        ratios = {ratio.name: ratio.judged(rows) for ratio in known}
        return {
            **own,
            "contenders": rows,
            "ratios": ratios,
            "spread": max((spread for spread in spreads if spread is not None), default=None),
            **{name: of["ratio"] for name, of in ratios.items()},
        }

    def details(self, found: dict) -> str:
        rows = [[name, *comparison.cells(row, self.columns)] for name, row in found["contenders"].items()]
        told = [comparison.markdown(["contender", *self.columns], rows)]
        ratios = []
        for name, of in found["ratios"].items():
            doubts = [*of.get("doubts", []), *([] if of.get("rates_equal", True) else ["rates differ"])]
            needed = comparison.shown(of["needed"], ".2%")
            ratios.append([name, of["of"], comparison.judged(of), needed, ", ".join(doubts)])
        if ratios:
            head = ("ratio", "of", "value", "twice the A-A spread", "")
            told.append(comparison.markdown(head, ratios))
        return "\n\n".join(told)


def medians(lines: list[dict]) -> dict:
    """Returns what a contender's lines say: of numbers the median, and `spreads` between the lines."""
    found = {key: value for key, value in lines[0].items() if key not in ORIGIN}
    numbers = {
        key: [line[key] for line in lines if line.get(key) is not None]
        for key, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    middle = {key: statistics.median(of) for key, of in numbers.items()}
    return found | middle | {"spreads": {key: comparison.spread(of) for key, of in numbers.items()}}
