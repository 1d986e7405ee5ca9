"""The command: what it writes and prints, and how it refuses bad input."""

import dataclasses
import html
import io
import json
import re

import fake_bucket
import pytest
import rich.console
import sample

from jaxthru.profile.__main__ import main
from jaxthru.profile.account import ledger
from jaxthru.profile.show import publish
from jaxthru.profile.show.html import report
from jaxthru.profile.show.terminal import summary


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def run(path, found=None, config=None, step=20):
    """Writes what a profiled run leaves behind, without the trace."""
    folder = path / "profile" / str(step)
    folder.mkdir(parents=True)
    (found or sample.ledger()).write(folder / "ledger.json")
    (path / "config.json").write_text(json.dumps(config or sample.config()))
    return path


def test_writes_report_and_ledger_and_says_the_most(tmp_path, capsys):
    path = run(tmp_path / "run")
    assert main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "Attention" in said
    assert "66.0" in said
    assert "491.0" in said
    assert "precision.matmul = fp8" in said
    folder = path / "profile" / "20"
    assert f"report: {folder / 'report.html'}" in said
    assert "Where the step of" in (folder / "report.html").read_text()
    written = ledger.read(folder / "ledger.json")
    assert written.advice[0].key == "precision.matmul"
    assert written.lines == sample.ledger().lines


def test_a_ledger_whose_trace_was_deleted_is_read_as_it_is(tmp_path):
    path = run(tmp_path / "run")
    (path / "profile/20/collected.json").write_text("{}")
    assert main([str(path)]) == 0
    assert ledger.read(path / "profile/20/ledger.json").lines == sample.ledger().lines


def test_a_ledger_of_before_facts_were_written_has_them_of_its_configuration(tmp_path, capsys):
    path = run(tmp_path / "run", dataclasses.replace(sample.ledger(), model=None))
    assert main([str(path)]) == 0
    assert "MFU 46.7%" in capsys.readouterr().out
    assert ledger.read(path / "profile/20/ledger.json").model == sample.ledger().model


def test_step_chooses_the_profile(tmp_path, capsys):
    path = run(run(tmp_path / "run"), sample.ledger(data_wait=0.2), step=40)
    assert main([str(path)]) == 0
    assert "200.0" in capsys.readouterr().out
    assert main([str(path), "--step", "20"]) == 0
    assert "200.0" not in capsys.readouterr().out


def test_a_run_in_a_bucket_has_its_report_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(fake_bucket.FOLDER, str(tmp_path))
    fake_bucket.join()
    here = run(tmp_path / "run")
    for path in ("config.json", "profile/20/ledger.json"):
        fake_bucket.store.write(f"bucket/run/{path}", (here / path).read_bytes())
    assert main(["gs://bucket/run"]) == 0
    assert b"Where the step of" in fake_bucket.store.read("bucket/run/profile/20/report.html")
    fake_bucket.store.write("bucket/other/config.json", (here / "config.json").read_bytes())
    assert main(["compare", "gs://bucket/other", str(here)]) == 2
    assert "was not profiled" in capsys.readouterr().err


def test_compare_names_the_cause_first(tmp_path, capsys):
    before = run(tmp_path / "clean")
    planted = sample.config(data__mix="slow.toml")
    after = run(tmp_path / "slow", sample.ledger(data_wait=0.112), planted)
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    assert first.startswith("Most changed: data wait (+100.0 ms, +20.4%)")
    assert "data.mix" in first
    assert "clean, ms" in said
    assert "slow, ms" in said


def test_compare_with_itself_names_nothing(tmp_path, capsys):
    path = run(tmp_path / "run")
    assert main(["compare", str(path), str(path)]) == 0
    assert "No change above the noise" in capsys.readouterr().out


def of_before(config):
    """Returns a configuration as commit 56c3c12 wrote it, with neither kernels nor families."""
    chosen = config.pop("kernels")
    config["model"]["attention"] = chosen["attention"]
    config["mesh"]["collective_matmul"] = chosen["collective_matmul"]
    del config["model"]["family"]
    return config


def test_keys_that_are_new_are_no_changes(tmp_path, capsys):
    before = run(tmp_path / "before", config=of_before(sample.config()))
    planted = sample.ledger(data_wait=0.112)
    after = run(tmp_path / "after", planted, sample.config(kernels__attention="reference"))
    assert publish.config(before) == json.loads(json.dumps(sample.config()))
    assert main(["compare", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    assert "kernels.attention" in said and "reference" in said
    for key in ("model.family", "kernels.adamw_8bit", "kernels.linear_cross_entropy", "model.attention"):
        assert key not in said


def test_a_configuration_without_kernels_is_one_of_before(tmp_path, capsys):
    old = of_before(sample.config(kernels__attention="reference", mesh__tensor=2))
    path = run(tmp_path / "run", sample.ledger(exposed_communication=0.1, attention=0.2), old)
    assert main([str(path)]) == 0
    keys = {entry.key for entry in ledger.read(path / "profile/20/ledger.json").advice}
    assert {"kernels.collective_matmul", "kernels.attention"} <= keys
    del old["model"]["attention"], old["mesh"]["collective_matmul"]
    (path / "config.json").write_text(json.dumps(old))
    assert main([str(path)]) == 0
    keys = {entry.key for entry in ledger.read(path / "profile/20/ledger.json").advice}
    assert "kernels.collective_matmul" in keys and "kernels.attention" not in keys


def test_compare_says_that_the_step_changed_though_no_part_did(tmp_path, capsys):
    small = {name: seconds + 0.0025 for name, seconds in sample.SECONDS.items() if name != "matmul"}
    before, after = run(tmp_path / "a"), run(tmp_path / "b", sample.ledger(**small))
    assert main(["compare", str(before), str(after)]) == 0
    assert "The step changed (+17.5 ms, +3.6%), but none of its parts" in capsys.readouterr().out


def test_names_with_brackets_are_shown_as_they_are(tmp_path, capsys):
    odd = sample.with_lint(sample.ledger(attention=0.1), "not_donated", None, "state['params'][0]")
    before, after = run(tmp_path / "a"), run(tmp_path / "b", odd)
    assert main(["compare", str(before), str(after)]) == 0
    assert "state['params'][0]" in capsys.readouterr().out


def _other_version(path):
    data = json.loads((path / "profile/20/ledger.json").read_text())
    (path / "profile/20/ledger.json").write_text(json.dumps(data | {"version": 99}))


def _cut_short(path):
    """A run that ended while it was profiled."""
    (path / "profile/20/ledger.json").unlink()
    (path / "profile/20/host.xplane.pb").touch()
    (path / "profile/20/collected.json").write_text("{}")
    (path / "environment.json").write_text("{}")
    (path / "metrics.jsonl").touch()


@pytest.mark.parametrize(
    ("spoil", "arguments", "said"),
    [
        (lambda path: None, ["nowhere"], "no such run directory"),
        (lambda path: None, ["compare", "run", "nowhere"], "no such run directory"),
        (lambda path: None, ["run", "--step", "21"], "was not profiled there, but at 20"),
        (lambda path: (path / "config.json").unlink(), ["run"], "config.json: no such file"),
        (lambda path: (path / "config.json").write_text("{"), ["run"], "config.json: not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), ["run"], "holds no configuration"),
        (lambda path: (path / "config.json").write_text('{"train": 3}'), ["run"], "holds no configuration"),
        (lambda path: (path / "config.json").write_text("{}"), ["run"], "profile/20: KeyError 'data'"),
        (lambda path: (path / "profile/20/ledger.json").write_text("[]"), ["run"], "ledger version None"),
        (lambda path: (path / "profile/20/ledger.json").unlink(), ["run"], "neither a whole profile nor"),
        (lambda path: (path / "profile/20/ledger.json").write_text("{}"), ["run"], "ledger version None"),
        (_other_version, ["compare", "run", "run"], "ledger version 99"),
        (_cut_short, ["run"], "profile/20"),
        (lambda path: (path / "profile").rename(path / "other"), ["run"], "profile.at=20"),
        (lambda path: None, ["run/profile/20"], "is a profile of a run; give the run, "),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, spoil, arguments, said):
    monkeypatch.chdir(tmp_path)
    spoil(run(tmp_path / "run"))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxthru: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("arguments", [[], ["compare", "one"], ["run", "--stap", "3"]])
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ({"closure": 1.48, "noise": 0.06}, "took 148% more time than the median of the run's others ("),
        ({"closure": -0.05, "noise": 0.01}, "took 5.0% less time than the median of the run's others ("),
        ({"closure": None, "loop_seconds": None, "noise": 0.0}, "Too few steps ran without the profiler"),
        ({"closure": 0.05, "noise": 0.06}, "(488.5 ms): they are typical."),
        ({"closure": 0.015, "noise": 0.001}, "(488.5 ms): they are typical."),
        ({"closure": 1e-5, "noise": 0.001}, "took as long as the median of the run's others"),
    ],
)
def test_profiled_steps_are_held_against_the_others_once(tmp_path, capsys, window, said):
    found = sample.ledger()
    found = dataclasses.replace(found, window=dataclasses.replace(found.window, **window))
    path = run(tmp_path / "run", found)
    assert main([str(path)]) == 0
    page, shown = (path / "profile/20/report.html").read_text(), capsys.readouterr().out
    typical = abs(window["closure"] or 0.0) <= max(window["noise"], 0.02)
    for text in (html.unescape(page), shown):
        text = " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
        assert text.count(said) == 1
        assert ("they are not typical" in text) is not typical
    assert ("Noise: not known" in page) == (found.window.loop_seconds is None)


def test_summary_adds_up():
    console = rich.console.Console(width=100, record=True, file=io.StringIO())
    found = dataclasses.replace(sample.ledger(), advice=())
    console.print(summary(found))
    said = console.export_text()
    numbers = [float(line.split()[-2]) for line in said.splitlines() if line.rstrip().endswith("%")]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.1)
    assert "MFU 46.7%" in said
    assert said.startswith("67% of what these GPUs sustain in large bf16 matmuls: fair.")
    assert "No setting is expected to win more than the noise" in said


def test_the_terminal_says_of_a_cpu_what_the_page_says():
    """One step time, no peak, and the same sentences."""
    console = rich.console.Console(width=200, record=True, file=io.StringIO())
    console.print(summary(sample.cpu()))
    said = console.export_text().replace("\N{NO-BREAK SPACE}", " ")
    lines = [line.strip() for line in said.splitlines()]
    assert lines[0] == "A run on a CPU shows that everything works; its speed is not judged."
    assert lines[1].startswith("Of a step of 3,702.1 ms, the matmuls take 67%.")
    assert lines[2].startswith(
        "The profiled steps took 16% more time than the median of the run's others (3,202.5"
    )
    assert lines[3] == "553 tokens/s"
    assert said.count("3,202.5") == 1
    assert "MFU" not in said and "peak" not in said
    assert re.search(r"step +3,702.1 +100.0%", said)
    assert "noise of this run, 1,184.7 ms (32.0% of the step)" in said
    page = " ".join(html.unescape(report(sample.cpu())).replace("\N{NO-BREAK SPACE}", " ").split())
    for line in lines[:3]:
        assert line in page
