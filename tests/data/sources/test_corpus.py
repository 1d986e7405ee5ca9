"""A store's key: of all that decides what a recipe's files become, and of nothing else."""

import dataclasses
import inspect
import sys
from pathlib import Path

import pytest
from formats import write

from jaxthru.data.sources import readers, record
from jaxthru.data.sources.corpus import Corpus
from jaxthru.data.sources.documents import read
from jaxthru.data.sources.files import File, HashCache, collect
from jaxthru.data.sources.readers import FORMATS
from jaxthru.data.sources.recipes import ASIDE, Recipe
from jaxthru.data.sources.transforms import Transform
from jaxthru.data.store.mix_file import load_mix
from jaxthru.runtime.errors import InputError

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


@pytest.mark.parametrize("format", sorted({*FORMATS} & {*KEYS}))
def test_prepared_stores_keep_their_keys(format):
    assert key(Recipe.of(format=format)) == KEYS[format]
    assert key(Recipe.of(format=format, **UNTOUCHED)) == KEYS[format]


def test_prepared_stores_of_other_options_keep_their_keys(tmp_path):
    assert key(Recipe.of(**CHOSEN)) == KEYS["chosen"]
    (tmp_path / "own.py").write_text("def lower(text):\n    return text.lower()\n")
    assert key(Recipe.of(transform=Transform("own:lower", str(tmp_path)))) == KEYS["transformed"]


def test_each_key_is_part_of_a_store_s_key_or_said_not_to_be():
    assert {*UNTOUCHED} == {*ASIDE}
    changed = CHOSEN | {"transform": Transform("x"), "records": "pairs"}
    own = {field.name for field in dataclasses.fields(Recipe)}
    assert own == {*ASIDE, "format", "cap_bytes", "transform", "options"}
    tar = {field.name for field in dataclasses.fields(readers.options_of("tar"))}
    assert {*changed} == {"format", "cap_bytes", "transform", *tar}
    for name, value in changed.items():
        assert (
            key(Recipe.of(**{"format": "tar", name: value})) != key(Recipe.of(format="tar"))
            or name == "format"
        )
    assert len({key(Recipe.of(format=format)) for format in FORMATS}) == len(FORMATS)


@pytest.fixture
def german(tmp_path, monkeypatch):
    """One more format, made of one file in the folder of readers, with an option of its own."""
    monkeypatch.setattr(readers, "__path__", [*readers.__path__, str(tmp_path)])
    monkeypatch.setattr(readers, "FORMATS", (*FORMATS, "german"))
    (tmp_path / "german.py").write_text(
        "import dataclasses\n"
        "from jaxthru.data.sources import record\n"
        "from jaxthru.data.sources.readers import text\n"
        "from jaxthru.runtime.errors import require\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Options(record.Options):\n"
        "    language: str = ''\n"
        "    def __post_init__(self):\n"
        "        require(self.language != 'xx', f'language = {self.language!r}: is none')\n"
        "def read(files, options):\n"
        "    for item in text.read(files, options):\n"
        "        yield item._replace(text=f'{options.language}: {item.text}')\n"
    )
    yield "german"
    sys.modules.pop("jaxthru.data.sources.readers.german", None)


def test_a_new_format_is_one_file_and_its_options_are_part_of_the_key(german, tmp_path):
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts", "text", ["ein Satz"])
    recipe = Recipe.of(format=german, paths=(f"{tmp_path}/texts/*",), language="de")
    files = collect("test", recipe, HashCache(tmp_path / "none.json"), frozenset())
    assert [item.text for item in read(files, recipe)] == ["de: ein Satz"]
    keys = {key(Recipe.of(format=german, language=language)) for language in ("", "de", "en")}
    assert len(keys) == 3
    with pytest.raises(TypeError):
        Recipe.of(format="text", language="de")


def test_a_mix_names_the_options_of_a_new_format(german, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxthru.data.sources.recipes.FORMATS", readers.FORMATS)
    source = "[sources.a]\nrecipe = 'local_text'\npaths = ['*']\nweight = 1\nformat = '{}'\nlanguage = '{}'\n"

    def recipe(*values: str) -> Recipe:
        (tmp_path / "m.toml").write_text(source.format(*values))
        return load_mix(str(tmp_path / "m.toml")).recipes["a"]

    assert recipe("german", "de").options.language == "de"
    with pytest.raises(InputError, match=r"sources\.a\.language = 'xx': is none$"):
        recipe("german", "xx")
    with pytest.raises(InputError, match=r"language = 'de': is read with format = 'german', not"):
        recipe("text", "de")


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_s_file_has_its_options_and_its_reader(format):
    module = readers.reader(format)
    assert issubclass(module.Options, record.Options)
    assert list(inspect.signature(module.read).parameters) == ["files", "options"]
