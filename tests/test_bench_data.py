"""The data benchmark: what it counts, and what it claims of it."""

import os
import subprocess
import sys
import types

import numpy as np
import pytest


def line(rate: float, **more) -> dict:
    return {
        "samples_per_second": rate,
        "tokens_per_second": 1000 * rate,
        "tokens_per_cpu_second": 1.0,
        "bytes_per_token": 4.0,
        **more,
    }


def test_medians_pass_over_rounds_that_failed(bench):
    table = bench("data_table")
    failed = {"error": ["out of memory"]}
    rounds = [{"a": line(1), "b": failed}, {"a": failed, "b": failed}, {"a": line(5)}, {"a": line(2)}]
    found = table.medians(rounds)
    assert found["a"]["samples_per_second"] == 2 and found["a"]["rounds"] == 3
    assert found["b"] == failed


def test_ratios_and_their_bars(bench):
    table = bench("data_table")
    found = {
        "packed/5/jaxthru": line(120_000),
        "heavy/jaxthru": line(40, private_mb=100.0),
        "heavy/grain-iterators": line(37, private_mb=1400.0),
        "slow/jaxthru": line(1700),
        "slow/grain": line(1000),
        "peers/torchdata": {"error": "not installed"},
    }
    ratios = {(one["a"], one["b"]): one for one in table.compare(found)}
    memory = ratios["heavy/grain-iterators", "heavy/jaxthru"]
    assert memory["ratio"] == 14 and not memory["met"] and not memory["rates_equal"]
    found["heavy/grain-iterators"] = line(40, private_mb=1400.0)
    assert next(one for one in table.compare(found) if one["a"] == "heavy/grain-iterators")["met"]
    assert not ratios["slow/jaxthru", "slow/grain"]["met"]
    assert ratios["packed/5/jaxthru", "1e+08"]["met"]
    assert len(ratios) == 3
    text = table.table(found, list(ratios.values()))
    assert "not installed" in text and "missed, rates differ" in text and "| met |" in text


def test_what_is_compared_is_a_contender(bench):
    table, contenders = bench("data_table"), bench("data_contenders").contenders()
    known = {*contenders, *bench("data_peers").contenders()}
    assert set(table.NAMES) <= known and contenders.keys() <= set(table.NAMES)
    assert {name for a, b, _, _ in table.RATIOS for name in (a, b)} <= known
    # Against a peer of as many processes, told to read no further ahead than it must.
    fair = contenders["heavy/grain-iterators-short"].keywords
    assert fair["workers"] == 1 and fair["reading"].num_threads == 1
    assert contenders["packed/5/jaxthru-best-fit"].keywords["packing"] == "best_fit"


def test_a_tree_of_processes_is_counted_whole(bench):
    data = bench("data")
    program = "import sys; held = bytearray(b'1' * 50_000_000); print(flush=True); sys.stdin.read()"
    before = data.memory(os.getpid())["processes"]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        tree, alone = data.memory(os.getpid()), data.memory(child.pid)
        assert child.pid in data.processes(os.getpid())
        child.stdin.close()
    assert tree["processes"] == before + 1
    assert tree["private_mb"] > alone["private_mb"] > 50


def test_taking_at_a_rate_counts_the_time_that_it_waits(bench, monkeypatch):
    data, now = bench("data"), [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = types.SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(data, "time", clock)
    slow = iter(lambda: sleep(0.01), "never")  # each takes 10 ms to come
    assert data.take(slow, 0.2, 0.05) == (5, 0.25)
    taken, took = data.take(slow, 0.2, 0)
    assert taken == 20 and took == pytest.approx(0.2)


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
