"""Preparation: from a mix to opened token stores, doing only what is not yet done."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

from jaxthru.data import store, text_store
from jaxthru.data.files import File, HashCache, collect
from jaxthru.data.mix import Mix, Recipe
from jaxthru.data.progress import Progress
from jaxthru.data.readers import Damage, Document, held_out, read
from jaxthru.data.text_store import Stretch, TextStore, stretches
from jaxthru.data.tokenizer import Tokenizer, train
from jaxthru.data.transform import find_transform
from jaxthru.runtime.errors import InputError, require

READERS = 2
"""Counts the changes to what documents the same files become."""
SHARD_BYTES = 64_000_000
"""Text in one shard: what a kill costs at most."""
BATCH_BYTES = 4_000_000
"""Text handed to the tokenizer at once: enough documents to keep all cores busy."""
KEEP_BYTES = 64_000_000
"""A source capped below this is read once and kept, for the tokenizer's training and for encoding."""
DAMAGE_SHOWN = 20
"""Damaged records of one shard that its record names; all are counted."""
WAIT_SECONDS = 1800.0
"""How long a process that does not prepare waits for the one that does."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """keys: of each store, from the content of its source, the tokenizer and the held-out share."""

    mix: Mix
    tokenizer: Tokenizer
    stores: dict[str, store.TokenStore | TextStore]
    keys: dict[str, str]


class Corpus:
    """The files of one source. key: the hash of all that decides its documents, and of nothing else."""

    def __init__(self, name: str, recipe: Recipe, files: list[File]):
        self.name, self.recipe, self.files = name, recipe, files
        contents = [(file.digest, file.path.suffix) for file in files]
        decisive = ("format", "text_key", "extension", "transform", "cap_bytes", "max_record_bytes")
        self.key = _hash([READERS, [getattr(recipe, name) for name in decisive], contents])
        self.size = min(sum(file.size for file in files), recipe.cap_bytes or 2**63)
        self._kept = read(files, recipe) if 0 < recipe.cap_bytes <= KEEP_BYTES else None

    def items(self) -> Iterator[Document | Damage]:
        """Yields the documents and damaged records, from the first."""
        if self._kept is None:
            return read(self.files, self.recipe)
        self._kept, items = itertools.tee(self._kept)
        return items


def open_stores(mix: Mix, folder: Path, prepare: bool = True) -> Prepared:
    """Returns the opened stores of a mix, kept in `folder`.

    prepare: make what is missing. Without it, wait until another process has made it: in a run of several
    processes the first one prepares. Raises InputError.
    """
    if prepare:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"data.store = {folder}: cannot be made ({error.strerror})") from error
    cache = HashCache(folder / "hashes.json")
    corpora, taken = {}, dict.fromkeys((recipe.format for recipe in mix.recipes.values()), frozenset())
    for name, recipe in mix.recipes.items():
        files = collect(name, recipe, cache, taken[recipe.format])
        taken[recipe.format] |= {file.digest for file in files}
        corpora[name] = Corpus(name, recipe, files)
    with Progress() as progress:
        if prepare:
            cache.save()
        tokenizer = _tokenizer(mix, folder, corpora, progress if prepare else None)
        parts = (store.VERSION, tokenizer.hash, mix.held_out, SHARD_BYTES)
        keys = {name: _hash([*parts, corpus.key])[:16] for name, corpus in corpora.items()}
        for name, corpus in corpora.items():
            target = _folder(folder, corpus, keys[name])
            if not prepare:
                _wait_for(target / "manifest.json")
            elif not (target / "manifest.json").is_file():
                _write(corpus, target, tokenizer, mix.held_out, progress)
    stores = {
        name: (TextStore if corpus.recipe.online else store.TokenStore)(_folder(folder, corpus, keys[name]))
        for name, corpus in corpora.items()
    }
    return Prepared(mix, tokenizer, stores, keys)


def _folder(folder: Path, corpus: Corpus, key: str) -> Path:
    """Returns where a source's store is. One of text and one of tokens hold the same documents: their key,
    by which a run knows its data, is the same."""
    return folder / f"{corpus.name}-{key}{'.text' if corpus.recipe.online else ''}"


def _tokenizer(mix: Mix, folder: Path, corpora: dict[str, Corpus], progress: Progress | None) -> Tokenizer:
    """Returns the named tokenizer, or the one trained on these corpora; waits for it without `progress`."""
    spec = mix.tokenizer
    if spec.path is not None:
        return Tokenizer(spec.path)
    contents = [corpus.key for corpus in corpora.values()]
    key = _hash([spec.vocabulary, spec.train_bytes, mix.held_out, contents])[:16]
    path = folder / f"tokenizer-{key}.json"
    if not path.is_file():
        if progress is None:
            _wait_for(path)
        else:
            train(_training_texts(mix, corpora, progress), spec.vocabulary, path)
            progress.finish()
    return Tokenizer(path)


def _training_texts(mix: Mix, corpora: dict[str, Corpus], progress: Progress) -> Iterator[str]:
    """Yields training documents, an equal share of bytes from each source whatever its weight.

    Weights may change when a run is resumed; its tokenizer may not.
    """
    share = mix.tokenizer.train_bytes // len(corpora)
    progress.begin("tokenizer", sum(min(share, corpus.size) for corpus in corpora.values()))
    for corpus in corpora.values():
        size = 0
        for item in corpus.items():
            if isinstance(item, Document) and not held_out(item.origin, mix.held_out):
                text = item.text.encode()[: share - size]
                size += len(text)
                progress.advance(len(text))
                yield text.decode(errors="ignore")
                if size >= share:
                    break


def _write(corpus: Corpus, target: Path, tokenizer: Tokenizer, share: float, progress: Progress) -> None:
    """Writes the store of one source, from the first shard that is not whole. Raises InputError."""
    recipe, transform = corpus.recipe, find_transform(corpus.recipe.transform)
    target.mkdir(parents=True, exist_ok=True)
    progress.begin(corpus.name, corpus.size)
    records = store.finished_shards(target)
    progress.advance(sum(record["bytes"] for record in records))
    items = itertools.islice(corpus.items(), sum(record["read"] for record in records), None)
    for documents, damaged, size in _shards(items):
        if not documents and not damaged and records:
            break  # the last shard ended exactly where the source does
        splits: dict[str, list] = {split: [] for split in store.SPLITS}
        for batch in _batches(documents):
            encoded = tokenizer.encode([transform(item.text) for item in batch])
            for document, ids in zip(batch, encoded, strict=True):
                split = splits["held_out" if held_out(document.origin, share) else "train"]
                if not recipe.online:
                    split.append(ids)
                elif recipe.transform:  # which may look at the whole text
                    split.append(Stretch(document.text.encode(), len(ids), True))
                else:
                    split += stretches(document.text, ids, tokenizer)
            progress.advance(sum(len(document.text.encode()) for document in batch))
        record = {
            "read": len(documents) + len(damaged),
            "bytes": size,
            "damaged": len(damaged),
            "damage": damaged[:DAMAGE_SHOWN],
        }
        write = text_store.write_shard if recipe.online else store.write_shard
        records.append(write(target, len(records), splits, record))
        _check_damage(corpus, records)
    _check_damage(corpus, records)  # also what an earlier preparation had read
    damage = [item for record in records for item in record["damage"]]
    if damage:
        number = sum(record["damaged"] for record in records)
        first = _describe(damage[0])
        progress.note(f"source {corpus.name}: {number} damaged records left out, first {first}")
    tokens = {split: sum(record["splits"][split]["tokens"] for record in records) for split in store.SPLITS}
    require(tokens["train"] > 0, f"source {corpus.name}: no text to train on in {len(corpus.files)} files")
    if share and not tokens["held_out"]:
        progress.note(f"source {corpus.name}: too few documents, none is held out for evaluation")
    manifest = {
        "source": corpus.name,
        "description": corpus.recipe.description,
        "tokenizer": tokenizer.hash,
        "vocabulary": tokenizer.vocabulary,
        "dtype": tokenizer.dtype.str,
        "held_out": share,
        "shards": records,
    }
    if recipe.online:
        manifest |= {"kind": text_store.KIND, "transform": recipe.transform}
    store.write_manifest(target, manifest)
    progress.finish()


def _shards(items: Iterator[Document | Damage]) -> Iterator[tuple[list[Document], list[Damage], int]]:
    """Cuts the items into shards: yields the documents, the damaged records and the bytes of text of each."""
    documents, damaged, size = [], [], 0
    for item in items:
        if isinstance(item, Damage):
            damaged.append(item)
            continue
        documents.append(item)
        size += len(item.text.encode())
        if size >= SHARD_BYTES:
            yield documents, damaged, size
            documents, damaged, size = [], [], 0
    yield documents, damaged, size


def _batches(documents: list[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_damage(corpus: Corpus, records: list[dict]) -> None:
    damaged, total = (sum(record[key] for record in records) for key in ("damaged", "read"))
    if damaged > corpus.recipe.max_damaged * total:
        first = _describe(next(item for record in records for item in record["damage"]))
        share = f"{damaged} of {total} records are damaged (max_damaged = {corpus.recipe.max_damaged:g})"
        require(False, f"source {corpus.name}: {share}, first {first}")


def _describe(damage: Damage | list[str]) -> str:
    file, position, reason = damage
    return f"{file}, {position}: {reason}"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.is_file():
        late = time.monotonic() >= deadline
        require(not late, f"{path}: not prepared by another process after {WAIT_SECONDS:g} s")
        time.sleep(0.2)


def _hash(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
