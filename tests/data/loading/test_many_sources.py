"""As many sources as MegaScale-Data reports, through everything from files to batches."""

import json
import time

import numpy as np

from jaxthru.data.loading.dataset import DataConfig, open_data, prepare_data
from jaxthru.data.mixture import planner as planner_module
from jaxthru.data.mixture.sampler import MixtureSampler

SOURCES = 306


def write_mix(folder) -> str:
    """Returns the path of a mix of sources of 1 to 9 records."""
    draw = np.random.default_rng(0)
    lines = ["held_out = 0", "[tokenizer]", "vocabulary = 260"]
    for number in range(SOURCES):
        words = (draw.integers(0, 99, draw.integers(1, 12)) for _ in range(1 + number % 9))
        records = (json.dumps({"text": f"{number}: {text}"}) + "\n" for text in words)
        (folder / f"{number}.jsonl").write_text("".join(records))
        lines += [f"[sources.s{number}]", 'recipe = "local_jsonl"', f'paths = ["{number}.jsonl"]']
        lines += [f"weight = {2 + number % 3}"]
    (folder / "many.toml").write_text("\n".join(lines))
    return str(folder / "many.toml")


def documents(batch, row: int) -> list[bytes]:
    """Returns the tokens of each document of a row."""
    segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
    return [tokens[segments == number].tobytes() for number in range(1, segments.max() + 1)]


def test_every_document_of_every_source_once_an_epoch(tmp_path):
    data = open_data(DataConfig(write_mix(tmp_path), 64, "best_fit", str(tmp_path / "store")))
    given = [[] for _ in range(SOURCES)]  # of each source, the documents of each row
    with data.train_batches(((0, data.mixture),), seed=1, rows=512, steps=18) as batches:
        for batch in batches:
            for row, source in enumerate(batch["source"][:, 0]):
                given[source].append(documents(batch, row))
    for rows, (split, packing) in zip(given, data.train, strict=True):
        ends = split.ends.tolist()
        pairs = zip([0, *ends[:-1]], ends, strict=True)
        there = sorted(split.read(*pair).astype(np.int32).tobytes() for pair in pairs)
        epochs = len(rows) // packing.rows
        assert there and epochs >= 1
        for epoch in range(epochs):
            taken = rows[epoch * packing.rows : (epoch + 1) * packing.rows]
            assert sorted(document for row in taken for document in row) == there


def test_thousands_of_sources_open_and_plan_in_proportion(tmp_path):
    """To how many they are, by the CPU's count: what grows with their square is out of the question.

    On a quiet machine 3,000 take 0.8 s."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "one of many"}) + "\n")
    head = "held_out = 0\n[tokenizer]\nvocabulary = 260\n"
    keys = 'recipe = "local_jsonl"\npaths = ["one.jsonl"]\nweight = '
    counts = (1, 300, 3000)
    for count in counts:
        tables = (f"[sources.s{number}]\n{keys}{1 + number % 5}\n" for number in range(count))
        (tmp_path / f"{count}.toml").write_text(head + "".join(tables))
    store = tmp_path / "store"
    [key] = prepare_data(DataConfig(str(tmp_path / "1.toml"), 64, store=str(store))).values()
    for number in range(1, max(counts)):  # each a store of its own, as far as opening it goes
        (store / f"s{number}-{key}").symlink_to(f"s0-{key}")

    def seconds(count: int) -> float:
        config = DataConfig(str(tmp_path / f"{count}.toml"), 64, store=str(store))
        began = time.process_time()
        data = open_data(config, prepare=False, begun={f"s{number}": key for number in range(count)})
        assert data.planner(((0, data.mixture),), seed=0, rows=64).end is None
        return time.process_time() - began

    took = [seconds(count) for count in counts]
    print(f"{counts} sources opened and planned in {took} s of CPU")
    assert took[2] < 25 * took[1]  # 10 times as many; 100 times as long if it were their square


def test_a_start_plans_once(tmp_path, monkeypatch):
    made = []
    counted = lambda *args, **keys: made.append(1) or MixtureSampler(*args, **keys)  # noqa: E731
    monkeypatch.setattr(planner_module, "MixtureSampler", counted)
    data = open_data(DataConfig(write_mix(tmp_path), 64, store=str(tmp_path / "store")))
    run = {"schedule": ((0, data.mixture),), "seed": 1, "rows": 64}
    assert data.last_step(**run, steps=5) == 5
    with data.train_batches(**run, steps=5, cost=(1.0, 0.01)) as batches:
        assert len(list(batches)) == 5
    assert made == [1]
    assert data.planner(((0, data.mixture),), seed=2, rows=64) and made == [1, 1]
