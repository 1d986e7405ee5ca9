"""Rows that are no races: starts of the training command, untuned shapes, steps near the limit of memory."""

import dataclasses
import sys

import blocks
import comparison
from suites.drawn_shapes import Drawn, shapes
from suites.rows import Block, Row, Setup, lines_of

# Of every run of the training command: TensorBoard's files are no part of what is measured.
PLAIN = "metrics.tensorboard=false"


@dataclasses.dataclass(frozen=True)
class Starts(Row):
    """The training command's seconds to its first step, with an empty cache and then with what that left.
    Each is started twice, and the slower counts. seconds: of both starts together."""

    seconds: float = 75.0

    def wanted(self, done: list[dict]) -> list[Block]:
        return [Block("starts", turn, self.seconds) for turn in (1, 2)]

    def command(self, name: str, setup: Setup) -> list[str]:
        own_corpus = [] if setup.tiny else ["data.mix=quickstart"]  # what a user's first start prepares
        words = setup.words(self, *own_corpus, PLAIN)
        return [sys.executable, str(blocks.HERE / "measure" / "starts.py"), "--steps", "11", *words]

    def found(self, setup: Setup, done: list[dict]) -> dict:
        both = [line["seconds_to_first_step"] for line in lines_of(done, "starts")]
        if not both:
            return {}
        each = {which: [of[which] for of in both] for which in ("first", "second")}
        spreads = [comparison.spread(of) for of in each.values()]
        spread = None if None in spreads else max(spreads)
        return {which: max(of) for which, of in each.items()} | {"spread": spread}


@dataclasses.dataclass(frozen=True)
class Untuned(Row):
    """Shapes drawn from the commit's hash: the first steps of those that fit, or one line for each that does
    not. steps: 0 of those that are to be refused. seconds: of a block, about."""

    steps: int = 10
    seconds: float = 200.0

    def drawn(self, setup: Setup) -> list[Drawn]:
        """Returns the row's shapes."""
        return shapes(setup.commit)[self.steps == 0]

    def refuses(self, setup: Setup) -> str:
        return "" if setup.commit else "its shapes are drawn from the commit's hash: give it with --commit"

    @property
    def names(self) -> list[str]:
        """The contenders: a shape each."""
        return [f"shape_{number}" for number in range(1, (2 if self.steps == 0 else 6) + 1)]

    def wanted(self, done: list[dict]) -> list[Block]:
        return [Block(name, 1, self.seconds) for name in self.names]

    def command(self, name: str, setup: Setup) -> list[str]:
        drawn = self.drawn(setup)[self.names.index(name)]
        shape = dataclasses.replace(self, settings=f"{self.settings} {drawn.settings}")
        # One that is too large stays so on a CPU.
        words = dataclasses.replace(setup, tiny=setup.tiny and self.steps > 0).words(shape, PLAIN)
        script = [sys.executable, str(blocks.HERE / "measure" / "first_steps.py")]
        return [*script, *words, "--steps", str(self.steps)]

    def found(self, setup: Setup, done: list[dict]) -> dict:
        lines = {name: line for name in self.names for line in lines_of(done, name)}
        told = {
            name: {
                "parameters": drawn.parameters,
                "as_it_should": lines.get(name, {}).get("as_it_should", False),
                **{key: lines.get(name, {}).get(key) for key in ("chosen", "refused", "step_seconds")},
            }
            for name, drawn in zip(self.names, self.drawn(setup), strict=True)
        }
        ran = any(each["contender"] in self.names for each in done)
        good = sum(of["as_it_should"] for of in told.values())
        return {"shapes": told, "as_they_should": good if ran else None, "spread": None}


@dataclasses.dataclass(frozen=True)
class NearLimit(Row):
    """Steps of equal work, one causal row like another, of a model that `auto` fills the card with."""

    steps: tuple[int, int] = (3, 40)
    seconds: float = 240.0

    def wanted(self, done: list[dict]) -> list[Block]:
        return [Block("near_limit", 1, self.seconds)]

    def command(self, name: str, setup: Setup) -> list[str]:
        script = [sys.executable, str(blocks.HERE / "measure" / "step.py"), *setup.words(self)]
        rows = str(setup.file(self, packed=False))
        return [*script, "--causal-rows", rows, "--steps", *setup.steps(*self.steps), "--keep-compiled"]

    def found(self, setup: Setup, done: list[dict]) -> dict:
        for line in lines_of(done, "near_limit"):
            peak, card = line["peak_hbm_bytes"], line["card_bytes"]
            slowest = round(line["step_seconds_max"] / line["step_seconds"], 4)
            share = round(peak / card, 4) if peak and card else None
            told = {key: line.get(key) for key in ("chosen", "tokens_per_second")}
            return {"slowest": slowest, "share_of_card": share, "spread": None, **told}
        return {}
