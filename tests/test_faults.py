"""Faults of one process of several: all end soon, with one exit code and a line that names its host."""

import resource
import signal
import socket
import subprocess
import time

import pytest
from runs import Workplace, kill, make_workplace, resumed_from

pytestmark = pytest.mark.slow(minutes=3)
SOON = 30.0  # seconds from a fault to the end of all processes
HOST = socket.gethostname()
STEPS = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_workplace(tmp_path_factory.mktemp("runs"))
    job(place, "whole")
    return place


def job(place: Workplace, run_dir: str, **settings) -> list[str]:
    """Returns what the two processes of a run printed that nothing disturbs."""
    processes = place.start_job(run_dir, 2, **SETTINGS | settings)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


SETTINGS = {"mesh__fsdp": 2, "train__steps": STEPS, "checkpoint__every": 10}
SETTINGS |= {"optim__schedule": "constant", "optim__warmup_ratio": 0}  # whatever train.steps is
ENDLESS = SETTINGS | {"train__steps": 100_000, "checkpoint__last": "false"}


def ended(processes: list[subprocess.Popen], since: float) -> list[str]:
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


def goes_on(place: Workplace, run_dir: str) -> None:
    """The same command goes on from the newest checkpoint, with equal losses."""
    saved = max(place.checkpoints(run_dir), default=0)
    first, _ = job(place, run_dir)
    assert saved > 0 and resumed_from(first) == saved
    assert place.losses(run_dir) == place.losses("whole")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_others(place, lost):
    name = f"killed{lost}"
    processes = place.start_job(name, 2, **SETTINGS)
    place.wait_for_step(processes[0], name, 25)
    since = time.monotonic()
    kill(processes[lost])
    (output,) = ended([processes[1 - lost]], since)
    assert processes[1 - lost].returncode == 160
    assert said(output).startswith(f"process {lost} ({HOST}) is lost: ") and "Traceback" not in output
    goes_on(place, name)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_ends_the_others(place, stopped):
    name = f"stopped{stopped}"
    processes = place.start_job(name, 2, **ENDLESS)
    place.wait_for_step(processes[0], name, 25)
    processes[stopped].send_signal(signal.SIGSTOP)
    try:
        processes[1 - stopped].wait(SOON)
    finally:
        processes[stopped].send_signal(signal.SIGCONT)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [160, 160]
    assert said(outputs[1 - stopped]).startswith(f"process {stopped} ({HOST}) is lost: ")


@pytest.mark.parametrize("full", [0, 1])
def test_a_process_that_cannot_write_its_shard_ends_all(place, full):
    name = f"full{full}"
    processes = place.start_job(name, 2, **ENDLESS)
    place.wait_for_step(processes[0], name, 25)
    resource.prlimit(processes[full].pid, resource.RLIMIT_FSIZE, (4096, 4096))
    saving = place.folder / name / "checkpoints"
    while (
        not list(saving.glob("*tmp*")) and processes[full].poll() is None
    ):  # the next save, or row of metrics
        time.sleep(0.01)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [1, 1]
    lines = [said(output) for output in outputs]
    assert "File too large" in lines[full]
    assert lines[1 - full] == f"process {full} ({HOST}) {lines[full]}"
    assert not any("Traceback" in output for output in outputs), outputs
    goes_on(place, name)


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


def test_a_stop_is_no_fault(place):
    """Both end with the code of a stop, whichever has heard of it; a straggler is named meanwhile."""
    processes = place.start_job("told", 2, **SETTINGS)
    place.wait_for_step(processes[0], "told", 25)
    processes[1].send_signal(signal.SIGTERM)
    outputs = ended(processes, time.monotonic())
    assert [process.returncode for process in processes] == [143, 143], outputs
    assert not any("jaxthru: " in output for output in outputs)
    goes_on(place, "told")
    row = place.metrics("told")[-1]
    assert row["slowest_process"] in (0, 1) and row["slowest_process_seconds"] > 0


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
