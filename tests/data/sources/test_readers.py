import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import items

from jaxthru.data.sources.documents import held_out, read
from jaxthru.data.sources.files import HashCache, _stdlib, collect
from jaxthru.data.sources.recipes import Recipe
from jaxthru.data.sources.record import Damage
from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.runtime.errors import InputError

LINES = [
    b'{"text": "one"}',
    b'{"text": "one"}',  # the same text again is left out
    b"",
    b'{"text": "two \xc3\xa9", "n": 1}',
    b'{"text": "broken',
    b'{"other": "x"}',
    b'{"text": 5}',
    b'["text"]',
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b'{"text": "three\\u0000"}',
]
DAMAGED = ["line 5", "line 6", "line 7", "line 8", "line 9", "line 10"]


def compress(suffix: str, content: bytes) -> bytes:
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as appended files have
        return zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    return gzip.compress(content, mtime=0) if suffix == ".gz" else content


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(folder, suffix):
    path = folder / f"records.jsonl{suffix}"
    path.write_bytes(compress(suffix, b"\n".join(LINES)))
    texts, damaged = items(folder, format="jsonl")
    assert texts == ["one", "two é", "three\0"]
    assert [item.position for item in damaged] == DAMAGED
    assert {item.file for item in damaged} == {str(path)}
    assert damaged[1].reason == "no text under 'text'; its keys: 'other'"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_or_false_archive_is_damage_after_what_could_be_read(folder, suffix):
    content = compress(
        suffix, b"".join(json.dumps({"text": f"{n}" * 50}).encode() + b"\n" for n in range(5000))
    )
    (folder / f"cut.jsonl{suffix}").write_bytes(content[: len(content) // 2])
    (folder / f"false.jsonl{suffix}").write_bytes(b"not compressed at all\n")
    texts, damaged = items(folder, format="jsonl")
    assert len(texts) < 5000
    assert {Path(item.file).name for item in damaged} == {f"cut.jsonl{suffix}", f"false.jsonl{suffix}"}
    assert all("cannot be read" in item.reason or "JSON" in item.reason for item in damaged)


def test_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["one", None, "two é", "one"], "n": [1, 2, 3, 4]})
    parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    parquet.write_table(table.select(["n"]), folder / "b.parquet")
    (folder / "c.parquet").write_bytes(b"not a table")
    texts, damaged = items(folder, format="parquet", text_key="body")
    assert texts == ["one", "two é"]
    assert {(Path(item.file).name, item.position) for item in damaged} == {
        ("a.parquet", "row 1"),
        ("b.parquet", "whole file"),
        ("c.parquet", "whole file"),
    }


def test_text_trees(folder):
    (folder / "sub").mkdir()
    (folder / "a.txt").write_text("one", encoding="utf-8")
    (folder / "sub" / "b.txt").write_text("two é", encoding="utf-8")
    (folder / "sub" / "copy.txt").write_text("one", encoding="utf-8")
    (folder / "empty.txt").write_text("")
    (folder / "bad.txt").write_bytes(b"ab\xff")
    (folder / "large.txt").write_text("x" * 1000)
    (folder / "skipped.log").write_text("log")
    keys = {"suffixes": (".txt",), "max_file_bytes": 999}
    texts, damaged = items(folder, **keys)
    assert sorted(texts) == ["one", "two é"]
    assert damaged == [Damage(str(folder / "bad.txt"), "byte 2", "not UTF-8")]
    assert len(items(folder, **keys, exclude=("*/sub/*", "*bad*"))[0]) == 1


PYTHON = '''"""Module."""
class C:
    """Class."""
    def f(self):
        """Method,
        of two lines."""
        if True:
            def g():
                """Inner."""
text = """no docstring"""
'''


def test_docstrings_and_descriptions(folder):
    (folder / "a.py").write_text(PYTHON)
    (folder / "none.py").write_text("x = 1\n")
    (folder / "broken.py").write_text('"""x"""\ndef (')
    (folder / "METADATA").write_text("Name: x\nVersion: 1\n\n# A long description\n")
    texts, damaged = items(folder, format="docstrings")
    prose = "Module.\n\nClass.\n\nMethod,\nof two lines.\n\nInner."
    assert sorted(texts) == sorted([prose, "# A long description\n"])
    assert [Path(item.file).name for item in damaged] == ["broken.py"]


@pytest.mark.parametrize("transform", ["", "case:upper"])
def test_a_files_docstrings_follow_it(tmp_path, transform):
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "case.py").write_text("upper = str.upper\n")
    transforms = {"text": Transform(), "docstrings": Transform(transform, str(tmp_path / "mix"))}
    for number in range(200):
        (tmp_path / f"{number}.py").write_text(f'"""Module {number}."""\nx = {number}\n')
    sides = {}
    for kind, transform in transforms.items():
        recipe = Recipe.of(format=kind, paths=(f"{tmp_path}/*.py",), transform=transform)
        files = collect("test", recipe, HashCache(tmp_path / "none.json"), frozenset())
        for item in read(files, recipe):
            number = re.search(r"\d+", item.text)[0]
            sides.setdefault(number, []).append(held_out(item.origin, 0.3))
    assert all(len(side) == 2 and side[0] == side[1] for side in sides.values())
    assert 30 < sum(side[0] for side in sides.values()) < 90


def test_the_cap_stops(folder):
    for number in range(100):
        (folder / f"{number}.txt").write_text(f"{number:03}" * 100)
    assert len(items(folder, cap_bytes=1000)[0]) == 4


def test_identical_files_are_taken_by_one_source_of_a_kind(mix, tmp_path):
    (tmp_path / "more").mkdir()
    for number in range(20):
        (tmp_path / "more" / f"{number}.txt").write_text(f"only here {number}\n" * 5)
    again = '[sources.again]\nrecipe = "local_text"\npaths = ["text/*.txt", "more/*.txt"]\nweight = 1\n'
    mix.write_text(mix.read_text() + again)
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["again"]
    assert len(opened.train.ends) + len(opened.held_out.ends) == 20


def test_few_damaged_records_are_reported_and_many_fail(mix, tmp_path, capsys):
    with (tmp_path / "records.jsonl").open("a") as stream:
        stream.write("broken\n")
    message = (
        r"source notes: more than max_damaged = 0\.01: 1 of 61 .*records\.jsonl, line 61: not valid JSON"
    )
    for _ in range(2):  # the second time the shard is already written
        with pytest.raises(InputError, match=message):
            open_stores(load_mix(str(mix)), tmp_path / "store")
    mix.write_text(mix.read_text() + "max_damaged = 0.05\n")
    opened = open_stores(load_mix(str(mix)), tmp_path / "store").stores["notes"]
    assert "1 of 61 records damaged and left out" in capsys.readouterr().err
    [shard] = opened.manifest["shards"]
    assert shard["damaged"] == 1 and shard["read"] == 61
    assert shard["damage"] == [[str(tmp_path / "records.jsonl"), "line 61", "not valid JSON"]]


def test_a_missing_format_names_the_extra(folder, monkeypatch):
    import importlib

    found = importlib.import_module

    def refuse(name):
        if name.startswith("jaxthru."):
            return found(name)
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    for name, kind in (("a.parquet", "parquet"), ("a.jsonl.zst", "jsonl")):
        (folder / name).write_bytes(b"x")
        with pytest.raises(InputError, match=r"pip install jaxthru\[formats\]"):
            items(folder, format=kind, suffixes=(name[1:],))


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300), kind=st.sampled_from(["jsonl", "text", "docstrings", "parquet"]))
def test_no_content_makes_a_reader_fail(tmp_path_factory, content, kind):
    folder = tmp_path_factory.mktemp("fuzz") / "corpus"
    folder.mkdir()
    suffix = {"jsonl": ".jsonl", "text": ".txt", "docstrings": ".py", "parquet": ".parquet"}[kind]
    (folder / f"a{suffix}").write_bytes(content)
    texts, damaged = items(folder, format=kind)
    assert all(isinstance(text, str) for text in texts) and len(damaged) <= content.count(b"\n") + 1


def test_every_file_is_hashed_once(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one")
    cache = HashCache(tmp_path / "hashes.json")
    first = cache.file(str(path))
    cache.save()
    again = HashCache(tmp_path / "hashes.json")
    monkeypatch.setattr(Path, "open", None)
    assert again.file(str(path)) == first and not again.changed
    monkeypatch.undo()
    path.write_text("two and more")
    assert again.file(str(path)).digest != first.digest
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    for none in (tmp_path, tmp_path / "b.txt", path / "c.txt", loop):
        assert again.file(str(none)) is None


def test_a_docstring_that_breaks_unicode_or_the_parser_is_damage(folder):
    (folder / "half.py").write_text('"""\\ud800"""\n')
    (folder / "deep.py").write_text('"""x"""\n' + "-" * 200_000 + "1\n")
    (folder / "fine.py").write_text('"""Fine."""\n')
    texts, damaged = items(folder, format="docstrings")
    assert texts == ["Fine."]
    assert {Path(item.file).name for item in damaged} == {"half.py", "deep.py"}


def test_exclude_does_not_see_the_folders_above_an_installation(tmp_path, monkeypatch):
    library = tmp_path / "tests" / "lib"
    for name in ("a.py", "test/b.py", "site-packages/c.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"'{name}'\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    monkeypatch.setattr("jaxthru.data.sources.files._stdlib", _stdlib.__wrapped__)
    recipe = Recipe.of(stdlib=True, suffixes=(".py",), exclude=("*/test/*", "*/tests/*"))
    found = collect("test", recipe, HashCache(tmp_path / "none.json"), frozenset())
    assert [file.path.name for file in found] == ["a.py"]


def test_packages_are_found_by_their_names_and_absent_ones_skipped(tmp_path):
    recipe = Recipe.of(
        packages=("numpy", "no-such-package", ""), suffixes=("/__init__.py",), exclude=("*/tests/*",)
    )
    found = collect("test", recipe, HashCache(tmp_path / "none.json"), frozenset())
    assert Path(np.__file__) in {file.path for file in found}


def found_of_package(folder: Path, monkeypatch, name: str, there: Iterable[str], record: str) -> set[str]:
    """Installs a package with these files of different contents, of which its list is `record`; returns those
    that a source of it has, below its folder."""
    about = folder / f"{name}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "RECORD").write_text(record)
    (folder / name).mkdir()
    for file in there:
        (folder / name / file).write_text(f"{file!r}\n")
    monkeypatch.syspath_prepend(str(folder))
    found = collect("test", Recipe.of(packages=(name,)), HashCache(folder / "none.json"), set())
    return {str(file.path.relative_to(folder / name)) for file in found}


def test_of_a_package_s_files_those_that_are_there_are_taken(tmp_path, monkeypatch):
    """Of an installation without compiled files, by its list: with quoted names, and one that is gone."""
    there = "a.txt", "b, c.txt", "a.pyc", "unlisted.txt"
    record = 'some/a.txt,,\n"some/b, c.txt",,\nsome/gone.txt,,\nsome/a.pyc,,\n\n'
    assert found_of_package(tmp_path, monkeypatch, "some", there, record) == {"a.txt", "b, c.txt"}


def test_of_a_package_without_a_list_its_module_s_files_are_taken(tmp_path, monkeypatch):
    assert found_of_package(tmp_path, monkeypatch, "bare", ["__init__.py"], "") == {"__init__.py"}
