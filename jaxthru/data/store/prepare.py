"""Preparation: from a mix to opened token stores, doing only what is not yet done."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxthru.data.sources.chat.records import words_of
from jaxthru.data.sources.chat.render import renderer
from jaxthru.data.sources.corpus import Corpus, hash_of
from jaxthru.data.sources.documents import held_out, read
from jaxthru.data.sources.files import HashCache, collect
from jaxthru.data.sources.record import Document
from jaxthru.data.store import token_store as store
from jaxthru.data.store import writer
from jaxthru.data.store.flat_file import REMEDY
from jaxthru.data.store.mix_file import MixFile
from jaxthru.data.store.parallel_writer import write_stores
from jaxthru.data.store.progress import Progress
from jaxthru.data.store.text_store import TextStore
from jaxthru.data.store.tokenizer import Tokenizer, train
from jaxthru.data.store.tokenizer_folder import CONTROL, UNSAID, tokenizer_file
from jaxthru.runtime.atomic import remove_partials
from jaxthru.runtime.errors import InputError, listed, require


@dataclasses.dataclass(frozen=True)
class Prepared:
    """keys: of each store, from the content of its source, the tokenizer and the held-out share."""

    mix: MixFile
    tokenizer: Tokenizer
    stores: dict[str, store.TokenStore | TextStore]
    keys: dict[str, str]


def open_stores(
    mix: MixFile, folder: Path, prepare: bool = True, begun: Mapping[str, str] | None = None
) -> Prepared:
    """Returns the opened stores of a mix, kept in `folder`.

    prepare: make what is missing, see `make_stores`. Without it nothing is made: the stores of the keys
    `begun` are opened, whose text need not be on this machine, or without keys those of the text as it is.
    Raises InputError.
    """
    keys = make_stores(mix, folder, begun) if prepare else begun or _keys_as_it_is(mix, folder)
    for name in mix.recipes:
        whole = name in keys and _is_whole(_folder(folder, mix, name, keys[name]))
        require(whole, lambda name=name: _unprepared(mix, folder, f"source {name}"))
    keys = {name: keys[name] for name in mix.recipes}
    store.let_files_open()
    stores = {
        name: (TextStore if recipe.online else store.TokenStore)(_folder(folder, mix, name, keys[name]))
        for name, recipe in mix.recipes.items()
    }
    tokenizer = kept_tokenizer(mix, folder, {opened.about["tokenizer"] for opened in stores.values()})
    require(tokenizer is not None, _unprepared(mix, folder, "tokenizer"))
    for name, opened in stores.items():
        wanted = mix.recipes[name].transform.name
        made = opened.about.get("transform", wanted)  # older stores of tokens do not say
        if made != wanted:
            was = f"was made with transform = {made!r}, the mix has {wanted!r}"
            begun = "a run that began with the former needs it in the mix; else"
            raise InputError(f"source {name}: {opened.folder} {was}; {begun} {REMEDY}")
    return Prepared(mix, tokenizer, stores, keys)


def make_stores(mix: MixFile, folder: Path, begun: Mapping[str, str] | None = None) -> dict[str, str]:
    """Makes the stores that are missing in `folder` and returns {source: key of its store}.

    begun: the keys of a run that goes on: those stores that are still there are kept, with their tokenizer,
    whatever has become of the text they were made from. Raises InputError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"data.store = {folder}: cannot be made ({error.strerror})") from error
    except ValueError as error:  # a NUL in it
        raise InputError(f"data.store = {str(folder)!r}: is no path ({error})") from error
    remove_partials(folder)
    kept = {name: key for name, key in (begun or {}).items() if name in mix.recipes}
    kept = {name: key for name, key in kept.items() if _is_whole(_folder(folder, mix, name, key))}
    cache = HashCache(folder / "hashes.json")
    corpora = _corpora(mix, cache, kept)
    cache.save()
    with Progress() as progress:
        manifests = (store.read_manifest(_folder(folder, mix, *item)) for item in kept.items())
        made = {manifest["tokenizer"] for manifest in manifests}
        tokenizer = kept_tokenizer(mix, folder, made)
        other = bool(made) and mix.tokenizer.path is not None
        require(tokenizer is not None or not other, lambda: _other(mix))
        if tokenizer is None:  # then their stores are of no use
            for name in mix.recipes:
                require(name in corpora, f"source {name}: no files found, nor the tokenizer of its store")
            kept, tokenizer = {}, _tokenizer(mix, folder, corpora, progress)
        keys = _keys(mix, corpora, tokenizer)
        conversations = [corpus for corpus in corpora.values() if corpus.recipe.records != "text"]
        if conversations:
            _tell_of_bos(tokenizer, progress)
        for corpus in conversations:
            corpus.render = renderer(tokenizer.chat_template, corpus.recipe.records, corpus.noted)
        changed = [name for name, key in kept.items() if keys.get(name) != key]
        if changed:
            was = f"changed since the run was started: {listed(changed)}"
            progress.keep(f"{was}; it goes on with the text as it was")
        keys = {name: kept.get(name) or keys[name] for name in mix.recipes}
        targets = {name: _folder(folder, mix, name, key) for name, key in keys.items()}
        missing = {name: target for name, target in targets.items() if not _is_whole(target)}
        write_stores(corpora, missing, tokenizer, mix.held_out, progress)
    return keys


def _tell_of_bos(tokenizer: Tokenizer, progress: Progress) -> None:
    """Says that conversations do not begin as the model's texts do; the template decides."""
    template, bos = tokenizer.chat_template, tokenizer.borders.bos
    if bos and not template.begins_with(bos):
        progress.keep(
            f"chat template {template.name}: writes no {bos}, with which texts begin; none is added"
        )


def _keys(mix: MixFile, corpora: dict[str, Corpus], tokenizer: Tokenizer) -> dict[str, str]:
    """Returns the key of each source's store. Raises InputError for conversations without a template that
    says which of them is trained on."""
    parts = (store.VERSION, tokenizer.identity, mix.held_out, writer.SHARD_BYTES)
    keys = {}
    for name, corpus in corpora.items():
        template = []
        if corpus.recipe.records != "text":
            tokenizer.chat_template.check()
            template = [tokenizer.chat_template.digest]
        keys[name] = hash_of([*parts, corpus.key, *template])[:16]
    return keys


def _keys_as_it_is(mix: MixFile, folder: Path) -> dict[str, str]:
    """Returns the keys that the stores of the text as it is would have, if their tokenizer is there."""
    corpora = _corpora(mix, HashCache(folder / "hashes.json"), {})
    path = _tokenizer_path(mix, folder, corpora)
    require(path.exists(), _unprepared(mix, folder, "tokenizer"))
    return _keys(mix, corpora, mix.tokenizer.opened(path))


def _unprepared(mix: MixFile, folder: Path, what: str) -> str:
    command = f"python -m jaxthru.data prepare {mix.path} --store {folder}"
    return f"{what}: not prepared in {folder}, which all processes of a run share: run `{command}` first"


def _corpora(mix: MixFile, cache: HashCache, kept: Mapping[str, str]) -> dict[str, Corpus]:
    """Returns the corpora of the sources, but for those whose files are gone and whose stores are kept."""
    corpora: dict[str, Corpus] = {}
    taken: dict[str, set[str]] = {recipe.format: set() for recipe in mix.recipes.values()}
    for name, recipe in mix.recipes.items():
        try:
            files = collect(name, recipe, cache, taken[recipe.format])
        except InputError:
            if name not in kept:
                raise
            continue
        taken[recipe.format].update(file.digest for file in files)
        corpora[name] = Corpus(name, recipe, files)
    return corpora


def _folder(folder: Path, mix: MixFile, name: str, key: str) -> Path:
    """Returns where a source's store is. One of text and one of tokens hold the same documents: their key,
    by which a run knows its data, is the same."""
    return folder / f"{name}-{key}{'.text' if mix.recipes[name].online else ''}"


def _is_whole(target: Path) -> bool:
    return (target / "manifest.json").is_file()


def kept_tokenizer(mix: MixFile, folder: Path, made: set[str]) -> Tokenizer | None:
    """Returns the one tokenizer that stores were made with, if it is still there. made: its identity, as each
    of them says."""
    spec = mix.tokenizer
    candidates = [(path, UNSAID, spec.template) for path in sorted(folder.glob("tokenizer-*.json"))]
    if spec.path:
        candidates = [(spec.path, spec.borders, spec.template)]
    if spec.kept:
        candidates.append((spec.kept, UNSAID, None))
    for path, borders, template in candidates if len(made) == 1 else ():
        content = hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()
        if not next(iter(made)).startswith(content):
            continue
        if (opened := Tokenizer.of(path, borders, template, spec.talks)).identity in made:
            return opened
    return None


def _other(mix: MixFile) -> str:
    """Returns what to say of a named tokenizer with which the stores of the run were not made."""
    spec = mix.tokenizer
    return (
        f"tokenizer {spec.path}: is not the one that the run was started with, or begins and ends documents "
        f"otherwise: {spec.opened(spec.path)}; name that one, or give another --run-dir"
    )


def _tokenizer_path(mix: MixFile, folder: Path, corpora: dict[str, Corpus]) -> Path:
    """Returns where the named tokenizer is, or the one trained on these corpora will be."""
    spec = mix.tokenizer
    contents = [corpus.key for corpus in corpora.values()]
    template = [spec.template] if spec.template else []
    key = hash_of([spec.vocabulary, spec.train_bytes, mix.held_out, contents, *template])[:16]
    return spec.path or folder / f"tokenizer-{key}.json"


def _tokenizer(mix: MixFile, folder: Path, corpora: dict[str, Corpus], progress: Progress) -> Tokenizer:
    """Returns the named tokenizer, or the one trained on these corpora."""
    path = _tokenizer_path(mix, folder, corpora)
    if not path.exists():
        control = CONTROL if mix.tokenizer.template else ()
        train(_training_texts(mix, corpora, progress), mix.tokenizer.vocabulary, path, control)
        progress.end()
    return mix.tokenizer.opened(path)


def _training_texts(mix: MixFile, corpora: dict[str, Corpus], progress: Progress) -> Iterator[str]:
    """Yields training documents, an equal share of bytes from each source whatever its weight.

    Weights may change when a run is resumed; its tokenizer may not.
    """
    share = mix.tokenizer.train_bytes // len(corpora)
    progress.begin("tokenizer", sum(min(share, corpus.size) for corpus in corpora.values()))
    for corpus in corpora.values():
        size = 0
        chat = corpus.recipe.records != "text"  # which cannot be rendered yet
        for item in read(corpus.files, corpus.recipe) if chat else corpus.items():
            if isinstance(item, Document) and not held_out(item.origin, mix.held_out):
                text = (words_of(item.text) if chat else item.text).encode()[: share - size]
                size += len(text)
                progress.advance(len(text))
                yield text.decode(errors="ignore")
                if size >= share:
                    break
