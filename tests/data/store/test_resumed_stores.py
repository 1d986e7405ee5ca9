"""A run that goes on opens the stores that it began with, whatever has become of their sources."""

import shutil

import pytest

from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.runtime.errors import InputError


def test_changed_and_lost_sources_are_opened_by_their_keys(mix, tmp_path, capsys):
    folder = tmp_path / "store"
    first = open_stores(load_mix(str(mix)), folder)
    (tmp_path / "text" / "new.txt").write_text("another document\n")
    capsys.readouterr()
    again = open_stores(load_mix(str(mix)), folder, begun=first.keys)
    assert again.keys == first.keys and again.tokenizer.hash == first.tokenizer.hash
    assert "changed since the run was started: books;" in capsys.readouterr().err
    assert open_stores(load_mix(str(mix)), folder).keys["books"] != first.keys["books"]  # a new run
    shutil.rmtree(tmp_path / "text")
    lost = open_stores(load_mix(str(mix)), folder, False, first.keys)
    assert lost.keys == first.keys and lost.stores["books"].train.tokens == first.stores["books"].train.tokens
    with pytest.raises(InputError, match="source books: no files found"):
        open_stores(load_mix(str(mix)), folder)


def test_a_source_that_is_added_takes_the_runs_tokenizer(mix, tmp_path):
    folder = tmp_path / "store"
    first = open_stores(load_mix(str(mix)), folder)
    for number in range(20):
        (tmp_path / f"more-{number}.txt").write_text(f"an added source {number}\n" * 5)
    mix.write_text(mix.read_text() + '[sources.local_text]\npaths = ["more-*.txt"]\nweight = 1\n')
    again = open_stores(load_mix(str(mix)), folder, begun=first.keys)
    assert again.keys.items() > first.keys.items() and list(again.keys) == ["books", "notes", "local_text"]
    assert again.tokenizer.hash == first.tokenizer.hash


def test_a_store_that_is_gone_is_made_again_from_the_same_text(mix, tmp_path):
    folder = tmp_path / "store"
    first = open_stores(load_mix(str(mix)), folder)
    (tmp_path / "text" / "new.txt").write_text("another document\n")
    shutil.rmtree(first.stores["notes"].folder)
    again = open_stores(load_mix(str(mix)), folder, begun=first.keys)
    assert again.keys == first.keys


def test_without_their_tokenizer_stores_are_of_no_use(mix, tmp_path):
    folder = tmp_path / "store"
    first = open_stores(load_mix(str(mix)), folder)
    (tmp_path / "text" / "new.txt").write_text("another document\n")
    first.tokenizer.path.unlink()
    again = open_stores(load_mix(str(mix)), folder, begun=first.keys)
    assert again.keys["books"] != first.keys["books"]  # which the checkpoint's data state refuses
    shutil.rmtree(tmp_path / "text")
    for path in folder.glob("tokenizer-*.json"):
        path.unlink()
    with pytest.raises(InputError, match="source books: no files found, nor the tokenizer"):
        open_stores(load_mix(str(mix)), folder, begun=first.keys)
