"""Mixes over a small corpus."""

from pathlib import Path

import pytest
from corpus import MIX, write_corpus


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


@pytest.fixture
def folder(tmp_path) -> Path:
    """An empty folder for a corpus."""
    (tmp_path / "corpus").mkdir()
    return tmp_path / "corpus"
