"""Compares runs by what they recorded: losses, speed and the settings that differ, as a table and a page."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import rich.console
import rich.table
import rich.text

from jaxthru.runtime import command_line
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import exit_code, require
from jaxthru.training import cost
from jaxthru.training.display import median, number
from jaxthru.training.plot import Panel, Picture, svg
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.table import Table

PROG = "python -m jaxthru.compare"
EXAMPLE = "runs/quickstart/1 runs/quickstart/2"
POINTS = 200
"""Points of a line of training losses: each is the mean of its steps, or noise would hide the line."""
MOST_SETTINGS = 30


class Line(NamedTuple):
    """A line of the table. values: of each run, None where one has none. form: of those that are numbers."""

    title: str
    values: list[object]
    form: str = ""

    @property
    def texts(self) -> list[str]:
        """Returns the values for people."""
        return [number(value, self.form) if self.form else shown(value) for value in self.values]


def runs_of(paths: Sequence[str]) -> dict[str, RunDirectory]:
    """Returns runs by names as short as tell them apart. Raises InputError for one without a step."""
    runs = [RunDirectory(path) for path in paths]
    for run in runs:
        require(run.path.is_dir(), f"{run.path}: there is no such run directory")
        require(bool(run.read_metrics()), f"{run.path}: no step has been recorded yet")
    full = [f"/{run.where}" if run.mirror else str(run.path.resolve()) for run in runs]
    require(len({*full}) == len(full), "a run is named twice; name each once")
    common = os.path.commonpath(full) if len(full) > 1 else str(Path(full[0]).parent)
    return {os.path.relpath(path, common): run for path, run in zip(full, runs, strict=True)}


def table_of(runs: dict[str, RunDirectory]) -> list[Line]:
    """Returns the lines of the table, those of the settings that differ last."""
    lines: list[Line] = []

    def add(title: str, values: list[float | None], form: str) -> None:
        if any(value is not None for value in values):
            lines.append(Line(title, values, form))

    rows = [run.read_metrics() for run in runs.values()]
    held_out = [[row for row in run.read_eval() if row["tokens"]] for run in runs.values()]
    add("steps", [of[-1]["step"] for of in rows], ",")
    add("tokens", [sum(row["tokens"] or 0 for row in of) for of in rows], ",")
    add("training loss, last", [of[-1]["loss"] for of in rows], ".4f")
    add("held-out loss, last", [of[-1]["loss"] if of else None for of in held_out], ".4f")
    sources = dict.fromkeys(name for of in held_out if of for name in of[-1]["loss_by_source"] or {})
    for name in sources:
        found = [(of[-1]["loss_by_source"] or {}).get(name) if of else None for of in held_out]
        add(f"  {name}", found, ".4f")
    medians = [median(of, "tokens_per_second") for of in rows]
    add("tokens/s, median", [None if math.isnan(value) else value for value in medians], ",.0f")
    totals = [cost.total(of) for of in rows]
    for name in cost.FIELDS:
        add(f"{name.replace('_', ' ')} of the steps", [getattr(of, name) for of in totals], ",.4g")
    add("updates skipped", [of[-1]["skipped_updates"] or 0 for of in rows], ",")
    return lines + differences(list(runs.values()))


def differences(runs: list[RunDirectory]) -> list[Line]:
    """Returns the settings that are not the same in all runs."""
    flat = [settings(run) for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    return [
        Line(key, [each.get(key) for each in flat])
        for key in keys
        if len({shown(each.get(key)) for each in flat}) > 1
    ]


def settings(run: RunDirectory) -> dict[str, object]:
    """Returns a run's settings by their full names; none where its config.json cannot be read."""
    try:
        groups = json.loads(run.config.read_text())
    except (OSError, ValueError):
        return {}
    groups = {name: keys for name, keys in groups.items() if isinstance(keys, dict)}
    return {f"{group}.{key}": value for group, keys in groups.items() for key, value in keys.items()}


def shown(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def picture_of(runs: dict[str, RunDirectory]) -> Picture:
    """Returns training losses by step and by token, and held-out losses by step where there are any."""
    by_step, by_token, held_out = {}, {}, {}
    for name, run in runs.items():
        rows, evaluations = run.metrics(), run.evaluations()
        by_step[name] = means(rows, np.asarray(rows["step"], float))
        by_token[name] = means(rows, np.cumsum(np.nan_to_num(np.asarray(rows["tokens"], float))))
        if len(evaluations):
            held_out[name] = evaluations["step"], np.asarray(evaluations["loss"], float)
    panels = [
        Panel("training loss (nats per token), by step", by_step),
        Panel("training loss (nats per token), by tokens seen", by_token),
    ]
    held = [Panel("held-out loss (nats per token), by step", held_out)] if held_out else []
    return Picture((*panels, *held))


def means(rows: Table, across: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and loss of a line of at most POINTS points. across: x of each row."""
    parts = np.array_split(np.arange(len(rows)), min(POINTS, len(rows)))
    losses = np.asarray(rows["loss"], float)
    return np.array([across[part[-1]] for part in parts]), np.array([_mean(losses[part]) for part in parts])


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def page(runs: dict[str, RunDirectory], lines: list[Line]) -> str:
    """Returns the table and the plots as one HTML page that needs no other file."""
    head = "".join(f"<th>{escape(name)}</th>" for name in runs)
    cells = lambda values: "".join(f"<td>{escape(value)}</td>" for value in values)  # noqa: E731
    body = "\n".join(f"<tr><th>{escape(line.title)}</th>{cells(line.texts)}</tr>" for line in lines)
    style = (
        "body{font-family:sans-serif;max-width:60em;margin:2em auto}"
        "table{border-collapse:collapse}th,td{text-align:left;padding:.2em .8em;border-bottom:1px solid #ddd}"
    )
    return (
        f'<!doctype html>\n<meta charset="utf-8">\n<title>runs compared</title>\n<style>{style}</style>\n'
        f"<h1>Runs compared</h1>\n{svg(picture_of(runs).panels)}"
        f"<table>\n<tr><th></th>{head}</tr>\n{body}\n</table>\n"
    )


def compare(arguments: argparse.Namespace) -> None:
    """Prints the table and writes the page. Raises InputError."""
    runs = runs_of(arguments.runs)
    lines = table_of(runs)
    if arguments.json:
        columns = zip(*(line.values for line in lines), strict=True)
        titles = [line.title.strip() for line in lines]
        found = {name: dict(zip(titles, of, strict=True)) for name, of in zip(runs, columns, strict=True)}
        print(json.dumps(found, indent=2))
    else:
        table = rich.table.Table("")
        for name in runs:
            table.add_column(rich.text.Text(name))
        for line in lines[:MOST_SETTINGS]:
            table.add_row(*map(rich.text.Text, (line.title, *line.texts)))
        console = rich.console.Console()
        console.print(table)
        if len(lines) > MOST_SETTINGS:
            console.print(f"and {len(lines) - MOST_SETTINGS} more settings: see the page")
    write_atomically(arguments.page, page(runs, lines))
    if not arguments.json:
        print(f"page: {arguments.page}")


def main(argv: list[str] | None = None, prog: str = PROG) -> int:
    """Runs the command; returns its exit code, 2 for bad input."""
    parser = command_line.parser(prog, "Compares runs by what they recorded.", EXAMPLE)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "--page", type=Path, default=Path("compare.html"), metavar="FILE", help="HTML, written"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    arguments = parser.parse_args(argv)
    return exit_code(lambda: compare(arguments))
