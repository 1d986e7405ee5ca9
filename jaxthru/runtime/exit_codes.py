"""Exit codes: how a command ended, which is all that a scheduler knows of it. See docs/running.md."""

FINISHED = 0
"""All that was asked for is done. Nothing else ends so."""
CANNOT_GO_ON = 1
"""A fault that the same command meets again: a loss that is not finite, a full disk, too little memory."""
BAD_INPUT = 2
HUNG = 70
"""No step finished for too long, or no Python ran."""
INTERRUPTED = 130
"""Ctrl-C: a person has stopped it. What was trained is saved."""
STOPPED = 143
"""SIGTERM: it was told to stop, and is to be started again. `train.stopped_exit_code` gives it another."""
PEER_LOST = 160
"""Another process of the run died, or answered no more."""

FIXED = (FINISHED, CANNOT_GO_ON, BAD_INPUT, HUNG, INTERRUPTED, PEER_LOST)
"""Those that no setting may give another meaning."""
AGAIN = frozenset({HUNG, STOPPED, PEER_LOST})
"""The same command, started again, goes on from the last checkpoint."""
