"""Names a straggler in the log: the process whose host keeps all the others waiting."""

import logging
import time
from collections.abc import Callable

from jaxthru.runtime.host_seconds import SLOWEST_FIELDS
from jaxthru.runtime.peers import NoPeers, Peers
from jaxthru.training.metrics import Row

log = logging.getLogger("jaxthru")

SHARE = 0.25
"""A straggler takes so much of a step longer than the median process."""
QUIET = 60.0
"""Seconds from a line to the next."""


class Stragglers:
    """Looks at the seconds of the slowest process's host in each step. A sink of the record."""

    def __init__(self, peers: Peers | NoPeers, clock: Callable[[], float] = time.monotonic):
        self._peers, self._clock, self._said = peers, clock, -QUIET

    def step(self, row: Row) -> None:
        """Takes the row of a step."""
        process, slowest, median = (row.get(field) for field in SLOWEST_FIELDS)
        if process is None or slowest - median < SHARE * row["step_seconds"]:
            return
        if self._clock() - self._said >= QUIET:
            self._said = self._clock()
            log.warning(
                "straggler: the others wait for process %d (%s): its host takes %.2f s for a step, the "
                "median process's %.2f s; its data, its files or its cores are slow",
                *(process, self._peers.host(process), slowest, median),
            )

    def evaluation(self, row: Row) -> None:
        """Takes the row of an evaluation."""
