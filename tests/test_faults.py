"""Faults of one process of several: all end soon, with one exit code and a line that names its host."""

import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from runs import Process, Workplace, kill, make_workplace, resumed_from

pytestmark = pytest.mark.slow(minutes=0.5)
SOON = 30.0  # seconds from a fault to the end of all processes
HOST = socket.gethostname()
STEPS = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("runs"), forks=True)
    job(place, "whole")
    return place


def job(place: Workplace, run_dir: str, **settings) -> list[str]:
    """Returns what the two processes of a run printed that nothing disturbs."""
    processes = place.start_job(run_dir, 2, **SETTINGS | settings)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


SETTINGS = {"mesh__fsdp": 2, "train__steps": STEPS, "checkpoint__every": 5}
SETTINGS |= {"model__layers": 1, "evaluate__rows": 0}  # much of what follows is starting again
SETTINGS |= {"optim__schedule": "constant", "optim__warmup_ratio": 0}  # whatever train.steps is
ENDLESS = SETTINGS | {"train__steps": 100_000}


def ended(processes: list[Process], since: float) -> list[str]:
    """Returns what processes printed, once all have ended, which is soon."""
    try:
        outputs = [process.communicate(timeout=3 * SOON)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    seconds = time.monotonic() - since
    print(f"{seconds:.1f} s: {[process.returncode for process in processes]}")
    assert seconds < SOON, outputs
    return outputs


def said(output: str) -> str:
    (line,) = (line for line in output.splitlines() if line.startswith("jaxthru: "))
    return line.removeprefix("jaxthru: ")


def killed(place: Workplace, processes: list[Process], victim: int) -> list[str]:
    since = time.monotonic()
    outputs = [kill(processes[victim]), *ended([processes[1 - victim]], since)]
    assert processes[1 - victim].returncode == 160
    assert said(outputs[1]).startswith(f"process {victim} ({HOST}) is lost: ")
    return outputs[:: 1 - 2 * victim]


def stopped(place: Workplace, processes: list[Process], victim: int) -> list[str]:
    processes[victim].send_signal(signal.SIGSTOP)
    try:
        processes[1 - victim].wait(SOON)
    finally:
        processes[victim].send_signal(signal.SIGCONT)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [160, 160]
    assert said(outputs[1 - victim]).startswith(f"process {victim} ({HOST}) is lost: ")
    return outputs


def robbed_of_its_disk(place: Workplace, processes: list[Process], victim: int) -> list[str]:
    """It cannot write its shard of the next save, or the next row of metrics."""
    resource.prlimit(processes[victim].pid, resource.RLIMIT_FSIZE, (4096, 4096))
    while not list((place.folder / "run/checkpoints").glob("*tmp*")) and processes[victim].poll() is None:
        time.sleep(0.01)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [1, 1]
    lines = [said(output) for output in outputs]
    assert "File too large" in lines[1 - victim]  # itself it may say more: of a save under way, too
    assert f"process {victim} ({HOST}) {lines[victim]}".startswith(lines[1 - victim])
    return outputs


def told_to_stop(place: Workplace, processes: list[Process], victim: int) -> list[str]:
    """That is no fault: both end with the code of a stop, whichever has heard of it."""
    processes[victim].send_signal(signal.SIGTERM)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [143, 143], outputs
    assert not any("jaxthru: " in output for output in outputs)
    return outputs


def test_whatever_ends_a_run_the_same_command_goes_on(place):
    """Each fault, of the first process or the other, befalls one run in turn. It goes on from the newest
    checkpoint, and its losses are those of a run that nothing disturbed."""
    faults = (killed, 0), (killed, 1), (stopped, 0), (robbed_of_its_disk, 1), (told_to_stop, 1)
    saved, further = 0, 11  # the second save has waited for the first
    for fault, victim in faults:
        print(f"from step {saved}: process {victim} is {fault.__name__}")
        processes = place.start_job("run", 2, **ENDLESS)
        place.wait_for_step(processes[0], "run", saved + further)
        outputs = fault(place, processes, victim)
        assert resumed_from(outputs[0]) == saved
        assert not any("Traceback" in output for output in outputs), outputs
        saved, further = max(place.checkpoints("run"), default=0), 6
        assert saved > 0
    assert resumed_from(job(place, "run")[0]) == saved
    assert place.losses("run") == place.losses("whole")


def test_a_straggler_is_named(place):
    """Means travel with the beats, every two seconds: a run of a few quick steps may end before one has."""
    processes = place.start_job("straggler", 2, **ENDLESS)
    try:
        place.wait_for_step(processes[0], "straggler", 1)
        deadline = time.monotonic() + 60
        while (row := place.metrics("straggler")[-1])["slowest_process"] is None:
            assert time.monotonic() < deadline and processes[0].poll() is None
            time.sleep(0.05)
    finally:
        told_to_stop(place, processes, 0)
    assert row["slowest_process"] in (0, 1) and row["slowest_process_seconds"] > 0


def test_a_killed_run_goes_on_from_its_hosts_own_disks(place):
    disk = {"checkpoint__local__directory": place.folder / "disk", "checkpoint__local__every": 10}
    settings = SETTINGS | disk | {"checkpoint__every": "2h"}
    processes = place.start_job("local", 2, **settings)
    place.wait_for_step(processes[0], "local", 25)
    since = time.monotonic()
    kill(processes[1])
    ended([processes[0]], since)
    assert not place.checkpoints("local")
    outputs = job(place, "local", **settings)
    assert resumed_from(outputs[0]) >= 10 and "restoring local checkpoint " in outputs[1]
    assert place.losses("local") == place.losses("whole") and place.checkpoints("local") == [STEPS]
    held = {path.parent.name for path in (place.folder / "disk").glob("local-*/process_?/*")}
    assert held == {"process_0", "process_1"}


def test_sigterm_before_the_steps_ends_all_processes(place):
    processes = place.start_job("early", 2, **ENDLESS)
    while "compiling the step" not in (line := processes[1].stdout.readline()):
        assert line, "ended too early"
    since = time.monotonic()
    processes[1].send_signal(signal.SIGTERM)
    outputs = ended(processes, since)
    assert [process.returncode for process in processes] == [143, 143]
    assert said(outputs[1]).startswith("told to stop (SIGTERM)")
    assert said(outputs[0]) == f"process 1 ({HOST}) {said(outputs[1])}"


def test_bad_input_of_one_process_is_said_by_all(place):
    processes = place.start_job("refused", 2, **ENDLESS | {"model__vocabulary": 200})
    outputs = ended(processes, time.monotonic() + 120)
    assert [process.returncode for process in processes] == [2, 2]
    assert all("model.vocabulary = 200: smaller than the tokenizer's 300" in said(each) for each in outputs)


SHORT_OF_MEMORY = """
import itertools
import jax.numpy as jnp
from jaxthru.train import start
from jaxthru.training.step_timer import StepTimer

steps, dispatching = itertools.count(1), StepTimer.dispatching

def short_of_memory(timer):
    if next(steps) == 6:
        {allocate}
    dispatching(timer)

StepTimer.dispatching = short_of_memory
start()
"""


@pytest.mark.parametrize(
    ("victim", "allocate", "why"),
    [
        (1, 'jnp.zeros((1 << 20, 1 << 30), "int8").block_until_ready()', "Out of memory allocating "),
        (0, "bytearray(1 << 50)", "out of memory: the host, or a limit on this process "),
    ],
    ids=["device", "host"],
)
def test_one_process_that_is_out_of_memory_ends_all(place, tmp_path, victim, allocate, why):
    (tmp_path / "short.py").write_text(SHORT_OF_MEMORY.format(allocate=allocate))
    program, run = [sys.executable, str(tmp_path / "short.py")], f"short_{victim}"
    processes = place.start_job(run, 2, programs={victim: program}, **ENDLESS)
    place.wait_for_step(processes[0], run, 3)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert said(outputs[victim]).startswith(why)
    assert said(outputs[1 - victim]) == f"process {victim} ({HOST}) {said(outputs[victim])}"
    assert not any("Traceback" in output for output in outputs), outputs


def test_a_damaged_record_of_one_process_ends_all(place, tmp_path):
    """Each sees a disk of its own, as on two hosts: one finds another store where the other finds its."""
    store, damaged = place.folder / "store", tmp_path / "store"
    shutil.copytree(store, damaged)
    (path,) = damaged.glob("python_stdlib-*/train-00000.tokens")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
    mounted += [str(damaged), str(store)]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("cannot mount for one process alone here")
    train = [sys.executable, "-m", "jaxthru.train"]
    processes = place.start_job("damaged", 2, programs={1: [*mounted, *train]}, **ENDLESS)
    while "compiling the step" not in (line := processes[1].stdout.readline()):
        assert line, "ended too early"
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert said(outputs[1]).startswith(f"{store / path.relative_to(damaged)}: block 0 (bytes 0 to ")
    assert " is damaged; " in said(outputs[1])
    assert said(outputs[0]) == f"process 1 ({HOST}) {said(outputs[1])}"
    assert not any("Traceback" in output for output in outputs), outputs


def test_a_store_that_is_cut_while_it_is_read_is_named(place):
    """In place of SIGBUS without a word."""
    process = place.start(
        "cut", train__steps=100_000, checkpoint__last="false", data__store=place.folder / "cut_store"
    )
    place.wait_for_step(process, "cut", 5)
    (path,) = (place.folder / "cut_store").glob("python_stdlib-*/train-00000.tokens")
    path.write_bytes(b"")
    (output,) = ended([process], time.monotonic())
    assert process.returncode == 2, output
    assert said(output).startswith(f"{path}: was cut from ") and "prepare again" in said(output)
