"""Writes the store of one source: reads, tokenises on all cores, and keeps account of what is damaged.

One thread reads, a few tokenise (the tokenizers library leaves Python's lock and has threads of its own), and
what they return is taken in the order of reading: the store's bytes do not depend on their number.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxthru.data.sources.corpus import Corpus
from jaxthru.data.sources.documents import held_out
from jaxthru.data.sources.record import Damage, Document
from jaxthru.data.store import text_store
from jaxthru.data.store import token_store as store
from jaxthru.data.store.marked import Encoded
from jaxthru.data.store.progress import Progress
from jaxthru.data.store.targets import Targets
from jaxthru.data.store.text_store import Chunk, StoredText, chunks
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.cores import usable_cores
from jaxthru.runtime.errors import one_line, require

SHARD_BYTES = 64_000_000
"""Text in one shard: what a kill costs at most."""
SHARD_DAMAGE = 100_000
"""Records that could not be read in one shard, whose list memory holds."""
BATCH_BYTES = 1_000_000
"""Text handed to the tokenizer at once. A long document keeps one thread busy, and later batches the rest."""
THREADS = min(usable_cores(), 16)
DAMAGE_SHOWN = 20
"""Damaged records of one shard that its record names; its list names all."""


@dataclasses.dataclass
class Batch:
    """Some items in the order of reading. size: bytes of text. last: whether they end a shard."""

    items: list[Document | Damage] = dataclasses.field(default_factory=list)
    size: int = 0
    last: bool = False


@dataclasses.dataclass
class Shard:
    """Batches added up. splits: what the store holds of each document. documents: how many were read."""

    splits: dict[str, list] = dataclasses.field(default_factory=lambda: {name: [] for name in store.SPLITS})
    damaged: list[Damage] = dataclasses.field(default_factory=list)
    documents: int = 0
    size: int = 0


def write(corpus: Corpus, target: Path, tokenizer: Tokenizer, share: float, progress: Progress) -> None:
    """Writes the store of one source, from the first shard that is not whole. Raises InputError.

    share: of the documents that is held out.
    """
    began = time.monotonic()
    target.mkdir(parents=True, exist_ok=True)
    progress.begin(corpus.name, corpus.size)
    records = store.finished_shards(target)
    found = sum(record["bytes"] for record in records)
    progress.advance(found)
    _check_damage(corpus, records, target, final=False)
    items = itertools.islice(corpus.items(), sum(record["read"] for record in records), None)
    encode = _encoder(corpus, tokenizer)
    shard = Shard()
    for batch, encoded in _ahead(encode, _batches(items, corpus.recipe.options.unit)):
        for item, parts in zip(batch.items, encoded, strict=True):
            if isinstance(parts, Damage):
                shard.damaged.append(parts)
                continue
            shard.splits["held_out" if held_out(item.origin, share) else "train"] += parts
            shard.documents += 1
        shard.size += batch.size
        progress.advance(batch.size)
        if not batch.last:
            continue
        if shard.documents or shard.damaged or not records:  # else the last one ended where the source does
            records.append(_write_shard(corpus, target, len(records), shard))
        _check_damage(corpus, records, target, final=False)
        shard = Shard()
    _check_damage(corpus, records, target, final=True)
    tokens = {split: sum(record["splits"][split]["tokens"] for record in records) for split in store.SPLITS}
    all_held = ": all is held out; give it more documents, or the mix held_out = 0"
    require(
        tokens["train"] > 0,
        f"source {corpus.name}: no text to train on in {len(corpus.files)} files"
        f"{all_held if tokens['held_out'] else ''}",
    )
    manifest = {
        "source": corpus.name,
        "description": corpus.recipe.description,
        "tokenizer": tokenizer.identity,
        "vocabulary": tokenizer.vocabulary,
        "dtype": tokenizer.dtype.str,
        "transform": corpus.recipe.transform.name,
        "held_out": share,
        "shards": records,
    }
    if corpus.recipe.options.unit > 1:
        manifest["unit"] = corpus.recipe.options.unit
    if corpus.recipe.online:
        manifest["kind"] = text_store.KIND
    store.write_manifest(target, manifest)
    progress.end()
    size, seconds = sum(record["bytes"] for record in records) - found, time.monotonic() - began
    speed = f"{size / 1e6:.1f} MB in {seconds:.1f} s"
    left_out = "".join(f"; {count:,} {why} left out" for why, count in sorted(corpus.left_out.items()))
    left_out += "".join(f"; {count:,} {what}" for what, count in corpus.noted.items() if count)
    account = f"{left_out}; {_account(records, target)}"
    progress.keep(f"source {corpus.name}: {sum(tokens.values()):,} tokens, {speed}{account}")
    if share and not tokens["held_out"]:
        progress.keep(f"source {corpus.name}: too few documents, none is held out for evaluation")
    splits = (split for record in records for split in record["splits"].values())
    longest = max((split.get("longest", 0) for split in splits), default=0)
    if longest > text_store.LONG_BYTES:  # of a token store nothing has this key
        why = "a document with a transform" if corpus.recipe.transform else "text without line ends to cut at"
        why = why if corpus.recipe.records == "text" else "a conversation"
        progress.keep(
            f"source {corpus.name}: each row from {why} makes the tokens of all of it, up to "
            f"{longest / 1e6:.1f} MB; without `online` they are made once"
        )


def _encoder(corpus: Corpus, tokenizer: Tokenizer) -> Callable[[Batch], list[list | Damage]]:
    """Returns what makes, of each item of a batch, what its split of the store holds, or damage."""
    recipe, unit = corpus.recipe, corpus.recipe.options.unit

    def stored(document: Document, encoded: Encoded) -> list | Damage:
        ids, trained = encoded
        if len(ids) > text_store.DOCUMENT_TOKENS:  # also without `online`, which changes no document
            return document.place.damage(f"longer than {text_store.DOCUMENT_TOKENS:,} tokens")
        if not len(ids):  # what a template writes need not have an end of text
            return document.place.damage("without a token")
        marked = document.rendered or trained is not None
        targets = Targets.of(len(ids), trained) if marked else None
        if not recipe.online:
            return [store.Entry(ids, targets, trained)]
        if marked:
            return [StoredText.of(document).chunk(len(ids), targets)]
        # A transform may look at the whole text. What it has made of conversations is kept instead.
        if recipe.transform and recipe.records == "text":
            return [Chunk(document.read.encode(), len(ids), True)]
        return chunks(document.text, ids, tokenizer)

    def encode(batch: Batch) -> list[list | Damage]:
        documents = [item for item in batch.items if isinstance(item, Document)]
        made = list(map(stored, documents, tokenizer.encode_documents(documents)))
        made = made if unit == 1 else list(_damaged_together(documents, made, unit))
        rest = iter(made)
        return [item if isinstance(item, Damage) else next(rest) for item in batch.items]

    return encode


def _damaged_together(
    documents: list[Document], made: list[list | Damage], unit: int
) -> Iterator[list | Damage]:
    """Yields what was made of documents, all of a unit damaged if one of them is."""
    pairs = zip(documents, made, strict=True)
    for together in itertools.batched(pairs, unit):
        damage = next((each for _, each in together if isinstance(each, Damage)), None)
        for document, each in together:
            yield document.place.damage(damage.reason) if damage else each


def _ahead(function: Callable[[Batch], list], batches: Iterable[Batch]) -> Iterator[tuple[Batch, list]]:
    """Yields each batch with what the function makes of it, in their order; threads work a little ahead."""
    running: deque = deque()
    pool = ThreadPoolExecutor(THREADS)
    try:
        for batch in batches:
            running.append((batch, pool.submit(function, batch)))
            if len(running) > THREADS:
                done, result = running.popleft()
                yield done, result.result()
        while running:
            done, result = running.popleft()
            yield done, result.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(items: Iterable[Document | Damage], unit: int) -> Iterator[Batch]:
    """Cuts the items into batches, and these into shards; the very last one ends a shard and may be empty.

    unit: documents that are not to be parted."""
    batch, size, damaged, documents = Batch(), 0, 0, 0
    for item in items:
        batch.items.append(item)
        if isinstance(item, Damage):
            damaged += 1
        else:
            batch.size += (length := len(item.read.encode()))
            size += length
            documents += 1
            if documents % unit:
                continue
        batch.last = size >= SHARD_BYTES or damaged >= SHARD_DAMAGE
        if batch.last:
            size = damaged = 0
        if batch.last or batch.size >= BATCH_BYTES:
            yield batch
            batch = Batch()
    batch.last = True
    yield batch


def _write_shard(corpus: Corpus, target: Path, number: int, shard: Shard) -> dict:
    if shard.damaged:
        lines = "".join(f"{describe(damage)}\n" for damage in shard.damaged)
        write_atomically(target / f"damaged-{number:05d}.txt", lines.encode())
    record = {
        "read": shard.documents + len(shard.damaged),
        "bytes": shard.size,
        "damaged": len(shard.damaged),
        "damage": shard.damaged[:DAMAGE_SHOWN],
    }
    write = text_store.write_shard if corpus.recipe.online else store.write_shard
    return write(target, number, shard.splits, record)


def _check_damage(corpus: Corpus, records: list[dict], target: Path, *, final: bool) -> None:
    """Raises InputError when too much is damaged.

    The share is known at the end, for damage may come in clusters; but where more than half of what was read
    is damaged, as with a wrong key, reading on is in vain.
    """
    damaged, total = _counts(records)
    limit = corpus.recipe.max_damaged
    require(
        damaged <= (limit if final else max(limit, 0.5)) * total,
        f"source {corpus.name}: more than max_damaged = {limit:g}: {_account(records, target)}",
    )


def _account(records: list[dict], target: Path) -> str:
    damaged, total = _counts(records)
    if not damaged:
        return f"{total:,} records, none damaged"
    first = describe(next(item for record in records for item in record["damage"]))
    return f"{damaged:,} of {total:,} records damaged and left out, listed in {target}/damaged-*.txt: {first}"


def _counts(records: list[dict]) -> tuple[int, int]:
    return sum(record["damaged"] for record in records), sum(record["read"] for record in records)


def describe(damage: Damage | list[str]) -> str:
    """Returns the file, place and reason of a damaged record in one line, whatever its names."""
    file, position, reason = damage
    return one_line(f"{file}, {position}: {reason}")
