"""A store's bytes depend on its text alone; its account of damage is exact."""

import gc
import json
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from jaxthru.data.store import parallel_writer, writer
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.runtime.errors import InputError


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "hashes.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_the_bytes_do_not_depend_on_threads_or_batches(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_BYTES", 8000)
    expected = None
    for threads, batch in ((1, 10**6), (2, 700), (7, 1)):
        monkeypatch.setattr(parallel_writer, "THREADS", threads)
        monkeypatch.setattr(parallel_writer, "SMALL", threads)
        monkeypatch.setattr(writer, "BATCH_BYTES", batch)
        open_stores(load_mix(str(mix)), tmp_path / f"{threads}")
        found = contents(tmp_path / f"{threads}")
        assert len(found) > 20 and found == (expected := expected or found)


def damage(path: Path, lines: list[int]) -> list[str]:
    records = path.read_text().splitlines()
    for line in lines:
        records[line - 1] = "{"
    path.write_text("\n".join(records) + "\n")
    return [f"{path}, line {line}: not valid JSON" for line in lines]


def test_every_damaged_record_is_listed(mix, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "SHARD_BYTES", 3000)
    monkeypatch.setattr(writer, "DAMAGE_SHOWN", 1)
    monkeypatch.setattr(writer, "SHARD_DAMAGE", 2)
    listed = damage(tmp_path / "records.jsonl", [3, 20, 21, 22, 23, 60])
    mix.write_text(mix.read_text() + "max_damaged = 0.1\n")
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"]
    lists = sorted(opened.folder.glob("damaged-*.txt"))
    assert "".join(path.read_text() for path in lists).splitlines() == listed
    shards = opened.manifest["shards"]
    assert sum(shard["damaged"] for shard in shards) == 6 and sum(shard["read"] for shard in shards) == 60
    assert all(shard["damaged"] <= 2 for shard in shards)
    printed = capsys.readouterr().err
    assert f"6 of 60 records damaged and left out, listed in {opened.folder}/damaged-*.txt" in printed
    assert f"{listed[0]}\n" in printed and "60 records, none damaged" in printed  # the other source


def test_damage_in_a_cluster_is_judged_at_the_end(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_BYTES", 1000)
    damage(tmp_path / "records.jsonl", [5, 6, 7])
    mix.write_text(mix.read_text() + "max_damaged = 0.05\n")
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"]
    shares = [shard["damaged"] / shard["read"] for shard in opened.manifest["shards"]]
    assert max(shares) > 0.05


def test_a_wrong_key_is_told_at_once(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_DAMAGE", 10)
    mix.write_text(mix.read_text() + 'text_key = "body"\n')
    with pytest.raises(InputError, match=r"10 of 10 records .*line 1: no text under 'body'"):
        open_stores(load_mix(str(mix)), tmp_path / "store")


def test_what_decides_no_document_makes_no_new_store(mix, tmp_path):
    """Comments, descriptions, weights, limits that change nothing: a store is found again."""
    first = open_stores(load_mix(str(mix)), tmp_path / "store")
    recipe = tmp_path / "data" / "sources" / "renamed" / "source.toml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text('# a comment\ndescription = "other words"\nformat = "jsonl"\nmax_damaged = 0.5\n')
    (tmp_path / "mixes").mkdir()
    text = mix.read_text().replace("weight = 1", "weight = 5  # more")
    text = text.replace('["', '["../').replace('recipe = "local_jsonl"', 'recipe = "renamed"')
    (tmp_path / "mixes" / "other.toml").write_text('description = "a mix"\n' + text)
    (tmp_path / "data" / "sources").rename(tmp_path / "sources")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*/*")}
    again = open_stores(load_mix(str(tmp_path / "mixes" / "other.toml")), tmp_path / "store")
    assert again.keys == first.keys and again.mix != first.mix
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*/*")} == times


def test_the_damage_of_a_store_is_the_same_after_a_kill(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_BYTES", 1000)
    damage(tmp_path / "records.jsonl", [2, 30, 31])
    mix.write_text(mix.read_text() + "max_damaged = 0.05\n")
    open_stores(load_mix(str(mix)), tmp_path / "whole")
    write_atomically, written = writer.store.write_atomically, []

    def dies(path, content):
        written.append(path)
        if len(written) == 40:
            raise KeyboardInterrupt
        write_atomically(path, content)

    monkeypatch.setattr(writer.store, "write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        open_stores(load_mix(str(mix)), tmp_path / "killed")
    monkeypatch.undo()
    monkeypatch.setattr(writer, "SHARD_BYTES", 1000)
    open_stores(load_mix(str(mix)), tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    records = [json.loads(path.read_bytes()) for path in (tmp_path / "killed").rglob("shard-*.json")]
    assert sum(record["damaged"] for record in records) == 3


TRANSFORMS = """
def strict(text):
    if "yesterday" in text:
        raise ValueError("of yesterday\\nand more")
    return None if "never" in text else "\\ud800" if "half" in text else text.upper()
"""


@pytest.mark.parametrize("online", ["", "online = true\n"])
def test_a_transform_that_fails_costs_its_record(mix, tmp_path, monkeypatch, capsys, online):
    (tmp_path / "strictly.py").write_text(TRANSFORMS)
    monkeypatch.setattr(writer, "SHARD_BYTES", 2000)
    path = tmp_path / "records.jsonl"
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    for line, word in ((7, "yesterday"), (30, "never"), (31, "half")):
        texts[line - 1] = f"{word} {line}"
    lines = [json.dumps({"text": text}) for text in texts]
    lines[7] = "{"
    path.write_text("\n".join(lines) + "\n")
    texts = [text for at, text in enumerate(texts) if at not in (6, 7, 29, 30)]
    mix.write_text(mix.read_text() + online + 'transform = "strictly:strict"\n')
    with pytest.raises(InputError, match=r"source notes: more than max_damaged = 0\.01: 4 of 60 .*, line 7:"):
        open_stores(load_mix(str(mix)), tmp_path / "store")
    mix.write_text(mix.read_text() + "max_damaged = 0.07\n")
    expected = None
    for batch in (10**6, 1):  # what is listed, and in which order, does not depend on batches
        monkeypatch.setattr(writer, "BATCH_BYTES", batch)
        prepared = open_stores(load_mix(str(mix)), tmp_path / f"store-{batch}")
        found = contents(tmp_path / f"store-{batch}")
        assert found == (expected := expected or found)
    opened = prepared.stores["notes"]
    listed = "".join(path.read_text() for path in sorted(opened.folder.glob("damaged-*.txt")))
    assert listed.splitlines() == [
        f"{path}, line 7: the transform raised ValueError: of yesterday",
        f"{path}, line 8: not valid JSON",
        f"{path}, line 30: the transform returned NoneType, not str",
        f"{path}, line 31: the transform returned what is not valid Unicode",
    ]
    assert "4 of 60 records damaged and left out" in capsys.readouterr().err
    tokens = sum(map(len, prepared.tokenizer.encode([text.upper() for text in texts])))
    assert opened.train.tokens + opened.held_out.tokens == tokens
    assert len(opened.train.ends) + len(opened.held_out.ends) == len(texts)


def test_a_document_of_too_many_tokens_costs_its_record(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(writer.text_store, "DOCUMENT_TOKENS", 3000)
    path = tmp_path / "records.jsonl"
    with path.open("a") as stream:
        stream.write(json.dumps({"text": "word " * 2000 + "\n" + "word " * 2000}) + "\n")
    expected = None
    for online in ("", "online = true\n"):
        keys = f"{online}max_damaged = 0.1\n"
        (tmp_path / "tokens.toml").write_text(mix.read_text() + keys)
        prepared = open_stores(load_mix(str(tmp_path / "tokens.toml")), tmp_path / "store")
        opened = prepared.stores["notes"]
        [listed] = opened.folder.glob("damaged-*.txt")
        assert listed.read_text() == f"{path}, line 61: longer than 3,000 tokens\n"
        ends = [opened.train.ends.tolist(), opened.held_out.ends.tolist()]
        assert sum(map(len, ends)) == 60
        assert (prepared.keys, ends) == (expected := expected or (prepared.keys, ends))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_damaged_file_of_any_name_is_one_line(mix, tmp_path, capsys):
    (tmp_path / "text" / "new\nline \udcff.txt").write_bytes(b"\xff")
    mix.write_text(mix.read_text().replace("weight = 3", "weight = 3\nmax_damaged = 0.1"))
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["books"]
    [listed] = opened.folder.glob("damaged-*.txt")
    assert listed.read_text() == rf"{tmp_path}/text/new\nline \udcff.txt, byte 0: not UTF-8" + "\n"
    assert r"/text/new\nline \udcff.txt, byte 0: not UTF-8" in capsys.readouterr().err


def test_the_tokenizer_is_trained_on_transformed_texts(mix, tmp_path):
    (tmp_path / "stripping.py").write_text(
        "def strip(text):\n    return None if text == 'bad' else text.replace('<html>', '')\n"
    )
    texts = [json.loads(line)["text"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    prepared = []
    for name, changed in (("plain", texts), ("marked", [*("<html>" * 9 + text for text in texts), "bad"])):
        records = "".join(json.dumps({"text": text}) + "\n" for text in changed)
        (tmp_path / f"{name}.jsonl").write_text(records)
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'held_out = 0\n[tokenizer]\nvocabulary = 300\n[sources.local_jsonl]\npaths = ["{name}.jsonl"]\n'
            'weight = 1\nmax_damaged = 0.1\ntransform = "stripping:strip"\n'
        )
        prepared.append(open_stores(load_mix(str(path)), tmp_path / name))
    assert prepared[0].tokenizer.hash == prepared[1].tokenizer.hash
    assert [one.stores["local_jsonl"].manifest["shards"][0]["damaged"] for one in prepared] == [0, 1]


@pytest.mark.parametrize("online", ["", "online = true\n"])
def test_a_text_that_its_transform_makes_empty_is_left_out(mix, tmp_path, monkeypatch, capsys, online):
    (tmp_path / "choosing.py").write_text("def choose(text):\n    return '' if 'kernel' in text else text\n")
    monkeypatch.setattr(writer, "SHARD_BYTES", 2000)
    texts = [json.loads(line)["text"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    left = [text for text in texts if "kernel" not in text]
    with (tmp_path / "records.jsonl").open("a") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in (left[0], "", ""))
    assert 0 < len(left) < len(texts)
    mix.write_text(mix.read_text() + online + 'transform = "choosing:choose"\n')
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"]
    lengths = np.concatenate([np.diff(split.ends, prepend=0) for split in (opened.train, opened.held_out)])
    assert len(lengths) == len(left) and lengths.min() > 1
    assert sum(shard["read"] for shard in opened.manifest["shards"]) == len(left)
    empty = len(texts) - len(left) + 2
    counted = f"; {empty} empty left out; 1 repeated left out; {len(left)} records, none damaged"
    assert counted in capsys.readouterr().err


def test_the_text_of_a_small_source_is_let_go_once_it_is_written(mix, tmp_path, monkeypatch):
    mix.write_text(mix.read_text().replace("weight", "cap_bytes = 20_000\nweight"))
    corpora = []

    class Watched(writer.StoreWriter):
        def __init__(self, corpus, *arguments):
            gc.collect()
            assert [reference() for reference in corpora] == [None] * len(corpora)
            corpora.append(weakref.ref(corpus))
            super().__init__(corpus, *arguments)

    monkeypatch.setattr(parallel_writer, "StoreWriter", Watched)
    monkeypatch.setattr(writer, "BATCH_BYTES", 1000)  # else all small ones are written at once
    open_stores(load_mix(str(mix)), tmp_path / "store")
    assert len(corpora) == 2


def test_a_long_text_that_cannot_be_cut_is_kept_as_tokens(mix, tmp_path, capsys):
    mix.write_text(mix.read_text() + "online = true\n")
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"]
    assert "kept as tokens" not in capsys.readouterr().err
    assert not [*opened.folder.glob("*.kept")]
    with (tmp_path / "records.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": "word " * 60_000}) + "\n")
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"]
    [kept] = opened.folder.glob("*.kept")
    size = f"; 1 long text kept as tokens, {kept.stat().st_size / 1e6:.1f} MB; 61 records, none damaged"
    assert size in capsys.readouterr().err
    opened.verify()
    content = bytearray(kept.read_bytes())
    content[1000] ^= 1
    kept.write_bytes(content)
    with pytest.raises(InputError, match=r"\.kept: block 0 .* is damaged; remove its folder"):
        open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"].verify()
