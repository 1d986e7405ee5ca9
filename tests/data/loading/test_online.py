"""A source tokenised while training gives the very batches of its token store, whatever befalls."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from absl import flags

from jaxthru.data.loading.dataset import Data, DataConfig, open_data
from jaxthru.data.loading.planned_batches import AHEAD, PlannedBatches
from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.store import chunks, writer
from jaxthru.runtime.errors import InputError

SCHEDULE = tuple(
    (step, Mixture.plain({"books": 4.0 - notes, "notes": notes})) for step, notes in ((0, 1.0), (6, 3.0))
)


@pytest.fixture
def online(mix) -> Path:
    """The mix, with one of its sources tokenised while training."""
    path = mix.with_name("online.toml")
    path.write_text(mix.read_text().replace("weight = 3", "weight = 3\nonline = true"))
    return path


@pytest.fixture
def opened(tmp_path):
    """Opens data, and ends its workers after the test."""
    made = []

    def open_(mix, **settings) -> Data:
        made.append(open_data(DataConfig(str(mix), sequence=64, store=str(tmp_path / "store"), **settings)))
        return made[-1]

    yield open_
    for data in made:
        data.close()


def test_several_processes_would_each_start_token_workers(online, opened):
    """`mp_prefetch` pickles the dataset for its processes, and says what is wrong before one starts."""
    flags.FLAGS.mark_as_parsed()  # Grain 0.2.18 asks absl for a flag
    data = opened(online)
    dataset = data.dataset(seed=0, rows=8, steps=12).to_iter_dataset(data.read_options)
    processes = grain.multiprocessing.MultiprocessingOptions(num_workers=1)
    with pytest.raises(InputError, match=r"online sources cannot .*mp_prefetch.*online.toml: books\)"):
        next(iter(dataset.mp_prefetch(processes)))
    assert not data.workers._workers


def drawn(data: Data, *, steps: int = 12, **asked):
    return data.train_batches(SCHEDULE, seed=0, rows=8, steps=steps, **asked)


def batches(data: Data, **asked) -> list[dict[str, np.ndarray]]:
    with drawn(data, **asked) as found:
        return list(found)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_the_batches_are_those_of_a_token_store(mix, online, opened, packing):
    """With any number of workers, in any division into processes, and from any step on."""
    plain = opened(mix, packing=packing)
    expected = batches(plain, cost=(1.0, 1.0))
    held_out = {"total_rows": 8, "rows": 4}
    for loaders, processes in ((1, 4), (2, 1), (3, 2)):
        data = opened(online, packing=packing, loaders=loaders)
        assert data.workers.sources == ("books",)
        each = 8 // processes
        slices = [slice(at, at + each) for at in range(0, 8, each)]
        parts = [batches(data, cost=(1.0, 1.0), start=loaders, local_rows=local) for local in slices]
        whole = [
            {name: np.concatenate([p[name] for p in step]) for name in step[0]}
            for step in zip(*parts, strict=True)
        ]
        assert_same(whole, expected[loaders:])
        assert_same(data.held_out_batches(**held_out), plain.held_out_batches(**held_out))


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_texts_that_are_kept_as_tokens_change_no_batch(mix, online, opened, packing, monkeypatch):
    """In rows that have some of these and some that a worker makes, and only parts of them."""
    monkeypatch.setattr(writer, "SHARD_BYTES", 5000)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    expected = batches(opened(mix, packing=packing), cost=(1.0, 1.0))
    for most in (60, 0):
        monkeypatch.setattr(chunks, "KEEP_TOKENS", most)
        shutil.rmtree(opened(online).prepared.stores["books"].folder)
        data = opened(online, packing=packing, loaders=2)
        split, asked = data.prepared.stores["books"].train, []
        request = data.workers.request
        data.workers.request = lambda *task, request=request, asked=asked: (
            asked.append(task) or request(*task)
        )
        assert_same(batches(data, cost=(1.0, 1.0)), expected)
        kept = split.are_kept(np.arange(split.chunks))
        assert kept.any() and kept.all() == (most == 0)
        assert (
            not asked if most == 0 else not split.are_kept(np.concatenate([task[2] for task in asked])).any()
        )
        data.prepared.stores["books"].verify()


def test_a_long_text_without_line_ends_is_tokenised_once(mix, opened):
    """Workers are not asked for it, whatever its weight."""
    one = mix.with_name("one.toml")
    (mix.parent / "line.txt").write_text("to be or not to be " * 20_000)
    keys = 'recipe = "local_text"\npaths = ["line.txt"]\nonline = true\nweight = 9\n'
    one.write_text(mix.read_text().replace("held_out = 0.2", "held_out = 0") + f"[sources.line]\n{keys}")
    data = opened(one, loaders=1)
    with data.train_batches(((0, data.mixture),), seed=0, rows=8, steps=12) as made:
        assert sum((batch["source"][:, 0] == 2).sum() for batch in made) >= 12 * 8 * 0.6
    assert not data.workers._workers


def test_a_store_of_text_has_the_key_of_the_tokens(mix, online, opened):
    """So a run may be resumed with one in place of the other."""
    assert opened(mix).keys == opened(online).keys


def test_workers_killed_while_batches_are_drawn_change_none(mix, online, opened):
    draw = np.random.default_rng(int(os.environ.get("JAXTHRU_TEST_SEED") or 0))
    steps = 400
    expected = batches(opened(mix), steps=steps)
    data = opened(online, loaders=2)
    found, killed = [], 0
    with drawn(data, steps=steps) as made:
        for batch in made:
            found.append(batch)
            worker = data.workers._workers[int(draw.integers(2))]
            if (
                len(found) % 40 == 1 and worker.deaths == 0
            ):  # thrice at its start would be taken for its fault
                time.sleep(float(draw.random()) * 0.02)
                os.kill(worker.process.pid, signal.SIGKILL)
                killed += 1
    assert_same(found, expected)
    assert killed >= 3 and data.workers.restarts >= 3


def test_workers_move_before_the_weights_do(mix, opened):
    """As many steps before as workers are told of, so that tokens are there when the change comes."""
    path = mix.with_name("both.toml")
    path.write_text(mix.read_text().replace("weight", "online = true\nweight"))
    data = opened(path, loaders=4)
    change, ahead = 40, max(AHEAD)
    schedule = tuple(
        (step, Mixture.plain({"books": books, "notes": notes}))
        for step, books, notes in ((0, 7.0, 1.0), (change, 1.0, 7.0))
    )
    planned = PlannedBatches(data, schedule, seed=0, rows=64, steps=80)
    workers_of = []  # each source, when a step is built

    def note(source, row):
        serves = data.workers.serves
        workers_of.append([sum(name in sources for sources in serves) for name in data.names])

    data.builder.build = note
    for index in range(change + 1):
        planned[index]
    assert all(count == [4, 1] for count in workers_of[: change - ahead])
    assert workers_of[change - ahead] == [3, 2]
    assert workers_of[change] == [1, 4]


def test_damage_found_while_training_ends_the_run_and_a_new_store_goes_on_with_it(mix, online, opened):
    """Nothing is left out on the way: another process, or the run resumed, would not leave out the same."""
    expected = batches(opened(mix))
    folder = opened(online).prepared.stores["books"].folder
    [text] = folder.glob("train-*.text")
    content = bytearray(text.read_bytes())
    content[len(content) // 2] ^= 255
    text.write_bytes(content)
    with pytest.raises(InputError) as caught:
        batches(opened(online))
    where = rf"source books: {text}: frame 0 \(bytes 0 to \d+\) is damaged"
    assert re.fullmatch(rf"{where}; remove its folder and prepare again", str(caught.value))
    shutil.rmtree(folder)
    assert_same(batches(opened(online), start=5), expected[5:])


def test_a_transform_changes_the_text(mix, opened, tmp_path):
    (tmp_path / "shouting.py").write_text("def shout(text):\n    return text.upper()\n")
    for line in ("", "\nonline = true"):
        path = mix.with_name("shouting.toml")
        path.write_text(
            mix.read_text().replace("weight = 1", f'weight = 1\ntransform = "shouting:shout"{line}', 1)
        )
        data = opened(path)
        for batch in batches(data, steps=2):
            tokens = batch["tokens"][(batch["source"] == 1) & (batch["segment_ids"] > 0)]
            text = data.prepared.tokenizer.decode(tokens).replace("<|endoftext|>", "")
            assert text and text.upper() == text


HANG = """
import contextlib, pathlib, sys, threading, time
from jaxthru.data.loading.dataset import DataConfig, open_data

mix, store, stuck = sys.argv[1:]
with open_data(DataConfig(mix, 64, store=store)) as data:
    with data.train_batches(((0, data.mixture),), seed=0, rows=8, steps=10**6) as batches:
        next(batches)
        pathlib.Path(stuck).touch()

        def drain():
            with contextlib.suppress(BaseException):
                while True:
                    next(batches)

        threading.Thread(target=drain, daemon=True).start()
        time.sleep(1)  # until all that build batches wait
print("ended", flush=True)
"""


def test_a_transform_that_hangs_does_not_keep_the_process(mix, tmp_path):
    stuck = tmp_path / "stuck"
    (tmp_path / "hanging.py").write_text(
        "import pathlib, time\n"
        "def hang(text):\n"
        f"    while pathlib.Path({str(stuck)!r}).exists():\n"
        "        time.sleep(1)\n"
        "    return text\n"
    )
    mix.write_text(mix.read_text().replace("weight =", 'transform = "hanging:hang"\nonline = true\nweight ='))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", HANG, str(mix), str(tmp_path / "store"), str(stuck)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n" and done.returncode == 0, done.stderr
