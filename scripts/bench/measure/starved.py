"""A run that starves for data, end to end: Grain's default pipeline against jaxthru's Source Loaders.

    python scripts/bench/suite.py data --rows starved
    python scripts/bench/measure/starved.py --config configs/llama3_2_1b.py --set train.rows=8 --input grain

Needs grain and zstandard. The same pages (4 KiB of source code, 35 sources of .jsonl.zst, a BPE of 32,768
tokens) are read, transformed, tokenised and packed into rows while Llama 3.2 1B trains on them: jaxthru's
compiled step, its loop's order (ask for a batch, dispatch, read the metrics of the step before) and its
transfer to the device. The inputs, each in a process of its own:

- `jaxthru`: sources that are `online`, in Source Loaders (`data.loaders`, by default half of the cores).
- `grain`: MapDataset.mix of the sources, the transform and the tokenizer as `map`, `to_iter_dataset()` with
  its 16 threads, ConcatThenSplit, batch: the strongest of the default ways, for one pool serves all
  sources.
- `grain-mp`: the same behind `mp_prefetch`, with as many processes as jaxthru has Source Loaders.
- `unstarved`: one batch that lies on the device, over and over.

What is expected. A token is 6 × 1.24 G and attention, about 7.8 GFLOP, so at 450 TFLOP/s the GPU takes
57,000 tokens, 55 pages of 1,030, in a second. A core tokenises 300,000 tokens a second or more, and leaves
Python's lock for it: tokenisation alone (`--milliseconds 0`) starves nothing on one H200. So each page also
costs --milliseconds of CPU under the lock, as a transform in Python would: 50 by default, about what
extracting the text of a web page takes. That is 2.8 cores, where one process has one: `grain` gives 20 pages
a second or fewer, 20,000 tokens, about a third of what the GPU takes, and its threads slow the loop.
`jaxthru` does about 12 % of the pages twice, for rows are cut anywhere, so it needs 3.1 of 8 cores and must
not wait; nor must `grain-mp`. The claim is about the default: against `grain-mp` no gain is expected.

`data_wait` is the time that the loop stands in next(batches) over the timed steps' time; all inputs place
batches on the device ahead, in threads. The device is busy in the beginning of that time. Where memory is
short, `--set train.rows=4`.

Log (H200, 8 Source Loaders, batches placed in the loop itself, another GPU of the host compiling, without
`grain-mp`): 62,245 tokens a second, data wait 0.37 %, 7.4 times Grain's default of one process (8,387, 63 %),
whose rate fell short of the 20,000 expected: the lock is also what dispatches the steps.
"""

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_contenders
import data_corpus
import grain
import harness
import jax
import numpy as np
import slow_transform
from measure.step import measure, packed_batches

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.build.defaults import replaced
from jaxthru.data.loading.dataset import open_data
from jaxthru.data.store import tokenizer
from jaxthru.engine.step import Batch
from jaxthru.models import llama
from jaxthru.runtime import xla
from jaxthru.runtime.errors import require

PAGE_CHARACTERS = 4096


def make_corpus(folder: Path, sources: int, pages: int, vocabulary: int) -> None:
    """Makes the corpus. Raises InputError for more sources than there are pages."""
    wanted = sources * pages
    found = data_corpus.chunks(data_corpus.library(2 * wanted * PAGE_CHARACTERS), PAGE_CHARACTERS)
    require(len(found) >= sources, f"--sources {sources}: the standard library has {len(found)} pages here")
    tokenizer.train(iter(found[: min(wanted, 1500)]), vocabulary, folder / "tokenizer.json")
    data_corpus.write(folder / "pages", (found[number:wanted:sources] for number in range(sources)))
    slow = data_corpus.slowed(folder)
    mix = {f"s{number}": data_corpus.paths("pages", [number]) | slow for number in range(sources)}
    data_corpus.write_mix(folder, "mix", mix)


def complete(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a batch (see `jaxthru.data.loading.batch`) of Grain's packed rows: what has no next token in
    its segment has no target."""
    tokens, segment_ids = packed["tokens"], packed["tokens_segment_ids"]
    follows = np.zeros(tokens.shape, bool)
    follows[:, :-1] = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, :-1] > 0)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.where(follows, np.roll(tokens, -1, axis=1), 0).astype(np.int32),
        "segment_ids": segment_ids.astype(np.int32),
        "positions": packed["tokens_positions"].astype(np.int32),
        "loss_mask": follows.astype(np.float32),
        "source": np.zeros(tokens.shape, np.int32),
    }


def place(batch: dict[str, np.ndarray], built: Build) -> Batch:
    """Returns the batch on the device. Raises InputError for rows of more documents than the step is
    compiled for."""
    most, room = int(batch["segment_ids"].max()), built.data.segments - 1
    require(most <= room, f"a row of {most} documents, the step takes {room}")
    return built.place(batch, built.config.train.rows)


def from_grain(built: Build, workers: int) -> Iterator[Batch]:
    """Yields what Grain's pipeline gives. workers: processes of mp_prefetch, 0 is none. Batches are placed
    ahead, as `grain.experimental.device_put` does it, with buffers of its sizes."""
    config, folder = built.config, Path(built.config.data.mix).parent
    pages = grain.MapDataset.mix(data_contenders.recorded(folder / "pages"))
    texts = pages.map(data_contenders.slowly).map(data_contenders.Tokenize(folder)).to_iter_dataset()
    batches = data_contenders.packed(texts, config.train.rows, config.data.sequence).map(complete)
    if workers:
        batches = batches.mp_prefetch(data_contenders.processes(workers))
    ahead = grain.experimental.ThreadPrefetchIterDataset
    placed = ahead(batches, prefetch_buffer_size=4).map(functools.partial(place, built=built))
    with contextlib.closing(iter(ahead(placed, prefetch_buffer_size=2))) as iterator:
        yield from iterator


def one_batch(built: Build) -> Iterator[Batch]:
    with contextlib.closing(packed_batches(built)) as batches:
        batch = next(batches)
    yield from itertools.repeat(batch)


INPUTS = {
    "jaxthru": packed_batches,
    "grain": lambda built: from_grain(built, 0),
    "grain-mp": lambda built: from_grain(built, built.config.data.loaders),
    "unstarved": one_batch,
}


class Waits:
    """An iterator, and how many seconds each element of it took to come."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches, self.seconds = batches, []

    def __iter__(self):
        return self

    def __next__(self) -> Batch:
        asked = time.perf_counter()
        batch = next(self.batches)
        self.seconds.append(time.perf_counter() - asked)
        return batch


def starved(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what steps took, and how long they waited for data."""
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    xla.configure()
    loaders = f"data.loaders={max((os.cpu_count() or 1) // 2, 1)}"
    settings = harness.set_words([loaders, *arguments.overrides, "data.packing=split", "train.steps=1000000"])
    config = configuration.load(arguments.config, settings[1::2])
    sizes = arguments.sources, arguments.pages, arguments.vocabulary
    folder = arguments.folder / "_".join(map(str, sizes))
    data_corpus.once(folder, lambda folder: make_corpus(folder, *sizes))
    own = {"data.mix": str(folder / "mix.toml"), "data.store": str(folder / "store")}
    config = replaced(config, own | {"data.balance": False})  # rows in any order: there is but one device
    data = open_data(config.data)
    data.segments = max(data.segments, 16)  # Grain packs other rows, with more documents perhaps
    built = build_step(config, data, jax.devices()[:1])
    os.environ[slow_transform.VARIABLE] = str(arguments.milliseconds)  # for what is started too
    with contextlib.closing(INPUTS[arguments.input](built)) as batches:
        waits = Waits(batches)
        found = measure(built, waits, argparse.Namespace(steps=None, **vars(arguments)))
    timed = waits.seconds[-found["steps_timed"] :]  # each asked for within the seconds of the step before
    return {
        "input": arguments.input,
        "milliseconds": arguments.milliseconds,
        "parameters": llama.parameters(config.model),
        "sources": arguments.sources,
        "page_characters": PAGE_CHARACTERS,
        "vocabulary": data.vocabulary,
        "processes": config.data.loaders,
        "cores": os.cpu_count(),
        **found,
        "data_wait": round(sum(timed) / (found["step_seconds_mean"] * found["steps_timed"]), 6),
        "data_wait_seconds_median": round(statistics.median(timed), 6),
    }


option = harness.option
main = harness.program(
    __doc__,
    starved,
    option("--input", choices=INPUTS, default="jaxthru"),
    option("--milliseconds", type=float, default=50.0, help="of CPU that a page costs"),
    option("--sources", type=int, default=35),
    option("--pages", type=int, default=160, help="of each source; they come again and again"),
    option("--vocabulary", type=int, default=32_768, help="of the tokenizer"),
    option("--folder", type=Path, default=Path("build/bench_starved"), help="corpora, kept"),
    config=harness.ROOT / "configs" / "llama3_2_1b.py",
    seconds=(20.0, 40.0),
)


if __name__ == "__main__":
    harness.end(main())
