"""A small corpus of two kinds of real files, and its mix: `from corpus import write_corpus`."""

import json
import random
from pathlib import Path

WORDS = (
    *("the", "a", "store", "row", "token", "of", "and", "to", "in", "is"),
    *("shard", "block", "step", "seed", "mix", "plan", "gather", "kernel", "mesh", "lower"),
)

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
