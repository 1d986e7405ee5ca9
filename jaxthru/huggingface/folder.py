"""A folder of published weights: which tensors it has, and in which of its files."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxthru.huggingface.safetensors import Reader, TensorInfo
from jaxthru.runtime.errors import InputError, require

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "*.bin", "*.pth", "*.pt")
"""Reading these runs code that stands in them."""


class Folder:
    """Weights in one file or in several with an index. Their headers are read, and hold together; nothing in
    the folder is run.

    files: {file name: Reader}, in the index's order. indexed: whether there is an index. tensors: {name:
    TensorInfo} of all files. Raises InputError.
    """

    def __init__(self, path: Path):
        require(path.is_dir(), f"{path}: is no folder of published weights")
        self.path = path
        single, index = (path / SINGLE).exists(), (path / INDEX).exists()
        require(not (single and index), f"{path}: has both {SINGLE} and {INDEX}; remove one of them")
        if not (single or index):
            raise InputError(_without_weights(path))
        self.indexed = index
        self._file_of = _weight_map(path / INDEX) if index else {}
        names = list(dict.fromkeys(self._file_of.values())) if index else [SINGLE]
        for name in names:
            require((path / name).is_file(), f"{path / INDEX}: names {name}, which is not there")
        for found in sorted(path.glob("*.safetensors")):
            extra = SHARD.fullmatch(found.name) and found.name not in names
            require(
                not extra, f"{found}: is not in {INDEX if index else f'use, as {SINGLE} is there'}; remove it"
            )
        self.files = {name: Reader(path / name) for name in names}
        self.tensors: dict[str, TensorInfo] = {}
        self._gather()

    def _gather(self) -> None:
        place: dict[str, str] = {}
        for file, reader in self.files.items():
            for name, info in reader.tensors.items():
                where = f"{self.path / file}: tensor {name!r}"
                require(name not in place, lambda: f"{where}: is in {place[name]} too")  # noqa: B023
                listed = self._file_of.get(name, None if self.indexed else file)
                require(listed is not None, f"{where}: is not in {INDEX}")
                require(listed == file, f"{where}: by {INDEX} is in {listed}")
                place[name], self.tensors[name] = file, info
        for name, file in self._file_of.items():
            require(name in place, f"{self.path / file}: lacks tensor {name!r}, which {INDEX} says is there")
        self._file_of = place

    def file_of(self, name: str) -> str:
        """Returns the name of the file that a tensor is in."""
        return self._file_of[name]

    def array(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only view of the mapped file."""
        return self.files[self._file_of[name]].array(name)

    def bytes(self, name: str) -> np.ndarray:
        """Returns a tensor's bytes, uint8 [bytes], as `array` does."""
        return self.files[self._file_of[name]].bytes(name)


def _without_weights(path: Path) -> str:
    for pattern in PICKLED:
        for found in sorted(path.glob(pattern)):
            return (
                f"{found}: pickled weights run code when they are read, so these are not read; "
                f"save them as {SINGLE} (safetensors)"
            )
    others = sorted(found.name for found in path.glob("*.safetensors"))
    said = f"; {others[0]} is there" if others else ""
    return f"{path}: has neither {SINGLE} nor {INDEX}{said}"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, no key of which may come twice. Raises InputError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            require(key not in found, f"{path}: names {key!r} twice")
            found[key] = value
        return found

    try:
        tree = json.loads(path.read_bytes().decode(), object_pairs_hook=once)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON in UTF-8 ({error})") from error
    require(isinstance(tree, dict), f"{path}: must be a JSON object")
    return tree


def _weight_map(path: Path) -> dict[str, str]:
    """Returns {tensor: file name} of an index. No name leads out of the folder."""
    found = read_json(path).get("weight_map")
    require(isinstance(found, dict) and bool(found), f"{path}: must have weight_map, a file's name by tensor")
    for tensor, file in found.items():
        require(
            isinstance(file, str) and file.endswith(".safetensors") and plain_name(file),
            f"{path}: tensor {tensor!r} is in {file!r}, which is no name of a .safetensors file beside it",
        )
    return found


def check_empty(folder: Path) -> None:
    """Raises InputError for a folder to be written that is there and not empty."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from error
    require(not taken, f"{folder}: is there and not an empty folder; name one that is not there yet")


def plain_name(name: str) -> bool:
    """Says whether a name is that of a file in a folder, not of one elsewhere."""
    return bool(name) and not set(name) & {"/", "\\", "\0"} and name not in (".", "..")
