"""The dataloader's state in a checkpoint: together with the seed it decides every batch to come."""

import dataclasses
import logging
from typing import Any

from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.sampler import VERSION
from jaxthru.data.mixture.schedule import Schedule
from jaxthru.runtime.errors import require

log = logging.getLogger(__name__)

LAST_COMMITS = {1: "7a9d05a"}
"""{version of the mixture sampler: the last commit that has it}"""
PACKING, LAST_FIRST_PACKING = 2, "fd64fb7"
"""Version of what is in rows and counts of them, and the last commit that has the first, which put at most
max(64, data.sequence / 128) whole documents into one and, of text that is cut, took each source's last row
for full."""


@dataclasses.dataclass(frozen=True)
class DataState:
    """step: completed updates. schedule: append-only. keys: {source: key of its token store}."""

    step: int
    schedule: Schedule
    keys: dict[str, str]

    @classmethod
    def first(cls, mixture: Mixture, keys: dict[str, str]) -> "DataState":
        """Returns the state before the first update. mixture, keys: of the opened data."""
        return cls(0, ((0, mixture),), keys)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        schedule = [[step, mixture.to_tree()] for step, mixture in self.schedule]
        versions = {"sampler": VERSION, "packing": PACKING}
        return {"step": self.step, "schedule": schedule, "keys": dict(self.keys), **versions}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "DataState":
        """Returns the state that `to_json` described. Raises InputError as `check_sampler` does."""
        check_sampler(tree)
        schedule = tuple((int(step), Mixture.from_tree(mixture)) for step, mixture in tree["schedule"])
        return cls(step=int(tree["step"]), schedule=schedule, keys=dict(tree["keys"]))

    def resumed(self, step: int, mixture: Mixture, keys: dict[str, str]) -> "DataState":
        """Returns the state of a run that goes on after `step` updates with today's mix.

        mixture: of the mix now; it enters the schedule, and the log, only if it has changed. keys: of the
        stores now. Raises InputError when a source of the run is gone or no longer what it was trained on.
        """
        for name, key in self.keys.items():
            require(name in keys, f"source {name} has gone from the mix since this run started")
            require(
                keys[name] == key,
                f"source {name} has changed since this run started: its text or tokenizer is not what the "
                "checkpoint was trained on",
            )
        schedule = tuple(entry for entry in self.schedule if entry[0] < step or entry[0] == 0)
        if mixture != schedule[-1][1]:
            # After no update at all the first entry itself changes: none of its steps has been taken.
            kept = tuple(entry for entry in schedule if entry[0] < step)
            schedule = (*kept, (step, mixture))
            log.info("the mix is now %s", mixture.to_tree())
        return DataState(step=step, schedule=schedule, keys=dict(keys))


def check_sampler(tree: dict[str, Any]) -> None:
    """Raises InputError unless a run's next batches are those that it would have had when it was begun.

    tree: of `DataState.to_json`, of any version. The first kept no number; of one source it gave these rows.
    """
    version = tree.get("sampler", 1)
    require(
        version == VERSION or (version == 1 and _sources(tree) == 1),
        f"the run was begun by version {version} of the mixture sampler, and version {VERSION} gives other "
        f"batches: continue it with {_commit_of(version)}, or start a new one",
    )


def check_packing(tree: dict[str, Any], sequence: int, segments: int, *, whole: bool, cut: bool) -> None:
    """Raises InputError unless rows hold the documents that they held when the run was begun, and are as many
    of each source.

    tree: of `DataState.to_json`, of any version. sequence: tokens in a row. segments: `Data.segments`. whole:
    whether documents lie whole in rows, of `best_fit` or as they say what of them is trained on. cut: whether
    there is text whose rows are cut anywhere.
    """
    if "packing" in tree:
        return
    most, instead = max(64, sequence // 128), f"continue it with commit {LAST_FIRST_PACKING} of jaxthru"
    require(
        not whole or segments <= most,
        f"the run was begun with at most {most} documents in a row, of which there may be more now, and its "
        f"rows would be others: {instead}, or start a new one",
    )
    require(
        not cut or _sources(tree) == 1,
        "the run was begun with the last row of each source counted as full, and shares are of the tokens in "
        f"rows now, so that its batches would be others: {instead}, or start a new one",
    )


def _sources(tree: dict[str, Any]) -> int:
    """Returns how many sources a run has rows of."""
    mixtures = [Mixture.from_tree(mixture) for _, mixture in tree["schedule"]]
    shares = [pair for mixture in mixtures for pair in mixture.shares.items()]
    return len({name for name, share in shares if any(weight > 0 for _, weight in share.points)})


def _commit_of(version: int) -> str:
    last = LAST_COMMITS.get(version)
    return f"commit {last} of jaxthru, the last with version {version}" if last else "a newer jaxthru"
