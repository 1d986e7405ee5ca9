"""A sign of life that needs no interpreter, of another process."""

import math
import signal
import socket
import subprocess
import sys
import time

import pytest

from jaxthru.runtime import pulse

HOLDS = """
import ctypes, sys, time
from jaxthru.runtime import pulse
pulse.begin("127.0.0.1", int(sys.argv[1]), 1)
time.sleep(0.5)
ctypes.PyDLL(None).sleep(60)  # and keeps the lock
"""


@pytest.fixture
def pulses():
    made = pulse.Pulses()
    yield made
    made.close()


def after(seconds: float, pulses: pulse.Pulses) -> float:
    """Returns how often there was nothing, after a first reading of what may be old."""
    pulses.silent(1)
    for _ in range(3):
        time.sleep(seconds)
        silent = pulses.silent(1)
    return silent


def test_who_keeps_the_interpreters_lock_lives_and_who_is_stopped_does_not(pulses):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(pulses.port)])
    try:
        deadline = time.monotonic() + 20
        while pulses.silent(1) == math.inf and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        assert after(0.2, pulses) == 0
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        assert after(0.1, pulses) >= 3  # the first reading, too, if all had been read before
    finally:
        process.kill()
        process.wait()
    time.sleep(0.1)
    pulses.silent(1)
    assert pulses.silent(1) == math.inf


def test_who_cannot_connect_or_is_a_stranger_gives_none(pulses):
    assert pulses.silent(1) == math.inf
    with socket.create_connection(("127.0.0.1", pulses.port)):
        assert pulses.silent(1) == math.inf
