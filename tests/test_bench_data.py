"""The data benchmark: what it counts, and what it claims of it."""

import argparse
import dataclasses
import os
import subprocess
import sys
import types

import numpy as np
import pytest


def blocks(contender: str, *rates: float | None, gpu: str | None = None, **more) -> list[dict]:
    """Returns the rounds of a contender; a rate of None is one that failed."""

    def told(rate: float | None) -> dict:
        if rate is None:
            return {"error": "out of memory"}
        line = {"samples_per_second": rate, "tokens_per_second": 1000 * rate, "benchmark": "loading"}
        return {"line": line | {"tokens_per_cpu_second": 1.0, "bytes_per_token": 4.0} | more}

    named = {"contender": contender, "gpu": gpu}
    return [named | {"round": turn} | told(rate) for turn, rate in enumerate(rates, 1)]


@pytest.fixture
def rows(bench):
    return bench("suites.data").ROWS


@pytest.fixture
def setup(bench, tmp_path):
    return bench("suites.rows").Setup(None, tmp_path, tiny=True)


def test_medians_pass_over_rounds_that_failed(rows, setup):
    found = rows["slow"].found(setup, [*blocks("jaxthru", 1, None, 5, 2), *blocks("grain", None)])
    own = found["contenders"]["jaxthru"]
    assert own["samples_per_second"] == found["samples_per_second"] == 2
    assert (own["blocks"], own["failed"]) == (3, 1) and "grain" not in found["contenders"]
    assert "benchmark" not in own and rows["slow"].found(setup, [])["contenders"] == {}


def test_memory_is_compared_at_equal_rates_alone(rows, setup):
    (bar,) = rows["heavy"].bars
    own, name = blocks("jaxthru", 40, 40, private_mb=100.0), "grain-iterators / jaxthru"
    found = rows["heavy"].found(setup, [*own, *blocks("grain-iterators", 37, 37, private_mb=1400.0)])
    assert found[name] == 14 and not found["ratios"][name]["rates_equal"] and bar.met(found) is False
    assert "rates differ" in rows["heavy"].details(found)
    found = rows["heavy"].found(setup, [*own, *blocks("grain-iterators", 40, 40, private_mb=1400.0)])
    assert bar.met(found) and "rates differ" not in rows["heavy"].details(found)
    assert bar.met(rows["heavy"].found(setup, own)) is None


def test_ratios_and_their_bars(rows, setup):
    default, as_many = rows["slow"].bars
    own = blocks("jaxthru", 1700, 1700)
    found = rows["slow"].found(
        setup, [*own, *blocks("grain", 1000, 1010), *blocks("grain-mp-prefetch", 1300)]
    )
    assert not default.met(found) and as_many.met(found)
    ratios = found["ratios"]
    assert ratios["jaxthru / grain"]["claimed"] and not ratios["jaxthru / grain-mp-prefetch"]["claimed"]
    assert ratios["jaxthru / grain"]["needed"] == pytest.approx(2 * 10 / 1005)
    assert "**1.692**" in rows["slow"].details(found) and "| 1.308 |" in rows["slow"].details(found)
    assert rows["packed_5"].bars[0].met(rows["packed_5"].found(setup, blocks("jaxthru", 120_000)))
    assert not rows["packed_5"].bars[0].met(rows["packed_5"].found(setup, blocks("jaxthru", 90_000)))


def test_what_is_compared_is_a_contender_that_can_be_read(bench, rows, setup, monkeypatch):
    loading, corpus = bench("measure.loading"), bench("data_corpus")
    parser = argparse.ArgumentParser()
    for names, how in loading.OPTIONS:
        parser.add_argument(*names, **how)
    monkeypatch.setattr(corpus, "make", lambda *_: None)
    monkeypatch.setattr(loading.harness, "need", lambda *_: None)
    for row in rows.values():
        assert {name for ratio in row.ratios for name in ratio.pair} <= row.contenders.keys()
        ratios = {ratio.name for ratio in row.ratios}
        assert all(bar.what in ratios for bar in row.bars if isinstance(bar, bench("suites.measured").Over))
        for name in row.contenders if isinstance(row, bench("suites.data").Loading) else ():
            words = row.command(name, setup)
            given = parser.parse_args(words[words.index(str(bench("suites.data").CORPUS / "quick")) :])
            assert callable(loading.opened(given)), "its reader takes these keys"
    # Against a peer of as many processes, told to read no further ahead than it must.
    assert rows["heavy"].contenders["grain-iterators-short"] == "grain_heavy workers=1 short=true"
    assert "packing=best_fit" in rows["packed_5"].contenders["jaxthru-best-fit"]


def test_who_cannot_keep_up_sets_the_rate_for_all_that_follow(bench, rows, setup, monkeypatch):
    monkeypatch.setattr(bench("data_corpus"), "make", lambda *_: None)
    asked = rows["heavy"].command("jaxthru", setup)
    assert asked[asked.index("--rate") + 1] == "16"
    setup = dataclasses.replace(setup, done=tuple(blocks("grain-iterators", 12.5, None)))
    asked = rows["heavy"].command("jaxthru", setup)
    assert asked[asked.index("--rate") + 1] == "12.5"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("grain_lazy",), "READER grain_lazy: not of jaxthru, "),
        (("grain_heavy", "wrokers=4"), "grain_heavy wrokers=4: missing a required argument: 'workers'"),
    ],
)
def test_what_cannot_be_read_is_one_line(bench, words, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["loading.py", str(tmp_path), *words])
    loading = bench("measure.loading")
    monkeypatch.setattr(loading.os, "environ", dict(os.environ))
    assert loading.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"loading.py: {said}")


def test_a_tree_of_processes_is_counted_whole(bench):
    data = bench("measure.loading")
    program = "import sys; held = bytearray(b'1' * 50_000_000); print(flush=True); sys.stdin.read()"
    before = data.held(os.getpid())["processes"]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        tree, alone = data.held(os.getpid()), data.held(child.pid)
        assert child.pid in {process.pid for process in data.processes(os.getpid())}
        child.stdin.close()
    assert tree["processes"] == before + 1
    assert tree["private_mb"] > alone["private_mb"] > 50


def test_taking_at_a_rate_counts_the_time_that_it_waits(bench, monkeypatch):
    data, now = bench("measure.loading"), [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = types.SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(data, "time", clock)
    slow = iter(lambda: sleep(0.01), "never")  # each takes 10 ms to come
    assert data.take(slow, 0.2, 0.05) == (pytest.approx([0.01] * 5), 0.25)
    taken, took = data.take(slow, 0.2, 0)
    assert len(taken) == 20 and took == pytest.approx(0.2)


def test_pages_fill_more_than_half_of_a_row(bench, tmp_path):
    corpus = bench("data_corpus")
    texts = list(corpus.library(400_000))
    path = tmp_path / "tokenizer.json"
    corpus.tokenizer.train(iter(texts), 2000, path)
    pages = corpus.pages(texts, path, 20)
    encoder = corpus.tokenizer.Tokenizer(path)
    lengths = [len(ids) for source in pages for ids in encoder.encode(source)]
    assert len({text for source in pages for text in source}) == 40
    assert np.all(np.array(lengths) > corpus.PAGE // 2)


def test_records_can_be_fetched_in_any_order(bench, tmp_path):
    corpus, contenders = bench("data_corpus"), bench("data_contenders")
    corpus.write(tmp_path / "records", [["one", "two\nlines", "three"]])
    records = contenders.Records(tmp_path / "records" / "000.jsonl.zst")
    assert [records[at]["text"] for at in (2, 0, 1)] == ["three", "one", "two\nlines"]


def test_jaxthru_is_a_contender_that_runs(bench, tmp_path):
    corpus, contenders = bench("data_corpus"), bench("data_contenders")
    texts = corpus.chunks(corpus.library(300_000), 2000)
    corpus.tokenizer.train(iter(texts), 2000, tmp_path / "tokenizer.json")
    corpus.write(tmp_path / "pages", corpus.pages(texts, tmp_path / "tokenizer.json", 40))
    corpus.write_mix(tmp_path, "some", {f"s{number}": corpus.paths("pages", [number]) for number in (0, 1)})
    corpus.open_data(corpus.config(tmp_path, "some", 128))
    batches = contenders.jaxthru(tmp_path, "some", rows=4, sequence=128)
    assert next(batches)["tokens"].shape == (4, 128)
    batches.close()


def test_a_simulated_run_is_as_near_as_its_farthest_number(bench, tmp_path):
    """Of p50, p99 and rate, in the median over rounds."""
    row, setup = bench("suites.data_scale").ROWS["paced"], bench("suites.rows").Setup(None, tmp_path)
    done = [
        {"contender": "paced", "round": turn, "gpu": None, "line": {"benchmark": "b", "error": error}}
        for turn, error in enumerate((0.1, 0.3, 0.14), 1)
    ]
    found = row.found(setup, done)
    assert found["error"] == 0.14 and row.bars[0].met(found)
    assert not row.bars[0].met(row.found(setup, done[1:2]))
