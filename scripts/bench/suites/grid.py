"""`auto` beside all that it may stand for: every policy of rematerialisation with every loop.

A point is timed if jaxthru's own account says that it fits the device without offload.
"""

import dataclasses
import statistics
import sys

import blocks
import comparison
from suites.rows import Block, Row, Setup, lines_of, rates

from jaxthru.build.proposals import POLICIES

AUTO = "auto"
POINTS = {
    f"{policy}_{loop}": (f"remat.policy={policy}", f"model.loop={loop}")
    for policy in POLICIES
    for loop in ("unroll", "scan")
}
"""Those that compute the least again first, so that a grid cut short tells most."""


@dataclasses.dataclass(frozen=True)
class Grid(Row):
    """A shape whose `auto` is held to the fastest point. seconds: of a block, about."""

    seconds: float = 45.0

    def wanted(self, done: list[dict]) -> list[Block]:
        order = [(AUTO, 1), *((name, 1) for name in POINTS), (AUTO, 2)]
        return [Block(name, turn, self.seconds) for name, turn in order]

    def command(self, name: str, setup: Setup) -> list[str]:
        point = POINTS.get(name, ())
        words = setup.words(self, *point)
        how = ["--resident"] if point else []
        tokens = ["--causal-rows", str(setup.file(self, packed=False))]
        script = [sys.executable, str(blocks.HERE / "measure" / "step.py")]
        return [*script, *words, *tokens, *how, "--keep-compiled", *setup.seconds(3, 10)]

    def details(self, found: dict) -> str:
        ranked = sorted(found["points"].items(), key=lambda point: -point[1])
        lines = ["| point | tokens/s |", "|---|---|", *(f"| {name} | {of:,.0f} |" for name, of in ranked)]
        lines += [f"| {name} | refused: {why} |" for name, why in found["refused"].items()]
        return "\n".join([*lines, *(f"| {name} | failed |" for name in found["failed"])])

    def found(self, setup: Setup, done: list[dict]) -> dict:
        own = rates(done, AUTO)
        by_point = {name: statistics.fmean(of) for name in POINTS if (of := rates(done, name))}
        best = max(by_point, key=by_point.get, default=None)
        failed = [
            each["contender"] for each in done if each["contender"] in (AUTO, *POINTS) and "error" in each
        ]
        found = {
            "tokens_per_second": statistics.fmean(own) if own else None,
            "spread": comparison.spread(own),
            "points": by_point,
            "refused": {
                name: line["reason"]
                for name in POINTS
                for line in lines_of(done, name)
                if line.get("fits") is False
            },
            "failed": failed,
            "unfit": len(failed) if done else None,
            "fastest_point": best,
        }
        if own and best:
            found["ratio"] = statistics.fmean(own) / by_point[best]
            found["chosen"] = lines_of(done, AUTO)[0]["chosen"]
        return found
