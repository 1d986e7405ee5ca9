"""Who reads what in the data benchmark: jaxthru, and Grain's own ways over the same stores and files.

Each function here is a contender: it opens what lies in the folder and yields batches for ever, dicts of
arrays of [rows, sequence] that have at least "tokens".
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import data_corpus as corpus
import data_transform
import grain
import numpy as np
import zstandard

from jaxthru.data.loading.dataset import open_data
from jaxthru.data.store.token_store import TokenStore
from jaxthru.data.store.tokenizer import Tokenizer

Batches = Iterator[dict[str, np.ndarray]]
ROWS, SEQUENCE = 64, 2048
HEAVY_ROWS, HEAVY_SEQUENCE = 8, 8192
FOREVER = 10**9
COST = (12 * 4096, 1)
"""What tokens cost beside token² of documents, in a model of width 4,096."""
BINS = 64
"""Rows that Grain's first-fit packer has open at once."""
SHORT = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
"""Reads ahead as much as the rate asked for needs, in place of Grain's 16 threads and 500 records."""


def jaxthru(folder: Path, mix: str, rows: int, sequence: int, **settings) -> Batches:
    """Planned, packed, balanced rows with segment ids, positions and loss mask."""
    data = open_data(corpus.config(folder, mix, sequence, **settings), prepare=False)
    with data.train_batches(((0, data.mixture),), seed=0, rows=rows, steps=FOREVER, cost=COST) as batches:
        yield from batches


class Rows:
    """A Grain source: the rows of a token store, cut from its stream."""

    def __init__(self, store: TokenStore, sequence: int):
        self.split, self.sequence = store.train, sequence

    def __len__(self) -> int:
        return self.split.tokens // self.sequence

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        begin = index * self.sequence
        return {"tokens": self.split.read(begin, begin + self.sequence)}


class Documents:
    """A Grain source: the documents of a token store."""

    def __init__(self, store: TokenStore, sequence: int):
        self.split = store.train
        self.starts = np.concatenate([[0], self.split.ends[:-1]]).tolist()
        self.ends = self.split.ends.tolist()

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.split.read(self.starts[index], self.ends[index])}


class Records:
    """A Grain source: the records of a .jsonl.zst whose frames are known, read by each worker for itself."""

    def __init__(self, path: Path):
        self.path, self.frames = path, np.load(path.with_suffix("").with_suffix(".frames.npy"))
        self.file = None

    def __len__(self) -> int:
        return len(self.frames) - 1

    def __getitem__(self, index: int) -> dict[str, str]:
        begin, end = self.frames[index : index + 2].tolist()
        if self.file is None:
            self.file = np.memmap(self.path, np.uint8, mode="r")
        frame = self.file[begin:end]
        return json.loads(zstandard.ZstdDecompressor().decompress(frame))

    def __getstate__(self) -> dict:
        return self.__dict__ | {"file": None}  # workers map it anew


class Tokenize:
    """Texts to tokens, as a `map` of Grain; opened by each worker for itself."""

    def __init__(self, folder: Path):
        self.path, self.tokenizer = folder / "tokenizer.json", None

    def __call__(self, record: dict[str, str]) -> dict[str, np.ndarray]:
        if self.tokenizer is None:
            self.tokenizer = Tokenizer(self.path)
        return {"tokens": self.tokenizer.encode([record["text"]])[0]}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"tokenizer": None}


def stores(folder: Path, mix: str, sequence: int) -> list[TokenStore]:
    data = open_data(corpus.config(folder, mix, sequence), prepare=False)
    return list(data.prepared.stores.values())


def grain_default(folder: Path, mix: str, element: type) -> Batches:
    """source → shuffle → mix → to_iter_dataset → batch, as Grain's guide has it, over the same stores."""
    found = (element(store, SEQUENCE) for store in stores(folder, mix, SEQUENCE))
    sources = [
        grain.MapDataset.source(source).shuffle(seed=number).repeat()
        for number, source in enumerate(found)
        if len(source)  # Grain refuses one without
    ]
    return iter(grain.MapDataset.mix(sources).to_iter_dataset().batch(ROWS))


def grain_packed(folder: Path, mix: str, packer: Callable) -> Batches:
    """Documents through one of Grain's packers; int32, segment ids and positions as jaxthru's."""
    sources = [
        grain.MapDataset.source(Documents(store, SEQUENCE)).shuffle(seed=number).repeat()
        for number, store in enumerate(stores(folder, mix, SEQUENCE))
    ]
    documents = grain.MapDataset.mix(sources).to_iter_dataset()
    if packer is grain.experimental.FirstFitPackIterDataset:
        # It refuses what is longer than a row, so documents are cut, as those who use it do.
        documents = grain.experimental.FlatMapIterDataset(documents, Cut())
        packed = packer(documents, length_struct={"tokens": SEQUENCE}, num_packing_bins=BINS)
    else:
        packed = packer(documents, length_struct={"tokens": SEQUENCE})
    return iter(packed.batch(ROWS))


class Cut(grain.experimental.FlatMapTransform):
    """Documents cut into pieces that fit a row."""

    max_fan_out = 10_000

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        tokens = element["tokens"]
        return [{"tokens": tokens[at : at + SEQUENCE]} for at in range(0, len(tokens), SEQUENCE)]


def heavy_sources(folder: Path) -> list[grain.MapDataset]:
    return [
        grain.MapDataset.source(Records(path)).shuffle(seed=number).repeat()
        for number, path in enumerate(sorted((folder / "heavy").glob("*.zst")))
    ]


def heavy_rows(mixed: grain.IterDataset, folder: Path, workers: int) -> Batches:
    packed = grain.experimental.ConcatThenSplitIterDataset(
        mixed.map(Tokenize(folder)), length_struct={"tokens": HEAVY_SEQUENCE}
    )
    return iter(packed.batch(HEAVY_ROWS).mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))


def grain_iterators(folder: Path, workers: int, reading: grain.ReadOptions | None = None) -> Batches:
    """MaxText's way: an iterator for each source, with its threads and buffer, mixed in each worker."""
    iterators = [source.to_iter_dataset(reading) for source in heavy_sources(folder)]
    return heavy_rows(grain.IterDataset.mix(iterators), folder, workers)


def grain_map_mix(folder: Path, workers: int, reading: grain.ReadOptions | None = None) -> Batches:
    """Mixed first: one iterator in each worker."""
    return heavy_rows(grain.MapDataset.mix(heavy_sources(folder)).to_iter_dataset(reading), folder, workers)


class Page:
    """A page in a row of its own, padded."""

    def __call__(self, record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tokens = record["tokens"]
        row, segment_ids = np.zeros((2, corpus.PAGE), np.int32)
        row[: len(tokens)], segment_ids[: len(tokens)] = tokens, 1
        return {"tokens": row, "segment_ids": segment_ids}


def slowly(record: dict[str, str]) -> dict[str, str]:
    return record | {"text": data_transform.slow(record["text"])}


def grain_pages(folder: Path, workers: int, slow_alone: bool = False) -> Batches:
    """Nine fast samples, read from a token store, to a slow one, tokenised on the fly.

    workers: processes, 0 for the threads of this one alone. slow_alone: they read the slow source only.
    """
    store = stores(folder, "pages", corpus.PAGE)[0]
    fast = grain.MapDataset.source(Documents(store, corpus.PAGE)).shuffle(seed=0).repeat()
    slow = grain.MapDataset.source(Records(folder / "pages" / "001.jsonl.zst")).shuffle(seed=1).repeat()
    slow, weights = slow.map(slowly).map(Tokenize(folder)), [0.9, 0.1]
    processes = grain.MultiprocessingOptions(num_workers=workers)
    if slow_alone:
        slow = slow.map(Page()).to_iter_dataset().mp_prefetch(processes)
        mixed = grain.IterDataset.mix([fast.map(Page()).to_iter_dataset(), slow], weights=weights)
        return iter(mixed.batch(ROWS))
    rows = grain.MapDataset.mix([fast, slow], weights=weights).map(Page()).to_iter_dataset().batch(ROWS)
    return iter(rows.mp_prefetch(processes) if workers else rows)


def contenders() -> dict[str, Callable[[Path], Batches]]:
    """Returns all that this file holds, by name."""
    found = {}
    for number in corpus.SOURCES:
        mix = f"documents_{number}"
        own = partial(jaxthru, mix=mix, rows=ROWS, sequence=SEQUENCE)
        found[f"packed/{number}/jaxthru"] = own
        found[f"packed/{number}/jaxthru-best-fit"] = partial(own, packing="best_fit")
        found[f"packed/{number}/grain"] = partial(grain_default, mix=mix, element=Rows)
        for name, packer in (
            ("grain-first-fit", grain.experimental.FirstFitPackIterDataset),
            ("grain-concat-split", grain.experimental.ConcatThenSplitIterDataset),
        ):
            found[f"packed/{number}/{name}"] = partial(grain_packed, mix=mix, packer=packer)
    heavy = {"rows": HEAVY_ROWS, "sequence": HEAVY_SEQUENCE}
    found["heavy/jaxthru"] = partial(jaxthru, mix="heavy_online", **heavy)
    found["heavy/jaxthru-mapped"] = partial(jaxthru, mix="heavy", **heavy)
    for name, way in (("iterators", grain_iterators), ("map-mix", grain_map_mix)):
        found[f"heavy/grain-{name}"] = partial(way, workers=4)
        found[f"heavy/grain-{name}-short-4"] = partial(way, workers=4, reading=SHORT)
        found[f"heavy/grain-{name}-short"] = partial(way, workers=1, reading=SHORT)
    pages = {"rows": ROWS, "sequence": corpus.PAGE, "packing": "best_fit", "loaders": 2}
    found["slow/jaxthru"] = partial(jaxthru, mix="pages", **pages)
    found["slow/grain"] = partial(grain_pages, workers=0)
    found["slow/grain-mp-prefetch"] = partial(grain_pages, workers=2)
    found["slow/grain-mp-slow"] = partial(grain_pages, workers=2, slow_alone=True)
    return found
