"""Runs compared: a table and a page of what they recorded."""

import json

import pytest

from jaxthru.engine.terms import METRICS_FIELDS
from jaxthru.training.curves import main
from jaxthru.training.run_directory import EVAL_FIELDS, RunDirectory


def record(path, rate: float, steps: int = 400) -> RunDirectory:
    run = RunDirectory(path)
    path.mkdir(parents=True)
    groups = {"optim": {"learning_rate": rate, "name": "adamw"}, "model": {"layers": 2, "pretrained": None}}
    run.config.write_text(json.dumps(groups))
    blank = dict.fromkeys(METRICS_FIELDS)
    for step in range(1, steps + 1):
        loss = None if step == 7 else 8 * step**-rate
        row = {"step": step, "loss": loss, "tokens": 100, "tokens_per_second": 50.0, "skipped_updates": 0}
        run.append_metrics(blank | row | {"loss_by_source": {}})
    row = {"step": steps, "loss": 4.5, "loss_by_source": {"prose": 4.25}, "tokens": 64}
    run.append_eval(dict.fromkeys(EVAL_FIELDS) | row)
    return run


@pytest.fixture
def runs(tmp_path):
    return [str(record(tmp_path / "sweep" / str(n), rate).path) for n, rate in ((1, 0.25), (2, 0.125))]


def test_table(runs, tmp_path, capsys):
    assert main([*runs, "--json", "--page", str(tmp_path / "page.html")]) == 0
    one, two = (found := json.loads(capsys.readouterr().out))["1"], found["2"]
    same = {"steps": 400, "tokens": 40_000, "held-out loss, last": 4.5, "prose": 4.25}
    assert same.items() <= one.items() and same.items() <= two.items()
    assert one["training loss, last"] == 8 * 400**-0.25
    assert (one["optim.learning_rate"], two["optim.learning_rate"]) == (0.25, 0.125)
    assert not {"optim.name", "model.layers", "model.pretrained"} & one.keys()


def test_page_shows_all_runs(runs, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main([*runs, "--page", str(page)]) == 0
    said, text = capsys.readouterr().out, page.read_text()
    assert all(number in said and number in text for number in ("40,000", "4.5000", "0.125"))
    assert "optim.learning_rate" in said and str(page) in said
    assert text.count("<polyline") == 6 and "by tokens seen" in text and "<th>2</th>" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # it loads nothing


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{none}"], "there is no such run directory"),
        (["{empty}"], "no step has been recorded yet"),
        (["{one}", "{one}"], "a run is named twice"),
        (["{one}", "{one}/../1"], "a run is named twice"),
    ],
)
def test_bad_input(words, said, runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    names = {"none": tmp_path / "none", "empty": tmp_path / "empty", "one": runs[0]}
    assert main([word.format(**names) for word in words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
