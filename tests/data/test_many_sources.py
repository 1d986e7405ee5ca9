"""As many sources as MegaScale-Data reports, through everything from files to batches."""

import json

import numpy as np

from jaxthru.data.loader import DataConfig, open_data

SOURCES = 306


def write_mix(folder) -> str:
    """Returns the path of a mix of sources of 1 to 9 records."""
    draw = np.random.default_rng(0)
    lines = ["held_out = 0", "[tokenizer]", "vocabulary = 260"]
    for number in range(SOURCES):
        words = (draw.integers(0, 99, draw.integers(1, 12)) for _ in range(1 + number % 9))
        records = (json.dumps({"text": f"{number}: {text}"}) + "\n" for text in words)
        (folder / f"{number}.jsonl").write_text("".join(records))
        lines += [f"[sources.s{number}]", 'recipe = "local_jsonl"', f'paths = ["{number}.jsonl"]']
        lines += [f"weight = {2 + number % 3}"]
    (folder / "many.toml").write_text("\n".join(lines))
    return str(folder / "many.toml")


def documents(batch, row: int) -> list[bytes]:
    """Returns the tokens of each document of a row."""
    segments, tokens = batch["segment_ids"][row], batch["tokens"][row]
    return [tokens[segments == number].tobytes() for number in range(1, segments.max() + 1)]


def test_every_document_of_every_source_once_an_epoch(tmp_path):
    data = open_data(DataConfig(write_mix(tmp_path), 64, "best_fit", str(tmp_path / "store")))
    given = [[] for _ in range(SOURCES)]  # of each source, the documents of each row
    with data.train_batches(((0, data.mixing),), seed=1, rows=512, steps=18) as batches:
        for batch in batches:
            for row, source in enumerate(batch["source"][:, 0]):
                given[source].append(documents(batch, row))
    for rows, (split, packing) in zip(given, data.train, strict=True):
        ends = split.ends.tolist()
        pairs = zip([0, *ends[:-1]], ends, strict=True)
        there = sorted(split.read(*pair).astype(np.int32).tobytes() for pair in pairs)
        epochs = len(rows) // packing.rows
        assert there and epochs >= 1
        for epoch in range(epochs):
            taken = rows[epoch * packing.rows : (epoch + 1) * packing.rows]
            assert sorted(document for row in taken for document in row) == there
