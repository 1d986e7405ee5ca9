"""What a terminal shows of a ledger, and of two compared: tables for `rich`."""

from collections.abc import Iterable, Sequence

import rich.box
import rich.console
import rich.table
from rich.text import Text

from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain.breakdown import figures, step_parts
from jaxthru.profile.explain.causes import Change
from jaxthru.profile.explain.compare import Comparison, title
from jaxthru.profile.explain.unit import Unit
from jaxthru.profile.explain.verdict import nothing_to_win, relation, shares, verdict

ADVICE = 3
CHANGES = 8
Shown = rich.console.RenderableType


def summary(ledger: Ledger) -> rich.console.Group:
    """Returns the verdict, the parts of the step, which add up to it, and the first few pieces of advice."""
    step, found = ledger.window.step_seconds, figures(ledger)
    unit = Unit.of(step)
    said = [f"{found.tokens_per_second:,.0f} tokens/s"]
    if found.mfu is not None:
        said.append(f"MFU {found.mfu:.1%} of the bf16 peak")
    if found.mfu_at_clock is not None:
        said.append(f"{found.mfu_at_clock:.1%} of it at the clock that ran")
    if ledger.cost.joules_per_token is not None:
        said.append(f"{1e3 * ledger.cost.joules_per_token:,.4g} mJ a token")
    head = (verdict(ledger), shares(ledger, unit), relation(ledger, unit), ", ".join(said))
    rows = [
        (title(name), unit.bare(seconds), f"{seconds / step:.1%}")
        for name, seconds in step_parts(ledger).items()
        if abs(seconds) >= 5e-4 * step
    ]
    columns = "part of the step", f">{unit.name}", ">share"
    table = _table(columns, rows, ("step", unit.bare(step), "100.0%"))
    return rich.console.Group(*map(Text, head), table, _advice(ledger, unit))


def _advice(ledger: Ledger, unit: Unit) -> Shown:
    rows = [
        (f"{each.key} = {each.value}", unit(each.gain_seconds), f"{each.gain_share:.1%}")
        for each in ledger.advice
        if each.gain_seconds is not None
    ]
    if not rows:
        return Text(nothing_to_win(ledger, unit))
    return _table(("what to change next", ">up to", ">share"), rows[:ADVICE])


def comparison(found: Comparison, names: tuple[str, str], brief: bool = False) -> rich.console.Group:
    """Returns what changed, the largest first, each with its likely cause. names: of the two runs. brief:
    without layers, kernels and what is not about time."""
    unit = Unit.of(max(found.step_before, found.step_after))
    shown: list[Shown] = [Text(_headline(found, unit))]
    if abs(found.tokens - 1) >= 0.01:
        more = f"{names[1]} has {found.tokens:.3g} times the tokens: its seconds are for as many."
        shown.append(Text(more))
    if found.config:
        shown.append(_table(("configuration", *names), found.config))
    seconds = [f">{each}, {unit.name}" for each in names]
    moved = found.step_after - found.step_before
    step = Change("step", found.step_before, found.step_after, moved, moved / found.step_before)
    rest = "", "", _signed(found.rest, unit), f"{found.rest / found.step_before:+.1%}"
    rows = [*_rows(found.changes, unit), ("the rest, under the noise", *rest)]
    changed = ">change", ">share"
    shown.append(_table(("part of the step", *seconds, *changed), rows, *_rows([step], unit)))
    shown += [Text(f"{title(change.name)}: {change.cause}.") for change in found.changes[1:] if change.cause]
    if brief:
        return rich.console.Group(*shown)
    for name, changes in (
        ("layer, phase (line)", found.scopes),
        ("kernels by scope", found.kernels),
        ("exposed collectives", found.collectives),
    ):
        if changes:
            shown.append(_table((name, *seconds, *changed), _rows(changes[:CHANGES], unit)))
    rows = [
        (f"{verb}: {entry.rule.replace('_', ' ')}", entry.scope, entry.text)
        for verb, entries in (("new", found.lint_new), ("gone", found.lint_gone))
        for entry in entries[:CHANGES]
    ]
    if rows:
        shown.append(_table(("found in the program", "where", "what"), rows))
    if found.figures:
        rows = [(name, _figure(before), _figure(after)) for name, before, after in found.figures]
        shown.append(_table(("measured", *(f">{name}" for name in names)), rows))
    return rich.console.Group(*shown)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:.4g}"


def _headline(found: Comparison, unit: Unit) -> str:
    top, step, least = found.top, found.step_after - found.step_before, unit(found.noise)
    if top:
        size, cause = f"{_signed(top.seconds, unit)} {unit.name}, {top.share:+.1%}", top.cause
        return f"Most changed: {title(top.name).lower()} ({size}){f': {cause}' if cause else ''}."
    if abs(step) <= found.noise:
        return f"No change above the noise of both runs, {least} a step."
    size = f"{_signed(step, unit)} {unit.name}, {step / found.step_before:+.1%}"
    return f"The step changed ({size}), but none of its parts by more than the noise of both runs, {least}."


def _rows(changes: Iterable[Change], unit: Unit) -> list[tuple[str, ...]]:
    return [
        (
            *(title(each.name), unit.bare(each.before), unit.bare(each.after)),
            *(_signed(each.seconds, unit), f"{each.share:+.1%}"),
        )
        for each in changes
    ]


def _signed(seconds: float, unit: Unit) -> str:
    return f"{'+' if seconds >= 0 else ''}{unit.bare(seconds)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence], total: Sequence[str] = ()) -> rich.table.Table:
    """Returns a table of plain text: brackets in names are no markup. ">" before a column's name aligns it at
    the right. total: the last row, apart from the others."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        justify = "right" if right else "left"
        table.add_column(Text(column.lstrip(">")), justify=justify, no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    if total:
        table.add_section()
        table.add_row(*map(Text, total))
    return table
