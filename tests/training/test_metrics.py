"""Rows, event files, progress and the final table."""

import io
import math
import threading
import time
from pathlib import Path

import pytest
import rich.console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from jaxthru.runtime.progress import Progress
from jaxthru.training import display, record
from jaxthru.training.metrics import FinishedStep, Meter, MetricsConfig
from jaxthru.training.record import open_record
from jaxthru.training.run_directory import METRICS_FIELDS, RunDirectory


def finished(step, **changes):
    values = {
        "step": step,
        "loss": 8.0 / step,
        "loss_by_source": {"code": 7.0 / step, "prose": 9.0 / step},
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 1000,
        "trained_tokens": 250,
        "attention_span": 50_000.0,
        "step_seconds": 0.5,
        "data_wait_seconds": 0.1,
    }
    return FinishedStep(**{**values, **changes})


def make_meter(monkeypatch, **options):
    """Returns a meter and a function that lets time pass."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def later(seconds):
        clock[0] += seconds

    return Meter(lambda tokens, span: 1e9 * tokens + 10 * span, **options), later


def test_a_row_has_the_contract_s_fields(monkeypatch):
    meter, later = make_meter(monkeypatch, peak_flops=4e12, batch_tokens=1250)
    later(1.0)
    row = meter.row(finished(1))
    assert row.keys() == set(METRICS_FIELDS)
    assert row["tokens_per_second"] == 2000
    assert row["model_tflops"] == pytest.approx((1e12 + 5e5) / 0.5 / 1e12)
    assert row["mfu"] == pytest.approx(row["model_tflops"] / 4)
    assert row["goodput"] == pytest.approx(0.4)
    assert row["hbm_peak_bytes"] is None
    assert row["masked_share"] == 0.75 and row["packing_fill"] == 0.8


def test_tokens_that_are_not_trained_on_need_fewer_flops(monkeypatch):
    meter, later = make_meter(monkeypatch, peak_flops=None, untrained_flops=4e8)
    later(1.0)
    row = meter.row(finished(1))
    untrained = row["tokens"] - row["trained_tokens"]
    assert untrained == 750
    assert row["model_tflops"] == pytest.approx((1e12 + 5e5 - 4e8 * untrained) / 0.5 / 1e12)


def test_further_metrics_follow_the_contract_s(monkeypatch):
    meter, later = make_meter(monkeypatch, peak_flops=None)
    later(1.0)
    row = meter.row(finished(1, further={"balance_loss": 0.25, "expert_load": [3, 5]}))
    assert {*row} - {*METRICS_FIELDS} == {"balance_loss", "expert_load"}
    assert row["attention_span"] == 50_000 and row["expert_load"] == [3, 5]


def test_mfu_is_unknown_without_a_peak(monkeypatch):
    meter, later = make_meter(monkeypatch, peak_flops=None)
    later(1.0)
    row = meter.row(finished(1))
    assert row["mfu"] is None
    assert row["model_tflops"] > 0


def test_goodput_counts_kept_updates_alone(monkeypatch):
    meter, later = make_meter(monkeypatch, peak_flops=None, skipped_updates=3)
    later(4.5)  # start-up
    later(0.5)
    goodput = meter.row(finished(1, data_wait_seconds=None, skipped_updates=3))["goodput"]
    assert goodput == pytest.approx(0.5 / 5.0)
    later(0.5)
    assert meter.row(finished(2, skipped_updates=4))["goodput"] == pytest.approx(0.5 / 5.5)
    later(2.0)  # an evaluation
    later(0.5)
    row = meter.row(finished(3, data_wait_seconds=0.1, checkpoint_seconds=0.2, skipped_updates=4))
    assert row["goodput"] == pytest.approx(0.7 / 8.0)


def read_events(run):
    """Returns {tag: {step: value}} as TensorBoard shows it, later files purging what a resume repeats."""
    shown = {}
    for path in sorted(run.tensorboard.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        with path.open("rb") as file:
            data = io.BytesIO(file.read())
        while True:
            header = data.read(12)
            if len(header) < 12:
                break
            content = data.read(int.from_bytes(header[:8], "little"))
            for part, checksum in (header[:8], header[8:]), (content, data.read(4)):
                assert masked_crc32c(part) == int.from_bytes(checksum, "little")
            event = Event.FromString(content)
            if event.session_log.status == 1:  # START
                for values in shown.values():
                    for step in [step for step in values if step >= event.step]:
                        del values[step]
            for value in event.summary.value:
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


def write_run(run, steps, resumed=0, tensorboard=True, **changes):
    meter = Meter(lambda tokens, span: 1e9 * tokens, peak_flops=None)
    with open_record(MetricsConfig(tensorboard=tensorboard), run, resumed) as opened:
        for step in steps:
            opened.step(meter.row(finished(step, **changes)))
            if step % 4 == 0:
                opened.evaluation(
                    {"step": step, "loss": 6.0 / step, "loss_by_source": {"prose": 6.0 / step}, "tokens": 64}
                )


def test_rows_and_events_survive_a_resume(tmp_path):
    run = RunDirectory(tmp_path)
    write_run(run, range(1, 8))
    run.cut(5)
    write_run(run, range(6, 10), resumed=5)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 10))
    assert [row["step"] for row in run.read_eval()] == [4, 8]
    events = read_events(run)
    assert sorted(events["train/loss"]) == list(range(1, 10))
    assert events["train/loss_by_source/prose"][3] == pytest.approx(3.0)
    assert events["eval/loss"] == {4: 1.5, 8: 0.75}
    assert "train/mfu" not in events
    assert "train/step" not in events


def test_further_metrics_are_in_every_sink(tmp_path):
    run = RunDirectory(tmp_path)
    write_run(run, [1], further={"balance_loss": 0.25, "expert_load": [3.0, math.nan, 5.0]})
    (row,) = run.read_metrics()
    assert (row["balance_loss"], row["expert_load"]) == (0.25, [3, None, 5])
    events = read_events(run)
    assert events["train/balance_loss"] == {1: 0.25}
    assert {tag: values[1] for tag, values in events.items() if "load" in tag} == {
        "train/expert_load/0": 3,
        "train/expert_load/2": 5,
    }


@pytest.mark.parametrize("begin", [0, 3])
def test_a_run_goes_on_where_tensorboard_cannot_be_written(tmp_path, monkeypatch, caplog, begin):
    run, whole = RunDirectory(tmp_path), Path.open

    def full(path, mode="r", *rest, **options):
        if "tensorboard" in path.parts and len(run.read_metrics()) >= begin:
            return whole(Path("/dev/full"), mode)
        return whole(path, mode, *rest, **options)

    monkeypatch.setattr(Path, "open", full)
    threads = threading.active_count()
    write_run(run, range(1, 100))  # more than any writer's queue holds
    assert len(run.read_metrics()) == 99 and threading.active_count() <= threads
    said = f"{run.tensorboard}: cannot be written (No space left on device); the run goes on without it"
    assert [record.getMessage() for record in caplog.records] == [said]
    monkeypatch.undo()
    assert list(read_events(run).get("train/loss", ())) == list(range(1, begin))


def test_tensorboard_can_be_switched_off(tmp_path):
    run = RunDirectory(tmp_path)
    write_run(run, range(1, 3), tensorboard=False)
    assert not run.tensorboard.exists()
    assert len(run.read_metrics()) == 2


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "is_primary", lambda: False)
    monkeypatch.setattr(display, "is_primary", lambda: False)
    run = RunDirectory(tmp_path / "run")
    write_run(run, range(1, 5))
    with open_record(MetricsConfig(trackers=("wandb",)), run) as opened:
        assert not opened.sinks
    assert not run.path.exists()
    with display.open_progress(10) as progress:
        progress.update({})


def row_of(step, **changes):
    row = dict.fromkeys(METRICS_FIELDS)
    row.update(step=step, loss=2.5, tokens_per_second=12345.6, step_seconds=0.5, skipped_updates=0)
    return {**row, **changes}


def test_plain_lines_come_every_few_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    out = io.StringIO()
    with display.StepProgress(100, console=rich.console.Console(file=out)) as lines:
        for step in range(1, 101):
            clock[0] += 0.5
            lines.update(row_of(step, mfu=0.512, data_wait_seconds=0.05))
    printed = out.getvalue().splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in printed] == [1, *range(11, 101, 10), 100]
    assert printed[0] == "step 1/100  loss 2.5000  12,346 tokens/s  MFU 51.2% of the bf16 peak  data wait 10%"
    assert printed[2].endswith("0:40 left")
    assert printed[-1].endswith("0:00 left")


def test_a_terminal_shows_a_bar():
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=120)
    with display.StepProgress(10, console=console) as bar:
        for step in range(1, 11):
            bar.update(row_of(step, loss=None, skipped_updates=2))
    assert "step 10/10" in out.getvalue()
    assert "loss -  12,346 tokens/s  2 skipped" in out.getvalue()


def test_what_is_waited_for_before_the_first_task_is_a_line():
    out = io.StringIO()
    console = rich.console.Console(file=out, force_terminal=True, width=120)
    with Progress(display.COLUMNS, console) as progress:
        progress.wait("reading the plan")
        assert out.getvalue() == "reading the plan\n"
        progress.start(3)
        progress.wait("compiling")
    assert "step 0/3" in out.getvalue() and "compiling" in out.getvalue()


def table_of(run):
    out = io.StringIO()
    display.final_table(run, rich.console.Console(file=out, width=100))
    return out.getvalue()


def test_one_process_prints_the_final_table(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "is_primary", lambda: False)
    assert not table_of(RunDirectory(tmp_path))


def test_the_final_table_is_read_from_the_files(tmp_path):
    run = RunDirectory(tmp_path / "a run")
    run.path.mkdir()
    write_run(run, range(1, 9))
    assert "resume: " not in table_of(run)  # there is no checkpoint
    (run.checkpoints / "8").mkdir(parents=True)
    table = table_of(run)
    assert table_of(RunDirectory(run.path)) == table
    lines = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in table.splitlines() if "│" in line
    }
    assert lines["steps"] == "8"
    assert lines["loss"] == "8.0000 → 1.0000"
    assert lines["held-out loss"] == lines["prose"] == "1.5000 → 0.7500"
    assert lines["throughput"] == "2,000 tokens/s"
    assert "skipped updates" not in lines
    assert "MFU" not in lines
    resume = table.splitlines()[-1]
    assert resume.startswith("resume: ")
    assert resume.endswith(f"-m jaxthru.train --config '{run.path}/config.json' --run-dir '{run.path}'")
    assert f"--logdir '{run.path}/tensorboard'" in table


def test_a_run_without_rows_has_a_table_too(tmp_path):
    run = RunDirectory(tmp_path)
    assert "run directory" in table_of(run)
    for path in (run.metrics_file, run.eval_file):
        path.write_text('{"step": 3}\n')  # of which nothing else is known
    assert "nan tokens/s" in table_of(run) and "- → -" in table_of(run)
