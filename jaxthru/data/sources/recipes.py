"""Recipes: how the files of a source are found and become documents, as its source.toml says."""

import dataclasses
import glob
from pathlib import Path
from typing import Any

from jaxthru.data.sources.chat.records import Records
from jaxthru.data.sources.readers import FORMATS, formats_with, options_of
from jaxthru.data.sources.record import Options
from jaxthru.data.sources.toml_file import check_keys, home, read_toml, typed
from jaxthru.data.sources.transforms import Transform
from jaxthru.runtime import plain
from jaxthru.runtime.errors import InputError, did_you_mean, require

REPOSITORY = Path(__file__).resolve().parents[3] / "data"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the documents of one source are obtained: data/sources/<name>/source.toml, changed by the mix.

    format: how a file becomes documents: the name of a file in `readers/`. options: those of its reader,
        which stand among the other keys in a source.toml.
    stdlib: take the files of Python's standard library. packages: and those of these installed
        distributions; one that is not installed is skipped.
    paths: and the files that these globs match (`~` and `**` are understood), from the mix file's folder.
    suffixes: only files whose names end so; empty takes all. exclude: not those that match these globs;
        for `stdlib` and `packages` the path begins at the library or the package.
    cap_bytes: stop after so much text; 0 takes all. max_file_bytes: leave out larger files; 0 takes all.
    max_damaged: preparation fails when more than this share of the records is damaged.
    online: keep the text, compressed, and make the tokens while training, in processes of their own.
    transform: "module:function" of a module that lies beside the file that says so, or the name of an entry
        point of the group jaxthru.transforms; applied to each text before it is tokenised. The same text must
        always give the same result, and "" leaves the text out. With `online` it runs while training.
    """

    description: str = ""
    format: str = "text"
    options: Options = Options()
    stdlib: bool = False
    packages: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    cap_bytes: int = 0
    max_file_bytes: int = 0
    max_damaged: float = 0.01
    online: bool = False
    transform: Transform = Transform()

    @property
    def records(self) -> Records:
        """What a record of its files is: see `keyed.Options`."""
        return getattr(self.options, "records", "text")

    @classmethod
    def of(cls, **keys: Any) -> "Recipe":
        """Returns the recipe of the keys of a source.toml: its own, and the options of its format's reader.

        Raises InputError for an option that cannot be.
        """
        own = {name: keys.pop(name) for name in plain.fields(cls) if name in keys}
        return cls(**own, options=options_of(own.get("format", cls.format))(**keys))


ASIDE = (
    *("description", "max_damaged", "online"),
    *("stdlib", "packages", "paths", "suffixes", "exclude", "max_file_bytes"),
)
"""The keys that do not decide what files become: those that change no document, and those that find the
files, whose contents count themselves. All others, any new one and every reader's options, are part of a
store's key."""

Read = dict[str, tuple[Path, dict[str, Any]]]
"""Recipes that were read: the file and its keys by their name, for many sources may have the same."""


def read_recipe(path: Path, name: str, table: dict[str, Any], read: Read) -> Recipe:
    """Returns the recipe of a source.

    path: of the mix that has it. table: its keys there, which come before those of the recipe that it names
    (default: the one of the source's own name). read: recipes that were read, and are. Raises InputError.
    """
    recipe = table.pop("recipe", name)
    require(isinstance(recipe, str), f"{path}: sources.{name}.recipe must be a name")
    if recipe not in read:
        read[recipe] = _find(path, name, recipe)
    own = {key: kind for key, kind in plain.fields(Recipe).items() if key != "options"} | {"transform": str}
    format = table.get("format", read[recipe][1].get("format", Recipe.format))
    known = [*FORMATS, *([format] if format in FORMATS else [])]  # last, for its own types count
    declared = {key: kind for one in known for key, kind in plain.fields(options_of(one)).items()} | own
    values = {}
    for file, keys, prefix in ((*read[recipe], ""), (path, table, f"sources.{name}.")):
        check_keys(file, keys, declared, prefix)
        for key, value in keys.items():
            value = typed(file, prefix + key, value, declared[key])
            if key == "transform":
                value = Transform(value, str(file.parent))
            if key == "paths":
                # The folder's own name is no pattern, whatever it holds.
                folder = Path(glob.escape(str(file.parent)))
                value = tuple(str(folder / home(f"{file}: paths", item)) for item in value)
            values[key] = value
    where = f"{path}: sources.{name}"
    require(format in FORMATS, lambda: f"{where}.format = {format!r}{did_you_mean(format, FORMATS)}")
    for key, value in values.items():
        if key not in own and format not in (formats := formats_with(key)):
            readers = " or ".join(map(repr, formats))
            raise InputError(f"{where}.{key} = {value!r}: is read with format = {readers}, not {format!r}")
    try:
        built = Recipe.of(**values)
    except InputError as error:
        raise InputError(f"{where}.{error}") from error
    require(built.max_damaged <= 1, f"{where}.max_damaged = {built.max_damaged}: is a share, 1 at most")
    somewhere = built.stdlib or bool(built.packages) or bool(built.paths)
    require(somewhere, f"{where} says nowhere what to read: give it paths = [...]")
    return built


def _find(path: Path, name: str, recipe: str) -> tuple[Path, dict[str, Any]]:
    folders = (Path("data/sources").resolve(), path.parent.parent / "sources", REPOSITORY / "sources")
    for folder in folders:
        if (file := folder / recipe / "source.toml").is_file():
            return file, read_toml(file)
    names = sorted({file.parent.name for folder in folders for file in folder.glob("*/source.toml")})
    raise InputError(f"{path}: sources.{name}: no recipe {recipe!r}{did_you_mean(recipe, names)}")
