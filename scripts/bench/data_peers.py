"""Other loaders over the same rows of tokens, each in its own format, in one process, shuffled as it does.

They give int32 tokens alone, 4 bytes each; jaxthru gives the six fields of a packed batch, 24. They are no
dependencies of jaxthru: whichever is not installed is left out of the table. Their own dependencies differ,
so that each may have a folder of its own:

    pip install --target build/bench_peers/mosaicml mosaicml-streaming "transformers<5"
    pip install --target build/bench_peers/webdataset webdataset
    pip install --target build/bench_peers/hugging_face datasets
    pip install --target build/bench_peers/torchdata torchdata
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import data_corpus as corpus
import numpy as np

from jaxthru.data.loading.dataset import open_data

ROWS, SEQUENCE = 64, 2048
Batches = Iterator[dict[str, np.ndarray]]


def rows(folder: Path) -> np.ndarray:
    """Returns uint16 [rows, SEQUENCE]: what the stores of five sources hold."""
    data = open_data(corpus.config(folder, f"documents_{corpus.SOURCES[0]}", SEQUENCE), prepare=False)
    splits = (store.train for store in data.prepared.stores.values())
    stream = np.concatenate([split.read(0, split.tokens) for split in splits])
    return stream[: len(stream) // SEQUENCE * SEQUENCE].reshape(-1, SEQUENCE)


def written(folder: Path, write: Callable[[Path, np.ndarray], None]) -> Path:
    """Returns where a peer's files lie, written at the first call."""
    target = folder / "peers" / write.__name__.removeprefix("write_")
    return corpus.once(target, lambda target: write(target / "data", rows(folder))) / "data"


def write_mosaicml(path: Path, tokens: np.ndarray) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(path), columns={"tokens": f"ndarray:uint16:{SEQUENCE}"}) as writer:
        for row in tokens:
            writer.write({"tokens": row})


def mosaicml(folder: Path) -> Batches:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(local=str(written(folder, write_mosaicml)), shuffle=True, batch_size=ROWS)
    while True:
        for batch in DataLoader(dataset, batch_size=ROWS, drop_last=True):
            yield {"tokens": batch["tokens"].numpy().astype(np.int32)}


def write_webdataset(path: Path, tokens: np.ndarray) -> None:
    import webdataset

    with webdataset.TarWriter(str(path)) as writer:
        for number, row in enumerate(tokens):
            writer.write({"__key__": f"{number:06}", "bin": row.tobytes()})


def webdataset(folder: Path) -> Batches:
    import webdataset

    dataset = webdataset.WebDataset(str(written(folder, write_webdataset)), shardshuffle=False).shuffle(1000)
    dataset = dataset.map(lambda sample: {"tokens": np.frombuffer(sample["bin"], np.uint16).astype(np.int32)})
    while True:
        for batch in itertools.batched(dataset, ROWS):
            yield {"tokens": np.stack([sample["tokens"] for sample in batch])}


def write_datasets(path: Path, tokens: np.ndarray) -> None:
    from datasets import Features, Sequence, Value
    from datasets.arrow_writer import ArrowWriter

    features = Features({"tokens": Sequence(Value("uint16"), length=SEQUENCE)})
    with ArrowWriter(path=str(path), features=features) as writer:
        writer.write_batch({"tokens": tokens})
        writer.finalize()


def hugging_face(folder: Path) -> Batches:
    import datasets

    dataset = datasets.Dataset.from_file(str(written(folder, write_datasets)))
    dataset.set_format("numpy", dtype=np.int32)
    for epoch in itertools.count():
        # Left to itself it names the result by pickling types of pyarrow, some of which cannot be.
        shuffled = dataset.shuffle(seed=epoch, new_fingerprint=str(epoch))
        yield from shuffled.iter(batch_size=ROWS, drop_last_batch=True)


def torchdata(folder: Path) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Memory:
        """A torch dataset that is a memory map."""

        def __init__(self, path: Path):
            self.rows = np.load(path.with_suffix(".npy"), mmap_mode="r")

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"tokens": self.rows[index].astype(np.int32)}

    dataset = Memory(written(folder, write_torchdata))
    while True:
        yield from StatefulDataLoader(dataset, batch_size=ROWS, shuffle=True, drop_last=True)


def write_torchdata(path: Path, tokens: np.ndarray) -> None:
    np.save(path.with_suffix(".npy"), tokens)


READERS: dict[str, Callable[[Path], Batches]] = {
    reader.__name__: reader for reader in (mosaicml, webdataset, hugging_face, torchdata)
}
NEEDS = {
    "mosaicml": "streaming",
    "webdataset": "webdataset",
    "hugging_face": "datasets",
    "torchdata": "torchdata",
}
"""The module of each."""
