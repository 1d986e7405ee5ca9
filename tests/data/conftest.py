"""A small corpus of real shape: text files, jsonl and a Python package, with a mix of its own."""

import json
import random
from pathlib import Path

import pytest

WORDS = "the a store row token of and to in is shard block step seed mix plan gather kernel mesh lower".split()


def sentences(draw: random.Random, count: int) -> str:
    lines = (" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(count))
    return ".\n".join(lines) + ".\n"


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> None:
    """Writes folder/text/*.txt and folder/records.jsonl."""
    draw = random.Random(seed)
    (folder / "text").mkdir(parents=True)
    for number in range(documents):
        (folder / "text" / f"{number}.txt").write_text(sentences(draw, draw.randint(1, 30)))
    records = ({"text": sentences(draw, draw.randint(1, 10)), "id": number} for number in range(documents))
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


MIX = """
held_out = 0.2
[tokenizer]
vocabulary = 300
[sources.books]
recipe = "local_text"
paths = ["text/*.txt"]
weight = 3
[sources.notes]
recipe = "local_jsonl"
paths = ["*.jsonl"]
weight = 1
"""


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
