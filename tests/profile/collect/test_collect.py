"""The command profiles itself: what is collected, and that the ledger agrees with the loop's clock."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from processes import finish
from runs import make_workplace

from jaxthru.profile.account import ledger
from jaxthru.profile.account.build import facts_of
from jaxthru.profile.collect import clocks, trace
from jaxthru.profile.collect.trace import ProfileConfig, open_profile
from jaxthru.profile.read.facts import Facts
from jaxthru.profile.show.publish import build
from jaxthru.runtime.errors import InputError

AT, STEPS = 6, 5
PROFILED = {"profile__at": AT, "profile__steps": STEPS, "train__steps": 16}
PROFILED |= {"checkpoint__every": 0, "evaluate__rows": 0}  # programs that no step has
IDLE = ("data_wait", "host_gap", "dependency")
LARGER = {"model__embed": 128, "model__mlp": 512, "data__sequence": 256}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    # Compiled as a user's runs are: the ledger is of what ran.
    return make_workplace(tmp_path_factory.mktemp("runs"), xla_flags="", forks=True)


@pytest.fixture
def quickly_compiled(place):
    """The same folder, where no time is compared."""
    return dataclasses.replace(place, xla_flags=os.environ["XLA_FLAGS"])


@pytest.fixture(scope="module")
def run(place):
    place.run("profiled", **PROFILED, **LARGER)
    return place.folder / "profiled"


FACTS = Facts(6.0, 6.0, 1, 1, {}, (), {}, {})


@pytest.fixture(scope="module")
def found(run) -> ledger.Ledger:
    return ledger.read(run / "profile" / str(AT) / "ledger.json")


def test_the_ledger_closes(run, found):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = {line.name: line.seconds for line in found.lines}
    assert list(lines) == list(ledger.LINES)
    assert sum(lines.values()) == pytest.approx(found.window.step_seconds, rel=1e-9)
    assert lines["unclassified"] <= 0.01 * found.window.step_seconds
    # A step of the ledger begins with its first kernel, one of the loop's with the end of the last one: the
    # time between steps is counted at different ends. The first step profiled begins with an idle device.
    of = [row["step_seconds"] for row in rows if AT < row["step"] < AT + STEPS]
    steps = [step for step in found.devices[0].steps if step.step > AT]
    mine = [step.seconds for step in steps]
    between = max(sum(step.lines[line] for line in IDLE) for step in found.devices[0].steps)
    assert len(mine) == len(of) == STEPS - 1
    assert sum(mine) == pytest.approx(sum(of), abs=0.02 * sum(of) + 2 * between)


def test_a_run_writes_down_what_its_ledger_knows_of_the_model(run, found):
    config = json.loads((run / "config.json").read_text())
    collected = json.loads((run / "profile" / str(AT) / "collected.json").read_text())
    assert found.model == facts_of(config, collected) == facts_of(config, {})  # as of an older run
    of_a_token = collected["model"]["matmul_flops_per_token"]
    assert of_a_token * found.run.tokens_per_step == found.matmul.model_flops


def test_every_layer_and_phase_is_seen(found):
    seen = {(scope.layer, scope.phase) for scope in found.scopes}
    for layer in ("attention", "mlp"):  # what is short may be hidden: a CPU runs several things at once
        assert {(layer, "forward"), (layer, "backward")} <= seen
    assert {("head", "loss"), ("optimizer", "optimizer")} <= seen
    scopes = sum(scope.seconds for scope in found.scopes)
    idle = sum(found.seconds(line) for line in IDLE)
    assert scopes + idle == pytest.approx(found.window.step_seconds, rel=1e-9)
    assert any(kernel.source and kernel.flops for kernel in found.kernels)


def test_the_table_of_operations_adds_up(run, found):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(run / "profile" / str(AT) / "ops.parquet").to_pydict()
    assert {*table["step"]} == set(range(AT, AT + STEPS)) and {*table["pass"]} == {"production"}
    assert sum(table["exposed"]) / 1e9 / STEPS == pytest.approx(found.window.step_seconds, rel=1e-9)
    for line in ledger.LINES:
        own = sum(each for each, of in zip(table["exposed"], table["line"], strict=True) if of == line)
        assert own / 1e9 / STEPS == pytest.approx(found.seconds(line), abs=1e-12), line
    flops = sum(filter(None, table["flops"])) / STEPS
    attention = (flops for flops, of in zip(table["flops"], table["line"], strict=True) if of == "attention")
    assert flops - sum(filter(None, attention)) / STEPS == pytest.approx(found.matmul.flops)


def test_products_are_counted(found):
    assert found.matmul.flops == pytest.approx(found.matmul.model_flops, rel=0.05)  # padding is not needed
    assert found.matmul.ideal_seconds is None and found.clock.source == "none"  # a CPU has no data sheet


def test_memory_is_told_apart(found):
    parameters = found.memory.categories["parameters"]
    assert found.memory.categories["optimizer"] == pytest.approx(2 * parameters, rel=0.01)
    kept = {name: size for name, size in found.memory.categories.items() if name.startswith("activations")}
    assert {"activations of attention", "activations of mlp"} <= kept.keys() and min(kept.values()) >= 0
    sizes = [buffer.bytes for buffer in found.memory.buffers]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    assert any(buffer.source for buffer in found.memory.buffers)
    positions = [at for at, _ in found.memory.curve]
    assert positions == sorted(positions) and positions[0] >= 0 and positions[-1] <= 1
    assert max(size for _, size in found.memory.curve) <= sum(found.memory.categories.values())


def test_the_runtimes_peak_has_what_the_program_does_not(tmp_path, run, found):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "profile" / str(AT)
    collected = json.loads((folder / "collected.json").read_text())
    peak = sum(found.memory.categories.values()) + 12345
    (folder / "collected.json").write_text(json.dumps(collected | {"peak_bytes": peak}))
    memory = build(folder).memory
    assert memory.categories == found.memory.categories | {"fragmentation": 12345}
    assert memory.peak_bytes == peak


@pytest.mark.slow
def test_profiling_changes_no_loss(place, run):
    place.run("plain", **PROFILED | {"profile__at": 0}, **LARGER)
    assert place.losses("plain") == place.losses("profiled")
    assert not (place.folder / "plain" / "profile").exists()


@pytest.mark.slow(minutes=0.4)
def test_several_devices(place):
    place.run("split", devices=4, mesh__fsdp=2, mesh__tensor=1, mesh__data=2, **PROFILED)
    found = ledger.read(place.folder / "split" / "profile" / str(AT) / "ledger.json")
    assert [device.device for device in found.devices] == ["0", "1", "2", "3"]
    kinds = {collective.kind for collective in found.collectives}
    assert {"all-gather", "all-reduce"} <= kinds
    for collective in found.collectives:
        assert 0 <= collective.wait_seconds <= collective.seconds
        assert collective.exposed_seconds <= collective.seconds * 1.000001
    assert found.seconds("exposed_communication") > 0 and found.seconds("unclassified") == 0


@pytest.mark.slow(minutes=0.3)
def test_a_layered_step(place):
    layered = {"model__loop": "unroll", "remat__policy": "attention", "offload__level": "optimizer"}
    place.run("layered", **PROFILED, **layered)
    found = ledger.read(place.folder / "layered" / "profile" / str(AT) / "ledger.json")
    seen = {(scope.layer, scope.phase) for scope in found.scopes}
    assert {("mlp", "forward"), ("mlp", "recomputation"), ("mlp", "backward")} <= seen
    assert ("optimizer", "optimizer") in seen and ("head", "loss") in seen
    assert found.matmul.flops >= 0.99 * found.matmul.model_flops


PLANTED = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "measure" / "planted.py"


@pytest.mark.slow
def test_a_planted_cause_has_its_line(place, tmp_path):
    planted = [sys.executable, PLANTED, "sync", tmp_path / "notes.json", "--seconds", "0.1"]
    arguments = place.command("sync", **PROFILED)[3:]
    subprocess.run([*planted, "--", *arguments], env=place.environment(), check=True)
    found = ledger.read(place.folder / "sync" / "profile" / str(AT) / "ledger.json")
    # For how long the device had nothing to do, by the loop's own clock: longer too on a busy machine.
    idle = json.loads((tmp_path / "notes.json").read_text())["idle"][AT - 1 : AT + STEPS]
    assert 0.8 * min(idle) <= found.seconds("host_gap") <= 1.2 * max(idle)
    assert found.seconds("host_gap") > 2 * max(found.seconds(line) for line in IDLE if line != "host_gap")


@pytest.mark.slow(minutes=0.3)
def test_two_processes_have_one_ledger(quickly_compiled):
    place = quickly_compiled
    finish(place.start_job("pair", 2, mesh__fsdp=2, **PROFILED), timeout=300)
    found = ledger.read(place.folder / "pair" / "profile" / str(AT) / "ledger.json")
    assert [device.device for device in found.devices] == ["0/0", "1/0"] and found.run.processes == 2
    # On one clock: whoever is late, nobody begins a step before all have begun the one before, whose weights
    # it gathers from all.
    begun = [[step.start for step in device.steps] for device in found.devices]
    assert max(map(min, *begun)) > 0
    for one, other in (begun, begun[::-1]):
        assert all(step > before for step, before in zip(one[1:], other[:-1], strict=True))
    assert found.seconds("unclassified") == 0 and found.memory is not None


@pytest.mark.slow
def test_a_run_that_ends_with_the_last_step_profiled(quickly_compiled):
    place = quickly_compiled
    place.run("short", **PROFILED | {"profile__at": 4, "profile__steps": 3, "train__steps": 6})
    found = build(place.folder / "short" / "profile" / "4")
    assert [step.step for step in found.devices[0].steps] == [4, 5, 6]


def test_switched_off_it_is_nothing(tmp_path):
    program = lambda state, batch: None  # noqa: E731
    off = open_profile(ProfileConfig(), tmp_path, program, None, 0, 20, None, FACTS)
    assert off.program is program
    assert not any(map(off.begins, range(10)))
    with off.span("dispatch", 3):
        off.after(3)
    off.finish()
    assert not list(tmp_path.iterdir())


def test_cupti_collects_at_the_end(tmp_path, monkeypatch):
    """Where a process has it loaded; one without it, as on a CPU, starts its trace all the same."""
    told = []

    class Library:
        def __init__(self, name: str, mode: int):
            if name != trace.CUPTI[0] or not mode & os.RTLD_NOLOAD:
                raise OSError(f"{name}: not loaded")

        def cuptiActivityFlushPeriod(self, milliseconds):
            told.append(milliseconds.value)

    monkeypatch.setattr(trace.ctypes, "CDLL", Library)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: told.append("started"))
    trace.start_trace(tmp_path, clock=False)
    assert told == ["started", trace.FLUSH_MS]


def test_a_gpu_takes_another_pass_without_graphs(tmp_path, monkeypatch):
    """On a GPU, as far as a CPU can show it: which steps are traced, with which program, compiled how."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls, sampled = [], []

    def start_trace(folder, profiler_options):
        calls.append(Path(folder).parent.name)
        sampled.append(bool(profiler_options.advanced_configuration))

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    monkeypatch.setattr(clocks, "sampling", lambda local: clocks.SAMPLING)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))

    class Program:
        def __init__(self, text: str):
            self.as_text = lambda: text

    asked, plain, named = [], Program("plain"), Program("named")

    def recompile(options):
        asked.append(options)
        return named

    noted = []
    config, handed = ProfileConfig(at=4, steps=2), (None, FACTS)
    profile = open_profile(config, tmp_path, plain, recompile, 0, 8, *handed, noted.append)
    programs = {}
    for step in range(1, 14):
        if profile.begins(step):
            profile.begin()
        programs[step] = profile.program
        profile.after(step - 1)
    assert [step for step, program in programs.items() if program is named] == [4, 5, 6]
    assert asked and all(options["xla_gpu_enable_command_buffer"] == "" for options in asked)
    assert calls == ["attribution", "stop", "production", "stop"] and sampled == [False, True]
    taken = json.loads((tmp_path / "4" / "collected.json").read_text())
    assert taken["passes"] == {
        "attribution": {"first_step": 4, "steps": 2},
        "production": {"first_step": 7, "steps": 2},
    }
    assert taken["model"] == json.loads(json.dumps(dataclasses.asdict(FACTS)))
    assert (tmp_path / "4" / "attribution.hlo.txt").read_text() == "named"
    assert noted == ["compiling the profiled step", *["collecting the profile"] * 2]
    # Of a run that is too short for both, the one without which there is no ledger.
    short = open_profile(config, tmp_path, plain, recompile, 0, 7, *handed)
    assert [(one.name, one.first_step) for one in short.passes] == [("production", 4)]


def test_a_run_does_not_wait_for_ever_for_the_names_of_kernels(tmp_path, monkeypatch):
    calls, heard, slow = [], [], threading.Event()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    started = lambda folder, **_: calls.append(Path(folder).parent.name)  # noqa: E731
    monkeypatch.setattr(jax.profiler, "start_trace", started)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(trace, "COMPILING", 0.05)
    monkeypatch.setattr(trace.log, "warning", lambda *words: heard.append(words[0] % words[1:]))
    plain = SimpleNamespace(as_text=lambda: "plain")
    config = ProfileConfig(at=4, steps=2)
    profile = open_profile(config, tmp_path, plain, lambda _: slow.wait(), 0, 8, None, FACTS)
    for step in range(1, 12):
        if profile.begins(step):
            profile.begin()
        assert profile.program is plain
        profile.after(step - 1)
    slow.set()
    assert calls == ["production"]
    assert heard == ["not compiled again after 0 s: kernels are not named"]
    taken = json.loads((tmp_path / "4" / "collected.json").read_text())
    assert taken["passes"] == {"production": {"first_step": 7, "steps": 2}}


@pytest.mark.parametrize(("start", "last", "said"), [(4, 9, True), (0, 3, True), (3, 9, False)])
def test_a_step_that_a_run_does_not_take_is_said(tmp_path, monkeypatch, start, last, said):
    """As where a run goes on behind it, or its data end before it."""
    heard = []
    monkeypatch.setattr(trace.log, "warning", lambda *words: heard.append(words[0] % words[1:]))
    open_profile(ProfileConfig(at=4), tmp_path, None, None, start, last, None, FACTS)
    where = f"profile.at = 4: nothing is profiled, as this run takes steps {start + 1} to {last}"
    assert heard == [where] * said
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "collected.json").touch()  # it was profiled before the run was stopped
    open_profile(ProfileConfig(at=4), tmp_path, None, None, start, last, None, FACTS)
    assert heard == [where] * said


@pytest.mark.parametrize(
    ("error", "said"),
    [(InputError("cut short"), "cut short"), (AttributeError("None"), "AttributeError: None")],
)
def test_a_profile_that_cannot_be_read_does_not_cost_the_run(tmp_path, monkeypatch, error, said):
    def publish(folder):
        raise error

    heard = []
    monkeypatch.setattr(trace.log, "warning", lambda *words: heard.append(words[0] % words[1:]))
    profile = open_profile(ProfileConfig(at=4), tmp_path, None, None, 0, 9, publish, FACTS)
    profile._coming.clear()  # all was traced
    profile.finish()
    assert heard == [f"{tmp_path / '4'}: no ledger: {said}"]


def test_a_trace_that_cannot_be_written_does_not_cost_the_run(tmp_path, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    heard, closed = [], []
    monkeypatch.setattr(trace.jax.profiler, "stop_trace", full)
    monkeypatch.setattr(trace.log, "warning", lambda *words: heard.append(words[0] % words[1:]))
    profile = open_profile(ProfileConfig(at=4), tmp_path, "the step", None, 0, 9, None, FACTS)
    profile._running, profile.program = profile._coming.pop(0), "the traced step"
    profile._open.callback(closed.append, True)
    profile.close()
    (said,) = heard
    assert "the trace is not whole: OSError: [Errno 28] No space left on device" in said
    assert closed and profile.program == "the step" and profile._running is None


@pytest.mark.parametrize("settings", [{"at": -1}, {"steps": 0}])
def test_impossible_settings(settings):
    with pytest.raises(InputError, match="profile"):
        ProfileConfig(**settings)
