"""From a profiled run to its ledger.json and report.html."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import rich.console

from jaxthru.models.family import SHIPPED
from jaxthru.models.kernels import KernelsConfig
from jaxthru.moved import renewed
from jaxthru.profile.account import ledger, operations
from jaxthru.profile.account.build import Accounted, account, facts_of
from jaxthru.profile.account.ledger import Ledger
from jaxthru.profile.explain.advice import with_advice
from jaxthru.profile.explain.lint import lint
from jaxthru.profile.show.html import report
from jaxthru.profile.show.terminal import summary
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import InputError, require
from jaxthru.training import goodput
from jaxthru.training.goodput import Account


def profiled(run: Path, step: int | None = None) -> Path:
    """Returns where a run was profiled. step: None is the last time. Raises InputError."""
    require(run.is_dir(), f"{run}: no such run directory")
    steps = sorted(int(path.name) for path in (run / "profile").glob("*") if path.name.isdecimal())
    within = any((run / name).is_file() for name in ("collected.json", "ledger.json"))
    require(not within, f"{run}: is a profile of a run; give the run, {run.absolute().parent.parent}")
    require(bool(steps), f"{run}: was not profiled; train with --set profile.at=20")
    said = ", ".join(map(str, steps))
    require(step is None or step in steps, f"--step {step}: {run} was not profiled there, but at {said}")
    return run / "profile" / str(steps[-1] if step is None else step)


def build(folder: Path) -> Ledger:
    """Returns the ledger of `runs/.../profile/<step>/`, without advice. Raises ValueError if what was
    collected is incomplete."""
    return _with_lint(account(folder))


def _with_lint(made: Accounted) -> Ledger:
    return dataclasses.replace(made.ledger, lint=lint(made))


def publish(folder: Path) -> Ledger:
    """Makes the ledger of a profile, with advice, and writes it, the report and the table
    of operations. Raises InputError.

    folder: `runs/.../profile/<step>`. Where the trace is gone, the ledger made of it before is read again.
    """
    run = folder.parent.parent
    configuration = config(run)
    try:
        made = account(folder) if any(folder.rglob("*.xplane.pb")) else None
        found = _with_lint(made) if made else read(folder)
        if found.model is None:  # an older ledger
            found = dataclasses.replace(found, model=facts_of(configuration, {}))
        found = with_advice(found, configuration)
        page = report(found, hours(run))
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, OSError) as error:  # as of files cut short, or an older run's
        raise InputError(f"{folder}: {_one_line(error)}") from error
    found.write(folder / "ledger.json")
    write_atomically(folder / "report.html", page)
    if made:
        operations.write(folder / "ops.parquet", made.operations)
    return found


def hours(run: Path) -> Account | None:
    """Returns what the hours of a run went to, over all of its starts; None where they were not booked."""
    try:
        return goodput.account(run)
    except ValueError:
        return None


def present(folder: Path) -> None:
    """Publishes a profile, and prints the most of its ledger and where the report is. Raises InputError."""
    console = rich.console.Console()
    console.print(summary(publish(folder)))
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True, markup=False, highlight=False)


def opened(run: Path, step: int | None = None) -> Ledger:
    """Returns the ledger of a run, made now if it is not there. Raises InputError."""
    folder = profiled(run, step)
    return read(folder) if (folder / "ledger.json").is_file() else publish(folder)


def read(folder: Path) -> Ledger:
    """Returns the ledger that was written to a folder. Raises InputError."""
    path = folder / "ledger.json"
    require(path.is_file(), f"{folder}: holds neither a whole profile nor a ledger.json")
    try:
        return ledger.read(path)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: {_one_line(error)}") from error


def config(run: Path) -> dict[str, Any]:
    """Returns the configuration of a run as nested plain values. Raises InputError.

    What an older run could not choose yet has the value that it had for all.
    """
    path = run / "config.json"
    require(path.is_file(), f"{path}: no such file")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error})") from error
    groups = found.values() if isinstance(found, dict) else [None]
    require(all(isinstance(group, dict) for group in groups), f"{path}: holds no configuration")
    found = renewed(found)
    kernels = dataclasses.asdict(KernelsConfig()) | found.get("kernels", {})
    return found | {"model": {"family": SHIPPED[0]} | found.get("model", {}), "kernels": kernels}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}"
