"""Many small sources are prepared side by side, and told in a few lines."""

import gzip
import json
import re
import threading
from pathlib import Path

import pytest
from corpus import write_small_sources

from jaxthru.data.__main__ import main
from jaxthru.data.sources.corpus import Corpus
from jaxthru.data.store import parallel_writer, report, writer
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import make_stores
from jaxthru.runtime.errors import InputError

COUNT = 120


@pytest.fixture
def many(mix) -> Path:
    """A mix of two sources and many small ones, of which chance decides whether a document is held out."""
    write_small_sources(mix, COUNT)
    return mix


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "hashes.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def prepare(mix: Path, folder: Path) -> dict[str, str]:
    return make_stores(load_mix(str(mix)), folder)


def test_they_are_the_same_however_many_are_written_at_once(many, tmp_path, monkeypatch):
    """And with large ones between them, and one that is small only while it is compressed."""
    monkeypatch.setattr(writer, "BATCH_BYTES", 2000)
    records = [json.dumps({"text": f"word {number} " * 30}) + "\n" for number in range(100)]
    (tmp_path / "small-9.jsonl.gz").write_bytes(gzip.compress("".join(records).encode()))
    many.write_text(many.read_text().replace("small-9.jsonl", "small-9.jsonl.gz"))
    expected = None
    for small in (1, 16):
        monkeypatch.setattr(parallel_writer, "SMALL", small)
        prepare(many, tmp_path / f"{small}")
        found = contents(tmp_path / f"{small}")
        assert found == (expected := expected or found)
    assert sum(name.endswith("manifest.json") for name in expected) == COUNT + 2


def test_they_are_told_in_a_few_lines(many, tmp_path, capsys):
    for number in (5, 50):
        with (tmp_path / f"small-{number}.jsonl").open("a") as stream:
            stream.write('{\n{"text": ""}\n')
    many.write_text(many.read_text().replace("weight = 1", "weight = 1\nmax_damaged = 0.5"))
    assert main(["prepare", str(many), "--store", str(tmp_path / "store")]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) <= 10 and len(printed.out.splitlines()) <= 10
    for number in (5, 50):
        [line] = [line for line in lines if line.startswith(f"source s{number}: 1 of ")]
        assert f"small-{number}.jsonl, line " in line
    [line] = [line for line in lines if "too few documents, none is held out" in line]
    without, of = map(int, re.match(r"(\d+) of (\d+) sources \(", line).groups())
    stores = [json.loads(path.read_bytes()) for path in (tmp_path / "store").glob("*/manifest.json")]
    shards = [shard for each in stores for shard in each["shards"]]
    assert of == len(stores) == COUNT + 2
    assert without == sum(shard["splits"]["held_out"]["tokens"] == 0 for shard in shards) > report.NAMED
    tokens = sum(split["tokens"] for shard in shards for split in shard["splits"].values())
    read = sum(shard["read"] for shard in shards)
    [line] = [line for line in lines if line.startswith(f"{COUNT + 2} sources: ")]
    assert line.startswith(f"{COUNT + 2} sources: {tokens:,} tokens, ")
    assert line.endswith(f"; 2 empty left out of 2 sources; {read:,} records, 2 damaged in 2 sources")
    prepare(many, tmp_path / "store")
    assert capsys.readouterr().err == ""


def test_one_that_cannot_be_prepared_is_named_and_the_others_stay(many, tmp_path, capsys):
    name_tokenizer(many)  # one that is trained changes with every source, and all stores with it
    kept = {number: (tmp_path / f"small-{number}.jsonl").read_bytes() for number in (70, 100)}
    (tmp_path / "small-70.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "small-100.jsonl").write_text("{\n")
    for _ in range(2):
        assert main(["prepare", str(many), "--store", str(tmp_path / "store")]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("jaxthru: ")]
        assert line == "jaxthru: source s70: no text to train on in 1 files"
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*/manifest.json")}
    assert len(made) >= 72
    for number, content in kept.items():
        (tmp_path / f"small-{number}.jsonl").write_bytes(content)
    prepare(many, tmp_path / "store")
    assert made == {path: path.stat().st_mtime_ns for path in made}
    prepare(many, tmp_path / "clean")
    assert contents(tmp_path / "clean").items() <= contents(tmp_path / "store").items()


def test_of_two_that_cannot_be_prepared_the_first_is_named(many, tmp_path, monkeypatch):
    """Though what is wrong with the other is found while its text is read, and so earlier."""
    name_tokenizer(many)
    (tmp_path / "small-7.jsonl").write_text('{"text": ""}\n')
    items, write_only, found = Corpus.items, writer.StoreWriter.write_only, threading.Event()

    def read(corpus):
        if corpus.name == "s9":
            found.set()
            raise InputError("source s9: is not read")
        return items(corpus)

    def waits(of, batch):
        assert of.corpus.name != "s7" or found.wait(60)
        return write_only(of, batch)

    monkeypatch.setattr(Corpus, "items", read)
    monkeypatch.setattr(writer.StoreWriter, "write_only", waits)
    with pytest.raises(InputError, match="source s7: no text to train on in 1 files"):
        prepare(many, tmp_path / "store")
    assert len(list((tmp_path / "store").glob("*/manifest.json"))) >= 9
    (tmp_path / "small-7.jsonl").write_text('{"text": "a row"}\n{"text": "the row"}\n')
    with pytest.raises(InputError, match="source s9: is not read"):
        prepare(many, tmp_path / "store")


def name_tokenizer(mix: Path) -> None:
    """Has a mix name its tokenizer, trained here."""
    one = mix.with_name("one.toml")
    one.write_text(mix.read_text().partition("[sources.s0]")[0])
    prepare(one, mix.parent / "trained")
    [made] = (mix.parent / "trained").glob("tokenizer-*.json")
    mix.write_text(mix.read_text().replace("[tokenizer]\nvocabulary = 300", f'tokenizer = "{made}"'))


def test_a_kill_leaves_whole_stores(many, tmp_path, monkeypatch):
    prepare(many, tmp_path / "whole")
    write, written = writer.store.write_atomically, []

    def dies(path, content):
        written.append(path)
        if len(written) >= 300:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(writer.store, "write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare(many, tmp_path / "killed")
    monkeypatch.undo()
    there = contents(tmp_path / "killed")
    assert there.items() <= contents(tmp_path / "whole").items() and len(there) > 200
    prepare(many, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_two_at_once_make_the_same(many, tmp_path):
    failures = []

    def make():
        try:
            prepare(many, tmp_path / "both")
        except InputError as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    prepare(many, tmp_path / "one")
    assert not failures and contents(tmp_path / "both") == contents(tmp_path / "one")
