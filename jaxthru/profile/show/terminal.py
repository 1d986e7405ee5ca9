"""What a terminal shows of a ledger, and of two compared: tables for `rich`."""

from collections.abc import Iterable

import rich.box
import rich.console
import rich.table
from rich.text import Text

from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain.breakdown import figures, parts
from jaxthru.profile.explain.causes import Change
from jaxthru.profile.explain.compare import Comparison, title
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import nothing_to_win, relation, shares, verdict

ADVICE = 3
CHANGES = 8


def summary(ledger: Ledger) -> rich.console.Group:
    """Returns the verdict, the parts of the step, which add up to it, and the first few pieces of advice."""
    window, found = ledger.window, figures(ledger)
    unit = Unit.of(window.step_seconds)
    said = [f"{found.tokens_per_second:,.0f} tokens/s"]
    if found.mfu is not None:
        said.append(f"MFU {found.mfu:.1%} of the bf16 peak")
    if found.mfu_at_clock is not None:
        said.append(f"{found.mfu_at_clock:.1%} of it at the clock that ran")
    head = (verdict(ledger), shares(ledger, unit), relation(ledger, unit), ", ".join(said))
    table = _table("part of the step", f">{unit.name}", ">share")
    for name, seconds in parts(ledger).items():
        if abs(seconds) >= 5e-4 * window.step_seconds:
            _row(table, title(name), unit.bare(seconds), f"{seconds / window.step_seconds:.1%}")
    table.add_section()
    _row(table, "step", unit.bare(window.step_seconds), "100.0%")
    return rich.console.Group(*map(Text, head), table, *_advice(ledger, unit))


def _advice(ledger: Ledger, unit: Unit) -> list[rich.console.RenderableType]:
    known = [each for each in ledger.advice if each.gain_seconds is not None]
    if not known:
        return [Text(nothing_to_win(ledger, unit))]
    table = _table("what to change next", ">up to", ">share")
    for each in known[:ADVICE]:
        _row(table, f"{each.key} = {each.value}", unit(each.gain_seconds), f"{each.gain_share:.1%}")
    return [table]


def comparison(found: Comparison, names: tuple[str, str], brief: bool = False) -> rich.console.Group:
    """Returns what changed, the largest first, each with its likely cause. names: of the two runs. brief:
    without layers, kernels and what is not about time."""
    unit = Unit.of(max(found.step_before, found.step_after))
    shown: list[rich.console.RenderableType] = [Text(_headline(found, unit))]
    if abs(found.tokens - 1) >= 0.01:
        shown.append(
            Text(f"{names[1]} has {found.tokens:.3g} times the tokens: its seconds are for as many.")
        )
    if found.config:
        table = _table("configuration", names[0], names[1])
        for key, before, after in found.config:
            _row(table, key, str(before), str(after))
        shown.append(table)
    table = _changes("part of the step", names, unit, found.changes)
    share = f"{found.rest / found.step_before:+.1%}"
    _row(table, "the rest, under the noise", "", "", _signed(found.rest, unit), share)
    table.add_section()
    moved = found.step_after - found.step_before
    step = Change("step", found.step_before, found.step_after, moved, moved / found.step_before)
    _row(table, "step", *_cells(step, unit))
    shown.append(table)
    shown += [Text(f"{title(change.name)}: {change.cause}.") for change in found.changes[1:] if change.cause]
    if brief:
        return rich.console.Group(*shown)
    for name, changes in (
        ("layer, phase (line)", found.scopes),
        ("kernels by scope", found.kernels),
        ("exposed collectives", found.collectives),
    ):
        if changes:
            shown.append(_changes(name, names, unit, changes[:CHANGES]))
    if found.lint_gone or found.lint_new:
        table = _table("found in the program", "where", "what")
        for verb, entries in (("new", found.lint_new), ("gone", found.lint_gone)):
            for entry in entries[:CHANGES]:
                _row(table, f"{verb}: {entry.rule.replace('_', ' ')}", entry.scope, entry.text)
        shown.append(table)
    if found.figures:
        table = _table("measured", f">{names[0]}", f">{names[1]}")
        for name, before, after in found.figures:
            _row(table, name, *("-" if value is None else f"{value:,.0f}" for value in (before, after)))
        shown.append(table)
    return rich.console.Group(*shown)


def _headline(found: Comparison, unit: Unit) -> str:
    if found.top is None:
        step, least = found.step_after - found.step_before, unit(found.noise)
        if abs(step) <= found.noise:
            return f"No change above the noise of both runs, {least} a step."
        size = f"{_signed(step, unit)} {unit.name}, {step / found.step_before:+.1%}"
        return (
            f"The step changed ({size}), but none of its parts by more than the noise of both runs, {least}."
        )
    top = found.top
    cause = f": {top.cause}" if top.cause else ""
    size = f"{_signed(top.seconds, unit)} {unit.name}, {top.share:+.1%}"
    return f"Most changed: {title(top.name).lower()} ({size}){cause}."


def _changes(name: str, names: tuple[str, str], unit: Unit, changes: Iterable[Change]) -> rich.table.Table:
    table = _table(name, *(f">{each}, {unit.name}" for each in names), ">change", ">share")
    for change in changes:
        _row(table, title(change.name), *_cells(change, unit))
    return table


def _cells(change: Change, unit: Unit) -> tuple[str, str, str, str]:
    numbers = unit.bare(change.before), unit.bare(change.after), _signed(change.seconds, unit)
    return *numbers, f"{change.share:+.1%}"


def _signed(seconds: float, unit: Unit) -> str:
    return f"{'+' if seconds >= 0 else ''}{unit.bare(seconds)}"


def _table(*columns: str) -> rich.table.Table:
    """Returns a table; ">" before a column's name aligns it at the right."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            Text(column.lstrip(">")),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    return table


def _row(table: rich.table.Table, *cells: str) -> None:
    """Adds a row of plain text: brackets in names are no markup."""
    table.add_row(*map(Text, cells))
