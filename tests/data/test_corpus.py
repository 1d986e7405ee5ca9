"""A store's key: of all that decides what a recipe's files become, and of nothing else."""

import dataclasses
from pathlib import Path

import pytest
from formats import write

from jaxthru.data.corpus import Corpus
from jaxthru.data.files import File, HashCache, collect
from jaxthru.data.mix import ASIDE, FORMATS, Recipe
from jaxthru.data.readers import READERS, options, read, text
from jaxthru.data.transform import Transform

FILES = [File(Path(f"folder/{number}{end}"), 10, f"{number:064x}") for number, end in enumerate((".a", ".b"))]
CHOSEN = {"format": "tar", "text_key": "body", "extension": "md", "cap_bytes": 5, "max_record_bytes": 7}
UNTOUCHED = {
    "description": "other",
    "online": True,
    "max_damaged": 0.5,
    "stdlib": True,
    "packages": ("numpy",),
    "paths": ("*",),
    "suffixes": (".txt",),
    "exclude": ("a",),
    "max_file_bytes": 9,
}

KEYS = {  # as prepared stores have them since commit 5f41d4b
    "text": "c1470c784a7e861d72d7fab5a48986c334ef78f7a4b9d445b06ede028b038807",
    "docstrings": "e5874abfbeaa62241cd116c99a13f5cb5629e58d996019fdaf4e1b8dea3e7c4c",
    "jsonl": "25ad822d8514543148294ef2b5ab4bbd7f83fb2e2d1481f04d130379851ca585",
    "parquet": "d6d9d0be451b22f78671302bdb9f8197b54f054854a2ce7c6ecf37ab42d48d83",
    "tar": "2c0e0c509f7aba923f2f4a1b6d55fa8f03377ab690d58d766f48f4a1d8cc911d",
    "array_record": "03ff401d99980b0c2f17b9706ddbcf23f83863a532f3b42e62aa29835a05bccd",
    "chosen": "ad57e4b0e138fba52db2900062c99949ea1b5f63a57b8d8e8c9a52f98d4c49e6",
    "transformed": "f213184b7746f5f7ae4e4577c913922343535ce399cef1122441d8ffdf221cfe",
}


def key(recipe: Recipe) -> str:
    return Corpus("any", recipe, FILES).key


@pytest.mark.parametrize("format", FORMATS)
def test_prepared_stores_keep_their_keys(format):
    assert key(Recipe(format=format)) == KEYS[format]
    assert key(Recipe(format=format, **UNTOUCHED)) == KEYS[format]


def test_prepared_stores_of_other_options_keep_their_keys(tmp_path):
    assert key(Recipe(**CHOSEN)) == KEYS["chosen"]
    (tmp_path / "own.py").write_text("def lower(text):\n    return text.lower()\n")
    assert key(Recipe(transform=Transform("own:lower", str(tmp_path)))) == KEYS["transformed"]


def test_each_option_is_part_of_the_key_or_said_not_to_be():
    assert {*UNTOUCHED} == {*ASIDE}
    changed = CHOSEN | {"transform": Transform("x")}
    assert {field.name for field in dataclasses.fields(Recipe)} == {*ASIDE, *changed}
    for name, value in changed.items():
        assert key(dataclasses.replace(Recipe(), **{name: value})) != key(Recipe()), name


@dataclasses.dataclass(frozen=True)
class Longer(Recipe):
    """A recipe with one more option."""

    language: str = ""


def test_a_new_option_is_part_of_the_key_unless_only_other_formats_readers_read_it(monkeypatch):
    assert key(Longer()) != key(Longer(language="de")) != key(Longer(language="en"))

    def of_a_language(files, *, language: str, max_record_bytes: int):
        for item in text.read(files, max_record_bytes=max_record_bytes):
            yield item._replace(text=f"{language}: {item.text}")

    monkeypatch.setitem(READERS, "jsonl", of_a_language)
    assert key(Longer(format="jsonl")) != key(Longer(format="jsonl", language="de"))
    assert key(Longer(language="de")) == key(Recipe()), "the text reader does not read it"


def test_a_reader_is_given_the_options_that_it_declares(tmp_path, monkeypatch):
    write(tmp_path, "text", ["ein Satz"])
    recipe = Longer(format="jsonl", paths=(f"{tmp_path}/*",), language="de")
    files = collect("test", recipe, HashCache(tmp_path.parent / "none.json"), frozenset())
    given = []
    monkeypatch.setitem(READERS, "jsonl", lambda files, *, language: given.append(language) or iter(()))
    assert list(read(files, recipe)) == [] and given == ["de"]


@pytest.mark.parametrize("format", FORMATS)
def test_readers_declare_what_a_recipe_has(format):
    assert {*options(format)} <= {field.name for field in dataclasses.fields(Recipe)} - {*ASIDE}
