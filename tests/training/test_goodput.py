"""The account of a run's hours closes, whatever its starts came to."""

import json
import os
import time

import pytest
from runs import make_workplace

from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training import display, goodput
from jaxthru.training.goodput import GoodputLog, account
from jaxthru.training.goodput_picture import picture
from jaxthru.training.run_directory import RunDirectory


def start(at, step, ended=None, lost=None):
    how = {"processes": 2, "devices": 8, "ended": ended, "lost": lost or {}}
    return {"time": at, "event": "start", "step": step, **how}


def spent(at, category, seconds):
    return {"time": at, "event": category, "seconds": seconds}


def stop(at, reason="ended"):
    return {"time": at, "event": "stop", "reason": reason}


def row(step, seconds=1.0, waited=0.0, saved=0.0, skipped=0):
    waits = {"data_wait_seconds": waited, "checkpoint_seconds": saved, "skipped_updates": skipped}
    return {"step": step, "step_seconds": seconds, **waits}


@pytest.fixture
def run(tmp_path):
    """Writes the two files of a run; the last row was written at `seen`."""

    def written(events, rows, seen=0.0, torn=""):
        lines = [json.dumps(event) if isinstance(event, dict) else event for event in events]
        (tmp_path / goodput.FILE).write_text("\n".join([*lines, torn]))
        metrics = tmp_path / "metrics.jsonl"
        metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
        os.utime(metrics, (seen, seen))
        return tmp_path

    return written


FIRST = (
    start(1000, 0),
    spent(1010, goodput.INITIALIZATION, 4),
    spent(1010, goodput.PREPARATION, 2),
    spent(1010, goodput.STARTUP, 4),
    spent(1012, goodput.EVALUATION, 2),
)


def test_a_run_of_one_start(run):
    rows = [row(1, 2.0, waited=0.5), row(2), row(3, 3.0, saved=2.0), row(4, skipped=1), row(5, skipped=1)]
    events = [*FIRST, spent(1015, goodput.SAVE, 2), spent(1024, goodput.SAVE, 1.5), stop(1021.5)]
    found = account(run(events, rows))
    assert found.wall == 21.5 and found.failures == 0 and found.steps == 5
    assert found.seconds == {
        goodput.PRODUCTIVE: 1.5 + 1 + 1 + 1,
        goodput.INITIALIZATION: 4,
        goodput.PREPARATION: 2,
        goodput.STARTUP: 4,
        goodput.DATA: 0.5,
        goodput.SAVE: 3.5,
        goodput.EVALUATION: 2,
        goodput.SKIPPED: 1,
    }
    assert found.goodput == 4.5 / 21.5 and sum(found.seconds.values()) == found.wall
    assert sum(share for _, share in found.shares()) == pytest.approx(1)


def test_steps_made_before_there_was_an_account_are_none_of_it(run):
    """A run that was begun with an older version, or whose goodput.jsonl was lost."""
    rows = [row(step, 10.0) for step in range(1, 1006)]
    torn = '{"time": 1e999, "event": "start", "step": 1e999, "processes": 1, "devices": 1, "ended": null}'
    found = account(run([torn, start(1000, 1000), stop(1060)], rows))
    assert found.wall == 60 and found.steps == 5
    assert found.seconds == {goodput.PRODUCTIVE: 50, goodput.OTHER: 10}


def test_a_kill_loses_steps_and_time(run):
    """Ten steps were made, five were saved; the process died a second after the last."""
    rows = [row(step) for step in range(1, 9)]
    events = [
        *FIRST,
        start(1030, 5, ended=1022, lost={"0": 5.0}),
        spent(1036, goodput.RESTORE, 6),
        stop(1039.5),
    ]
    found = account(run(events, rows))
    assert found.seconds[goodput.WASTED] == 5 and found.seconds[goodput.RECOVERY] == 8
    assert found.seconds[goodput.PRODUCTIVE] == 8 and found.seconds[goodput.OTHER] == 0.5
    assert [each.seconds.get(goodput.PRODUCTIVE) for each in found.starts] == [5, 3]
    assert found.wall == 39.5 == sum(found.seconds.values())


def test_a_start_that_goes_back_behind_another(run):
    """The checkpoint of step 20 was damaged: steps 11 to 20, of the first start, are made again too."""
    rows = [row(step) for step in range(1, 13)]
    events = [
        *FIRST,
        start(1040, 20, ended=1032),
        start(1060, 10, ended=1045, lost={"0": 10.0, "1": 5.0}),
        stop(1062),
    ]
    found = account(run(events, rows))
    assert [each.seconds.get(goodput.PRODUCTIVE, 0) for each in found.starts] == [10, 0, 2]
    assert [each.seconds.get(goodput.WASTED, 0) for each in found.starts] == [10, 5, 0]
    assert goodput.OTHER not in found.seconds and found.wall == 62


def test_what_is_told_twice_counts_once(run):
    """A start was killed between telling of what was lost and cutting it: the next tells of it again."""
    rows = [row(step) for step in range(1, 6)]
    lost = {"0": 5.0}
    events = [
        *FIRST,
        start(1030, 5, ended=1022, lost=lost),
        start(1040, 5, ended=1030, lost=lost),
        stop(1041),
    ]
    found = account(run(events, rows))
    assert found.seconds[goodput.WASTED] == 5 and found.wall == 41 == sum(found.seconds.values())


def test_a_run_that_is_under_way_or_was_killed_ends_at_its_last_sign_of_life(run):
    found = account(run(FIRST, [row(1), row(2)], seen=1014.0))
    assert found.wall == 14 and found.starts[0].reason is None and found.seconds[goodput.PRODUCTIVE] == 2
    assert account(run(FIRST, [])).wall == 12


@pytest.mark.parametrize(
    "torn", ['{"time": 1021, "eve', "[1]", "7", '{"event": "stop"}', "null", "\0\0\0", "{" * 9999]
)
def test_torn_lines_are_passed_over(run, torn):
    whole = [*FIRST, stop(1013)]
    expected = account(run(whole, [row(1)])).seconds
    assert account(run([*FIRST, torn, stop(1013)], [row(1)])).seconds == expected
    assert account(run(whole, [row(1)], torn=torn)).seconds == expected


def test_without_a_start_there_is_no_account(tmp_path, run):
    for events in ([], ["torn"], [stop(3)]):
        with pytest.raises(ValueError, match=r"holds no goodput.jsonl with a start"):
            account(run(events, []))
    assert display.kept(RunDirectory(tmp_path)) == []


def test_what_a_run_writes_is_what_is_read(tmp_path):
    began = time.monotonic() - 3.0
    parts = {"python": 1.0, "data": 0.5, "compile": 1.0, "state": 0.5}
    with pytest.raises(TrainingError), GoodputLog(tmp_path, 0, parts, began) as log:
        log.ready()
        with log.spending(goodput.EVALUATION):
            time.sleep(0.02)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row(n, 0.01)) + "\n" for n in range(1, 5)))
        time.sleep(0.05)
        raise TrainingError("the disk is full")
    late = time.monotonic() - began - 3.07  # of a busy machine
    first = account(tmp_path)
    assert first.starts[0].reason == "TrainingError"
    assert 3.06 < first.wall < 3.08 + late and abs(first.seconds[goodput.OTHER]) < 0.05 + late
    assert (tmp_path / goodput.PICTURE).read_text().startswith("<svg")
    with (tmp_path / goodput.FILE).open("a") as file:
        file.write('{"torn')
    log = GoodputLog(tmp_path, 2, parts, time.monotonic(), processes=4, devices=8)
    second = account(tmp_path)
    assert second.starts[1].step == 2 and (second.starts[1].processes, second.starts[1].devices) == (4, 8)
    assert second.seconds[goodput.WASTED] == pytest.approx(0.02) and second.seconds[goodput.RESTORE] == 0.5
    assert second.starts[1].began >= second.starts[0].ended
    before = (tmp_path / goodput.FILE).read_bytes()
    GoodputLog(tmp_path, 2, parts, began, writes=False).ready()
    assert (tmp_path / goodput.FILE).read_bytes() == before
    GoodputLog(tmp_path / "gone", 2, parts, began).ready()  # a disk that is full ends no run


def test_the_table_and_the_picture(tmp_path, run):
    rows = [row(step) for step in range(1, 9)]
    folder = run([*FIRST, start(1030, 5, ended=1022, lost={"0": 5.0}), stop(1033)], rows)
    lines = dict(display.kept(RunDirectory(folder)))
    assert lines["goodput"] == "24.2% of 33 s, 2 starts"
    assert lines["  between an end and the next start"] == "24.2%" and len(lines) == 6
    shown = picture(account(folder))
    assert "goodput 24.2% of 33 s" in shown and "start 2, from step 5" in shown and goodput.WASTED in shown
    assert RunDirectory(folder).goodput()._repr_svg_() == shown
    with pytest.raises(InputError, match="holds no goodput"):
        RunDirectory(tmp_path / "nowhere").goodput()
    many = [start(1000 + 10 * n, n, ended=None if n == 0 else 995 + 10 * n) for n in range(300)]
    shown = picture(account(run([*many, stop(5000)], [])))
    assert "start 300, from step 299" in shown and "start 259," not in shown


def test_owners_of_steps_among_many_starts():
    starts = [goodput.Start(0.0, step) for step in (0, 10, 20, 10, 30, 5, 5, 9)]
    owner = goodput.owners(starts)
    for step in range(1, 40):
        plain = max((at for at, each in enumerate(starts) if each.step < step), default=0)
        assert owner(step) == plain


@pytest.mark.slow(minutes=0.5)
def test_the_account_closes_over_random_kills(tmp_path, bench):
    """scripts/bench/measure/goodput_kills.py makes twenty."""
    place = make_workplace(tmp_path)
    settings = {"train__steps": 250, "checkpoint__every": 20, "evaluate__every": 100}
    command = place.command("run", **settings)
    seed = int(os.environ.get("SEED", "20"))
    os_environment = place.environment()
    found = bench("measure.goodput_kills").killed(command, 3, seed, os_environment)
    print(found)
    assert found.starts > 2 and found.off["wall"] <= 0.01 and found.off["unknown"] <= 0.01, found
    # What a kill cuts off of a step is not known to be one: a share of hours as short as these.
    longest = max(0.3, *(row["step_seconds"] for row in place.metrics("run")))
    assert 0 <= found.between_booked - found.between <= longest * found.kills, found
