import errno
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from corpus import sides, write_corpus, write_small_sources

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.loading.packed_rows import PackedRows
from jaxthru.data.mixture.packing import pack
from jaxthru.data.store import flat_file, prepare, text_store, writer
from jaxthru.data.store import token_store as store
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.runtime.errors import InputError


def documents(split) -> list[np.ndarray]:
    starts = np.concatenate([[0], split.ends[:-1]])
    return [split.read(*pair) for pair in zip(starts, split.ends, strict=True)]


def files(folder: Path) -> dict[str, bytes]:
    """Returns the finished files of all token stores and the tokenizer."""
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".partial")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name != "hashes.json"}


@pytest.mark.parametrize("shard_bytes", [10**9, 5000])
def test_round_trip(mix, tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(writer, "SHARD_BYTES", shard_bytes)
    prepared = open_stores(load_mix(str(mix)), tmp_path / "store")
    opened, tokenizer = prepared.stores["books"], prepared.tokenizer
    assert (len(opened.manifest["shards"]) == 1) == (shard_bytes == 10**9)
    expected = sides(tmp_path)["books"]
    assert len(expected["held_out"]) > 5
    for split, texts in expected.items():
        found = []
        for ids in documents(getattr(opened, split)):
            assert ids[-1] == tokenizer.end_of_text and tokenizer.end_of_text not in ids[:-1]
            found.append(tokenizer.decode(ids[:-1]))
        assert sorted(found) == sorted(texts), split
    whole = opened.train.read(0, opened.train.tokens)  # over the borders of shards
    assert whole.dtype == np.dtype("<u2") and (whole == np.concatenate(documents(opened.train))).all()
    opened.verify()


def test_a_second_preparation_writes_nothing_and_a_changed_text_gets_another_key(mix, tmp_path):
    folder = tmp_path / "store"
    first = open_stores(load_mix(str(mix)), folder)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert open_stores(load_mix(str(mix)), folder).keys == first.keys
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    (tmp_path / "text" / "new.txt").write_text("another document\n")
    again = open_stores(load_mix(str(mix)), folder)
    assert again.keys["books"] != first.keys["books"]


def test_the_key_does_not_depend_on_where_the_files_lie(mix, tmp_path):
    keys = open_stores(load_mix(str(mix)), tmp_path / "store").keys
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("text", "records.jsonl", "small.toml"):
        (tmp_path / name).rename(moved / name)
    (moved / "text" / "0.txt").rename(moved / "text" / "zzz.txt")
    assert open_stores(load_mix(str(moved / "small.toml")), moved / "store").keys == keys


def test_damage_is_named(mix, tmp_path):
    folder = tmp_path / "store"
    opened = open_stores(load_mix(str(mix)), folder).stores["books"]
    [tokens] = opened.folder.glob("train-*.tokens")
    content = bytearray(tokens.read_bytes())
    content[5] ^= 1
    tokens.write_bytes(content)
    damaged = store.TokenStore(opened.folder)
    with pytest.raises(InputError, match=r"train-00000\.tokens: block 0 "):
        damaged.verify()
    with pytest.raises(InputError, match="block 0 "):  # and when it is first read
        damaged.train.read(100, 101)
    tokens.write_bytes(content[:-2])
    short = store.TokenStore(opened.folder)
    for read in (short.verify, lambda: short.train.read(100, 101)):
        with pytest.raises(InputError, match=r"train-00000\.tokens: \d+ bytes, expected"):
            read()
    (opened.folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="not a token store"):
        store.TokenStore(opened.folder)


def test_the_bad_block_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr(flat_file, "BLOCK", 64)
    ids = np.arange(1000, dtype="<u2")
    record = store.write_shard(tmp_path, 0, {"train": [store.Entry(ids)], "held_out": []}, {})
    store.write_manifest(tmp_path, {"dtype": "<u2", "shards": [record]})
    content = bytearray((tmp_path / "train-00000.tokens").read_bytes())
    content[64 * 7 + 3] ^= 255
    (tmp_path / "train-00000.tokens").write_bytes(content)
    opened = store.TokenStore(tmp_path)
    for start, stop in ((0, 224), (256, 1000)):  # the 32 tokens between are those of the bad block
        assert (opened.train.read(start, stop) == ids[start:stop]).all()
    for read in (opened.verify, lambda: opened.train.read(255, 256), lambda: opened.train.read(0, 225)):
        with pytest.raises(InputError, match=r"block 7 \(bytes 448 to 511\)"):
            read()


@pytest.fixture(scope="module")
def vast(tmp_path_factory):
    """A store of a little more than 2^31 tokens, which takes no room: its shards are one file of zeros, and
    at the end one of five documents."""
    folder, each, shards = tmp_path_factory.mktemp("vast"), 2**28, 8
    with (folder / "zeros").open("wb") as file:
        file.truncate(2 * each)
    for number in range(shards):
        (folder / f"train-{number:05d}.tokens").symlink_to(folder / "zeros")
        np.array([0, each - 10, each], "<i8").tofile(folder / f"train-{number:05d}.offsets")
        for name in ("tokens", "offsets"):
            (folder / f"held_out-{number:05d}.{name}").write_bytes(b"\0" * (8 if name == "offsets" else 0))
    offsets = (folder / "train-00000.offsets").read_bytes()
    held_out = {"documents": 0, "tokens": 0, "tokens_crc32": [], "offsets_crc32": zlib.crc32(b"\0" * 8)}
    train = {
        "documents": 2,
        "tokens": each,
        "tokens_crc32": [zlib.crc32(bytes(flat_file.BLOCK))] * (2 * each // flat_file.BLOCK),
        "offsets_crc32": zlib.crc32(offsets),
    }
    records = [{"splits": {"train": train, "held_out": held_out}}] * shards
    last = [np.arange(1, size, dtype="<u2") for size in (40_000, 4, 5, 6, 7)]
    entries = [store.Entry(ids) for ids in last]
    records.append(store.write_shard(folder, shards, {"train": entries, "held_out": []}, {}))
    store.write_manifest(folder, {"dtype": "<u2", "shards": records})
    return store.TokenStore(folder).train, last


def test_documents_end_beyond_what_32_bits_hold(vast):
    split, last = vast
    each = 2**28
    expected = [end for number in range(8) for end in ((number + 1) * each - 10, (number + 1) * each)]
    for document in last:
        expected.append(expected[-1] + len(document))
    assert split.ends.tolist() == expected and split.tokens == expected[-1] > 2**31
    assert split.read(2**31 - 2, 2**31 + 3).tolist() == [0, 0, 1, 2, 3]
    for document, end in zip(last, expected[-5:], strict=True):
        assert split.read(end - len(document), end).tolist() == document.tolist()


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_rows_beyond_what_32_bits_hold(vast, packing):
    """From the packing, which cuts the first of the last documents, to the batch."""
    split, last = vast
    sequence = 2**15
    packed = pack(split.ends, sequence, packing)
    assert packed.length.sum() == split.tokens
    row = np.searchsorted(packed.first, np.flatnonzero(packed.start + packed.length == split.tokens), "right")
    packed_rows = PackedRows.of(packed, sequence)
    batch = BatchBuilder([(split, packed_rows)], sequence).build(np.zeros(1, np.int64), row - 1)
    tokens, segment = batch["tokens"][0], batch["segment_ids"][0]
    segments = [tokens[segment == number].tolist() for number in range(1, segment.max() + 1)]
    assert all(document.tolist() in segments for document in last[1:])


def test_texts_end_beyond_what_32_bits_hold(tmp_path):
    """Of a text store, which counts the tokens and does not hold them."""
    parts = [text_store.Chunk(b"x", 2**26, number % 2 == 1) for number in range(40)]
    record = text_store.write_shard(tmp_path, 0, {"train": parts, "held_out": []}, {})
    store.write_manifest(tmp_path, {"kind": text_store.KIND, "shards": [record]})
    split = text_store.TextStore(tmp_path).train
    assert split.ends.tolist() == [2**27 * (number + 1) for number in range(20)]
    assert split.tokens == record["splits"]["train"]["tokens"] == 40 * 2**26 > 2**31
    asked = np.array([0, 39])
    assert split.starts(asked).tolist() == [0, 39 * 2**26] and (split.lengths(asked) == 2**26).all()


PREPARE = """
import sys, pathlib
from jaxthru.data.store import prepare
from jaxthru.data.store import writer
from jaxthru.data.store.mix_file import load_mix
writer.SHARD_BYTES, writer.BATCH_BYTES = 20_000, 5_000
print("go", flush=True)
prepare.open_stores(load_mix(sys.argv[1]), pathlib.Path(sys.argv[2]))
"""


def start(mix: Path, folder: Path) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", PREPARE, str(mix), str(folder)], stdout=subprocess.PIPE)
    with child.stdout:
        assert child.stdout.readline() == b"go\n"
    return child


@pytest.fixture
def large(mix):
    """More text, so that a preparation takes long enough to be killed within, and small sources."""
    shutil.rmtree(mix.parent / "text")
    write_corpus(mix.parent, documents=1500)
    write_small_sources(mix, 40)
    return mix


def test_killed_at_any_moment_it_goes_on_and_ends_the_same(large, tmp_path):
    begin = time.perf_counter()
    assert start(large, tmp_path / "undisturbed").wait() == 0
    duration = time.perf_counter() - begin
    expected = files(tmp_path / "undisturbed")
    assert len(expected) > 40  # many shards
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    folder, kept = tmp_path / "killed", {}
    for _ in range(4):
        child = start(large, folder)
        time.sleep(draw.uniform(0, duration / 2))
        child.send_signal(signal.SIGKILL)
        child.wait()
        for path in folder.glob("*/manifest.json"):
            store.TokenStore(path.parent).verify()  # what opens is whole
        whole = {path: path.stat().st_mtime_ns for path in folder.rglob("shard-*.json")}
        assert kept.items() <= whole.items()  # what was done is not done again
        kept = whole
    assert start(large, folder).wait() == 0
    assert files(folder) == expected
    assert not list(folder.rglob("*.partial"))  # nor is what the killed ones have begun


def test_two_at_once_do_not_harm_each_other(large, tmp_path):
    children = [start(large, tmp_path / "store") for _ in range(2)]
    assert [child.wait() for child in children] == [0, 0]
    assert start(large, tmp_path / "alone").wait() == 0
    assert files(tmp_path / "store") == files(tmp_path / "alone")


def test_what_is_not_prepared_is_one_line(mix, tmp_path):
    loaded, folder = load_mix(str(mix)), tmp_path / "store"
    with pytest.raises(InputError, match=r"tokenizer: not prepared .*jaxthru\.data prepare .*small"):
        open_stores(loaded, folder, False)
    assert not folder.exists()
    keys = open_stores(loaded, folder).keys
    assert open_stores(loaded, folder, False).keys == keys
    shutil.rmtree(folder / f"notes-{keys['notes']}")
    for begun in (None, keys, {"books": keys["books"]}):
        with pytest.raises(InputError, match="source notes: not prepared in"):
            open_stores(loaded, folder, False, begun)


def test_a_special_token_in_the_text_is_text(mix, tmp_path):
    text = "before <|endoftext|> after\n"
    (tmp_path / "text" / "special.txt").write_text(text)
    prepared = open_stores(load_mix(str(mix)), tmp_path / "store")
    [ids] = prepared.tokenizer.encode([text])
    assert (ids == prepared.tokenizer.end_of_text).sum() == 1
    assert prepared.tokenizer.decode(ids[:-1]) == text


@pytest.mark.parametrize("train_bytes", [None, 3000])
def test_the_tokenizer_sees_training_text_alone(mix, tmp_path, monkeypatch, train_bytes):
    """All of it, or an equal share of bytes from each source."""
    if train_bytes:
        mix.write_text(mix.read_text().replace("[tokenizer]", f"[tokenizer]\ntrain_bytes = {train_bytes}"))
    seen, train = [], prepare.train

    def noted(texts, *where):
        train((seen.append(text) or text for text in texts), *where)

    monkeypatch.setattr(prepare, "train", noted)
    open_stores(load_mix(str(mix)), tmp_path / "store")
    expected = sides(tmp_path)
    training = {source: expected[source]["train"] for source in expected}
    if not train_bytes:
        assert sorted(seen) == sorted(text for texts in training.values() for text in texts)
        return
    for texts in training.values():
        own = [text for text in seen if any(whole.startswith(text) for whole in texts)]
        assert sum(len(text.encode()) for text in own) == train_bytes // 2
    assert sum(len(text.encode()) for text in seen) == train_bytes


def test_another_held_out_share_is_another_store(mix, tmp_path):
    """Else a run would be evaluated on what it was trained on; a named tokenizer stays what it is."""
    trained = open_stores(load_mix(str(mix)), tmp_path / "store").tokenizer
    head, _, tail = mix.read_text().partition("[tokenizer]\nvocabulary = 300\n")
    for share in (0.2, 0.5):
        text = f'tokenizer = "{trained.path}"\n{head}{tail}'.replace("held_out = 0.2", f"held_out = {share}")
        mix.write_text(text)
        opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["books"]
        assert len(opened.held_out.ends) == len(sides(tmp_path, share)["books"]["held_out"])


def test_a_named_tokenizer(mix, tmp_path):
    trained = open_stores(load_mix(str(mix)), tmp_path / "store").tokenizer
    tree = json.loads(trained.path.read_bytes())
    (tmp_path / "named.json").write_text(json.dumps(tree))
    head, _, tail = mix.read_text().partition("[tokenizer]\nvocabulary = 300\n")
    mix.write_text(f'tokenizer = "named.json"\n{head}{tail}')
    prepared = open_stores(load_mix(str(mix)), tmp_path / "store")
    assert prepared.tokenizer.path == tmp_path / "named.json" and prepared.tokenizer.vocabulary == 300
    text = json.dumps(tree).replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "named.json").write_text(text)
    with pytest.raises(InputError, match="no end-of-text token"):
        open_stores(load_mix(str(mix)), tmp_path / "store")
    (tmp_path / "named.json").write_text("{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        open_stores(load_mix(str(mix)), tmp_path / "store")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tokenizers.models.BPE(), "has no end-of-text token"),
        (tokenizers.models.WordLevel({"</s>": 0}), "cannot tokenise what the sources hold .*UNK"),
    ],
)
def test_a_tokenizer_that_cannot_tokenise_is_one_line(mix, tmp_path, model, message):
    tokenizers.Tokenizer(model).save(str(tmp_path / "named.json"))
    text = mix.read_text().replace("[tokenizer]\nvocabulary = 300\n", "")
    mix.write_text(f'tokenizer = "named.json"\n{text}')
    with pytest.raises(InputError, match=rf"named\.json: {message}"):
        open_stores(load_mix(str(mix)), tmp_path / "store")


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(mix, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
        open_stores(load_mix(str(mix)), tmp_path / "store")
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_what_a_preparation_left_damaged_is_made_again_and_a_file_in_the_way_is_one_line(mix, tmp_path):
    folder = tmp_path / "store"
    keys = open_stores(load_mix(str(mix)), folder).keys
    expected, notes = files(folder), folder / f"notes-{keys['notes']}"
    (notes / "manifest.json").unlink()
    (notes / "shard-00000.json").write_bytes(b"{")
    open_stores(load_mix(str(mix)), folder)
    assert files(folder) == expected
    shutil.rmtree(notes)
    notes.write_text("no folder")
    with pytest.raises(
        InputError, match=rf"{notes}/train-00000\.tokens: cannot be written \(Not a directory\)"
    ):
        open_stores(load_mix(str(mix)), folder)


def test_a_store_of_more_shards_than_files_may_be_open_is_read(tmp_path):
    """What was mapped first is let go of. One line where not even a file more may be open."""
    splits = {"train": [store.Entry(np.arange(3))], "held_out": []}
    records = [store.write_shard(tmp_path, number, splits, {}) for number in range(60)]
    store.write_manifest(tmp_path, {"dtype": "int64", "shards": records})
    program = f"""if True:
        import os, pathlib, resource
        from jaxthru.data.store import token_store as store
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 80))
        opened = store.TokenStore(pathlib.Path({str(tmp_path)!r}))
        for _ in range(2):
            print(sum(int(opened.train.read(at, at + 1)[0]) for at in range(opened.train.tokens)))
        print(len(os.listdir("/proc/self/fd")) < 40)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, 80))
        try:
            opened.train.read(0, 1)
        except store.InputError as error:
            print(error)
    """
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *sums, bounded, refused = told.stdout.splitlines()
    assert sums == ["180", "180"] and bounded == "True"
    assert refused.endswith(
        "cannot be opened (Too many open files); raise the limit of open files, `ulimit -n`"
    )
