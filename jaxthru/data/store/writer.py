"""Writes the store of one source, in batches and shards, and keeps account of what is damaged.

Which thread does what, `parallel_writer.py` decides: no byte of a store depends on it.
"""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxthru.data.sources.corpus import Corpus
from jaxthru.data.sources.documents import held_out
from jaxthru.data.sources.record import Damage, Document
from jaxthru.data.store import text_store
from jaxthru.data.store import token_store as store
from jaxthru.data.store.chunks import Chunk, StoredText, chunks
from jaxthru.data.store.marked import Encoded
from jaxthru.data.store.targets import Targets
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.errors import one_line, require

SHARD_BYTES = 64_000_000
"""Text in one shard: what a kill costs at most."""
SHARD_DAMAGE = 100_000
"""Records that could not be read in one shard, whose list memory holds."""
BATCH_BYTES = 1_000_000
"""Text handed to the tokenizer at once. A long document keeps one thread busy, and later batches the rest."""
DAMAGE_SHOWN = 20
"""Damaged records of one shard that its record names; its list names all."""


@dataclasses.dataclass
class Batch:
    """Some items in the order of reading. size: bytes of text. last: whether they end a shard. final: and the
    source."""

    items: list[Document | Damage] = dataclasses.field(default_factory=list)
    size: int = 0
    last: bool = False
    final: bool = False


@dataclasses.dataclass
class Shard:
    """Batches added up. splits: what the store holds of each document. documents: how many were read."""

    splits: dict[str, list] = dataclasses.field(default_factory=lambda: {name: [] for name in store.SPLITS})
    damaged: list[Damage] = dataclasses.field(default_factory=list)
    documents: int = 0
    size: int = 0


@dataclasses.dataclass
class Written:
    """What became of a source.

    share: of the documents that is held out. tokens: of each split. read, damaged: how many records there
    were, and how many of these are left out. size: bytes of text, `found` of which a preparation before this
    one has written.
    left_out, noted: see `Corpus`. kept: chunks that are kept as tokens, and their bytes. account: of the
    records, in words.
    """

    name: str
    share: float
    tokens: dict[str, int]
    read: int
    damaged: int
    size: int
    found: int
    seconds: float
    left_out: Counter
    noted: Counter
    kept: tuple[int, int]
    account: str


class StoreWriter:
    """Writes the store of one source, from the first shard that is not whole.

    share: of the documents that is held out. found: bytes of text in the shards that are there. Its methods
    raise InputError, as soon as too much is damaged. `encode` may be called by several threads.
    """

    def __init__(self, corpus: Corpus, target: Path, tokenizer: Tokenizer, share: float):
        self._began = time.monotonic()
        self.corpus, self._target, self._tokenizer, self._share = corpus, target, tokenizer, share
        self._records = store.finished_shards(target)
        self.found = sum(record["bytes"] for record in self._records)
        _check_damage(corpus, self._records, target, final=False)
        self.encode = _encoder(corpus, tokenizer)
        self._shard = Shard()

    def batches(self) -> Iterator[Batch]:
        """Yields what is not yet written; the last batch is `final`. One thread reads: what a mix has
        transform text need not bear two."""
        written = sum(record["read"] for record in self._records)
        items = itertools.islice(self.corpus.items(), written, None)
        return _batches(items, self.corpus.recipe.options.unit)

    def take(self, batch: Batch, encoded: list[list | Damage]) -> None:
        """Takes the next batch and what `encode` has made of it; writes the shard that it ends."""
        shard, records = self._shard, self._records
        for item, parts in zip(batch.items, encoded, strict=True):
            if isinstance(parts, Damage):
                shard.damaged.append(parts)
                continue
            shard.splits["held_out" if held_out(item.origin, self._share) else "train"] += parts
            shard.documents += 1
        shard.size += batch.size
        if not batch.last:
            return
        if shard.documents or shard.damaged or not records:  # else the last one ended where the source does
            records.append(_write_shard(self.corpus, self._target, len(records), shard))
        _check_damage(self.corpus, records, self._target, final=False)
        self._shard = Shard()

    def write_only(self, batch: Batch) -> Written:
        """Writes a source that is one batch."""
        self.take(batch, self.encode(batch))
        return self.finish()

    def finish(self) -> Written:
        """Makes the store one that opens, once all is taken."""
        corpus, records, target = self.corpus, self._records, self._target
        _check_damage(corpus, records, target, final=True)
        tokens = {
            split: sum(record["splits"][split]["tokens"] for record in records) for split in store.SPLITS
        }
        all_held = ": all is held out; give it more documents, or the mix held_out = 0"
        require(
            tokens["train"] > 0,
            f"source {corpus.name}: no text to train on in {len(corpus.files)} files"
            f"{all_held if tokens['held_out'] else ''}",
        )
        store.write_manifest(target, self._manifest())
        damaged, total = _counts(records)
        return Written(
            name=corpus.name,
            share=self._share,
            tokens=tokens,
            read=total,
            damaged=damaged,
            size=sum(record["bytes"] for record in records),
            found=self.found,
            seconds=time.monotonic() - self._began,
            left_out=corpus.left_out,
            noted=corpus.noted,
            kept=_kept(records),
            account=_account(records, target),
        )

    def _manifest(self) -> dict:
        recipe = self.corpus.recipe
        manifest = {
            "source": self.corpus.name,
            "description": recipe.description,
            "tokenizer": self._tokenizer.identity,
            "vocabulary": self._tokenizer.vocabulary,
            "dtype": self._tokenizer.dtype.str,
            "transform": recipe.transform.name,
            "held_out": self._share,
            "shards": self._records,
        }
        if recipe.options.unit > 1:
            manifest["unit"] = recipe.options.unit
        if recipe.online:
            manifest["kind"] = text_store.KIND
        return manifest


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
            return [StoredText.of(document).chunk(encoded, tokenizer.vocabulary, targets)]
        # A transform may look at the whole text. What it has made of conversations is kept instead.
        if recipe.transform and recipe.records == "text":
            return [Chunk.of(document.read, encoded, tokenizer.vocabulary)]
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
    batch.last = batch.final = True
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


def _kept(records: list[dict]) -> tuple[int, int]:
    of_each = (split.get("kept") for record in records for split in record["splits"].values())
    kept = [each for each in of_each if each]
    return sum(each["chunks"] for each in kept), sum(each["bytes"] for each in kept)


def describe(damage: Damage | list[str]) -> str:
    """Returns the file, place and reason of a damaged record in one line, whatever its names."""
    file, position, reason = damage
    return one_line(f"{file}, {position}: {reason}")
