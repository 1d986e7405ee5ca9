"""The benchmark of a host's memory: what it asks of whom, and when memory has stopped growing."""

import argparse

import pytest


@pytest.fixture
def rows(bench):
    return bench("suites.data_host").ROWS


def test_every_contender_can_be_read_and_every_bar_compares_two(bench, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(bench("data_corpus"), "make_heavy", lambda *_: None)
    program, loading = bench("measure.host_memory"), bench("measure.loading")
    monkeypatch.setattr(loading.harness, "need", lambda *_: None)
    parser = argparse.ArgumentParser()
    for names, how in program.OPTIONS:
        parser.add_argument(*names, **how)
    setup = bench("suites.rows").Setup(None, tmp_path)
    for name, row in rows.items():
        assert {who for ratio in row.ratios for who in ratio.pair} == row.contenders.keys()
        assert {bar.what for bar in row.bars} <= {ratio.name for ratio in row.ratios}
        for contender in row.contenders:
            script, *words = row.command(contender, setup)[1:]
            found = parser.parse_args(words)
            assert script.endswith("host_memory.py") and name == f"trainers_{found.trainers}"
            if found.reader == "jaxthru_host":
                found.words += program.which(argparse.Namespace(trainer=0, trainers=2, host="none"))
            assert callable(loading.opened(found))
    assert len(rows["trainers_8"].bars) == 3


def test_a_ratio_is_of_equal_rates(bench, rows, tmp_path):
    (bar, *_), setup = rows["trainers_8"].bars, bench("suites.rows").Setup(None, tmp_path)

    def block(contender: str, private: float, rate: float) -> dict:
        line = {"private_mb": private, "samples_per_second": rate, "tokens_per_second": 8192 * rate}
        return {"contender": contender, "round": 1, "gpu": None, "line": line}

    for private, rate, met in ((400.0, 8.0, True), (399.0, 8.0, False), (400.0, 7.0, False)):
        done = [block("jaxthru", 100.0, 8.0), block("grain-map-mix", private, rate)]
        assert bar.met(rows["trainers_8"].found(setup, done)) is met


def test_memory_has_settled_when_it_has_twice_hardly_grown(bench, monkeypatch):
    program = bench("measure.host_memory")
    monkeypatch.setattr(program, "CHECKED_SECONDS", 0.0)
    sizes = iter([100.0, 150.0, 151.0, 170.0, 170.5, 170.9, 500.0])
    trainers = object.__new__(program.Trainers)
    monkeypatch.setattr(program.Trainers, "memory", lambda self: {"private_mb": next(sizes)})
    trainers.settle(60.0)
    assert next(sizes) == 500.0
