"""The mix of many online sources that parts of the data plane are measured on."""

import functools
import itertools
from pathlib import Path
from typing import Any

import data_corpus
import harness
import numpy as np

from jaxthru.data.loading.dataset import Data, open_data

CORPUS = harness.ROOT / "build" / "bench_data_scale"
SOURCES, SEQUENCE = 32, 4096
DOCUMENT = 1 << 12
"""Characters of a document, about those of a web page."""


def corpus(folder: Path, tiny: bool) -> Path:
    """Returns the folder of a mix of online sources, the standard library's text, made if it is missing."""
    return data_corpus.once(folder / ("quick" if tiny else "whole"), functools.partial(make, tiny=tiny))


def make(folder: Path, tiny: bool) -> None:
    sources, records = (4, 40) if tiny else (SOURCES, 192)
    texts = list(itertools.islice(data_corpus.library(6e6 if tiny else 4e7), 400 if tiny else None))
    data_corpus.tokenizer.train(iter(texts[:200]), data_corpus.VOCABULARY, folder / "tokenizer.json")
    pieces = itertools.cycle(data_corpus.chunks(texts, DOCUMENT))
    data_corpus.write(folder / "online", (list(itertools.islice(pieces, records)) for _ in range(sources)))
    weights = np.random.default_rng(0).lognormal(0.0, 1.0, sources).round(3).tolist()
    named = {
        f"s{number}": data_corpus.paths("online", [number]) | {"online": True, "weight": weight}
        for number, weight in enumerate(weights)
    }
    data_corpus.write_mix(folder, "online", named)
    open_data(data_corpus.config(folder, "online", SEQUENCE)).close()


def opened(folder: Path, **settings: Any) -> Data:
    return open_data(data_corpus.config(folder, "online", SEQUENCE, **settings), prepare=False)
