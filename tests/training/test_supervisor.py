"""The supervisor restarts what a restart can mend, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxthru import supervise
from jaxthru.runtime.errors import InputError
from jaxthru.training import supervisor
from jaxthru.training.supervisor import End, Failures, Supervisor, judge, restartable

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = """
import json, os, signal, sys, time
folder, *ends = sys.argv[sys.argv.index("--run-dir") + 1 :]
index = os.environ.get("JAX_PROCESS_ID", "0")
with open(f"{folder}/starts-{index}", "a") as file:
    print(os.environ.get("JAX_NUM_PROCESSES", "1"), os.environ.get("JAX_COORDINATOR_ADDRESS"), file=file)
with open(f"{folder}/starts-{index}") as file:
    start = len(file.readlines())
step, *codes = ends[min(start, len(ends)) - 1].split(":")
if index == "0":
    with open(f"{folder}/metrics.jsonl", "a") as file:
        print(json.dumps({"step": int(step)}), file=file)
code = codes[min(int(index), len(codes) - 1)]
if code == "wait":
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(143))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(130))
    open(f"{folder}/waits-{index}", "w").close()
    while not stopped:
        time.sleep(0.01)
    sys.exit(stopped[0])
if code == "hang":
    time.sleep(600)
if code.startswith("-"):
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""
"""A run that reaches so many steps at each start, and ends so: `STEPS:CODE OF PROCESS 0:OF PROCESS 1`."""


@pytest.fixture
def run(tmp_path, caplog):
    """Returns what (exit code, lines, starts of process 0) a supervised run comes to."""
    (tmp_path / "run.py").write_text(RUN)

    def supervised(*ends: str, **how):
        command = (sys.executable, "-S", str(tmp_path / "run.py"), "--run-dir", str(tmp_path), *ends)
        how = {"pause": 0.0, "patience": 0.2} | how
        code = Supervisor(command, tmp_path, **how).run()
        starts = (tmp_path / "starts-0").read_text().splitlines()
        return code, [record.message for record in caplog.records], starts

    return supervised


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (0, False),
        (1, False),
        (2, False),
        (130, False),
        (70, True),
        (143, True),
        (160, True),
        (137, True),
        (139, True),
    ],
)
def test_codes(code, again):
    assert restartable(code) is again
    assert restartable(42, (42,)) and not restartable(42)


def test_a_finished_run_is_started_once(run):
    assert run("9:0") == (0, [], ["1 None"])


def test_it_goes_on_after_a_hang_a_crash_a_kill_and_a_stop(run):
    code, lines, starts = run("1:70", "2:-9", "3:-11", "4:160", "4:143", "4:143", "4:143", "9:0")
    assert code == 0 and len(starts) == 8 and len(lines) == 7
    assert lines[0] == (
        "supervise: the run ended with exit code 70 (hung) after step 1, failure 1 of 3 there; "
        "starting again in 0 s"
    )
    assert "exit code 137 (SIGKILL) after step 2" in lines[1] and "139 (SIGSEGV)" in lines[2]
    assert "(told to stop) after step 4; starting again" in lines[4]


@pytest.mark.parametrize(
    ("code", "why"),
    [(1, "a person has to look"), (2, "the input has to be mended"), (130, "as a person asked")],
)
def test_what_a_restart_cannot_mend_ends_it(run, code, why):
    found, lines, starts = run(f"3:{code}", "9:0")
    assert found == code and len(starts) == 1
    assert len(lines) == 1 and lines[0].endswith(f"after step 3: not started again, {why}")


def test_a_step_that_fails_three_times_is_given_up(run):
    code, lines, starts = run("5:70", "5:70", "7:70", "6:-9", "7:70", "7:70", "9:0")
    assert code == 70 and len(starts) == 6
    assert lines[-1].endswith("after step 7: step 8 has failed 3 times, given up")


def test_other_codes_on_demand(run):
    assert run("3:1", "4:42", "9:0", retry=(1, 42))[0] == 0


def test_a_run_s_own_code_of_a_stop(run, tmp_path):
    (tmp_path / "config.json").write_text('{"train": {"stopped_exit_code": 42}}')
    code, lines, _ = run("4:42", "4:42", "4:42", "4:42", "9:0")
    assert code == 0 and not any("failure" in line for line in lines)


SET = "train.stopped_exit_code=42"


@pytest.mark.parametrize("words", [["--set", SET], [f"--set={SET}"]])
def test_a_stop_before_there_is_a_config_json(words, tmp_path):
    """The first start may be told to stop while it compiles."""
    command = ["--config", "F", "--run-dir", str(tmp_path / "run")]
    assert supervise.main(["--after", "42", "--", *command, *words]) == 0
    assert supervise.main(["--after", "42", "--", *command]) == 42


def test_processes_of_one_run(run, tmp_path):
    code, lines, starts = run("3:0:-9", "9:0:0", processes=(2,))
    assert code == 0 and "process 1 of 2 ended with exit code 137" in lines[0]
    others = (tmp_path / "starts-1").read_text().splitlines()
    assert starts == others and all(line.startswith("2 127.0.0.1:") for line in starts)


@pytest.mark.parametrize(
    ("ends", "cause"), [("3:160:1", 1), ("3:160:-9", 137), ("3:hang:70", 70), ("3:160:160", 160)]
)
def test_the_process_that_failed_first_decides(run, ends, cause):
    """The others are lost with it; one that does not end is killed."""
    code, lines, _ = run(ends, "9:2", processes=(2,))
    assert f"exit code {cause}" in lines[0] and code in (1, 2)


def test_fewer_processes_once_a_step_has_failed_too_often(run):
    code, lines, starts = run("3:70", "3:70", "3:70", "3:70", "3:70", "9:0", processes=(2, 1))
    assert code == 0 and [line[0] for line in starts] == ["2", "2", "2", "1", "1", "1"]
    assert "has failed 3 times, given up: going on with 1 processes" in lines[2]


def test_pauses_grow_without_progress(run, monkeypatch):
    pauses = []
    monkeypatch.setattr(supervisor.Stop, "within", lambda self, seconds: pauses.append(seconds))
    run("3:70", "3:70", "4:70", "4:143", "9:0", pause=0.01)
    assert pauses == [0.01, 0.02, 0.01, 0.01]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_once_and_ends_it(tmp_path, number, code):
    (tmp_path / "run.py").write_text(RUN)
    words = [sys.executable, "-m", "jaxthru.supervise", "--processes", "2", "--", sys.executable, "-S"]
    words += [str(tmp_path / "run.py"), "--run-dir", str(tmp_path), "3:wait"]
    with subprocess.Popen(
        words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("waits-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, number)  # as a terminal does
        said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert said == f"supervise: {number.name} is passed on; the run is not started again\n"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
def test_a_run_does_not_outlive_its_supervisor(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    words = [sys.executable, "-m", "jaxthru.supervise", "--", sys.executable, "-S", str(tmp_path / "run.py")]
    words += ["--run-dir", str(tmp_path), "3:wait"]
    with subprocess.Popen(words, cwd=ROOT) as process:
        while not (tmp_path / "waits-0").exists():
            time.sleep(0.01)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_counts_outlast_a_process_and_are_forgotten_once_it_is_given_up(tmp_path, capsys):
    words = ["--", "python", "-m", "jaxthru.train", "--run-dir", str(tmp_path)]
    codes = [supervise.main(["--after", "70", *words]) for _ in range(3)]
    assert codes == [0, 0, 70] and not (tmp_path / supervise.COUNTS).exists()
    assert supervise.main(["--after", "143", *words]) == 0
    assert supervise.main(["--after", "1", *words]) == 1
    (tmp_path / supervise.COUNTS).write_text("torn")
    assert supervise.main(["--after", "137", *words]) == 0
    assert json.loads((tmp_path / supervise.COUNTS).read_text()) == {"furthest": 0, "failed": {"0": 1}}
    assert len(capsys.readouterr().err.splitlines()) == 6


def test_a_count_that_a_bucket_does_not_take_is_said_in_a_line():
    class Refuses:
        def write_text(self, text):
            raise RuntimeError("503\nslow down")

        def __str__(self):
            return "gs://b/r/failures.json"

    with pytest.raises(InputError, match=r"^gs://b/r/failures.json: cannot be written \(503 slow down\)$"):
        Failures(Refuses()).add(3)


def test_progress_clears_the_counts(tmp_path):
    failures = Failures()
    assert [failures.add(step) for step in (3, 2, 3, 5, 3, 5)] == [1, 1, 2, 1, 1, 2]
    assert judge(End(70), tmp_path, Failures(), tries=1).given_up


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the command after --"),
        (["--"], "give the command after --"),
        (["--", "python", "-m", "jaxthru.train"], "no --run-dir"),
        (["--", "nowhere-to-be-found", "--run-dir", "r"], "nowhere-to-be-found: there is no such command"),
        (["--", "python", "--run-dir", "r", "--resume", "never"], "leave out --resume never"),
        (
            ["--", "python", "--run-dir", "az://b/r"],
            "--run-dir az://b/r: az:// is not supported",
        ),
        (["--processes", "2,2", "--", "python", "--run-dir", "r"], "--processes 2,2: must be"),
        (["--processes", "0", "--", "python", "--run-dir", "r"], "--processes 0: must be"),
        (["--processes", "two", "--", "python", "--run-dir", "r"], "--processes two: must be whole numbers"),
        (["--tries", "0", "--", "python", "--run-dir", "r"], "--tries 0: must be at least 1"),
        (["--after", "0", "--", "python", "--run-dir=r"], "--after 0: must be the exit code of a run"),
        (["--pause", "nan", "--", "python", "--run-dir=r"], "--pause nan: must be"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert supervise.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("jaxthru: ") and err.count("\n") == 1


def test_processes_within_a_larger_job_are_refused(monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    with pytest.raises(InputError, match="JAX_PROCESS_ID says that a larger job"):
        supervisor.environments(2)
    assert supervisor.environments(1)[0]["JAX_PROCESS_ID"] == "3"


def test_gpus_are_shared(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(supervisor, "bus_ids", lambda: ("a", "b", "c", "d"))
    found = [each["JAX_LOCAL_DEVICE_IDS"] for each in supervisor.environments(2)]
    assert found == ["0,1", "2,3"]
    with pytest.raises(InputError, match="--processes 3: cannot share 4 GPUs evenly"):
        supervisor.environments(3)


def test_it_loads_no_jax():
    code = "import sys, jaxthru.supervise; print([name for name in ('jax', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
