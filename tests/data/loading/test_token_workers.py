"""token workers: the same tokens as from a token store, whoever dies on the way."""

import concurrent.futures
import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from corpus import sentences
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.loading import token_workers as workers_module
from jaxthru.data.loading import worker as worker_module
from jaxthru.data.loading import worker_handle
from jaxthru.data.loading.online import OnlineSplit
from jaxthru.data.loading.token_workers import TokenWorkers, share_out
from jaxthru.data.loading.worker import Stores, produce
from jaxthru.data.loading.worker_process import WorkerProcess
from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store import chunks, text_store
from jaxthru.data.store import token_store as store
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.errors import InputError


def write_store(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Writes a text store of two shards with nothing held out; returns the tokens of each text."""
    ids = tokenizer.encode(texts)
    records, middle = [], len(texts) // 2
    for part in (slice(0, middle), slice(middle, None)):
        parts = [
            chunk
            for text, tokens in zip(texts[part], ids[part], strict=True)
            for chunk in chunks.chunks(text, tokens, tokenizer)
        ]
        splits = {"train": parts, "held_out": []}
        records.append(text_store.write_shard(folder, len(records), splits, {}))
    manifest = {"kind": text_store.KIND, "transform": "os:system", "shards": records}  # what nobody asks
    store.write_manifest(folder, manifest)
    return ids


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer):
    """A store of short documents and one long one, and its tokens as one stream."""
    draw = random.Random(1)
    texts = [sentences(draw, draw.randint(1, 30)) for _ in range(60)]
    texts.insert(30, sentences(draw, 5000))
    folder = tmp_path_factory.mktemp("store")
    ids = write_store(folder, tokenizer, texts)
    return folder, np.concatenate(ids).astype(np.int32), np.cumsum([len(x) for x in ids])


def runs(draw: np.random.Generator, tokens: int, count: int):
    """Returns runs of a stream of so many tokens: from within a document, and over the ends of some."""
    start = draw.integers(0, tokens, count)
    return start, np.minimum(draw.integers(1, 900, count), tokens - start)


def assert_runs(found, stream, start, length):
    for tokens, first, stop in zip(found, start, start + length, strict=True):
        assert np.array_equal(tokens, stream[first:stop])


def test_a_long_document_is_cut_into_chunks_with_the_same_tokens(source):
    folder, stream, ends = source
    split = text_store.TextStore(folder).train
    assert (split.ends == ends).all() and split.tokens == len(stream)
    assert split.chunks > len(ends) + 3
    longest = max(len(stored.text.encode()) for stored, _, _ in split.texts(np.arange(split.chunks)))
    assert longest < 3 * chunks.CHUNK_BYTES


@settings(deadline=None, max_examples=25)
@given(lines=st.lists(st.text(alphabet="ab \n\t\r\u2028é", max_size=40), min_size=1, max_size=60))
def test_chunks_say_what_the_document_says(tokenizer, lines):
    text = "\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 20)
        (ids,) = tokenizer.encode([text])
        parts = chunks.chunks(text, ids, tokenizer)
    assert b"".join(part.text for part in parts).decode() == text
    assert sum(part.tokens for part in parts) == len(ids)
    assert [part.final for part in parts] == [False] * (len(parts) - 1) + [True]


GPT4 = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"""
    r"""\s*[\r\n]|\s+(?!\S)|\s+"""
)


@pytest.mark.parametrize("pattern", [None, GPT4])
def test_texts_of_paragraphs_and_indented_lines_are_cut(tokenizer, tmp_path, pattern):
    """Where either kind of pattern lets them be: before the line ends, or behind them."""
    if pattern:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        made = tokenizers.Tokenizer.from_file(str(tokenizer.path))
        plain = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, plain])
        made.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    draw = random.Random(2)
    paragraphs = "\n\n".join(sentences(draw, 3).replace("\n", " ").strip() for _ in range(200))
    code = "".join(f"def f{n}(x):\n    if x:\n        return {n}\n\n    pass\n\n\n" for n in range(800))
    for text in (paragraphs, code):
        (ids,) = tokenizer.encode([text])
        parts = chunks.chunks(text, ids, tokenizer)
        assert max(len(part.text) for part in parts) < 3 * chunks.CHUNK_BYTES
        assert b"".join(part.text for part in parts).decode() == text


def test_the_tokens_are_those_of_the_documents(source, tokenizer):
    folder, stream, _ = source
    split = text_store.TextStore(folder).train
    draw = np.random.default_rng(0)
    with TokenWorkers(2, ("books",), tokenizer.path) as workers:
        online = OnlineSplit("books", split, workers)
        waiting = [(pair, online.begin(*pair)) for pair in (runs(draw, len(stream), 40) for _ in range(20))]
        for (start, length), finish in waiting:
            assert_runs(finish(), stream, start, length)
        assert workers.seconds_per_token["books"] != 1e-6 and workers.restarts == 0


def test_killed_workers_lose_nothing_and_double_nothing(source, tokenizer):
    folder, stream, _ = source
    split = text_store.TextStore(folder).train
    draw = np.random.default_rng(int(os.environ.get("JAXTHRU_TEST_SEED") or 0))
    with TokenWorkers(2, ("books", "notes"), tokenizer.path) as workers:
        splits = [OnlineSplit(name, split, workers) for name in workers.sources]
        for _ in range(6):
            asked = [runs(draw, len(stream), 60) for _ in range(16)]
            begun = [splits[turn % 2].begin(*pair) for turn, pair in enumerate(asked)]
            time.sleep(float(draw.random()) * 0.05)
            os.kill(workers._workers[int(draw.integers(2))].process.pid, signal.SIGKILL)
            for (start, length), finish in zip(asked, begun, strict=True):
                assert_runs(finish(), stream, start, length)
        deadline = time.monotonic() + 20
        while workers.restarts < 6 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert workers.restarts == 6


def test_a_worker_runs_the_code_of_the_process_that_it_works_for(source, tokenizer, tmp_path, monkeypatch):
    """Also where the working directory has some other."""
    folder, stream, _ = source
    (tmp_path / "jaxthru").mkdir()
    (tmp_path / "jaxthru" / "__init__.py").write_text("raise ImportError('another version')")
    monkeypatch.chdir(tmp_path)
    with TokenWorkers(1, ("books",), tokenizer.path) as workers:
        tokens = workers.request("books", text_store.TextStore(folder).train, np.array([0])).result()
    assert len(tokens) and np.array_equal(tokens, stream[: len(tokens)])


def test_a_request_to_stop_is_not_for_the_workers(source, tokenizer):
    """Ctrl-C and Slurm's SIGTERM reach them too, from their first moment on."""
    folder, stream, _ = source
    split = text_store.TextStore(folder).train
    start, length = runs(np.random.default_rng(0), len(stream), 40)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with TokenWorkers(2, ("books",), tokenizer.path) as workers:
        online = OnlineSplit("books", split, workers)
        for _ in range(3):
            finish = online.begin(start, length)
            for worker in workers._workers:
                os.kill(worker.process.pid, signal.SIGINT)
                os.kill(worker.process.pid, signal.SIGTERM)
            assert_runs(finish(), stream, start, length)
        assert workers.restarts == 0 and all(worker.process.poll() is None for worker in workers._workers)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_a_worker_that_cannot_start_is_an_error_not_a_loop(source, tmp_path):
    folder, *_ = source
    (tmp_path / "tokenizer.json").write_text("{}")
    with TokenWorkers(1, ("books",), tmp_path / "tokenizer.json") as workers:
        split = OnlineSplit("books", text_store.TextStore(folder).train, workers)
        with pytest.raises(InputError, match="ended with code 1 3 times without"):
            split.begin(np.array([0]), np.array([5]))()


@pytest.mark.parametrize("processes", [1, 3])
def test_a_text_that_ends_its_worker_is_named(tmp_path, tokenizer, monkeypatch, processes):
    name = f"deadly_{processes}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(
        "import os, signal\n"
        "def change(text):\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if text == 'text 2' else text\n"
    )
    write_store(tmp_path / "s", tokenizer, [f"text {number}" for number in range(4)])
    split = text_store.TextStore(tmp_path / "s").train
    transforms = {"notes": Transform(f"{name}:change", str(tmp_path))}
    with TokenWorkers(processes, ("books", "notes"), tokenizer.path, transforms) as workers:
        asked = [workers.request("notes", split, np.array([chunk])) for chunk in (0, 2, 1, 3, 0)]
        with pytest.raises(InputError, match=r"code -9 3 times .*chunks 2 to 2 of train") as caught:
            asked[1].result()
        assert "source notes" in str(caught.value)


def test_who_waits_for_closed_workers_is_told(source, tokenizer):
    folder, stream, _ = source
    workers = TokenWorkers(1, ("books",), tokenizer.path)
    split = OnlineSplit("books", text_store.TextStore(folder).train, workers)
    assert_runs(split.begin(np.array([0]), np.array([9]))(), stream, np.array([0]), np.array([9]))
    os.kill(workers._workers[0].process.pid, signal.SIGSTOP)
    begun = [split.begin(np.array([0]), np.array([9])) for _ in range(5)]  # in its hands, and waiting
    workers.close()
    for finish in begun:
        with pytest.raises(InputError, match="the token workers are closed"):
            finish()
    with pytest.raises(InputError, match="the token workers are closed"):
        split.begin(np.array([0]), np.array([9]))


def test_no_task_is_too_large_for_a_worker_that_is_busy(tmp_path, tokenizer):
    """Who asks does not wait, whose lock others need: those who wait for tokens, or want to close."""
    ids = write_store(tmp_path / "s", tokenizer, ["a"] * 40_000)
    split = text_store.TextStore(tmp_path / "s").train
    with TokenWorkers(1, ("books",), tokenizer.path) as workers:
        workers.request("books", split, np.array([0])).result()
        os.kill(workers._workers[0].process.pid, signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            chunks = np.arange(len(ids))
            asked = [pool.submit(workers.request, "books", split, chunks) for _ in range(3)]
            waiting = concurrent.futures.wait(asked, timeout=60).not_done
            os.kill(workers._workers[0].process.pid, signal.SIGCONT)
        assert not waiting
        for tokens in asked:
            assert np.array_equal(tokens.result().result(), np.concatenate(ids))


def refusing(allowed: int):
    """Returns a Popen that fails as one does when no more processes are to be had."""
    popen, calls = subprocess.Popen, itertools.count()

    def started(*arguments, **settings):
        if next(calls) >= allowed:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(*arguments, **settings)

    return started


def test_who_waits_is_told_that_a_worker_cannot_be_started_again(source, tokenizer, monkeypatch):
    folder, *_ = source
    monkeypatch.setattr(subprocess, "Popen", refusing(1))
    with TokenWorkers(1, ("books",), tokenizer.path) as workers:
        split = text_store.TextStore(folder).train
        begun = [workers.request("books", split, np.array([0])) for _ in range(5)]
        os.kill(workers._workers[0].process.pid, signal.SIGKILL)
        message = "token worker 0 cannot go on: BlockingIOError: [Errno"
        for tokens in begun:
            assert str(tokens._parts[0].exception(timeout=20)).startswith(message)
        with pytest.raises(InputError, match="token worker 0 cannot go on"):
            workers.request("books", split, np.array([0]))


def test_workers_that_are_started_end_though_others_cannot_be_started(source, tokenizer, monkeypatch):
    folder, *_ = source
    threads = threading.active_count()
    monkeypatch.setattr(subprocess, "Popen", refusing(2))
    split = text_store.TextStore(folder).train
    with TokenWorkers(3, ("books",), tokenizer.path) as workers:
        with pytest.raises(InputError, match=r"token worker 2 of 3 cannot be started: .*unavailable"):
            workers.request("books", split, np.array([0]))
        processes = [worker.process for worker in workers._workers]
        workers.expect({"books": 1.0})
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


def test_the_transform_of_the_mix_runs_in_the_worker(tmp_path, tokenizer):
    (tmp_path / "shouting.py").write_text("def shout(text):\n    return text.upper()\n")
    (ids,) = tokenizer.encode(["THE STORE"])
    parts = [text_store.Chunk(b"the store", len(ids), True)]
    record = text_store.write_shard(tmp_path / "s", 0, {"train": parts, "held_out": []}, {})
    store.write_manifest(tmp_path / "s", {"kind": text_store.KIND, "shards": [record]})
    transforms = {"books": Transform("shouting:shout", str(tmp_path))}
    with TokenWorkers(1, ("books",), tokenizer.path, transforms) as workers:
        split = OnlineSplit("books", text_store.TextStore(tmp_path / "s").train, workers)
        assert (split.begin(np.array([0]), np.array([len(ids)]))() == ids).all()
        (tmp_path / "shouting.py").write_text("def shout(text):\n    return text\n")
        workers._workers[0].process.kill()
        with pytest.raises(InputError, match="a transform must give the same result for the same text"):
            for _ in range(50):
                split.begin(np.array([0]), np.array([len(ids)]))()
                time.sleep(0.1)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("lambda text: [][0]", "the transform raised IndexError: list index out of range, and did not when"),
        ("lambda text: text.encode()", "the transform returned bytes, not str, and did not when"),
        ("lambda text: text + text", r"is \d+ tokens long, and was \d+ when"),
    ],
    ids=["raises", "bytes", "longer"],
)
def test_a_transform_that_has_changed_is_told_with_its_place(
    tmp_path, tokenizer, monkeypatch, function, what
):
    name = f"changed_{abs(hash(function))}"  # a module is imported once
    (tmp_path / f"{name}.py").write_text(f"change = {function}\n")
    texts = [f"text {number}" for number in range(4)]
    write_store(tmp_path / "s", tokenizer, texts)
    transform = Transform(f"{name}:change", str(tmp_path))
    message = rf"^{tmp_path}/s: chunk 2 of train:? {what} the store was made: a transform must give"
    with pytest.raises(InputError, match=message):
        produce(Stores(), tokenizer, str(tmp_path / "s"), "train", transform, np.array([2, 3]))


def test_a_worker_opens_a_store_once(tmp_path, tokenizer, monkeypatch):
    opened = []
    monkeypatch.setattr(
        worker_module, "TextStore", lambda path: opened.append(path.name) or text_store.TextStore(path)
    )
    names = [f"s{number}" for number in range(100)]
    for name in names:
        write_store(tmp_path / name, tokenizer, ["text"] * 4)
    stores = Stores()
    for name in names * 2:
        stores.split(str(tmp_path / name), "train")
    assert opened == names


def test_a_damaged_frame_is_named(source, tmp_path, tokenizer):
    folder, *_ = source
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    for name in ("frames", "stretches"):
        path = copy / f"train-00001.{name}"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=rf"train-00001\.{name}: block 0 \(bytes 0 to \d+\) is damaged"):
            text_store.TextStore(copy).verify()
        path.write_bytes(content)
    path = copy / "train-00001.text"
    content = bytearray(path.read_bytes())
    content[-100] ^= 255  # in the last frame
    path.write_bytes(content)
    opened = text_store.TextStore(copy)
    with pytest.raises(InputError, match=r"train-00001.text: frame [1-9] \(bytes .* is damaged"):
        opened.verify()
    with TokenWorkers(1, ("books",), tokenizer.path) as workers:
        split = OnlineSplit("books", opened.train, workers)
        with pytest.raises(InputError, match=r"source books: .*train-00001.text: frame [1-9] "):
            split.begin(np.array([split.tokens - 2]), np.array([1]))()


def test_what_a_transform_starts_it_can_end(tmp_path, tokenizer, monkeypatch):
    """TokenWorkers pass over SIGTERM; their own processes do not."""
    lines = (
        "import multiprocessing, subprocess, time",
        "def ends(text):",
        "    program = subprocess.Popen(['sleep', '100'])",
        "    program.terminate()",
        "    fork = multiprocessing.get_context('fork').Process(target=time.sleep, args=(100,))",
        "    fork.start()",
        "    time.sleep(0.5)",  # a signal that comes within the fork itself is lost on any Python handler
        "    fork.terminate()",
        "    fork.join(20)",
        "    return f'{program.wait(20)} {fork.exitcode}'",
    )
    (tmp_path / "ending.py").write_text("\n".join(lines))
    expected = write_store(tmp_path / "s", tokenizer, ["-15 -15"] * 2)[0]
    with TokenWorkers(
        1, ("books",), tokenizer.path, {"books": Transform("ending:ends", str(tmp_path))}
    ) as workers:
        split = OnlineSplit("books", text_store.TextStore(tmp_path / "s").train, workers)
        assert (split.begin(np.array([0]), np.array([len(expected)]))()[0] == expected).all()


PROGRAM = """
import sys, time, numpy as np
from pathlib import Path
from jaxthru.data.store import text_store
from jaxthru.data.loading.token_workers import TokenWorkers
from jaxthru.data.loading.online import OnlineSplit
from jaxthru.data.sources.transforms import Transform
transforms = {"hung": Transform("hanging:hang", folder) for folder in sys.argv[3:]}
workers = TokenWorkers(2, ("books", "hung"), Path(sys.argv[2]), transforms)
split = OnlineSplit("books", text_store.TextStore(Path(sys.argv[1])).train, workers)
split.begin(np.array([0]), np.array([9]))()
if hanging := sys.argv[3:]:
    hung = OnlineSplit("hung", text_store.TextStore(Path(hanging[0])).train, workers)
    begun = [hung.begin(np.array([0]), np.array([1])) for _ in workers._workers]
    while len(list(Path(hanging[0]).glob("hung-*"))) < 2:
        time.sleep(0.05)
print(*(worker.process.pid for worker in workers._workers), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("hung", [False, True])
def test_nothing_is_left_when_the_process_is_killed(source, tokenizer, tmp_path, hung):
    command = [sys.executable, "-c", PROGRAM, str(source[0]), str(tokenizer.path)]
    if hung:
        marks = f"import os, time, pathlib\nmark = pathlib.Path({str(tmp_path)!r}, f'hung-{{os.getpid()}}')\n"
        hang = "def hang(text):\n    mark.touch()\n    time.sleep(100)\n    return text\n"
        (tmp_path / "hanging.py").write_text(marks + hang)
        write_store(tmp_path, tokenizer, ["one", "two"])
        command.append(str(tmp_path))
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    workers = [int(word) for word in process.stdout.readline().split()]
    assert len(workers) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (process.pid, *workers)]
    assert not any("/dev/shm/" in mapped for mapped in maps), "what would stay there"
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=60))
def test_no_task_is_larger_than_the_memory_for_one(lengths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers_module, "TASK_TOKENS", 50)
        parts = workers_module._cut(np.array(lengths))
    assert [length for part in parts for length in lengths[part]] == lengths
    assert all(sum(lengths[part]) < 50 + max(lengths[part]) for part in parts if any(lengths[part]))
    assert worker_handle.REGION_TOKENS == text_store.DOCUMENT_TOKENS + worker_handle.TASK_TOKENS


# Which worker serves which source


@settings(deadline=None)
@given(
    demand=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    workers=st.integers(1, 9),
)
def test_sources_are_shared_out_by_demand(demand, workers):
    names = [f"s{number}" for number in range(len(demand))]
    serves = share_out(dict(zip(names, demand, strict=True)), workers)
    assert len(serves) == workers
    assert sum(map(len, serves)) <= len(names) + workers - 1
    count = {name: sum(name in sources for sources in serves) for name in names}
    assert min(count.values()) >= 1
    total = sum(demand)
    for name, wanted in zip(names, demand, strict=True):
        if total:
            assert count[name] >= int(wanted / total * workers - 1e-6)  # a heavy source has its share


def test_workers_go_where_the_coming_steps_need_them(source, tokenizer):
    """By the tokens that those want, and by what a token of each source was seen to cost."""
    workers = TokenWorkers(4, ("a", "b"), tokenizer.path)
    workers.expect({"a": 3000.0, "b": 1000.0})
    assert workers.serves == [["a"], ["a"], ["a"], ["b"]]
    workers.seconds_per_token |= {"a": 1e-6, "b": 3e-6}
    workers.expect({"a": 3000.0, "b": 1000.0})
    assert workers.serves == [["a"], ["a"], ["b"], ["b"]]
    workers.expect({"b": 4000.0})
    assert workers.serves == [["a", "b"], ["b"], ["b"], ["b"]]


def test_what_a_token_costs_is_measured(source, tokenizer, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time\ndef wait(text):\n    time.sleep(0.02)\n    return text\n")
    folder, *_ = source
    write_store(tmp_path / "s", tokenizer, ["text"] * 10)
    splits = {"fast": text_store.TextStore(folder).train, "slow": text_store.TextStore(tmp_path / "s").train}
    transforms = {"slow": Transform("slow:wait", str(tmp_path))}
    with TokenWorkers(4, ("fast", "slow"), tokenizer.path, transforms) as workers:
        for name, split in splits.items():
            for _ in range(5):
                workers.request(name, split, np.arange(10)).result()
        guess = workers_module.FIRST_GUESS
        assert workers.seconds_per_token["fast"] != guess
        # Two thirds of what it takes, after five: ten waits at least, however busy the machine is.
        waits = 10 * 0.02 / splits["slow"].lengths(np.arange(10)).sum()
        assert workers.seconds_per_token["slow"] > 0.6 * waits > 100 * guess
        workers.seconds_per_token["fast"] = guess
        workers.expect({"fast": 1000.0, "slow": 1000.0})
        assert [sources for sources in workers.serves if "fast" not in sources] == [["slow"]] * 3


def test_a_worker_with_nothing_to_do_helps_others(source, tokenizer, monkeypatch):
    folder, stream, _ = source
    split = text_store.TextStore(folder).train
    monkeypatch.setattr(workers_module, "TASK_TOKENS", 400)
    given, give = [], WorkerProcess.give

    def noted(worker, task):
        given.append((worker.number, task.source))
        give(worker, task)

    monkeypatch.setattr(WorkerProcess, "give", noted)
    with TokenWorkers(2, ("a", "b"), tokenizer.path) as workers:
        a, b = (OnlineSplit(name, split, workers) for name in workers.sources)
        assert workers.serves == [["a"], ["b"]]
        for online in (b, a, b):
            assert_runs(online.begin(np.array([0]), np.array([9]))(), stream, np.array([0]), np.array([9]))
        assert given == [(1, "b"), (0, "a"), (1, "b")]  # its own worker, if that has nothing to do either
        given.clear()
        first, second = (worker.process.pid for worker in workers._workers)
        for pid in (first, second):
            os.kill(pid, signal.SIGSTOP)
        whole = np.array([0]), np.array([len(stream)])
        finish, mine = a.begin(*whole), b.begin(np.array([0]), np.array([9]))
        assert given == [(0, "a"), (1, "a"), (0, "a"), (1, "b")]
        os.kill(second, signal.SIGCONT)
        assert_runs(mine(), stream, np.array([0]), np.array([9]))
        deadline = time.monotonic() + 20
        while workers._waiting["a"] and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(first, signal.SIGCONT)
        assert_runs(finish(), stream, *whole)
        assert len(given) > 10 and given.count((0, "a")) == 2
