"""A ledger, and two compared, as a notebook shows them: pictures, tables and sentences."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import rich.console

from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain import compare as comparing
from jaxthru.profile.explain.settings import TITLES
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import nothing_to_win, shares, verdict
from jaxthru.profile.show.html import bars, template
from jaxthru.profile.show.publish import config, opened
from jaxthru.profile.show.terminal import comparison, summary
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.table import Table

Run = RunDirectory | Path | str


@dataclasses.dataclass(frozen=True, repr=False)
class ShownLedger:
    """A run's ledger. A notebook draws the parts of the step, and `print` gives the same as text; `.ledger`
    has all numbers, as docs/ledger.md explains them."""

    ledger: Ledger

    def table(self, most: int | None = 10) -> Table:
        """Returns the operations of a step, those that take the longest first.

        most: so many of them; None is all. Columns: `operation`, `part` of the step that it counts for,
        `source` line that asked for it, `times` in a step, `ms` a step in all, beside what else runs, and
        where it multiplies `GFLOP/s`.
        """
        found = sorted(self.ledger.kernels, key=lambda kernel: -kernel.seconds)[:most]
        names = "operation", "part", "source", "times", "ms", "GFLOP/s"
        rows = []
        for each in found:
            speed = each.flops_per_second and each.flops_per_second / 1e9
            values = each.name, TITLES[each.line][0], each.source or "", round(each.count)
            rows.append(dict(zip(names, (*values, 1e3 * each.seconds, speed), strict=True)))
        return Table(rows, names)

    def layers(self) -> Table:
        """Returns the seconds of the step by layer, phase and part, the longest first."""
        found = sorted(self.ledger.scopes, key=lambda scope: -scope.seconds)
        names = "layer", "phase", "part", "ms"
        rows = [(each.layer, each.phase, TITLES[each.line][0], 1e3 * each.seconds) for each in found]
        return Table([dict(zip(names, row, strict=True)) for row in rows], names)

    def advice(self) -> str:
        """Returns what to change next, what it is expected to win at most, and why."""
        unit = Unit.of(self.ledger.window.step_seconds)
        said = []
        for each in self.ledger.advice:
            known, step = each.gain_seconds, unit(self.ledger.window.step_seconds)
            gain = "memory only, or not known" if known is None else f"up to {unit(known)} of {step}"
            said.append(f"{each.key} = {each.value}: {gain}. {each.text}")
        return "\n".join(said) or nothing_to_win(self.ledger, unit)

    def __repr__(self) -> str:
        return _text(summary(self.ledger))

    def _repr_svg_(self) -> str:
        return waterfall(self.ledger)


@dataclasses.dataclass(frozen=True, repr=False)
class ShownComparison:
    """Two runs compared. `print` gives what changed; `.details` has layers and kernels too; `.comparison`
    all numbers."""

    comparison: comparing.Comparison
    names: tuple[str, str]

    @property
    def details(self) -> str:
        """All that changed, as `jaxthru profile compare` prints it."""
        return _text(comparison(self.comparison, self.names))

    def __repr__(self) -> str:
        return _text(comparison(self.comparison, self.names, brief=True))


def ledger(run: Run, step: int | None = None) -> ShownLedger:
    """Returns where the time of a profiled run's step went. A notebook shows it as a picture; `table()` has
    the operations, `layers()` the layers, `advice()` what to change next.

    run: a run that was trained with `profile.at`. step: where it was profiled; None is the last time.
    Raises InputError.
    """
    return ShownLedger(opened(_path(run), step))


def compare(
    before: Run, after: Run, names: tuple[str, str] = ("before", "after"), step: int | None = None
) -> ShownComparison:
    """Returns what changed from one profiled run to another, by how much, and the likely cause.

    names: what the two are called. step: where both were profiled; None is the last time of each.
    Raises InputError.
    """
    runs = _path(before), _path(after)
    ledgers = [opened(run, step) for run in runs]
    return ShownComparison(comparing.compare(*ledgers, *map(config, runs)), names)


def waterfall(ledger: Ledger) -> str:
    """Returns the parts of the step as SVG: bars that begin where the one before ends."""
    unit = Unit.of(ledger.window.step_seconds)
    drawn = [(TITLES[name][0], *bar) for name, *bar in bars(ledger, unit, 5e-4)]
    drawn.append(("Observed step", 0.0, 1.0, unit(ledger.window.step_seconds)))
    said = {"verdict": verdict(ledger), "shares": shares(ledger, unit)}
    return template("waterfall.svg").render(bars=drawn, **said)


def _path(run: Run) -> Path:
    return run.path if isinstance(run, RunDirectory) else Path(run).expanduser()


def _text(shown: Any) -> str:
    """Returns what a terminal would show, 100 columns wide."""
    console = rich.console.Console(file=io.StringIO(), width=100, force_jupyter=False, force_terminal=False)
    console.print(shown)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip()).rstrip()
