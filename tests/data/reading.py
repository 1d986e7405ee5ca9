"""Reading a folder by a recipe: `from reading import items`."""

from pathlib import Path

from jaxthru.data.sources.documents import read
from jaxthru.data.sources.files import HashCache, collect
from jaxthru.data.sources.recipes import Recipe
from jaxthru.data.sources.record import Damage, Document


def items(folder: Path, **keys) -> tuple[list[str], list[Damage]]:
    """Returns the texts and the damaged records of everything in `folder` by a recipe with these keys."""
    recipe = Recipe.of(paths=(f"{folder}/**/*",), **keys)
    found = list(read(collect("test", recipe, HashCache(folder.parent / "none.json"), frozenset()), recipe))
    texts = [item.text for item in found if isinstance(item, Document)]
    return texts, [item for item in found if isinstance(item, Damage)]
