"""A mix: which sources, by which recipes, in which shares. Read from data/mixes/<name>.toml."""

import dataclasses
import glob
import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxthru.data.schedule import MIXING_KEYS, SHARE_KEYS, Mixing, is_number
from jaxthru.data.tokenizer_folder import TOKENIZER, UNSAID, Borders
from jaxthru.data.transform import Transform
from jaxthru.runtime import plain
from jaxthru.runtime.errors import InputError, did_you_mean, require

REPOSITORY = Path(__file__).resolve().parents[2] / "data"
NAME = re.compile(r"[^/\x00-\x1f\x7f]{1,100}")
"""What a source may be called: its store is a folder of that name, and terminals are shown it."""
FORMATS = ("text", "docstrings", "jsonl", "parquet", "tar", "array_record")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the documents of one source are obtained: data/sources/<name>/source.toml, changed by the mix.

    format: how a file becomes documents; `text` is one document a file, `docstrings` one document a Python
        file or METADATA file, `jsonl`, `parquet` and `array_record` one document a record, `tar`
        (WebDataset) one document a sample. Files of text, jsonl and tar may be .gz or .zst.
    stdlib: take the files of Python's standard library. packages: and those of these installed
        distributions; one that is not installed is skipped.
    paths: and the files that these globs match (`~` and `**` are understood), from the mix file's folder.
    suffixes: only files whose names end so; empty takes all. exclude: not those that match these globs;
        for `stdlib` and `packages` the path begins at the library or the package.
    text_key: the key of a record, or the column, that holds the text; of an ArrayRecord "" if the record is
        the text. extension: of the member of a tar sample that holds the text (JSON if it ends in `json`);
        "" is `txt`, or else `json`.
    cap_bytes: stop after so much text; 0 takes all. max_file_bytes: leave out larger files; 0 takes all.
    max_record_bytes: a longer record counts as damaged; as it stands in its file, decompressed.
    max_damaged: preparation fails when more than this share of the records is damaged.
    online: keep the text, compressed, and make the tokens while training, in processes of their own.
    transform: "module:function" of a module that lies beside the file that says so, or the name of an entry
        point of the group jaxthru.transforms; applied to each text before it is tokenised. The same text must
        always give the same result, and "" leaves the text out. With `online` it runs while training.
    """

    description: str = ""
    format: str = "text"
    stdlib: bool = False
    packages: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    text_key: str = "text"
    extension: str = ""
    cap_bytes: int = 0
    max_file_bytes: int = 0
    max_record_bytes: int = 16_000_000
    max_damaged: float = 0.01
    online: bool = False
    transform: Transform = Transform()


ASIDE = (
    *("description", "max_damaged", "online"),
    *("stdlib", "packages", "paths", "suffixes", "exclude", "max_file_bytes"),
)
"""The options that do not decide what files become: those that change no document, and those that find the
files, whose contents count themselves. All others, and any new one, are part of a store's key."""


@dataclasses.dataclass(frozen=True)
class TokenizerSpec:
    """Either a tokenizer on disk, or a byte-level BPE to be trained.

    path: a tokenizer.json, or a folder of published weights that holds one; None trains one of `vocabulary`
        tokens on at most `train_bytes` of training documents.
    borders: what documents begin and end with, before what the folder says.
    kept: where the run that goes on keeps the tokenizer it began with, which is taken if it is the one that
        the stores were made with and is to be had nowhere else.
    """

    path: Path | None = None
    vocabulary: int = 8192
    train_bytes: int = 20_000_000
    borders: Borders = UNSAID
    kept: Path | None = None


@dataclasses.dataclass(frozen=True)
class Mix:
    """Sources in the order of the file. mixing: what each gives. held_out: share of documents."""

    path: Path
    description: str
    recipes: dict[str, Recipe]
    mixing: Mixing
    tokenizer: TokenizerSpec
    held_out: float


def load_mix(mix: str, tokenizer: str | None = None, kept: Path | None = None) -> Mix:
    """Returns the mix of a `.toml` path, or of a name in ./data/mixes or in the repository's data/mixes.

    tokenizer: a path that takes the place of the mix's tokenizer. kept: the folder in which a run that goes
    on keeps its own, which is taken where the one that is named is not there any more.
    Raises InputError for a missing file, an unknown key or source, or weights that are no shares.
    """
    path = _find(mix)
    tree = _read_toml(path)
    _check_keys(path, tree, ("description", "held_out", "tokenizer", "sources", *MIXING_KEYS), "")
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
        recipes[name] = _recipe(path, name, table, read)
    held_out = _typed(path, "held_out", tree.get("held_out", 0.02), float)
    require(held_out < 1, f"{path}: held_out = {held_out}: must be below 1")
    mixing = {key: tree[key] for key in MIXING_KEYS if key in tree}
    return Mix(
        path=path,
        description=str(tree.get("description", "")),
        recipes=recipes,
        mixing=Mixing.from_tree({**mixing, "sources": shares}, f"{path}: ").normalised(),
        tokenizer=_tokenizer(path, tree.get("tokenizer", {}), tokenizer, kept),
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


Read = dict[str, tuple[Path, dict[str, Any]]]
"""Recipes that were read: the file and its keys by their name, for many sources may have the same."""


def _read_recipe(path: Path, name: str, recipe: str) -> tuple[Path, dict[str, Any]]:
    folders = (Path("data/sources").resolve(), path.parent.parent / "sources", REPOSITORY / "sources")
    for folder in folders:
        if (file := folder / recipe / "source.toml").is_file():
            return file, _read_toml(file)
    names = sorted({file.parent.name for folder in folders for file in folder.glob("*/source.toml")})
    raise InputError(f"{path}: sources.{name}: no recipe {recipe!r}{did_you_mean(recipe, names)}")


def _recipe(path: Path, name: str, table: dict[str, Any], read: Read) -> Recipe:
    """Returns the recipe named in `table` (default: the source's own name), with the table's other keys."""
    recipe = table.pop("recipe", name)
    require(isinstance(recipe, str), f"{path}: sources.{name}.recipe must be a name")
    if recipe not in read:
        read[recipe] = _read_recipe(path, name, recipe)
    values = {}
    for file, keys, prefix in ((*read[recipe], ""), (path, table, f"sources.{name}.")):
        declared = plain.fields(Recipe) | {"transform": str}
        _check_keys(file, keys, declared, prefix)
        for key, value in keys.items():
            value = _typed(file, prefix + key, value, declared[key])
            if key == "transform":
                value = Transform(value, str(file.parent))
            if key == "paths":
                # The folder's own name is no pattern, whatever it holds.
                folder = Path(glob.escape(str(file.parent)))
                value = tuple(str(folder / _home(f"{file}: paths", item)) for item in value)
            values[key] = value
    built = Recipe(**values)
    require(
        built.format in FORMATS,
        lambda: f"{path}: sources.{name}.format = {built.format!r}{did_you_mean(built.format, FORMATS)}",
    )
    _check_read(path, name, built, values)
    for key in ("text_key", "max_record_bytes"):
        needed = key != "text_key" or built.format in ("jsonl", "parquet")
        value = getattr(built, key)
        require(bool(value) or not needed, f"{path}: sources.{name}.{key} = {value!r}: must not be empty")
    require(
        built.max_damaged <= 1,
        f"{path}: sources.{name}.max_damaged = {built.max_damaged}: is a share, 1 at most",
    )
    require(
        built.max_record_bytes < 2**31,
        f"{path}: sources.{name}.max_record_bytes = {built.max_record_bytes}: must be below 2 GiB",
    )
    require(
        built.stdlib or bool(built.packages) or bool(built.paths),
        f"{path}: sources.{name} says nowhere what to read: give it paths = [...]",
    )
    return built


def _check_read(path: Path, name: str, recipe: Recipe, given: Collection[str]) -> None:
    """Raises InputError for a given option that readers read, but not the format's own."""
    from jaxthru.data.readers import formats_with  # which imports this module

    for key in given:
        if (formats := formats_with(key)) and recipe.format not in formats:
            said = f"{path}: sources.{name}.{key} = {getattr(recipe, key)!r}"
            formats = " or ".join(map(repr, formats))
            raise InputError(f"{said}: is read with format = {formats}, not {recipe.format!r}")


def _home(said: str, text: str) -> Path:
    """Returns a path with its `~` replaced. said: by what key."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{said} = {text!r}: no home folder is known for it") from error


def _tokenizer(path: Path, value: Any, instead: str | None, kept: Path | None) -> TokenizerSpec:
    """Returns what a mix says of its tokenizer. instead: the path that takes the place of the mix's, whose
    `bos` and `end` still count. kept: as in `load_mix`."""
    kept = kept if kept and (kept / TOKENIZER).is_file() else None
    if isinstance(value, str):
        value = {"path": value}
    require(isinstance(value, dict), f"{path}: tokenizer must be a path or a table")
    texts = {"path": str, "bos": str, "end": str}
    numbers = {"vocabulary": int, "train_bytes": int}
    _check_keys(path, value, texts | numbers, "tokenizer.")
    keys = {
        key: _typed(path, f"tokenizer.{key}", each, (texts | numbers)[key]) for key, each in value.items()
    }
    borders = Borders(keys.get("bos"), keys.get("end"))
    if instead is not None:
        return _named(_home("data.tokenizer", instead), f"data.tokenizer = {instead!r}", borders, kept)
    if "path" in keys:
        trained = next((key for key in numbers if key in keys), None)
        require(
            trained is None, f"{path}: tokenizer.{trained} is of a tokenizer to be trained: not with path"
        )
        file = path.parent / _home(f"{path}: tokenizer.path", keys["path"])
        said = f"{path}: tokenizer = {keys['path']!r}"
        return _named(file, said, borders, kept)
    alone = next((key for key in ("bos", "end") if key in keys), None)
    require(
        alone is None, f"{path}: tokenizer.{alone} needs tokenizer.path, a tokenizer that has such a token"
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


def _named(path: Path, said: str, borders: Borders, kept: Path | None) -> TokenizerSpec:
    """Returns the tokenizer of a path, or the one that the run keeps if the path is not there any more."""
    there = path.is_file() or path.is_dir()
    if kept and not there:
        return TokenizerSpec(path=kept.resolve())
    require(there, f"{said}: no such file or folder")
    return TokenizerSpec(path=path.resolve(), borders=borders, kept=kept)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as TOML ({error})") from error


def _check_keys(path: Path, table: dict[str, Any], valid: Collection[str], prefix: str) -> None:
    for key in table:
        plain.check_key(key, valid, prefix, where=f"{path}: ")


def _typed(path: Path, key: str, value: Any, declared: Any) -> Any:
    """Returns a value of the type declared for it. A number is not below 0."""
    if declared is float:
        require(is_number(value), f"{path}: {key} = {value}: must be a number >= 0")
    value = plain.read(declared, value, f"{path}: {key}")
    require(declared is not int or value >= 0, f"{path}: {key} = {value}: must not be negative")
    return value
