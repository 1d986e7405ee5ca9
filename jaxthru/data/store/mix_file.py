"""The mix file, data/mixes/<name>.toml: its sources, their recipes and mixture, and the tokenizer."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from jaxthru.data.mixture.configuration import MIXTURE_KEYS, SHARE_KEYS, Mixture
from jaxthru.data.sources.recipes import REPOSITORY, Recipe, read_recipe
from jaxthru.data.sources.toml_file import check_keys, home, read_toml, typed
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.data.store.tokenizer_folder import OWN, TOKENIZER, UNSAID, Borders
from jaxthru.runtime.errors import InputError, did_you_mean, require

NAME = re.compile(r"[^/\x00-\x1f\x7f]{1,100}")
"""What a source may be called: its store is a folder of that name, and terminals are shown it."""


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """Either a tokenizer on disk, or a byte-level BPE to be trained.

    path: a tokenizer.json, or a folder of published weights that holds one; None trains one of `vocabulary`
        tokens on at most `train_bytes` of training documents.
    borders: what documents begin and end with, before what the folder says. template: the chat template,
        before the folder's: see `tokenizer_folder.read_template`. One that is trained where there are
        conversations has OWN, and its control tokens. talks: whether a source has conversations.
    kept: where the run that goes on keeps the tokenizer it began with, which is taken if it is the one that
        the stores were made with and is to be had nowhere else.
    """

    path: Path | None = None
    vocabulary: int = 8192
    train_bytes: int = 20_000_000
    borders: Borders = UNSAID
    template: str | None = None
    talks: bool = False
    kept: Path | None = None

    def opened(self, path: Path) -> Tokenizer:
        """Returns the tokenizer of a path, as the mix wants it. Raises InputError."""
        return Tokenizer.of(path, self.borders, self.template, self.talks)


@dataclasses.dataclass(frozen=True)
class MixFile:
    """Sources in the order of the file. mixture: what each gives. held_out: share of documents."""

    path: Path
    description: str
    recipes: dict[str, Recipe]
    mixture: Mixture
    tokenizer: TokenizerSpec
    held_out: float


def load_mix(mix: str, tokenizer: str | None = None, kept: Path | None = None) -> MixFile:
    """Returns the mix of a `.toml` path, or of a name in ./data/mixes or in the repository's data/mixes.

    tokenizer: a path that takes the place of the mix's tokenizer. kept: the folder in which a run that goes
    on keeps its own, which is taken where the one that is named is not there any more.
    Raises InputError for a missing file, an unknown key or source, or weights that are no shares.
    """
    path = _find(mix)
    tree = read_toml(path)
    check_keys(path, tree, ("description", "held_out", "tokenizer", "sources", *MIXTURE_KEYS), "")
    sources = tree.get("sources", {})
    require(isinstance(sources, dict) and bool(sources), f"{path}: needs at least one [sources.<name>]")
    recipes, shares, read = {}, {}, {}
    for name, table in sources.items():
        require(isinstance(table, dict), f"{path}: sources.{name} must be a table")
        require(
            NAME.fullmatch(name) is not None,
            f"{path}: source {name[:60]!r}: its store is named after it: give it 1 to 100 characters, "
            "none of them '/' or a control character",
        )
        table = dict(table)
        shares[name] = {key: table.pop(key) for key in SHARE_KEYS if key in table}
        recipes[name] = read_recipe(path, name, table, read)
    held_out = typed(path, "held_out", tree.get("held_out", 0.02), float)
    require(held_out < 1, f"{path}: held_out = {held_out}: must be below 1")
    mixture = {key: tree[key] for key in MIXTURE_KEYS if key in tree}
    spec = _tokenizer(path, tree.get("tokenizer", {}), tokenizer, kept)
    talks = any(recipe.records != "text" for recipe in recipes.values())
    if spec.path is None and talks:
        spec = dataclasses.replace(spec, template=OWN)  # whose control tokens it can be given
    return MixFile(
        path=path,
        description=str(tree.get("description", "")),
        recipes=recipes,
        mixture=Mixture.from_tree({**mixture, "sources": shares}, f"{path}: ").normalised(),
        tokenizer=dataclasses.replace(spec, talks=talks),
        held_out=held_out,
    )


def _find(mix: str) -> Path:
    if mix.endswith(".toml"):
        path = Path(mix).expanduser()
        require(path.is_file(), f"data.mix = {mix}: no such file")
        return path.resolve()
    folders = (Path("data/mixes").resolve(), REPOSITORY / "mixes")
    for folder in folders:
        if (folder / f"{mix}.toml").is_file():
            return folder / f"{mix}.toml"
    names = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    raise InputError(f"data.mix = {mix!r}: no such mix{did_you_mean(mix, names)}")


def _tokenizer(path: Path, value: Any, instead: str | None, kept: Path | None) -> TokenizerSpec:
    """Returns what a mix says of its tokenizer. instead: the path that takes the place of the mix's, whose
    `bos` and `end` still count. kept: as in `load_mix`."""
    kept = kept if kept and (kept / TOKENIZER).is_file() else None
    if isinstance(value, str):
        value = {"path": value}
    require(isinstance(value, dict), f"{path}: tokenizer must be a path or a table")
    texts = {"path": str, "bos": str, "end": str, "chat_template": str}
    numbers = {"vocabulary": int, "train_bytes": int}
    check_keys(path, value, texts | numbers, "tokenizer.")
    keys = {key: typed(path, f"tokenizer.{key}", each, (texts | numbers)[key]) for key, each in value.items()}
    borders, template = Borders(keys.get("bos"), keys.get("end")), keys.get("chat_template")
    if template and template.endswith(".jinja"):
        template = str(path.parent / home(f"{path}: tokenizer.chat_template", template))
        there = Path(template).is_file()
        require(there, f"{path}: tokenizer.chat_template = {keys['chat_template']!r}: no such file")
    if instead is not None:
        file, said = home("data.tokenizer", instead), f"data.tokenizer = {instead!r}"
        return _named(file, said, borders, template, kept)
    if "path" in keys:
        trained = next((key for key in numbers if key in keys), None)
        require(
            trained is None, f"{path}: tokenizer.{trained} is of a tokenizer to be trained: not with path"
        )
        file = path.parent / home(f"{path}: tokenizer.path", keys["path"])
        said = f"{path}: tokenizer = {keys['path']!r}"
        return _named(file, said, borders, template, kept)
    template = keys.pop("chat_template", OWN)
    require(
        template == OWN,
        f"{path}: tokenizer.chat_template = {template!r}: needs tokenizer.path, a tokenizer that has its "
        f"control tokens; one to be trained has those of {OWN!r}",
    )
    alone = next((key for key in ("bos", "end") if key in keys), None)
    require(
        alone is None, f"{path}: tokenizer.{alone} needs tokenizer.path, a tokenizer that has such tokens"
    )
    spec = TokenizerSpec(**keys, kept=kept)
    require(
        spec.vocabulary > 257,
        f"{path}: tokenizer.vocabulary = {spec.vocabulary}: must exceed 257 (every byte and the end of text)",
    )
    require(
        spec.vocabulary <= 2**20,  # the trainer takes memory for all of them at once, and aborts without it
        f"{path}: tokenizer.vocabulary = {spec.vocabulary}: must be at most 2**20",
    )
    return spec


def _named(path: Path, said: str, borders: Borders, template: str | None, kept: Path | None) -> TokenizerSpec:
    """Returns the tokenizer of a path, or the one that the run keeps if the path is not there any more."""
    there = path.is_file() or path.is_dir()
    if kept and not there:
        return TokenizerSpec(path=kept.resolve())
    require(there, f"{said}: no such file or folder")
    return TokenizerSpec(path=path.resolve(), borders=borders, template=template, kept=kept)
