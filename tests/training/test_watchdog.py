"""The watchdog ends a hanging run, and only that."""

import re
import subprocess
import sys
import time

import pytest

from jaxthru.training.watchdog import Watchdog

STEPS = """
import sys, time
from jaxthru.training import watchdog
from jaxthru.training.watchdog import Watchdog
{before}

def hanging_collective():
    time.sleep(30)

with Watchdog(factor=5.0, at_least=1.0, first=float(sys.argv[1])) as watchdog:
    for step in range(int(sys.argv[2])):
        time.sleep(0.02)
        watchdog.beat()
    with watchdog.paused():
        time.sleep(float(sys.argv[3]))
    {then}
print("finished", flush=True)
"""


NO_TIMERS = "watchdog.PosixTimer = lambda *_: open('/nowhere')"


def run(then, first=60.0, steps=6, before="", pause=0.0):
    """pause: seconds before `then`; more than one are over the limit of a step."""
    program = STEPS.replace("{then}", then).replace("{before}", before)
    command = [sys.executable, "-c", program, str(first), str(steps), str(pause)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_hanging_step_ends_the_process_with_all_stacks():
    ran = run("hanging_collective()", pause=1.5)
    assert ran.returncode == 70
    first, *stacks = ran.stderr.splitlines()
    assert first.startswith("watchdog: no step has finished for")
    assert re.search(r"the median is 0\.\d+ s, the limit \d", first)
    assert "in hanging_collective" in "\n".join(stacks)
    assert sum(line.startswith(("Thread", "Current thread")) for line in stacks) == 2
    assert "finished" not in ran.stdout


KEEPING_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep({seconds})"


def test_a_call_that_keeps_the_interpreter_s_lock_ends_the_process_too():
    started = time.monotonic()
    ran = run(KEEPING_THE_LOCK.format(seconds=60))
    assert ran.returncode == 70 and time.monotonic() - started < 30
    line, timeout, *stacks = ran.stderr.splitlines()
    said = "watchdog: no Python has run for 2 s: a call into C keeps the interpreter's lock; the stacks"
    assert said in line and line.endswith("exit code 70") and timeout.startswith("Timeout (0:00:0")
    assert '  File "<string>", line 16 in <module>' in stacks
    assert sum(line.startswith("Thread") for line in stacks) == 2
    assert "finished" not in ran.stdout


def test_without_timers_faulthandler_ends_it():
    ran = run(KEEPING_THE_LOCK.format(seconds=60), before=NO_TIMERS)
    assert ran.returncode == 1
    assert ran.stderr.startswith("Timeout (0:00:0") and "line 16 in <module>" in ran.stderr


@pytest.mark.slow
def test_a_call_that_keeps_the_lock_may_take_its_time_in_a_pause():
    """So much that an end that was not put off for it would have come."""
    then = "with watchdog.paused(): " + KEEPING_THE_LOCK.format(seconds=7)
    ran = run(then, pause=1.5)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "finished\n", "")


def test_a_forked_child_ends():
    ran = run("os.fork() or sys.exit(); assert os.wait()[1] == 0", before="import os")
    assert (ran.returncode, ran.stdout) == (0, "finished\n")


def test_a_pause_and_an_end_are_no_hang():
    ran = run("pass", pause=1.5)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "finished\n", "")


def test_the_first_steps_have_a_limit_of_their_own():
    assert run("time.sleep(1.5)", first=60.0, steps=2).returncode == 0
    ran = run("hanging_collective()", first=0.2, steps=0)
    assert ran.returncode == 70
    assert "none has yet" in ran.stderr


def test_the_limit_follows_the_median(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    watchdog = Watchdog(factor=10.0, at_least=60.0, first=3600.0)

    def step(seconds):
        clock[0] += seconds
        watchdog.beat()

    step(500)  # compiles
    for _ in range(3):
        assert watchdog.limit() == 3600.0
        step(1)
    assert watchdog.limit() == 60.0
    for _ in range(20):
        step(8)
    assert watchdog.limit() == pytest.approx(80.0)
    with watchdog.paused():
        clock[0] += 1000
    step(3)  # what is left of a step after a pause is not taken for a whole one
    assert watchdog.limit() == pytest.approx(80.0)
