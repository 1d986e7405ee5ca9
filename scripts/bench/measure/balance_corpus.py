"""Text in documents of heavy-tailed length, for steps whose rows differ in what they cost."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_corpus
import numpy as np
from measure import balance

from jaxthru.data.store import tokenizer

LENGTHS = "lognormal(6, 2)"


def make(folder: Path, tokens: int, sequence: int, vocabulary: int) -> Path:
    """Makes the corpus if it is missing; returns its mix. Documents are pieces of the standard library."""
    sizes = sequence, tokens, vocabulary
    own = folder / "_".join(map(str, sizes))
    return data_corpus.once(own, lambda folder: write(folder, *sizes)) / "mix.toml"


def write(folder: Path, sequence: int, tokens: int, vocabulary: int) -> None:
    text = "\n".join(data_corpus.library(4 * tokens))
    sample = data_corpus.chunks([text[:4_000_000]], 4096)
    tokenizer.train(iter(sample), vocabulary, folder / "tokenizer.json")
    encoded = tokenizer.Tokenizer(folder / "tokenizer.json").encode(sample[:200])
    characters = sum(map(len, sample[:200])) / sum(map(len, encoded))  # of a token
    lengths = balance.lengths(LENGTHS, tokens, sequence)
    with (folder / "documents.jsonl").open("w") as file:
        for piece in pieces(text, lengths * characters):
            file.write(json.dumps({"text": piece}) + "\n")
    data_corpus.write_mix(folder, "mix", {"documents": {"paths": ["documents.jsonl"]}})


def pieces(text: str, characters: np.ndarray) -> Iterator[str]:
    """Yields pieces of the text of these lengths, one behind the other and from the start again."""
    at = 0
    for size in np.maximum(characters, 1).astype(int).tolist():
        piece = text[at : at + size]
        while len(piece) < size:
            piece += text[: size - len(piece)]
        yield piece
        at = (at + size) % len(text)
