"""The text that the data benchmark reads: the standard library's source, in the shapes that its rows need.

    FOLDER/documents/*.jsonl.zst   306 files of whole documents: mixes of 5, 35 and 306 sources
    FOLDER/heavy/*.jsonl.zst       100 sources of records of 32 KiB
    FOLDER/pages/*.jsonl.zst       two sources of texts that each fill more than half of a short row
    FOLDER/<name>.toml             the mixes
    FOLDER/store                   what jaxthru makes of them, once

Each record is a zstd frame of its own, and `*.frames.npy` says where each begins: any reader of .zst takes
the files from front to back, and Grain, which wants its sources indexed, can fetch any record.
"""

import ast
import contextlib
import functools
import io
import itertools
import json
import math
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import slow_transform

from jaxthru.data.loading.dataset import DataConfig, open_data, prepare_data
from jaxthru.data.store import tokenizer

NO_PROGRAMS = ("test", "tests", "idle_test", "site-packages", "lib2to3")
SOURCES = (5, 35, 306)
HEAVY_SOURCES, HEAVY_BYTES = 100, 1 << 15
PAGE = 512
"""Tokens of a row of pages. Each page has more than half of that, so that a row holds one: one sample."""
PAGES = 4000
VOCABULARY = 8192
HEAVY_RECORDS = 60
"""In each heavy source. Readers repeat them: what is measured is the reading, not the text."""

KEYS = "keys.json"
"""{source: key of its store}, by which any process opens them."""


def make(folder: Path, quick: bool) -> None:
    """Makes what is missing; quick: a small corpus, of pieces of files."""
    once(folder, functools.partial(make_all, quick=quick))


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns the folder, made at the first call."""
    if not (folder / "made").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
        (folder / "made").touch()
    return folder


def make_all(folder: Path, quick: bool) -> None:
    texts = chunks(library(1_500_000), 2000) if quick else list(library(40_000_000))
    tokenizer.train(iter(texts[: len(texts) // 8]), VOCABULARY, folder / "tokenizer.json")
    by_size = sorted(texts, key=len, reverse=True)  # so that each source has a long one
    write(folder / "documents", (by_size[number :: SOURCES[-1]] for number in range(SOURCES[-1])))
    sources = write_heavy(folder, texts, quick, HEAVY_RECORDS)
    write(folder / "pages", pages(texts, folder / "tokenizer.json", PAGES // 20 if quick else PAGES))
    write_mixes(folder, sources)
    long = (*(f"documents_{number}" for number in SOURCES), "heavy", "heavy_online")
    for name, sequence in (*((name, 2048) for name in long), ("pages", PAGE)):
        print(f"preparing {name}", file=sys.stderr, flush=True)
        with contextlib.redirect_stderr(io.StringIO()):  # hundreds of sources, each with its line
            open_data(config(folder, name, sequence))


def write_heavy(folder: Path, texts: list[str], quick: bool, records: int) -> int:
    """Writes the heavy sources, of so many records each; returns how many sources there are."""
    pieces = itertools.cycle(chunks(texts, HEAVY_BYTES // 8 if quick else HEAVY_BYTES))
    sources = 3 if quick else HEAVY_SOURCES
    heavy = (list(itertools.islice(pieces, 2 if quick else records)) for _ in range(sources))
    write(folder / "heavy", heavy)
    return sources


def make_heavy(folder: Path, quick: bool, sequence: int) -> None:
    """Makes the heavy sources alone, with the keys of their stores in KEYS. sequence: of the rows."""

    def make(folder: Path) -> None:
        texts = chunks(library(1_500_000), 2000) if quick else list(library(40_000_000))
        tokenizer.train(iter(texts[: len(texts) // 8]), VOCABULARY, folder / "tokenizer.json")
        write_heavy_mixes(folder, write_heavy(folder, texts, quick, HEAVY_RECORDS // 3))
        with contextlib.redirect_stderr(io.StringIO()):
            keys = prepare_data(config(folder, "heavy_online", sequence))
        (folder / KEYS).write_text(json.dumps(keys))

    once(folder, make)


def config(folder: Path, mix: str, sequence: int, **settings) -> DataConfig:
    """Returns how jaxthru reads one of the mixes."""
    return DataConfig(
        mix=str(folder / f"{mix}.toml"), sequence=sequence, store=str(folder / "store"), **settings
    )


def library(most: float, skipped: Collection[str] = ("site-packages",)) -> Iterator[str]:
    """Yields modules of the standard library, at most so many bytes, none twice. skipped: folders."""
    root, seen = Path(sysconfig.get_paths()["stdlib"]), set()
    for path in sorted(root.rglob("*.py")):
        if not set(skipped).isdisjoint(path.relative_to(root).parts):
            continue
        content = path.read_bytes()
        if content in seen:
            continue
        seen.add(content)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # a test file in another encoding
        most -= len(content)
        if most < 0:
            return
        if text.strip():
            yield text


def chunks(texts: Iterable[str], size: int) -> list[str]:
    """Returns the texts end to end, in records of `size` characters; whole ones only."""
    whole = "\n".join(texts)
    return [whole[at : at + size] for at in range(0, len(whole) - size, size)]


def functions(folder: Path) -> None:
    """Writes functions and classes of the standard library, a document each, and their mix.

    Definition by definition is how corpora of code are often cut. Rows of 8,192 tokens then hold about as
    many documents as rows of web text do, where the files of the quickstart's mix fill most of a row each.
    """
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    with (folder / "functions.jsonl").open("w", encoding="utf-8") as file:
        for text in library(math.inf, NO_PROGRAMS):
            with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's files
                nodes = [node for node in ast.parse(text).body if isinstance(node, kinds)]
            for node in nodes:
                file.write(json.dumps({"text": ast.get_source_segment(text, node)}) + "\n")
    own = "held_out = 0.05\n[tokenizer]\nvocabulary = 8192"
    write_mix(folder, "mix", {"local_jsonl": {"paths": ["functions.jsonl"]}}, own)


def pages(texts: list[str], path: Path, count: int) -> list[list[str]]:
    """Returns two sources of `count` texts whose tokens, the end counted, fill over half of a row of PAGE."""
    found = []
    encoder = tokenizer.Tokenizer(path)
    for part in itertools.batched(itertools.cycle(chunks(texts, 1100)), 1000):
        for text, ids in zip(part, encoder.encode(list(part)), strict=True):
            if PAGE // 2 < len(ids) <= PAGE:
                found.append(f"{text}#{len(found)}"[-len(text) :])  # none the same: jaxthru keeps one of such
        if len(found) >= 2 * count:
            break
    return [found[:count], found[count : 2 * count]]


def write(folder: Path, sources: Iterable[list[str]]) -> None:
    """Writes one file a source, and where its records begin."""
    import zstandard  # here, for not all that need a corpus need this

    folder.mkdir(exist_ok=True)
    compressor = zstandard.ZstdCompressor()
    for number, texts in enumerate(sources):
        frames = [compressor.compress(json.dumps({"text": text}).encode() + b"\n") for text in texts]
        (folder / f"{number:03}.jsonl.zst").write_bytes(b"".join(frames))
        np.save(folder / f"{number:03}.frames.npy", np.cumsum([0, *map(len, frames)]))


def write_mixes(folder: Path, heavy_sources: int) -> None:
    """Writes the mixes. A mix of documents is the same text whatever the number of its sources."""
    for number in SOURCES:
        files = [range(source, SOURCES[-1], number) for source in range(number)]
        sources = {f"d{number}_{at}": paths("documents", part) for at, part in enumerate(files)}
        write_mix(folder, f"documents_{number}", sources)
    write_heavy_mixes(folder, heavy_sources)
    fast, slow = paths("pages", [0]), paths("pages", [1])
    write_mix(folder, "pages", {"fast": {**fast, "weight": 9}, "slow": slow | slowed(folder)})


def write_heavy_mixes(folder: Path, sources: int) -> None:
    """Writes the mixes of the heavy sources."""
    heavy = {f"h{number}": paths("heavy", [number]) for number in range(sources)}
    write_mix(folder, "heavy", heavy)
    write_mix(folder, "heavy_online", {name: keys | {"online": True} for name, keys in heavy.items()})


def slowed(folder: Path) -> dict[str, Any]:
    """Returns the keys of a source whose texts cost time while they are read (see `slow_transform`)."""
    shutil.copy(slow_transform.__file__, folder)
    return {"online": True, "transform": "slow_transform:slow"}


def paths(kind: str, numbers: Iterable[int]) -> dict[str, list[str]]:
    return {"paths": [f"{kind}/{number:03}.jsonl.zst" for number in numbers]}


OWN = 'tokenizer = "tokenizer.json"\nheld_out = 0.0'


def write_mix(folder: Path, mix: str, sources: dict[str, dict], own: str = OWN) -> None:
    """Writes a mix of sources with these keys. own: the mix's keys."""
    lines = [own]
    for name, keys in sources.items():
        keys = {"recipe": "local_jsonl", "weight": 1, **keys}
        lines += [f"[sources.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    (folder / f"{mix}.toml").write_text("\n".join(lines) + "\n")
