import dataclasses
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from absl import flags
from corpus import sides
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthru.data.loading.batch import check_batch
from jaxthru.data.loading.dataset import DataConfig, canonical_groups, open_data
from jaxthru.data.loading.placement import local_rows, to_global
from jaxthru.data.loading.planned_batches import PlannedBatches
from jaxthru.data.mixture.configuration import Mixture, Share
from jaxthru.runtime.errors import InputError

ROWS, SEQUENCE = 8, 32


@pytest.fixture(params=["split", "best_fit"])
def data(shared, request):
    mix, store = shared
    return open_data(DataConfig(str(mix), SEQUENCE, request.param, str(store)))


def batches(data, **keys):
    keys = {"schedule": ((0, data.mixture),), "seed": 1, "rows": ROWS, "steps": 12, **keys}
    with data.train_batches(**keys) as made:
        return list(made)


def same(left, right):
    return all((left[name] == right[name]).all() for name in left)


def test_what_it_says_of_itself(data):
    assert data.names == ("books", "notes")
    assert data.mixture == Mixture.plain({"books": 0.75, "notes": 0.25})
    assert data.vocabulary == 300 and data.keys.keys() == data.tokens.keys() == set(data.names)
    most = max(int(batch["segment_ids"].max()) for batch in batches(data, steps=200))
    assert most < data.segments and data.segments % 8 == 0


def test_batches_are_the_same_for_any_division_into_processes_and_any_start(data):
    whole = batches(data)
    assert len(whole) == 12
    for batch in whole:
        check_batch(batch, ROWS, SEQUENCE)
        assert batch["tokens"].max() < data.vocabulary
    for processes in (2, 4, 8):
        each = ROWS // processes
        parts = [batches(data, local_rows=slice(at * each, (at + 1) * each)) for at in range(processes)]
        for step, batch in enumerate(whole):
            joined = {name: np.concatenate([part[step][name] for part in parts]) for name in batch}
            assert same(joined, batch)
    resumed = batches(data, start=5)
    assert len(resumed) == 7 and all(same(*pair) for pair in zip(resumed, whole[5:], strict=True))
    assert batches(data, start=12) == [] == batches(data, start=20)
    assert not same(batches(data, seed=2)[0], whole[0])


def test_balanced_batches_hold_the_same_rows_in_an_order_that_no_division_into_processes_changes(data):
    plain, whole = batches(data), batches(data, cost=(1.0, 1.0))
    parts = [batches(data, cost=(1.0, 1.0), local_rows=slice(at, at + 2)) for at in range(0, ROWS, 2)]
    for step, batch in enumerate(whole):
        assert same({name: np.concatenate([part[step][name] for part in parts]) for name in batch}, batch)
        rows = [
            sorted(zip(b["tokens"].tolist(), b["positions"].tolist(), strict=True))
            for b in (plain[step], batch)
        ]
        assert rows[0] == rows[1]
    assert not all(same(*pair) for pair in zip(plain, whole, strict=True))


def test_a_changed_schedule_leaves_earlier_batches(data):
    before = batches(data)
    after = batches(data, schedule=((0, data.mixture), (6, Mixture.plain({"notes": 1.0}))))
    assert all(same(*pair) for pair in zip(before[:6], after[:6], strict=True))
    assert all((batch["source"] == 1).all() for batch in after[6:])


def test_one_epoch_holds_every_token_once(data):
    rows = data.train[0][1].rows
    epoch = batches(data, schedule=((0, Mixture.plain({"books": 1.0})),), rows=1, steps=rows)
    tokens = np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in epoch])
    split = data.train[0][0]
    assert len(tokens) == split.tokens
    expected = np.bincount(split.read(0, split.tokens), minlength=300)
    assert (np.bincount(tokens, minlength=300) == expected).all()
    unmasked = sum(batch["loss_mask"].sum() for batch in epoch)
    assert unmasked == split.tokens - len(split.ends)  # all but the end of each document is predicted from


def test_held_out_batches(data):
    made = data.held_out_batches(total_rows=20, rows=8)
    assert len(made) == 3
    for batch in made:
        check_batch(batch, 8, SEQUENCE)
    joined = {name: np.concatenate([batch[name] for batch in made]) for name in made[0]}
    full = joined["segment_ids"].any(axis=1)
    assert full[:20].all() and not full[20:].any() and not joined["loss_mask"][20:].any()
    assert (joined["source"][:20, 0] == np.repeat([0, 1], 10)).all()
    assert len({row.tobytes() for row in joined["tokens"][:20]}) == 20
    parts = [data.held_out_batches(total_rows=20, rows=8, local_rows=slice(at, at + 4)) for at in (0, 4)]
    for number, batch in enumerate(made):
        assert same({name: np.concatenate([part[number][name] for part in parts]) for name in batch}, batch)
    available = sum(packing.rows for _, packing in data.held_out)
    everything = data.held_out_batches(total_rows=10**6, rows=8)
    assert sum(batch["segment_ids"].any(axis=1).sum() for batch in everything) == available


def test_held_out_rows_are_spread_over_each_source(data):
    """Not its first ones alone."""
    some, every = (
        [
            (row[0], tokens.tobytes())
            for batch in made
            for row, tokens in zip(batch["source"], batch["tokens"], strict=True)
        ]
        for made in (data.held_out_batches(total_rows=n, rows=4) for n in (8, 10**6))
    )
    for source, (_, packing) in enumerate(data.held_out):
        own = [tokens for number, tokens in every if number == source][: packing.rows]
        places = [own.index(tokens) for number, tokens in some if number == source]
        assert len(places) == 4 and places[0] == 0
        assert np.abs(np.diff([*places, packing.rows]) - packing.rows / 4).max() <= 1


@pytest.mark.parametrize("count", ["tokens", "documents"])
def test_weights_are_shares_of_what_is_counted(data, shared, count):
    """Of two equal weights, over enough steps."""
    tree = {"count": count, "sources": {name: {"weight": 1} for name in data.names}}
    planner = data.planner(((0, Mixture.from_tree(tree)),), seed=0, rows=ROWS)
    each = []  # of a row, on average
    for (_, packing), texts in zip(data.train, sides(shared[0].parent).values(), strict=True):
        tokens = sum(len(ids) for ids in data.prepared.tokenizer.encode(texts["train"]))
        each.append((tokens if count == "tokens" else len(texts["train"])) / packing.rows)
    given = planner.sampler.taken(10_000) * each
    assert given[0] / given[1] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_sources_below_a_row_give_their_share_of_the_tokens(tmp_path, packing):
    """Their rows are padding for the most part, and so are as many more: counted in the batches."""
    sequence, rows, steps = 1024, 16, 300
    letters = {"tiny": (129, 1), "small": (333, 2), "ragged": (2600, 2), "large": (400_000, 95)}
    text = "held_out = 0\n[tokenizer]\nvocabulary = 258\n"  # a token a letter, but for the few merges
    for name, (count, weight) in letters.items():
        draw = np.random.default_rng(count)
        (tmp_path / f"{name}.txt").write_text("".join(map(chr, draw.integers(97, 123, count - 1))))
        text += f'[sources.{name}]\nrecipe = "local_text"\npaths = ["{name}.txt"]\nweight = {weight}\n'
    (tmp_path / "mix.toml").write_text(text)
    config = DataConfig(str(tmp_path / "mix.toml"), sequence, packing, str(tmp_path / "store"))
    with open_data(config) as data:
        given = np.zeros((2, len(letters)))  # tokens, and rows
        for batch in batches(data, rows=rows, steps=steps):
            given[0] += np.bincount(batch["source"][batch["segment_ids"] > 0], minlength=len(letters))
            given[1] += np.bincount(batch["source"][:, 0], minlength=len(letters))
        asked = data.planner(((0, data.mixture),), seed=1, rows=rows).sampler.asked(steps)
        each = np.array(list(data.tokens.values())) / [packed.rows for _, packed in data.train]
    weights = np.array([weight for _, weight in letters.values()]) / 100
    assert np.abs(given[1] - asked).max() <= 1
    assert asked * each / (asked * each).sum() == pytest.approx(weights)
    # One row is rounding; of a source of several, one more is where in its last epoch the emptier row comes.
    off = np.abs(given[0] - given[0].sum() * weights)
    assert (off <= np.add(each, (0, 0, sequence, sequence))).all(), off / each


def test_a_start_names_sources_that_are_read_too_often(data, caplog):
    asked = {"schedule": ((0, data.mixture),), "seed": 1, "rows": ROWS}
    for steps, often in (
        (10, None),
        (10_000, r"2 sources are .* in this run \(books [\d.,]+, notes [\d.,]+\): "),
    ):
        caplog.clear()
        assert data.last_step(**asked, steps=steps) == steps
        said = [record.getMessage() for record in caplog.records]
        assert [bool(re.match(often, line)) for line in said] == [True] if often else not said


def test_each_split_holds_its_own_documents(data, shared):
    """What is trained on is not what is evaluated on: counted by token, as rows cut documents anywhere."""
    for number, (source, expected) in enumerate(sides(shared[0].parent).items()):
        rows = data.train[number][1].rows
        only = ((0, Mixture.plain({source: 1.0})),)
        made = {
            "train": batches(data, schedule=only, rows=1, steps=rows),
            "held_out": data.held_out_batches(total_rows=10**6, rows=8),
        }
        for split, texts in expected.items():
            ids = np.concatenate(data.prepared.tokenizer.encode(texts))
            tokens = np.concatenate(
                [b["tokens"][(b["segment_ids"] > 0) & (b["source"] == number)] for b in made[split]]
            )
            assert (np.bincount(tokens, minlength=300) == np.bincount(ids, minlength=300)).all(), split


def test_global_arrays_and_the_rows_of_a_process():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    for spec in (PartitionSpec("data"), PartitionSpec(("data", "tensor")), PartitionSpec()):
        sharding = NamedSharding(mesh, spec)
        assert local_rows(sharding, ROWS, SEQUENCE) == slice(0, ROWS)
        batch = {"tokens": np.arange(ROWS * SEQUENCE, dtype=np.int32).reshape(ROWS, SEQUENCE)}
        made = to_global(batch, sharding, ROWS)["tokens"]
        assert made.sharding == sharding and (np.asarray(made) == batch["tokens"]).all()


class Elsewhere:
    """A sharding of which this process has only some rows."""

    def __init__(self, *ranges):
        self.ranges = ranges

    def addressable_devices_indices_map(self, shape):
        return {at: (slice(*item), slice(None)) for at, item in enumerate(self.ranges)}


def test_local_rows_are_one_range():
    assert local_rows(Elsewhere((4, 6), (6, 8), (4, 6)), 8, SEQUENCE) == slice(4, 8)
    with pytest.raises(InputError, match="rows up to 2 and again from 4"):
        local_rows(Elsewhere((0, 2), (4, 6)), 8, SEQUENCE)


def test_canonical_groups():
    assert [canonical_groups(rows) for rows in (1, 8, 64, 96, 128, 134)] == [1, 8, 64, 48, 64, 2]


def test_batches_come_as_they_were_placed(data):
    keys = {"seed": 0, "rows": 8, "steps": 5}
    with data.train_batches(
        ((0, data.mixture),), **keys, place=lambda batch: (batch["tokens"].sum(),)
    ) as made:
        sums = [placed for (placed,) in made]
    with data.train_batches(((0, data.mixture),), **keys) as made:
        assert sums == [batch["tokens"].sum() for batch in made]


def test_the_dataset_is_one_of_grain_s(data):
    whole, asked = batches(data), {"seed": 1, "rows": ROWS, "steps": 12}
    dataset = data.dataset(**asked)
    assert len(dataset) == 12
    for step in (11, 0, 5):  # any step, in any order
        assert same(dataset[step], whole[step])
    iterator = iter(dataset.to_iter_dataset(data.read_options))
    found = [next(iterator) for _ in range(4)]
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    resumed = iter(data.dataset(**asked).to_iter_dataset(data.read_options))
    resumed.set_state(state)
    found += list(resumed)
    assert len(found) == 12 and all(same(*pair) for pair in zip(found, whole, strict=True))
    every_third = dataset.map(lambda batch: batch["tokens"].sum())[1::3]
    assert list(every_third) == [batch["tokens"].sum() for batch in whole[1::3]]
    two = dataset.batch(2)[2]
    assert two["tokens"].shape == (2, ROWS, SEQUENCE) and (two["tokens"][1] == whole[5]["tokens"]).all()


def test_a_source_that_ends_the_run_ends_the_dataset(data):
    once = Mixture({"notes": Share(((0.0, 1.0),), max_epochs=1.0, exhausted="stop")})
    mixture = dataclasses.replace(once, shares={"books": Share(((0.0, 1.0),)), **once.shares})
    schedule = ((0, mixture),)
    asked = {"seed": 1, "rows": ROWS, "steps": 10**6}
    dataset = data.dataset(schedule, **asked)
    assert len(dataset) == data.planner(schedule, seed=1, rows=ROWS).end < 10**6
    assert same(dataset[len(dataset) - 1], batches(data, schedule=schedule, steps=10**6)[-1])


def test_a_copy_in_another_process_opens_the_stores_itself(data):
    """Pickled memory maps would be all of the corpus."""
    dataset = PlannedBatches(data, ((0, data.mixture),), seed=1, rows=ROWS, steps=12, cost=(1.0, 0.1))
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    assert same(pickle.loads(pickled)[7], dataset[7])


@pytest.mark.slow
def test_processes_of_grain_build_the_same(shared):
    flags.FLAGS.mark_as_parsed()  # Grain 0.2.18 asks absl for a flag
    mix, store = shared
    config = DataConfig(str(mix), SEQUENCE, "best_fit", str(store))
    with open_data(config) as data:
        whole = batches(data)
        dataset = data.dataset(seed=1, rows=ROWS, steps=12).to_iter_dataset(data.read_options)
        found = list(dataset.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=2)))
    assert len(found) == 12 and all(same(*pair) for pair in zip(found, whole, strict=True))


def test_the_page_s_ten_lines_run(shared):
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    lines = page.split("## As a Grain dataset")[1].split("```python\n")[1].split("```")[0]
    assert len(lines.splitlines()) <= 10
    mix, store = map(str, shared)
    names = {}
    exec(lines.replace('mix="books.toml"', f"mix={mix!r}, store={store!r}"), names)
    assert (names["first"] == names["dataset"][1]["tokens"]).all() and names["state"] == {"next_index": 1}
    assert names["batch"]["tokens"].shape == (16, 1024)


def test_dropped_batches_do_not_keep_the_process(shared):
    mix, store = shared
    program = (
        "import sys; from jaxthru.data.loading.dataset import *\n"
        "data = open_data(DataConfig(mix=sys.argv[1], sequence=32, store=sys.argv[2]))\n"
        "made = data.train_batches(((0, data.mixture),), seed=0, rows=8, steps=10**9)\n"
        "next(made)\n"
        "raise SystemExit(3)\n"
    )
    command = [sys.executable, "-c", program, str(mix), str(store)]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == 3


def test_damage_found_while_training_is_named(mix, tmp_path):
    config = DataConfig(str(mix), SEQUENCE, store=str(tmp_path / "store"))
    [tokens] = open_data(config).prepared.stores["books"].folder.glob("train-*.tokens")
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(InputError, match=r"train-00000\.tokens: block 0 .* is damaged"):
        batches(open_data(config))


def test_a_store_that_cannot_be_made(mix, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data\.store = .*file"):
        open_data(DataConfig(str(mix), store=str(tmp_path / "file")))


@pytest.mark.parametrize("costs", [(np.inf, 1.0), (1.0, np.inf), (np.nan, 1.0), (1.0, -1.0), (1.0, None)])
def test_costs_by_which_nothing_can_be_balanced(costs):
    with pytest.raises(InputError, match=r"data\.linear_cost = .* data\.attention_cost = "):
        DataConfig(linear_cost=costs[0], attention_cost=costs[1])
