"""The bench that measures attention's table: what it draws, how it goes on, and what it writes."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxthru.runtime.errors import InputError
from pallas_kernels import dispatch
from pallas_kernels.attention import measured

PROVENANCE = {"device": ["NVIDIA H200"], "versions": {}, "commit": "abc", "command": "python"}


@pytest.fixture
def table(bench, monkeypatch):
    module = bench("measure.attention_table")
    monkeypatch.setattr(module.harness, "provenance", lambda: dict(PROVENANCE))
    return module


@pytest.fixture
def on_gpu(table, monkeypatch):
    """Says that there is a GPU, and measures nothing on it."""
    monkeypatch.setattr(table.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "nvidia_compute_capability", lambda: (9, 0))
    done = []

    def measure(point):
        done.append(point.key)
        return row(*point.key[:2], point.documents, {"cudnn_packed": 2.0, "triton": 1.0}, point.key[2])

    monkeypatch.setattr(table, "measure", measure)
    return done


def row(head_dim, sequence, documents, milliseconds, mean=None, spread=0.01, difference=1e-3):
    return {
        "point": [head_dim, sequence, mean],
        "documents": documents,
        "milliseconds": milliseconds,
        "spread": dict.fromkeys(milliseconds, spread),
        "differences": {"o": difference} if len(milliseconds) > 1 else {},
        "failed": {},
    }


def test_points_have_equal_tokens_and_the_documents_that_they_say(table):
    points = table.points()
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


def test_the_plan_is_printed_and_keeps_the_limit(table, capsys):
    assert 60 < table.plan(table.points()) < 280
    said = capsys.readouterr().err
    assert said.count("head_dim ") == 30 and "30 points, about " in said
    one = table.plan(table.points()[:1])
    assert one == table.points()[0].seconds() + table.TRITON_COMPILERS


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


def test_a_run_with_a_wrong_point_goes_on_and_is_an_error(table, on_gpu, tmp_path, monkeypatch, capsys):
    sound, bad = table.measure, []

    def measure(point):
        found = sound(point)
        if point.key == [64, 8192, 512]:
            bad.append(found["differences"].update(o=6e-3))
        return found

    monkeypatch.setattr(table, "measure", measure)
    monkeypatch.setattr(table.time, "monotonic", lambda: 0.0)
    assert table.run(tmp_path / "record.json", 280.0) == 1 and bad
    assert "[64, 8192, 512]: {'o': 0.006}" in capsys.readouterr().err
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["results"]) == 30 and len(table.entries(record)["9.0"]) == 29


def test_a_run_goes_on_where_it_stopped(table, on_gpu, tmp_path, capsys, monkeypatch):
    output, whole = tmp_path / "record.json", [point.key for point in table.points()]
    clock = iter(range(0, 100_000, 20))
    monkeypatch.setattr(table.time, "monotonic", lambda: next(clock))
    assert table.run(output, 280.0) == 1
    first = list(on_gpu)
    assert 0 < len(first) < 30 and first == whole[: len(first)]
    assert f"{30 - len(first)} points are left" in capsys.readouterr().err
    record = json.loads(output.read_text())
    assert record["commit"] == "abc" and [each["point"] for each in record["results"]] == first
    monkeypatch.setattr(table.time, "monotonic", lambda: 0.0)
    assert table.run(output, 280.0) == 0
    assert on_gpu == whole == [each["point"] for each in json.loads(output.read_text())["results"]]
    monkeypatch.setattr(table.harness, "provenance", lambda: PROVENANCE | {"commit": "def"})
    with pytest.raises(InputError, match="its commit is 'abc', here it is 'def'; give another --output"):
        table.run(output, 280.0)


def test_without_a_gpu_it_says_what_it_needs(table, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attention_table.py"])
    monkeypatch.setattr(table.harness, "keep_stdout", lambda: None)
    assert table.harness.run(table.main) == 2
    assert "found cpu: needs an NVIDIA GPU; --dry-run says" in capsys.readouterr().err


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
    (tmp_path / "record.json").write_text(json.dumps(record()))
    table.write_table(tmp_path / "record.json")
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
    assert table.harness.run(table.main) == 2
    said = capsys.readouterr().err
    assert "--table" in said and said.count("\n") == 1
