"""Reading a folder by a recipe: `from reading import items`."""

from pathlib import Path

from jaxthru.data.files import HashCache, collect
from jaxthru.data.mix import Recipe
from jaxthru.data.readers import Damage, Document, read


def items(folder: Path, **keys) -> tuple[list[str], list[Damage]]:
    """Returns the texts and the damaged records of everything in `folder` by a recipe with these keys."""
    recipe = Recipe(paths=(f"{folder}/**/*",), **keys)
    found = list(read(collect("test", recipe, HashCache(folder.parent / "none.json"), frozenset()), recipe))
    texts = [item.text for item in found if isinstance(item, Document)]
    return texts, [item for item in found if isinstance(item, Damage)]
