"""What a run prints: progress during training, and the final table."""

import contextlib
import importlib.util
import math
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
import rich.table
import rich.text

from jaxthru.models.family import SHIPPED
from jaxthru.runtime.distributed import is_primary
from jaxthru.runtime.notebook import in_notebook
from jaxthru.runtime.progress import Progress
from jaxthru.training import cost, goodput
from jaxthru.training.checkpoint import saved_steps
from jaxthru.training.run_directory import RunDirectory

Row = dict[str, Any]
COLUMNS = (
    rich.progress.TextColumn("step {task.completed}/{task.total}"),
    rich.progress.BarColumn(bar_width=20),
    rich.progress.TextColumn("{task.description}"),
)


class NoProgress(contextlib.AbstractContextManager):
    """What processes other than the first show."""

    def __exit__(self, *_) -> None:
        pass

    def update(self, row: Row) -> None:
        pass

    def wait(self, text: str) -> None:
        pass

    def sample(self, prompt: str, text: str) -> None:
        pass


class StepProgress(Progress):
    """The progress of training: `update(row)` after each step, and `wait(text)` where the run waits."""

    def __init__(self, steps: int, done: int = 0, console: rich.console.Console | None = None):
        """steps: in the whole run. done: of them, so far."""
        super().__init__(COLUMNS, console)
        self._steps, self._left = steps, TimeLeft(steps)
        self.start(steps, done)

    def update(self, row: Row) -> None:
        """Shows a step's row; the last step's at once."""
        step = row["step"]
        text = describe(row, self._left(step))
        self.show(step, text, f"step {step}/{self._steps}  {text}", now=step == self._steps)

    def sample(self, prompt: str, text: str) -> None:
        """Shows what the model makes of a prompt."""
        show_sample(self.console, prompt, text)


def show_sample(console: rich.console.Console, prompt: str, text: str) -> None:
    """Prints a prompt, set off by its style, and what the model continues it with."""
    shown = rich.text.Text("sample: ", style="dim")
    shown.append(printable(prompt), style="bold").append(printable(text), style="not dim")
    console.print(shown, soft_wrap=True)


def printable(text: str) -> str:
    """Returns a text that does nothing to a terminal but to be read there."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def open_progress(steps: int, done: int = 0) -> StepProgress | NoProgress:
    """Returns this process's progress display on stderr. steps: in the whole run; done: of them, so far."""
    return StepProgress(steps, done) if is_primary() else NoProgress()


class TimeLeft:
    """Estimates the seconds left from the rate since the first step it was shown, which compiled."""

    def __init__(self, steps: int):
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def __call__(self, step: int) -> float | None:
        """Returns the seconds left after `step`, None at the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        done = step - self._first[0]
        return (now - self._first[1]) / done * (self._steps - step) if done > 0 else None


def describe(row: Row, seconds_left: float | None) -> str:
    """Returns a step's figures in one line."""
    parts = [f"loss {number(row['loss'], '.4f')}", f"{number(row['tokens_per_second'], ',.0f')} tokens/s"]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%} of the bf16 peak")
    if row["data_wait_seconds"] is not None:
        parts.append(f"data wait {row['data_wait_seconds'] / row['step_seconds']:.0%}")
    if row["skipped_updates"]:
        parts.append(f"{row['skipped_updates']} skipped")
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    return "  ".join(parts)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def clock(seconds: float) -> str:
    """Returns h:mm:ss, or m:ss under an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def final_table(run: RunDirectory, console: rich.console.Console | None = None) -> None:
    """Prints what came of a run, all from the files in its directory, and how to look at it and resume it; in
    the first process alone."""
    if not is_primary():
        return
    console = console or rich.console.Console()
    table = rich.table.Table(show_header=False)
    for name, value in summary(run):
        table.add_row(rich.text.Text(name), rich.text.Text(value))
    console.print(table)
    for sample in (run.read_eval() or [{}])[-1].get("samples") or ():
        show_sample(console, sample["prompt"], sample["text"])
    for purpose, command in commands(run):
        # Not in the table, whose borders and line breaks would be copied with it.
        console.print(f"{purpose}: {command}", soft_wrap=True, markup=False, highlight=False)


def summary(run: RunDirectory) -> list[tuple[str, str]]:
    """Returns (name, value) of each line of the final table."""
    rows = run.read_metrics()
    evaluations = [row for row in run.read_eval() if row["tokens"] != 0]  # the others have samples alone
    found = []
    if rows:
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        found.append(("steps", str(rows[-1]["step"])))
        if losses:
            found.append(("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        found.append(("held-out loss", change(first["loss"], last["loss"])))
        before = first["loss_by_source"] or {}
        for source, loss in (last["loss_by_source"] or {}).items():
            found.append((f"  {source}", change(before.get(source), loss)))
    if rows:
        found.append(("throughput", f"{median(rows, 'tokens_per_second'):,.0f} tokens/s"))
        if rows[-1]["mfu"] is not None:
            found.append(("MFU", f"{median(rows, 'mfu'):.1%} of the bf16 peak"))
        found += spent(cost.total(rows))
        if rows[-1]["skipped_updates"]:
            found.append(("skipped updates", str(rows[-1]["skipped_updates"])))
        if partly := sum(row["partly_updated"] or False for row in rows):
            found.append(("of these in part made", f"{partly} (optim.clip_rule = previous, docs/offload.md)"))
    found += kept(run)
    return [*found, ("run directory", run.where)]


def kept(run: RunDirectory) -> list[tuple[str, str]]:
    """Returns the lines of the share of the run's hours that trained, over all of its starts, and of what
    took most of the others; none of a run that has no account of them."""
    try:
        found = goodput.account(run.path)
    except ValueError:
        return []
    starts = f", {len(found.starts)} starts" if found.failures else ""
    lines = [("goodput", f"{found.goodput:.1%} of {goodput.hours(found.wall)}{starts}")]
    rest = [(share, name) for name, share in found.shares(0.01) if name != goodput.PRODUCTIVE]
    return lines + [(f"  {goodput.CATEGORIES[name]}", f"{share:.1%}") for share, name in sorted(rest)[:-6:-1]]


def spent(of: cost.Total) -> list[tuple[str, str]]:
    """Returns the lines of energy and money, of the steps alone; none of what is not known."""
    found = []
    if of.joules is not None:
        each = f", {1e3 * of.joules_per_token:,.4g} mJ a token" if of.joules_per_token is not None else ""
        found.append(("energy of the steps", f"{of.joules / KWH:,.4g} kWh{each}"))
    if of.dollars is not None:
        per = of.dollars_per_million_tokens
        each = f", {per:,.4g} a million tokens" if per is not None else ""
        found.append(("dollars of the steps", f"{of.dollars:,.4g}{each}"))
    return found


KWH = 3.6e6


def change(first: float | None, last: float | None) -> str:
    return f"{number(first, '.4f')} → {number(last, '.4f')}"


def median(rows: list[Row], field: str) -> float:
    return statistics.median([row[field] for row in rows if row[field] is not None] or [math.nan])


def commands(run: RunDirectory) -> list[tuple[str, str]]:
    """Returns (purpose, command) of what one may want to do next: for a shell or, in a notebook, a cell."""
    if in_notebook():
        return calls(run)
    python = shlex.quote(this_python())
    found = []
    if run.tensorboard.is_dir():
        look = f"{python} -m tensorboard.main --logdir {shlex.quote(str(run.tensorboard))}"
        if importlib.util.find_spec("tensorboard") is None:
            look = f"{python} -m pip install tensorboard && {look}"
        found.append(("look", look))
    config, directory = shlex.quote(str(run.config)), shlex.quote(run.where)
    if purpose := next_purpose(run):
        more = "".join(f" --set {shlex.quote(word)}" for word in overrides(run, purpose))
        command = f"{python} -m jaxthru.train --config {config} --run-dir {directory}{more}"
        found.append((purpose, command))
    return found


def overrides(run: RunDirectory, purpose: str) -> list[str]:
    """Returns what has to be set to go on: more steps, and a family of the user's own, by name, since what is
    stored imports no code."""
    name = run.asked("model").get("family", SHIPPED[0])
    found = [] if name in SHIPPED else [f"model.family={name}"]
    return [*found, *([f"train.steps={2 * run.steps()}"] if purpose == LONGER else [])]


LONGER = "train longer"


def next_purpose(run: RunDirectory) -> str | None:
    """Returns what the same command would do now: train longer a run that is complete, resume another; None
    without a checkpoint."""
    saved = saved_steps(run.checkpoints)
    if not saved:
        return None
    return LONGER if saved[-1] >= (run.steps() or math.inf) else "resume"


def calls(run: RunDirectory) -> list[tuple[str, str]]:
    """Returns (purpose, Python) of the same, for a notebook."""
    directory, config = repr(run.where), repr(str(run.config))
    found = [("look", f"jaxthru.RunDirectory({directory}).plot()")]
    if purpose := next_purpose(run):
        more = overrides(run, purpose)
        arguments = f"{config}, {more}" if more else config
        found.append((purpose, f"jaxthru.run(jaxthru.load_config({arguments}), {directory})"))
    return found


def this_python() -> str:
    """Returns this interpreter as one would type it here: relative if it lies below the working directory."""
    python, here = Path(os.path.abspath(sys.executable)), Path.cwd()  # noqa: PTH100 - keeps a venv's link
    return str(python.relative_to(here)) if python.is_relative_to(here) else str(python)
