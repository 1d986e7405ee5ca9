"""The conversations of the package chitchat-dataset, of which the tests make one of the same form."""

import json
from pathlib import Path

import pytest

from jaxthru.data.sources import files
from jaxthru.data.sources.files import HashCache, collect
from jaxthru.data.sources.readers import chitchat
from jaxthru.data.sources.recipes import REPOSITORY, Recipe
from jaxthru.data.sources.record import Damage
from jaxthru.data.sources.toml_file import read_toml
from jaxthru.runtime.errors import InputError


def turn(sender: str, *lines: str) -> list[dict]:
    return [{"text": line, "sender": sender, "timestamp": "2018-05-02T19:38:15Z"} for line in lines]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an installed chitchat-dataset of some content, and returns its recipe and its file."""
    file = tmp_path / "chitchat_dataset" / "dataset.json"
    about = tmp_path / "chitchat_dataset-0.9.0.dist-info"
    about.mkdir()
    file.parent.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: chitchat-dataset\nVersion: 0.9.0\n")
    (about / "RECORD").write_text("chitchat_dataset/__init__.py,,\nchitchat_dataset/dataset.json,,\n")
    (file.parent / "__init__.py").write_text("raise RuntimeError('nothing of a package is run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    files._package.cache_clear()

    def make(content) -> tuple[Recipe, Path]:
        file.write_text(json.dumps(content))
        keys = read_toml(REPOSITORY / "sources" / "chitchat" / "source.toml")
        lists = {key: tuple(value) for key, value in keys.items() if isinstance(value, list)}
        return Recipe.of(**keys | lists), file

    yield make
    files._package.cache_clear()


def read(recipe: Recipe, tmp_path: Path) -> list:
    [file] = collect("chitchat", recipe, HashCache(tmp_path / "hashes.json"), frozenset())
    return list(chitchat.read([file], recipe.options))


def test_who_speaks_first_is_the_user_and_lines_are_one_message(package, tmp_path):
    hello = [turn("a", "Hello", "How are you? "), turn("b", "Fine"), turn("a", " "), turn("b", "And you?")]
    recipe, _ = package({"x": {"messages": hello}, "y": {"messages": [turn("c", "Anyone?")]}})
    assert recipe.records == "conversations"
    first, second = read(recipe, tmp_path)
    assert json.loads(first.text)["messages"] == [
        {"role": "user", "content": "Hello\nHow are you?"},
        {"role": "assistant", "content": "Fine\nAnd you?"},
    ]
    assert json.loads(second.text)["messages"] == [{"role": "user", "content": "Anyone?"}]
    assert first.place.position == "conversation x"


def test_pairs_reject_what_was_said_in_the_conversation_before(package, tmp_path):
    first = [turn("a", "Hello"), turn("b", "Hi"), turn("a", "Bye")]
    second = [turn("c", "Who are you?"), turn("d", "Nobody")]
    package({"x": {"messages": first}, "y": {"messages": [turn("e", "?")]}, "z": {"messages": second}})
    keys = read_toml(REPOSITORY / "sources" / "chitchat_pairs" / "source.toml")
    lists = {key: tuple(value) for key, value in keys.items() if isinstance(value, list)}
    recipe = Recipe.of(**keys | lists)
    assert recipe.records == "pairs" and recipe.options.unit == 2
    (found,) = read(recipe, tmp_path)
    question = {"role": "user", "content": "Who are you?"}
    answers = {side: json.loads(found.text)[side] for side in ("chosen", "rejected")}
    assert answers["chosen"]["messages"] == [question, {"role": "assistant", "content": "Nobody"}]
    assert answers["rejected"]["messages"] == [question, {"role": "assistant", "content": "Hi"}]


def test_what_is_no_conversation_is_damage(package, tmp_path):
    content = {"a": {"messages": [[{"text": "no sender"}]]}, "b": {}, "c": {"messages": []}, "d": 3}
    content["number"] = {"messages": [[{"text": 5, "sender": "a"}]]}
    content["long"] = {"messages": [turn("a", "x" * 200), turn("b", "y")]}
    recipe, file = package(content)
    recipe = Recipe.of(
        packages=recipe.packages, suffixes=recipe.suffixes, format="chitchat", max_record_bytes=99
    )
    found = read(recipe, tmp_path)
    assert len(found) == 6 and all(isinstance(each, Damage) for each in found)
    assert found[0] == (str(file), "conversation a", "no messages of utterances with 'text' and 'sender'")
    assert found[5].reason == "longer than max_record_bytes = 99"
    file.write_text("[1, 2]")
    assert read(recipe, tmp_path)[0].reason == "no JSON object of conversations"
    file.write_text("{")
    assert read(recipe, tmp_path)[0].reason == "not valid JSON"


def test_a_package_that_is_missing_is_named(tmp_path):
    files._package.cache_clear()
    recipe = Recipe.of(format="chitchat", packages=("chitchat-data-of-nobody",))
    with pytest.raises(InputError) as caught:
        read(recipe, tmp_path)
    why = "needs a package that is not installed: python -m pip install chitchat-data-of-nobody"
    assert str(caught.value) == f"source chitchat: {why}"
