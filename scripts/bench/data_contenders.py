"""Who reads what in the data benchmarks: jaxthru, and Grain's own ways over the same stores and files.

Each reader opens what lies in a folder of `data_corpus` and yields batches for ever, dicts of arrays of
[rows, sequence] that have at least "tokens".
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import data_corpus as corpus
import grain
import numpy as np
import slow_transform
import zstandard

from jaxthru.data.loading.dataset import open_data
from jaxthru.data.loading.host_client import Host
from jaxthru.data.loading.host_pool import HostData
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


def jaxthru(folder: Path, mix: str, rows: int = ROWS, sequence: int = SEQUENCE, **settings) -> Batches:
    """Planned, packed, balanced rows with segment ids, positions and loss mask."""
    data = open_data(corpus.config(folder, mix, sequence, **settings), prepare=False)
    with data.train_batches(((0, data.mixture),), seed=0, rows=rows, steps=FOREVER, cost=COST) as batches:
        yield from batches


def jaxthru_host(
    folder: Path, rows: int, sequence: int, trainer: int, trainers: int, host: str, **settings
) -> Batches:
    """The rows of one of several training processes, which have one data server; one alone has none."""
    config = corpus.config(folder, "heavy_online", sequence, **settings)
    keys = json.loads((folder / corpus.KEYS).read_text())
    cores = sorted(os.sched_getaffinity(0))
    alone = trainers == 1
    data = (
        open_data(config, prepare=False, begun=keys)
        if alone
        else HostData(Host(host, trainers, cores), config, keys)
    )
    asked = {"seed": 0, "rows": rows * trainers, "steps": FOREVER, "cost": COST}
    local = slice(trainer * rows, (trainer + 1) * rows)
    with data, data.train_batches(((0, data.mixture),), **asked, local_rows=local) as batches:
        yield from batches


class Rows:
    """A Grain source: the rows of a token store, cut from its stream."""

    def __init__(self, store: TokenStore):
        self.split = store.train

    def __len__(self) -> int:
        return self.split.tokens // SEQUENCE

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        begin = index * SEQUENCE
        return {"tokens": self.split.read(begin, begin + SEQUENCE)}


class Documents:
    """A Grain source: the documents of a token store."""

    def __init__(self, store: TokenStore):
        self.split = store.train
        self.bounds = [0, *self.split.ends.tolist()]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.split.read(*self.bounds[index : index + 2])}


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
        return json.loads(zstandard.ZstdDecompressor().decompress(self.file[begin:end]))

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


def slowly(record: dict[str, str]) -> dict[str, str]:
    """The slow transform as a `map` of Grain."""
    return record | {"text": slow_transform.slow(record["text"])}


def shuffled(sources: Iterable) -> list[grain.MapDataset]:
    """Returns sources that are shuffled and come again and again; Grain refuses one without elements."""
    return [
        grain.MapDataset.source(source).shuffle(seed=number).repeat()
        for number, source in enumerate(sources)
        if len(source)
    ]


def stores(folder: Path, mix: str, sequence: int = SEQUENCE) -> list[TokenStore]:
    data = open_data(corpus.config(folder, mix, sequence), prepare=False)
    return list(data.prepared.stores.values())


def recorded(folder: Path) -> list[grain.MapDataset]:
    """Returns the .zst files of a folder."""
    return shuffled(map(Records, sorted(folder.glob("*.zst"))))


def processes(number: int) -> grain.MultiprocessingOptions:
    return grain.MultiprocessingOptions(num_workers=number)


def packed(texts: grain.IterDataset, rows: int, sequence: int) -> grain.IterDataset:
    """Returns batches of rows that are cut from the documents end to end."""
    split = grain.experimental.ConcatThenSplitIterDataset(texts, length_struct={"tokens": sequence})
    return split.batch(rows)


def grain_default(folder: Path, mix: str) -> Batches:
    """source → shuffle → mix → to_iter_dataset → batch, as Grain's guide has it, over the same stores."""
    return iter(grain.MapDataset.mix(shuffled(map(Rows, stores(folder, mix)))).to_iter_dataset().batch(ROWS))


def documents(folder: Path, mix: str) -> grain.IterDataset:
    return grain.MapDataset.mix(shuffled(map(Documents, stores(folder, mix)))).to_iter_dataset()


def grain_concat_split(folder: Path, mix: str) -> Batches:
    """Documents through a packer of Grain's; int32, segment ids and positions as jaxthru's."""
    return iter(packed(documents(folder, mix), ROWS, SEQUENCE))


def grain_first_fit(folder: Path, mix: str) -> Batches:
    """It refuses what is longer than a row, so documents are cut, as those who use it do."""
    cut = grain.experimental.FlatMapIterDataset(documents(folder, mix), Cut())
    fitted = grain.experimental.FirstFitPackIterDataset(
        cut, length_struct={"tokens": SEQUENCE}, num_packing_bins=BINS
    )
    return iter(fitted.batch(ROWS))


class Cut(grain.experimental.FlatMapTransform):
    """Documents cut into pieces that fit a row."""

    max_fan_out = 10_000

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        tokens = element["tokens"]
        return [{"tokens": tokens[at : at + SEQUENCE]} for at in range(0, len(tokens), SEQUENCE)]


def grain_heavy(
    folder: Path, workers: int, mixed_first: bool = False, short: bool = False, rows: int = HEAVY_ROWS
) -> Batches:
    """An iterator for each source, with its threads and buffer, mixed in each worker, as MaxText has it.

    workers: 0 for the threads of this process alone. mixed_first: one iterator in each worker. short: with
    SHORT.
    """
    sources, reading = recorded(folder / "heavy"), SHORT if short else None
    if mixed_first:
        mixed = grain.MapDataset.mix(sources).to_iter_dataset(reading)
    else:
        mixed = grain.IterDataset.mix([source.to_iter_dataset(reading) for source in sources])
    batches = packed(mixed.map(Tokenize(folder)), rows, HEAVY_SEQUENCE)
    return iter(batches.mp_prefetch(processes(workers)) if workers else batches)


def as_page(record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a page in a row of its own, padded."""
    tokens = record["tokens"]
    row, segment_ids = np.zeros((2, corpus.PAGE), np.int32)
    row[: len(tokens)], segment_ids[: len(tokens)] = tokens, 1
    return {"tokens": row, "segment_ids": segment_ids}


def grain_pages(folder: Path, workers: int = 0, slow_alone: bool = False) -> Batches:
    """Nine fast samples, read from a token store, to a slow one, tokenised on the fly.

    workers: processes, 0 for the threads of this one alone. slow_alone: they read the slow source only.
    """
    (fast,) = shuffled([Documents(stores(folder, "pages", corpus.PAGE)[0])])
    fast, slow, weights = fast.map(as_page), recorded(folder / "pages")[1], [0.9, 0.1]
    slow = slow.map(slowly).map(Tokenize(folder)).map(as_page)
    if slow_alone:
        apart = [fast.to_iter_dataset(), slow.to_iter_dataset().mp_prefetch(processes(workers))]
        return iter(grain.IterDataset.mix(apart, weights=weights).batch(ROWS))
    rows = grain.MapDataset.mix([fast, slow], weights=weights).to_iter_dataset().batch(ROWS)
    return iter(rows.mp_prefetch(processes(workers)) if workers else rows)


OWN = jaxthru, jaxthru_host
GRAIN = grain_default, grain_concat_split, grain_first_fit, grain_heavy, grain_pages
READERS: dict[str, Callable[..., Batches]] = {reader.__name__: reader for reader in (*OWN, *GRAIN)}
