"""Several processes that train together: starting them, and agreeing."""

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxthru.runtime import crashes, hardware
from jaxthru.runtime.errors import InputError, require
from jaxthru.runtime.exit_codes import PEER_LOST

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

MEET_SECONDS = 300
"""How long the processes of a run wait for one another at the start."""
PAUSE_SECONDS = 86_400
"""How long all processes of a run may be paused, by a laptop's lid say, before JAX's own heartbeats take them
for lost."""
POLL_SECONDS = 2.0
"""The longest pause between two looks for what process 0 has to say."""
_asked = itertools.count()


def initialize(watched: bool = False) -> None:
    """Joins this process to the others of its job, if the environment says that there are others.

    It says so by JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID, by a
    Slurm step of several tasks, or by a TPU pod's list of workers. scripts/launch/ sets what each scheduler
    leaves unsaid. An indexed Kubernetes job alone is no sign: its pods may be runs of their own.
    Call it before JAX is used. watched: `peers.watched` follows, which knows a paused job from a lost
    process; JAX's own heartbeats do not. Raises InputError if the three variables are incomplete or
    contradictory.
    """
    if jax.distributed.is_initialized():
        return
    # A stop is agreed on by `stop_signal`; JAX's own service would take SIGTERM away from it.
    jax.config.update("jax_enable_preemption_service", False)
    given = [name for name in VARIABLES if os.environ.get(name)]
    if given:
        missing = [name for name in VARIABLES if name not in given]
        require(not missing, f"{', '.join(given)} set without {', '.join(missing)}")
        address, count, index = (os.environ[name] for name in VARIABLES)
        for name, value in zip(VARIABLES[1:], (count, index), strict=True):
            require(value.isdecimal(), f"{name} = {value!r}: must be a whole number")
        require(
            int(index) < int(count),
            f"JAX_PROCESS_ID = {index}: must be below JAX_NUM_PROCESSES = {count}",
        )
        require(":" in address, f"JAX_COORDINATOR_ADDRESS = {address!r}: must be host:port")
        if int(count) > 1:
            where = {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}
            _start(watched, **where)
    elif cluster_says_several():
        _start(watched)


def cluster_says_several() -> bool:
    """Says whether a scheduler that JAX can ask started more processes than this one."""
    environment = os.environ
    if all(name in environment for name in SLURM):  # else it is no task of a job step: an sbatch script's own
        return int(environment["SLURM_NTASKS"]) > 1
    addresses = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    return "," in addresses


def _start(watched: bool, **where) -> None:
    # Read only if the backend is the CPU, which cannot send between processes without it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    at = where.get("coordinator_address", "process 0")
    said = (
        f"the processes of the run have not met at {at} within {MEET_SECONDS} s: does each run, and reach it?"
    )
    # JAX's client aborts, and the callback it has for that can be none of Python's (jaxlib 0.11.2: bad_cast).
    crashes.explain(signal.SIGABRT, lambda: (said, PEER_LOST))
    late = {"heartbeat_timeout_seconds": PAUSE_SECONDS} if watched else {}
    jax.distributed.initialize(**where, **late, initialization_timeout=MEET_SECONDS)
    crashes.explain(signal.SIGABRT, None)


def is_primary() -> bool:
    """Says whether this is process 0, which alone writes the run directory. Touches no device if alone."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def gather_text(text: str) -> list[str]:
    """Returns the text of every process, by process index, cut to 1000 bytes. All processes must call it."""
    if not jax.distributed.is_initialized():
        return [text]
    data = text.encode()[:1000]
    padded = np.zeros(1000, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in np.asarray(rows)]


def refused_anywhere(said: str) -> None:
    """Raises InputError, in all processes, if one of them says why it cannot go on: none can without the
    others. said: nothing, or a line. All processes must call it."""
    for each in gather_text(said):
        require(not each, each)


def sharing_memory() -> set[int]:
    """Returns the processes, this one included, that take from one host's memory. All must call it."""
    found = gather_text(hardware.memory_limit_identity())
    own = jax.process_index() if len(found) > 1 else 0
    return {process for process, identity in enumerate(found) if identity == found[own]}


def from_first(call: Callable[[], Any]) -> Any:
    """Returns in every process what process 0 alone gets by `call`, a JSON value, and raises its InputError
    in all. All processes must ask, in the same order.

    The call may take hours: the others wait as long as process 0 lives.
    """
    if not jax.distributed.is_initialized():
        return call()
    store, key = key_value_store(), f"jaxthru/from_first/{next(_asked)}"
    if is_primary():
        try:
            value = call()
            answer = json.dumps({"value": value})
        except BaseException as error:  # else the others would wait for what never comes
            message = str(error) if isinstance(error, InputError) else f"process 0 failed: {error!r}"
            store.key_value_set(key, json.dumps({"error": message}))
            raise
        store.key_value_set(key, answer)
        return value
    pause = 0.05
    while (answer := try_get(key)) is None:
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)  # a thousand processes may be asking
    answer = json.loads(answer)
    require("error" not in answer, answer.get("error", ""))
    return answer["value"]


class Notices:
    """Short texts that processes let each other know, each its latest, without waiting for one another."""

    _made = 0  # the same in all processes, because they make their Notices in the same order

    def __init__(self, folder: str):
        """folder: of the job's key-value store, ending in a slash."""
        Notices._made += 1
        self._folder = f"{folder}{Notices._made}/"

    def publish(self, text: str) -> None:
        """Takes the place of what this process published before."""
        key = f"{self._folder}{jax.process_index()}"
        key_value_store().key_value_set(key, f"={text}", allow_overwrite=True)

    def others(self) -> dict[int, str]:
        """Returns what each other process published last, by process."""
        found = key_value_store().key_value_dir_get(self._folder)
        texts = {int(key.rpartition("/")[2]): text.removeprefix("=") for key, text in found}
        return {process: text for process, text in texts.items() if process != jax.process_index()}


class Announcements:
    """Texts by which process 0 lets all know what it has decided, numbered from 0. None is read twice by a
    process, and none later than process 0 publishes the next but one."""

    _made = 0  # the same in all processes, because they make their Announcements in the same order

    def __init__(self, folder: str):
        """folder: of the job's key-value store, ending in a slash."""
        Announcements._made += 1
        self._folder = f"{folder}{Announcements._made}/"
        self.speaks = is_primary()

    def publish(self, number: int, text: str) -> None:
        """Takes the place of the last but one."""
        value = f"{number}={text}"
        key_value_store().key_value_set(f"{self._folder}{number % 2}", value, allow_overwrite=True)

    def read(self, number: int) -> str:
        """Returns an announcement, once it has been made."""
        while True:
            found, _, text = (try_get(f"{self._folder}{number % 2}") or "").partition("=")
            if found == str(number):
                return text
            time.sleep(0.001)


def key_value_store():
    """Returns the client of the job's coordinator: jax.distributed has no public name for its key-value store
    (JAX 0.11.2)."""
    from jax._src import distributed

    return distributed.global_state.client


def coordinator() -> tuple[str, int]:
    """Returns host and port of the job's coordinator."""
    from jax._src import distributed

    host, _, port = distributed.global_state.coordinator_address.rpartition(":")
    return host.strip("[]"), int(port)


def coordinator_listens() -> bool:
    """Says whether somebody listens where the job's coordinator was."""
    try:
        with socket.create_connection(coordinator(), timeout=2):
            return True
    except OSError:
        return False


def within(seconds: float, call: Callable[[], Any]) -> None:
    """Waits so long at most for a call that asks the coordinator, which may be gone, or stopped."""

    def suppressed() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            call()

    thread = threading.Thread(target=suppressed, daemon=True)
    thread.start()
    thread.join(seconds)


def try_get(key: str) -> str | None:
    """Returns what a process has published under this key, if any has."""
    try:
        return key_value_store().key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None
