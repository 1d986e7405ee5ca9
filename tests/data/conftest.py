"""Mixes over a small corpus."""

import random
from pathlib import Path

import pytest
from corpus import MIX, sentences, write_corpus

from jaxthru.data.store.tokenizer import Tokenizer, train


@pytest.fixture
def mix(tmp_path) -> Path:
    """The path of a mix of two sources, beside its corpus."""
    write_corpus(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(MIX)
    return path


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> tuple[Path, Path]:
    """The path of such a mix and of a store that tests may fill but not harm."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    (folder / "small.toml").write_text(MIX)
    return folder / "small.toml", folder / "store"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Of 300 tokens, trained on such a corpus."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    draw = random.Random(0)
    train((sentences(draw, 20) for _ in range(20)), 300, path)
    return Tokenizer(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty folder for a corpus."""
    (tmp_path / "corpus").mkdir()
    return tmp_path / "corpus"
