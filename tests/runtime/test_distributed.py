"""Starting several processes, agreeing, and stopping together."""

import os
import signal
import subprocess
import sys
import time

import jax
import pytest
from processes import finish, start_processes

from jaxthru.runtime import distributed
from jaxthru.runtime.distributed import from_first, gather_text, initialize, is_primary
from jaxthru.runtime.errors import InputError
from jaxthru.runtime.stop_signal import StopSignal

AT, OF, ME = distributed.VARIABLES
SCHEDULERS = (*distributed.SLURM, "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
TASK = dict.fromkeys(distributed.SLURM, "8")


@pytest.fixture
def started(monkeypatch):
    """Returns the arguments of each jax.distributed.initialize that would have happened."""
    calls = []

    def initialize(initialization_timeout, **where):
        calls.append(where)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in (*distributed.VARIABLES, *SCHEDULERS):
        monkeypatch.delenv(name, raising=False)
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield calls
    for name, value in before.items():
        jax.config.update(name, value)


SETTINGS = ("jax_enable_preemption_service", "jax_cpu_collectives_implementation")


@pytest.mark.parametrize(
    "environment, wanted",
    [
        ({}, []),
        ({AT: "host:1", OF: "1", ME: "0"}, []),
        (
            {AT: "host:1", OF: "4", ME: "3"},
            [{"coordinator_address": "host:1", "num_processes": 4, "process_id": 3}],
        ),
        (TASK, [{}]),
        ({**TASK, "SLURM_NTASKS": "1"}, []),
        ({"SLURM_JOB_ID": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, []),  # an sbatch script itself
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, []),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, [{}]),
        ({"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, []),
    ],
)
def test_joins_others_only_if_there_are_any(started, monkeypatch, environment, wanted):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    initialize()
    assert started == wanted


@pytest.mark.parametrize(
    "environment, message",
    [
        ({AT: "host:1"}, f"{AT} set without {OF}, {ME}"),
        ({OF: "2", ME: "0"}, f"{OF}, {ME} set without {AT}"),
        ({AT: "host:1", OF: "2", ME: "2"}, f"{ME} = 2: must be below {OF} = 2"),
        ({AT: "host:1", OF: "two", ME: "0"}, f"{OF} = 'two': must be a whole number"),
        ({AT: "host", OF: "2", ME: "0"}, "must be host:port"),
    ],
)
def test_contradictions_are_the_user_s_to_mend(started, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        initialize()
    assert not started


def test_jax_s_own_heartbeats_outlast_a_pause_where_ours_watch(started, monkeypatch):
    for name, value in {AT: "host:1", OF: "2", ME: "0"}.items():
        monkeypatch.setenv(name, value)
    initialize(watched=True)
    assert started[0]["heartbeat_timeout_seconds"] == distributed.PAUSE_SECONDS


def test_alone():
    assert is_primary()
    assert gather_text("one") == ["one"]
    assert from_first(lambda: "one") == "one"


def test_a_signal_stops_a_lone_process_after_the_step(capfd):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    for number in (signal.SIGTERM, signal.SIGINT):
        with StopSignal() as stop:
            assert not stop.should_stop(1)
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # at once: the same one, handed on
            assert stop.should_stop(2)
            assert (stop.number, stop.exit_code) == (number, CODES[number])
        assert "stopping after this step; again to exit at once" in capfd.readouterr().err
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with StopSignal() as stop:
        assert not stop.should_stop(1)
        stop.request()
        assert stop.should_stop(1)


HANG = """
import time
from jaxthru.runtime.stop_signal import StopSignal
StopSignal.SAME_SECONDS = 0
with StopSignal():
    print("ready", flush=True)
    time.sleep(60)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_exits_at_once(number):
    process = subprocess.Popen([sys.executable, "-c", HANG], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert b"stopping" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == CODES[number]


LOOP = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxthru.runtime.distributed import gather_text, initialize
from jaxthru.runtime.stop_signal import StopSignal

initialize()
mesh = Mesh(np.asarray(jax.devices()), ("data",))
slow = jax.process_index() * float(sys.argv[1])
ones = np.ones((1, 4), np.float32)
x = jax.make_array_from_callback((2, 4), NamedSharding(mesh, P("data")), lambda at: ones)
whole = NamedSharding(mesh, P())
step_function = jax.jit(lambda x, n: (x.sum() + n, x), out_shardings=(whole, x.sharding))
assert gather_text(f"process {jax.process_index()}") == ["process 0", "process 1"]

def loop(requested):
    global x
    previous, step = None, 0
    with StopSignal() as stop:
        while True:
            step += 1
            if step == requested:
                stop.request()
            if stop.should_stop(step):
                return step, stop.exit_code
            total, x = step_function(x, np.float32(step))
            if previous is not None:
                assert float(previous) == 8 + step - 1
            previous = total
            time.sleep(0.005 + slow)
            if step == 20:
                print("running", flush=True)
            assert step < 3000

stopped = loop(None)
again, code = loop(5 if jax.process_index() == 1 else None)  # another run of this job
assert again < 20 and code == 143, (again, code)
print("stopped before step", *stopped, again, flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.parametrize(
    "receivers, number",
    [([0], signal.SIGTERM), ([1], signal.SIGTERM), ([0, 1], signal.SIGTERM), ([1], signal.SIGINT)],
)
def test_all_processes_stop_at_the_same_step(tmp_path, receivers, number):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    processes = start_processes(script, "0.02" if receivers == [0] else "0")
    try:
        for process in processes:
            while "running" not in (line := process.stdout.readline()):
                assert line, "ended too early"
        for receiver in receivers:
            processes[receiver].send_signal(number)
            time.sleep(0.003)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    outputs = finish(processes)
    stops = [output.splitlines()[-1] for output in outputs]
    assert stops[0].startswith("stopped before step") and int(stops[0].split()[-2]) == CODES[number]
    assert stops[0] == stops[1]
    told = ["stopping after this step" in output for output in outputs]
    assert told == [index in receivers for index in range(2)]


FIRST = """
import time
import jax
from jaxthru.runtime.distributed import from_first, initialize
from jaxthru.runtime.errors import InputError

initialize()

def slow():
    assert jax.process_index() == 0, "asked elsewhere"
    time.sleep(1)
    return {"stores": ["é" * 2000]}

def refuse():
    raise InputError("no such text")

assert from_first(slow) == {"stores": ["é" * 2000]}
for call in (refuse, lambda: 1 // 0):
    try:
        from_first(call)
    except (InputError, ZeroDivisionError) as error:
        print(type(error).__name__, error, flush=True)
assert from_first(lambda: None) is None
jax.distributed.shutdown()
"""


def test_all_processes_get_what_the_first_one_gets(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    outputs = finish(start_processes(tmp_path / "first.py"))
    assert all("InputError no such text" in output for output in outputs)
    assert "ZeroDivisionError" in outputs[0]
    assert "InputError process 0 failed: ZeroDivisionError" in outputs[1]


NOTICES = """
import time
import jax
from jaxthru.runtime.distributed import Notices, initialize

initialize()
notices, other = Notices("tests/notices/"), 1 - jax.process_index()
for text in ("", "1.5", f"own {jax.process_index()}"):
    notices.publish(text)
while notices.others().get(other) not in (f"own {other}", "done"):
    time.sleep(0.01)
notices.publish("done")
while notices.others() != {other: "done"}:
    time.sleep(0.01)
print(notices.others(), flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_processes_see_the_latest_that_others_let_them_know(tmp_path):
    (tmp_path / "notices.py").write_text(NOTICES)
    outputs = finish(start_processes(tmp_path / "notices.py"))
    assert [output.splitlines()[-1] for output in outputs] == ["{1: 'done'}", "{0: 'done'}"]


ALONE = """
import sys
from jaxthru.runtime import distributed
from jaxthru.runtime.errors import exit_code
distributed.MEET_SECONDS = 1
sys.exit(exit_code(distributed.initialize))
"""


@pytest.mark.slow
def test_a_process_that_meets_nobody_says_so(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    other, one = start_processes(tmp_path / "alone.py")
    other.kill()
    output = one.communicate(timeout=60)[0]
    assert one.returncode == 160, output
    assert "jaxthru: the processes of the run have not met at 127.0.0.1:" in output.splitlines()[-1]
    other.communicate()
