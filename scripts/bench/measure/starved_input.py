"""What the starved run trains on: its pages, and the two ways to read them."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_corpus
import grain
import numpy as np
from data_contenders import Records, Tokenize
from measure import starved_transform

from jaxthru import config as configuration
from jaxthru.data.loading.dataset import Place, open_data
from jaxthru.data.loading.state import DataState
from jaxthru.data.store import tokenizer
from jaxthru.engine.step import Batch
from jaxthru.runtime.errors import require

PAGE_CHARACTERS = 4096


def make_corpus(folder: Path, sources: int, pages: int, vocabulary: int) -> Path:
    """Makes the corpus if it is missing; returns its folder."""
    folder = folder / f"{sources}_{pages}_{vocabulary}"
    if (folder / "made").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    wanted = sources * pages
    found = data_corpus.chunks(data_corpus.library(2 * wanted * PAGE_CHARACTERS), PAGE_CHARACTERS)
    require(len(found) >= sources, f"--sources {sources}: the standard library has {len(found)} pages here")
    found = found[:wanted]
    tokenizer.train(iter(found[:1500]), vocabulary, folder / "tokenizer.json")
    data_corpus.write(folder / "pages", (found[number::sources] for number in range(sources)))
    online = {"online": True, "transform": "starved_transform:page"}
    mix = {f"s{number}": data_corpus.paths("pages", [number]) | online for number in range(sources)}
    data_corpus.write_mix(folder, "mix", mix)
    shutil.copy(starved_transform.__file__, folder)
    (folder / "made").touch()
    return folder


class Transform:
    """The transform as a `map` of Grain."""

    def __call__(self, record: dict[str, str]) -> dict[str, str]:
        return record | {"text": starved_transform.page(record["text"])}


class Complete:
    """Grain's packed rows as a batch of jaxthru."""

    def __call__(self, packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return complete(packed["tokens"], packed["tokens_segment_ids"], packed["tokens_positions"])


def complete(tokens: np.ndarray, segment_ids: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch (see `jaxthru.data.loading.batch`) of packed rows: what has no next token in its
    segment has no target."""
    follows = np.zeros(tokens.shape, bool)
    follows[:, :-1] = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, :-1] > 0)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.where(follows, np.roll(tokens, -1, axis=1), 0).astype(np.int32),
        "segment_ids": segment_ids.astype(np.int32),
        "positions": positions.astype(np.int32),
        "loss_mask": follows.astype(np.float32),
        "source": np.zeros(tokens.shape, np.int32),
    }


@contextlib.contextmanager
def from_grain(
    config: configuration.RunConfig, place: Place, folder: Path, workers: int
) -> Iterator[Iterator[Batch]]:
    """Opens Grain's pipeline. workers: processes of mp_prefetch, 0 is none. Batches are placed ahead, as
    `grain.experimental.device_put` does it, with buffers of its sizes."""
    files = sorted((folder / "pages").glob("*.zst"))
    sources = [
        grain.MapDataset.source(Records(path)).shuffle(seed=number).repeat()
        for number, path in enumerate(files)
    ]
    pages = grain.MapDataset.mix(sources).map(Transform()).map(Tokenize(folder)).to_iter_dataset()
    packed = grain.experimental.ConcatThenSplitIterDataset(
        pages, length_struct={"tokens": config.data.sequence}
    )
    batches = packed.batch(config.train.rows).map(Complete())
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    ahead = grain.experimental.ThreadPrefetchIterDataset
    iterator = iter(ahead(ahead(batches, prefetch_buffer_size=4).map(place), prefetch_buffer_size=2))
    try:
        yield iterator
    finally:
        iterator.close()


@contextlib.contextmanager
def from_jaxthru(config: configuration.RunConfig, place: Place) -> Iterator[Iterator[Batch]]:
    """Opens jaxthru's data plane, with Source Loaders of its own."""
    train = config.train
    with open_data(config.data, prepare=False) as data:
        state = DataState(0, ((0, data.mixture),), data.keys)
        keys = {"seed": train.seed, "rows": train.rows, "steps": train.steps, "place": place}
        with data.train_batches(state.schedule, **keys) as batches:
            yield batches
