"""What is held out is not trained on, wherever else the same text stands."""

import gzip
import json
import os
import random
import sys

import pytest
from corpus import sentences

from jaxthru.data.sources.transforms import find_transform
from jaxthru.data.store import writer
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores

MIX = "held_out = 0.3\n[tokenizer]\nvocabulary = 300\n"


def texts_of(prepared, name: str) -> dict[str, list[str]]:
    """Returns {split: the texts of a source's store}."""
    opened, found = prepared.stores[name], {}
    for split in ("train", "held_out"):
        stored = getattr(opened, split)
        ends = stored.ends.tolist()
        pairs = zip([0, *ends[:-1]], ends, strict=True)
        tokens = (stored.read(start, end)[:-1] for start, end in pairs)
        found[split] = [prepared.tokenizer.decode(ids) for ids in tokens]
    return found


@pytest.mark.parametrize("online", [False, True])
def test_texts_that_a_transform_makes_alike_are_one(tmp_path, online):
    """2,000 lines that are 100 texts once they are in lower case and without their ends."""
    (tmp_path / "clean.py").write_text("def clean(text):\n    return text.lower().partition('|')[0]\n")
    draw = random.Random(0)
    texts = [sentences(draw, 2) for _ in range(100)]
    lines = [
        json.dumps({"text": f"{draw.choice([text, text.upper()])}|{n}"}) for n in range(20) for text in texts
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    keys = 'recipe = "local_jsonl"\npaths = ["lines.jsonl"]\nweight = 1\n'
    clean = f'transform = "clean:clean"\nonline = {str(online).lower()}\n'
    (tmp_path / "mix.toml").write_text(f"{MIX}[sources.lines]\n{keys}{clean}")
    prepared = open_stores(load_mix(str(tmp_path / "mix.toml")), tmp_path / "store")
    opened = prepared.stores["lines"]
    counts = [len(split.ends) for split in (opened.train, opened.held_out)]
    assert sum(counts) == 100 and min(counts) > 10
    if not online:
        found = texts_of(prepared, "lines")
        assert not set(found["train"]) & set(found["held_out"])
        assert sorted(found["train"] + found["held_out"]) == sorted(texts)


def test_one_text_is_on_one_side_in_every_format(tmp_path):
    """As plain text, with a byte order mark, compressed, as a record, and from a column."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = random.Random(1)
    texts = [sentences(draw, 2) for _ in range(60)]
    for folder in ("plain", "marked", "packed"):
        (tmp_path / folder).mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "plain" / f"{number}.txt").write_text(text)
        (tmp_path / "marked" / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
        (tmp_path / "packed" / f"{number}.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "rows.parquet")
    sources = {
        "plain": ("local_text", "plain/*.txt"),
        "marked": ("local_text", "marked/*.txt"),
        "packed": ("local_text", "packed/*.gz"),
        "records": ("local_jsonl", "records.jsonl"),
        "rows": ("local_parquet", "rows.parquet"),
    }
    parts = [
        f'[sources.{name}]\nrecipe = "{recipe}"\npaths = ["{path}"]\nsuffixes = []\nweight = 1\n'
        for name, (recipe, path) in sources.items()
    ]
    (tmp_path / "mix.toml").write_text(MIX + "".join(parts))
    prepared = open_stores(load_mix(str(tmp_path / "mix.toml")), tmp_path / "store")
    held = {name: set(texts_of(prepared, name)["held_out"]) for name in sources}
    assert 5 < len(held["plain"]) < 40
    assert all(side == held["plain"] for side in held.values())


def test_a_run_that_began_with_other_stores_goes_on_with_them(tmp_path):
    """As under an older rule of what is held out: its stores are kept, under their keys."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(50)))
    keys = 'recipe = "local_jsonl"\npaths = ["a.jsonl"]\nweight = 1\n'
    (tmp_path / "mix.toml").write_text(f"{MIX}[sources.a]\n{keys}")
    mix, store = load_mix(str(tmp_path / "mix.toml")), tmp_path / "store"
    [key] = open_stores(mix, store).keys.values()
    (store / f"a-{key}").rename(store / "a-0123456789abcdef")
    assert open_stores(mix, store, begun={"a": "0123456789abcdef"}).keys == {"a": "0123456789abcdef"}
    assert open_stores(mix, store).keys == {"a": key}


def test_a_store_is_of_what_its_transform_does_not_of_its_name(tmp_path, monkeypatch):
    """Two mixes over the same text and one store, each with a module of the same name; then one is edited,
    in the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"Text {n}"}) + "\n" for n in range(50)))
    keys = 'recipe = "local_jsonl"\npaths = ["../a.jsonl"]\nweight = 1\ntransform = "clean:clean"\n'

    def prepared(name: str, method: str):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "clean.py").write_text(f"def clean(text):\n    return text.{method}()\n")
        os.utime(tmp_path / name / "clean.py", (1e9, 1e9))
        (tmp_path / name / "mix.toml").write_text(f"{MIX}[sources.a]\n{keys}")
        find_transform.cache_clear()  # as in a process of its own
        return open_stores(load_mix(str(tmp_path / name / "mix.toml")), tmp_path / "store")

    made = [prepared("one", "lower"), prepared("two", "upper"), prepared("one", "title")]
    assert len({one.keys["a"] for one in made}) == 3
    for one, method in zip(made, ("lower", "upper", "title"), strict=True):
        texts = [text for side in texts_of(one, "a").values() for text in side]
        assert sorted(texts) == sorted(getattr(f"Text {n}", method)() for n in range(50))
    assert prepared("one", "lower").keys == made[0].keys


def test_shards_are_of_so_much_text_as_was_read(tmp_path, monkeypatch):
    """Memory holds that of an online source, however little its transform leaves."""
    monkeypatch.setattr(writer, "SHARD_BYTES", 10_000)
    lines = (json.dumps({"text": f"{n} " + "x" * 1000}) + "\n" for n in range(50))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "clean.py").write_text("def clean(text):\n    return text[:2]\n")
    keys = (
        'recipe = "local_jsonl"\npaths = ["a.jsonl"]\nweight = 1\ntransform = "clean:clean"\nonline = true\n'
    )
    (tmp_path / "mix.toml").write_text(f"{MIX}[sources.a]\n{keys}")
    opened = open_stores(load_mix(str(tmp_path / "mix.toml")), tmp_path / "store").stores["a"]
    assert len(opened.manifest["shards"]) == 5
