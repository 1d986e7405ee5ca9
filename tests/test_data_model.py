"""The simulation of the data plane: against formulas of queues, and that nothing is lost in it."""

import dataclasses
import json
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
import simpy

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(study_script):
    return study_script("data_model")


def test_a_worker_is_a_queue_of_one_server(model):
    """M/D/1: tasks that arrive at random wait ρ / (2 (1 - ρ)) services in the mean (Pollaczek, Khinchine)."""
    environment, random, waits = simpy.Environment(), np.random.default_rng(0), []
    queue = simpy.Store(environment)
    worker = model.Worker(environment, queue, None)

    def arrive():
        for pause in random.exponential(1 / 0.7, 20_000).tolist():
            yield environment.timeout(pause)
            done, asked = environment.event(), environment.now
            done.callbacks.append(lambda _, asked=asked: waits.append(environment.now - asked - 1.0))
            queue.put((1.0, done))

    environment.process(arrive())
    environment.run()
    assert np.mean(waits) == pytest.approx(0.7 / (2 * 0.3), rel=0.05)
    assert worker.busy == len(waits) == 20_000


def test_cores_are_shared_evenly_by_turns(model):
    environment, ended = simpy.Environment(), {}
    cores = model.Cores(environment, 2, quantum=0.01)

    def work(name, seconds):
        yield from cores.work(seconds)
        ended[name] = environment.now

    for name in range(4):
        environment.process(work(name, 1.0))
    environment.process(work("short", 0.1))
    environment.run()
    assert all(ended[name] == pytest.approx(2.05, abs=0.03) for name in range(4))
    assert ended["short"] == pytest.approx(0.25, abs=0.03)  # a fifth of two cores, not behind the long ones
    alone = simpy.Environment()
    alone.process(model.Cores(alone, 2).work(3.0))
    alone.run()
    assert alone.now == 3.0


def services(model, **more):
    return model.Services(token=1e-6, fetch=1e-3, row=1e-4, plan={8: 1e-3}, **more)


@pytest.mark.parametrize("way", ("process", "host", "direct", "fan-out"))
def test_a_fetch_takes_its_parts(model, way):
    """One trainer, a worker that has nothing else to do: plan, ask, tokens, row, one after the other."""
    setup = model.Setup(1, per_host=1, sequence=1000, period=1.0, workers=1, network=float("inf"))
    found = model.simulate(setup, model.WAYS[way], services(model), warm=2)
    assert found.quantile(0.5) == pytest.approx(1e-3 + 1e-3 + 1000 * 1e-6 + 1e-4)
    assert found.rows / found.seconds == pytest.approx(1.0) and found.waits.sum() == 0


def test_with_more_work_than_cores_the_cores_say_the_rate(model):
    setup = model.Setup(
        4, per_host=4, rows=8, sequence=4096, period=0.0, steps=60, cores=2, quantum=0.003, workers=1
    )
    found = model.simulate(setup, model.WAYS["process"], services(model), warm=6)
    each = 8 * (4096e-6 + 1e-4) + 1e-3 + 1e-3
    assert found.rows / found.seconds == pytest.approx(2 * 8 / each, rel=0.03)
    # Of so many batches ahead, four at a time are fetched by each: all share two cores (Little's law).
    assert found.quantile(0.5) == pytest.approx(16 * each / 2, rel=0.1)


def test_a_host_that_asks_makes_shared_rows_once_and_plans_once(model):
    setup = model.Setup(16, share=8, rows=8, workers=4)
    own, once = (model.simulate(setup, model.WAYS[name], services(model)) for name in ("direct", "fan-out"))
    assert own.busy == pytest.approx(8 * once.busy)
    assert own.rows == once.rows == 16 * setup.steps and len(own.fetches) == 8 * len(once.fetches)


def test_it_is_a_function_of_its_seed(model):
    setup = model.Setup(16, workers=3)
    first, again, other = (
        model.simulate(setup, model.WAYS["direct"], services(model), seed=seed) for seed in (1, 1, 2)
    )
    assert np.array_equal(first.fetches, again.fetches) and first.seconds == again.seconds
    assert not np.array_equal(first.fetches, other.fetches)


def test_a_killed_worker_delays_its_tasks_and_loses_none(model):
    setup = model.Setup(8, per_host=8, sequence=100_000, period=1.0, workers=2, steps=12)
    known = dataclasses.replace(services(model), restart=0.5)
    calm, killed = (
        model.simulate(dataclasses.replace(setup, killed=at), model.WAYS["host"], known)
        for at in (None, 0.15)
    )
    assert len(killed.fetches) == len(calm.fetches) and killed.busy == pytest.approx(calm.busy)
    assert killed.waits[0] > calm.waits[0]
    slow = model.simulate(dataclasses.replace(setup, slow=3.0), model.WAYS["host"], known)
    assert slow.quantile(0.99) > calm.quantile(0.99)


def test_tasks_hold_the_rows_that_were_drawn(model):
    draw = model.tasks_of(np.array([1.0, 0.0, 3.0]), 1000, 8192.0)
    tasks = draw(np.random.default_rng(0), 0, 0)
    tokens = [sum(count for source, count in tasks if source == of) for of in range(3)]
    assert sum(tokens) == 1000 * 8192 and tokens[1] == 0
    assert tokens[2] / tokens[0] == pytest.approx(3, rel=0.2)
    assert max(count for _, count in tasks) <= model.TASK_TOKENS


@pytest.fixture(scope="module")
def study(study_script):
    return study_script("data_scale")


def test_trainers_of_a_host_need_not_share_evenly(model):
    """Of eight, three and three and two take the same rows: all go step by step, and none waits."""
    services = model.Services(token=1e-6, row=1e-4, fetch=1e-3)
    for way in model.WAYS.values():
        found = model.simulate(model.Setup(16, share=3, steps=8, ahead=2, workers=4), way, services, warm=2)
        assert found.waits.max() == 0 and found.seconds == pytest.approx(6 * 5.0)


def test_a_small_study_has_its_tables_and_pictures(study, tmp_path):
    study.main(["--small", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "data_scale.json").read_text())
    by_way = {(row["gpus"], row["way"]): row for row in found["rows"]}
    assert by_way[64, "direct"]["connections_worker"] == 64
    assert by_way[64, "fan-out"]["connections_worker"] == 8 and by_way[64, "host"]["connections_worker"] == 0
    assert by_way[64, "process"]["files_host"] == pytest.approx(8 * by_way[64, "host"]["files_host"])
    shared = {row["way"]: row for row in found["shared"]}
    assert shared["direct"]["cores"] == pytest.approx(8 * shared["fan-out"]["cores"])
    assert {path.name for path in tmp_path.glob("*.svg")} == set(study.pictures(found))
    for path in tmp_path.glob("*.svg"):
        assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


def test_without_a_record_it_says_what_makes_it(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "RECORDS", tmp_path)
    with pytest.raises(SystemExit, match=r"no data_scale_services\.json, which `.* --rows services` makes"):
        study.main(["--small"])


def test_the_page_has_what_the_record_says(study):
    found, page = json.loads(study.KEPT.read_text()), study.PAGE.read_text()
    for name, table in study.tables(found).items():
        assert f"<!-- {name}: by scripts/study/data_scale.py -->\n{table}\n<!-- end of {name} -->" in page
    for picture in study.pictures(found):
        assert f"(images/{picture})" in page and (ROOT / "docs" / "images" / picture).is_file()
