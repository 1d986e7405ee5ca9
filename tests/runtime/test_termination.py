"""SIGTERM while there is nothing to save ends a command soon, wherever it is, with the code of a stop."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxthru.runtime import termination

PROGRAM = """
import hashlib, os, signal, sys, time
from jaxthru.runtime import termination
from jaxthru.runtime.errors import exit_code, leave

def python():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("put away", flush=True)

def compiling():
    "A call that hears of no signal."
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def with_a_child():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"forked")
        time.sleep(60)
        os._exit(0)
    os.read(read, 9)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(2 * termination.SECONDS_TO_UNWIND)
    python()

def importing():
    termination.handle()
    python()

termination.SECONDS_TO_UNWIND = 0.2
if sys.argv[1] == "importing":
    importing()
leave(exit_code(globals()[sys.argv[1]]))
"""


def ended(process: subprocess.Popen, pid: int | None = None) -> tuple[int, str, str, float]:
    """Returns exit code, output, errors and seconds of a program that gets SIGTERM once it is ready."""
    assert process.stdout.readline() == "ready\n"
    asked = time.monotonic()
    os.kill(pid or process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors, time.monotonic() - asked


def start(*command: str) -> subprocess.Popen:
    words = [*command[:-1], sys.executable, "-W", "ignore", "-c", PROGRAM, command[-1]]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("doing", ["python", "compiling", "with_a_child", "importing"])
def test_sigterm_ends_it_soon(doing):
    code, output, errors, seconds = ended(start(doing))
    assert (code, errors) == (143, f"jaxthru: {termination.SAID}\n") and seconds < 15
    assert output == ("put away\n" if doing in ("python", "with_a_child") else "")


def test_the_first_process_of_a_container_hears_it_too():
    process = start("unshare", "--pid", "--fork", "python")
    if "unshare" in (process.stderr.readline() if process.poll() else ""):
        pytest.skip("no process namespace can be made here")
    time.sleep(0.2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    if not children:
        pytest.skip(f"no process namespace can be made here: {process.communicate()[1].strip()}")
    code, output, errors, _ = ended(process, int(children[0]))
    assert (code, output, errors) == (143, "put away\n", f"jaxthru: {termination.SAID}\n")


def test_who_has_the_signal_keeps_it():
    def mine(*_):
        heard.append("mine")

    heard, before = [], signal.signal(signal.SIGTERM, mine)
    try:
        with termination.handled():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["mine"] and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(termination.Terminated), termination.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before


TWO_COMMANDS = """
import os, signal, time
from jaxthru.runtime import termination

termination.SECONDS_TO_UNWIND = 0.1
for _ in range(2):
    try:
        with termination.handled():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    except termination.Terminated:
        print("told")
with termination.handled():
    time.sleep(0.5)
"""


def test_the_next_command_of_a_process_is_not_ended_for_the_one_before():
    done = subprocess.run([sys.executable, "-c", TWO_COMMANDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\ntold\n", "")
