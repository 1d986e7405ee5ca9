"""The bench that measures attention's table: what it draws, how it goes on, and what it writes."""

import dataclasses
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.attention import measured

PROVENANCE = {"device": ["NVIDIA H200"], "versions": {}, "commit": "abc", "command": "python"}


@pytest.fixture
def table(bench, monkeypatch):
    module = bench("measure.attention_table")
    monkeypatch.setattr(module.harness, "provenance", lambda: dict(PROVENANCE))
    return module


def row(head_dim, sequence, documents, milliseconds, mean=None, spread=0.01, difference=1e-3):
    return {
        "point": [head_dim, sequence, mean],
        "heads": [32, 8],
        "documents": documents,
        "milliseconds": milliseconds,
        "spread": dict.fromkeys(milliseconds, spread),
        "differences": {"o": difference} if len(milliseconds) > 1 else {},
        "failed": {},
    }


def every(bench, table) -> list:
    rows = bench("suites.attention").ROWS.values()
    return [table.point_of(row.head_dim, row.sequence, mean) for row in rows for mean in table.MEANS]


def test_points_have_equal_tokens_and_the_documents_that_they_say(bench, table):
    points = every(bench, table)
    assert len(points) == 2 * 3 * 5 == len({tuple(point.key) for point in points})
    for point in points:
        rows = [np.array(lengths) for lengths in point.lengths]
        assert [each.sum() for each in rows] == [point.sequence] * (table.TOKENS // point.sequence)
        assert max(map(len, rows)) < point.segments and point.segments % 8 == 0
        if point.mean is None:
            assert all(len(each) == 1 for each in rows) and point.documents == point.sequence
        else:  # rows' ends cut documents, so that pieces are shorter: the longer they are the more
            assert point.documents < point.mean and point.documents < point.sequence
            longest = point.sequence >= 16 * point.mean
            assert not longest or point.documents == pytest.approx(point.mean, rel=0.1)
    assert {"triton"} < {name for point in points for name in point.names} == set(table.NAMES)


def test_a_batch_costs_what_the_corpus_does(table):
    point = table.point_of(64, 8192, 512)
    packed = table.corpus(8192, 512)
    of_corpus = float((packed.length.astype(np.float64) ** 2).sum() / packed.length.sum())
    assert point.spans / table.TOKENS == pytest.approx(of_corpus, rel=0.05)


def test_heads_are_the_most_whose_workspace_cudnn_would_get(table):
    few = table.Point(64, 2048, 512, 500.0, 16, ((2048,),))
    assert few.heads == (32, 8)
    assert dataclasses.replace(few, segments=64).heads == (16, 4)
    many = dataclasses.replace(few, segments=4096)
    assert (many.heads, many.names) == ((8, 2), ("triton",))


@pytest.fixture
def on_cpu(table, monkeypatch):
    """A small point and implementations that a CPU has."""
    monkeypatch.setattr(table, "TOKENS", 128)
    monkeypatch.setattr(table, "NAMES", ("reference", "xla"))
    monkeypatch.setattr(table, "ROUND_SECONDS", 0.001)
    return table.Point(16, 64, 16, 16.0, 8, ((16, 16, 32), (40, 24)))


def test_a_point_is_measured_and_compared(table, on_cpu):
    found = table.measure(on_cpu)
    assert found["point"] == [16, 64, 16] and found["rows"] == 2 and found["heads"] == [32, 8]
    assert {*found["milliseconds"]} == {*found["spread"]} == {"reference", "xla"}
    assert min(found["milliseconds"].values()) > 0
    assert {*found["differences"]} == {"o", "dq", "dk", "dv"}
    assert max(found["differences"].values()) < table.TOLERANCE
    assert found["share_of_causal"] == round((2 * 16**2 + 32**2 + 40**2 + 24**2) / (2 * 64 * 64), 4)


def test_one_that_crosses_documents_is_seen(table, on_cpu, monkeypatch):
    sound = table.program

    def program(name):
        run = sound(name)
        if name == "reference":
            return run
        whole = table.find_segments(jnp.ones((2, 64), jnp.int32), 8)
        return lambda q, k, v, do, segments: run(q, k, v, do, whole)

    monkeypatch.setattr(table, "program", program)
    found = table.measure(on_cpu)
    assert found["differences"]["o"] > 0.1 and table.wrong(found)


def test_one_that_cannot_run_is_said(table, on_cpu, monkeypatch):
    sound = table.program

    def refuse(*_):
        raise dispatch.Unsupported("needs another GPU\nand more")

    monkeypatch.setattr(table, "program", lambda name: refuse if name == "xla" else sound(name))
    found = table.measure(on_cpu)
    assert found["failed"] == {"xla": "needs another GPU"}
    assert {*found["milliseconds"]} == {"reference"} and found["differences"] == {}


def test_a_wrong_point_is_recorded_and_misses_the_bar(bench, table, monkeypatch, capsys):
    def measured_at(point):
        found = row(*point.key[:2], point.documents, {"cudnn_packed": 2.0, "triton": 1.0}, point.key[2])
        if point.mean == 512:
            found["differences"].update(o=6e-3)
        return found

    monkeypatch.setattr(table, "measure", measured_at)
    monkeypatch.setattr(table.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(table.harness, "keep_stdout", lambda: None)
    monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda: (9, 0))
    of, setup = bench("suites.attention").ROWS["64_8192"], bench("suites.rows").Setup("", Path())
    monkeypatch.setattr(sys, "argv", of.command("points", setup)[1:])
    assert table.main() == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["benchmark"], line["commit"], len(line["results"])) == ("attention_table", "abc", 5)
    assert len(table.entries(line)["9.0"]) == 4
    found = of.found(setup, [{"contender": "points", "round": 1, "line": line}])
    assert (found["wrong"], found["spread"]) == (1, 0.01) and not of.bars[0].met(found)
    assert of.details(found).count("| 2.0 | 1.0 |") == 5


def test_without_a_gpu_it_says_what_it_needs(table, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attention_table.py"])
    assert table.main() == 2
    assert "found cpu: needs an NVIDIA GPU" in capsys.readouterr().err


def record() -> dict:
    rows = [
        row(64, 2048, 409.0, {"cudnn_packed": 3.16, "triton": 1.74}),
        row(64, 2048, 2048.0, {"cudnn_packed": 1.0, "triton": 1.2}),
        row(64, 8192, 1634.0, {"cudnn_packed": 1.0, "triton": 1.04}, spread=0.05),
        row(128, 32_768, 127.0, {"triton": 1.0}),
    ]
    return {"benchmark": "attention_table", "settings": {"capability": [9, 0]}, "results": rows}


def test_the_table_has_what_both_were_measured_at(table, tmp_path, monkeypatch):
    path = tmp_path / "attention_table.json"
    monkeypatch.setattr(measured, "TABLE_FILE", path)
    monkeypatch.setattr(measured, "TABLE", {"8.0": [], "9.0": [{"of": "another record"}]})
    whole = record()
    halves = [whole | {"results": whole["results"][:2]}, whole | {"results": whole["results"][2:]}]
    of_suite = {"blocks": [{"line": halves[1]}, {"error": "it hangs"}]}
    (tmp_path / "suite.json").write_text(json.dumps(of_suite))
    (tmp_path / "record.json").write_text(json.dumps(halves[0]))
    table.write_table([tmp_path / "record.json", tmp_path / "suite.json"])
    written = json.loads(path.read_text())
    assert written.keys() == {"8.0", "9.0"} and len(written["9.0"]) == 3

    def fastest(*place):
        found = measured.nearest(*place, (9, 0), written)
        return found and found.fastest

    assert fastest(64, 2048, 409) == "triton" and fastest(64, 2048, 2048) == "cudnn_packed"
    assert measured.nearest(64, 8192, 1634, (9, 0), written).fastest is None  # no further apart than rounds
    assert fastest(128, 32_768, 127) is None


@pytest.mark.parametrize("text", ["[]", "{", '{"benchmark": "attention"}'])
def test_what_is_no_record_is_one_line(table, tmp_path, monkeypatch, capsys, text):
    (tmp_path / "other.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["attention_table.py", "--table", str(tmp_path / "other.json")])
    assert table.main() == 2
    said = capsys.readouterr().err
    assert "--table" in said and said.count("\n") == 1
