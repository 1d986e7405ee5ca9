"""A small corpus of two kinds of real files, and its mix: `from corpus import sides, write_corpus`."""

import hashlib
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


def write_small_sources(mix: Path, count: int) -> None:
    """Adds sources s0, s1, ... to a mix, of six to nine records each, beside it in small-<number>.jsonl."""
    tables = []
    for number in range(count):
        draw = random.Random(number)
        records = (json.dumps({"text": sentences(draw, 2)}) + "\n" for _ in range(draw.randint(6, 9)))
        (mix.parent / f"small-{number}.jsonl").write_text("".join(records))
        paths = f'recipe = "local_jsonl"\npaths = ["small-{number}.jsonl"]\nweight = 1\n'
        tables.append(f"[sources.s{number}]\n{paths}")
    mix.write_text(mix.read_text().replace("*.jsonl", "records.jsonl") + "".join(tables))


def sides(folder: Path, share: float = 0.2) -> dict[str, dict[str, list[str]]]:
    """Returns {source: {split: texts}} of such a corpus by docs/data.md's rule, and by no code of jaxthru's:
    the hash of the text decides."""
    lines = (folder / "records.jsonl").read_text().splitlines()
    texts = {
        "books": [path.read_bytes().decode() for path in (folder / "text").glob("*.txt")],
        "notes": [json.loads(line)["text"] for line in lines],
    }
    found = {}
    for source, documents in texts.items():
        found[source] = {"train": [], "held_out": []}
        for text in documents:
            last = hashlib.sha256(text.encode()).digest()[-8:]  # the first bytes order the files
            split = "held_out" if int.from_bytes(last, "big") / 2**64 < share else "train"
            found[source][split].append(text)
    return found
