"""Mixtures whose experts lie on two GPUs, beside single GPUs, and how a command is given its devices."""

import dataclasses
import statistics
import sys

import blocks
from suites.rows import TINY_EXPERTS, Block, Row, Setup, lines_of

from jaxthru.runtime.xla import MEMORY_FRACTION


def on_two(setup: Setup, words: list[str], memory: float, devices: int = 2) -> list[str]:
    """Returns a command line with what it needs of its environment; for --tiny, with devices of the CPU.
    memory: the share that XLA takes; less where CUDA loads all code at its start."""
    if not setup.tiny:
        return ["env", f"XLA_CLIENT_MEM_FRACTION={memory:g}", *words]
    # As `Overlap` says of NPROC.
    forced = f"--xla_force_host_platform_device_count={devices}"
    return ["env", "JAX_PLATFORMS=cpu", "NPROC=16", f"XLA_FLAGS={forced}", *words]


@dataclasses.dataclass(frozen=True)
class Experts(Row):
    """A mixture whose experts lie on two GPUs, beside single GPUs that each train alone at the same time, a
    process each. pair: settings of the two. smaller: over these, where a step with these does not run. alone:
    whether one GPU can hold it. steps: to warm up with and to time, in place of seconds. seconds: of a block.
    memory: see `on_two`.
    """

    pair: str = ""
    smaller: str = ""
    alone: bool = True
    steps: tuple[int, int] = ()
    seconds: float = 90.0
    memory: float = MEMORY_FRACTION
    gpus: int = 2
    products = ()
    small: str = TINY_EXPERTS

    def wanted(self, done):
        alone = [Block("alone", turn, self.seconds, "each") for turn in (1, 2)] if self.alone else []
        failed = any(each["contender"] == "pair" and "error" in each for each in done)
        less = [Block("smaller", 1, self.seconds)] if self.smaller and failed else []
        return [*alone, Block("pair", 1, self.seconds), *less]

    def command(self, name, setup):
        own = {"pair": self.pair, "smaller": f"{self.pair} {self.smaller}"}.get(name, "")
        row = dataclasses.replace(self, settings=f"{self.settings} {own}")
        rows = str(setup.file(row, packed=True))
        timing = ["--steps", *map(str, self.steps)] if self.steps else setup.seconds(12, 24)
        timing = ["--steps", "1", "3"] if setup.tiny else timing
        script = [sys.executable, str(blocks.HERE / "measure" / "step.py"), *setup.words(row)]
        words = [*script, "--packed-rows", rows, "--keep-compiled", *timing]
        return on_two(setup, words, self.memory, 1 if name == "alone" else 2)

    def check(self, setup):
        setup.config(self)
        setup.config(self, *self.pair.split())

    def found(self, setup, done):
        pair, alone = (
            [line["tokens_per_second"] for of in names for line in lines_of(done, of)]
            for names in (("pair", "smaller"), ("alone",))
        )
        if not pair:
            return {}
        apart = abs(alone[0] - alone[1]) / statistics.fmean(alone) if len(alone) > 1 else None
        one = {"of_one": pair[0] / self.gpus / statistics.fmean(alone)} if alone else {}
        return {"of_a_gpu": pair[0] / self.gpus} | one | {"spread": apart}


class Skewed(Experts):
    """The same where the router favours one device."""

    def wanted(self, done):
        return [Block("skewed", 1, self.seconds)]

    def command(self, name, setup):
        row = dataclasses.replace(self, settings=f"{self.settings} {self.pair}")
        script = [sys.executable, str(blocks.HERE / "measure" / "experts_skew.py"), *setup.words(row)]
        return on_two(setup, [*script, *setup.seconds(10, 15)], self.memory)

    def found(self, setup, done):
        for line in lines_of(done, "skewed"):
            of = line["contenders"]
            spread = max(row["spread"] or 0.0 for row in of.values())
            return {"over_predicted": line["over_predicted"], "spread": spread, "contenders": of}
        return {}
