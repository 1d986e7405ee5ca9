"""Whether a run directory may be resumed, and what a run there was started with."""

import logging
from pathlib import Path

from jaxthru import config as configuration
from jaxthru.build import choices
from jaxthru.config import RunConfig
from jaxthru.data.loading.state import check_sampler
from jaxthru.optim.schedule_change import Plan, schedule_change
from jaxthru.runtime.errors import require
from jaxthru.runtime.plain import flat
from jaxthru.training.checkpoint import newest_data_state, saved_steps
from jaxthru.training.run_directory import RunDirectory

log = logging.getLogger("jaxthru")


def check_resumable(config: RunConfig, directory: RunDirectory, resume: str) -> None:
    """Raises InputError unless the directory may be started or resumed with this configuration."""
    path = directory.path
    if not directory.holds_run():
        return
    require(resume == "auto", f"--resume never: {path} already holds a run; give another --run-dir")
    if directory.config.exists() or saved_steps(directory.checkpoints):
        old = configuration.load_own(directory.config)
        for line in configuration.check_change(old, config, path):
            log.info("changed since the run was started: %s", line)


def chosen_anew(run: RunConfig | None, asked: RunConfig, config: RunConfig) -> list[str]:
    """Returns what was left open and is another than the run had so far, one `group.key (old → new)` each.
    run: the configuration that it was started with."""
    if run is None:
        return []
    before, wanted, now = (flat(configuration.to_dict(each)) for each in (run, asked, config))
    left_open = [key for key, value in wanted.items() if value == "auto"]
    left_open += [other for key in left_open for other in choices.KEPT_WITH.get(key, ())]
    anew = [key for key in left_open if before.get(key) not in (now[key], "auto")]  # it had no such key
    return [f"{key} ({before.get(key)!r} → {now[key]!r})" for key in sorted(anew)]


def schedule_changed(old: RunConfig | None, config: RunConfig, step: int) -> str:
    """Returns what the change does to the learning rate of a run that goes on from a step; empty if nothing.
    old: the configuration of the run so far."""
    plans = [Plan(each.optim, each.train.steps) for each in (old, config) if each]
    return schedule_change(*plans, step) if old else ""


def keys_of_run(directory: RunDirectory, local: Path | None = None) -> dict[str, str] | None:
    """Returns the keys of the stores that a run was trained on, None before its first checkpoint. Raises
    InputError if its batches cannot be continued. local: this process's directory of local checkpoints."""
    saved = newest_data_state(directory.checkpoints, local)
    if saved:
        check_sampler(saved)
    return saved.get("keys")


def recorded(directory: RunDirectory | None) -> tuple[RunConfig | None, tuple[choices.Choice, ...]]:
    """Returns the configuration that a run was started with, and what was chosen then."""
    if directory is None or not directory.config.exists():
        return None, ()
    return configuration.load_own(directory.config), choices.read(directory.choices)
