"""Writing a folder of published weights: whole or not at all, one tensor at a time.

It grows beside its place under a name of its own, is renamed when all of it is on the disk, and only then
gets its marker: a server that waits for the marker never sees a part of it.
"""

import collections
import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.huggingface import safetensors
from jaxthru.huggingface.folder import INDEX, SINGLE, Folder, check_empty, plain_name
from jaxthru.huggingface.mapping import Mapped, mapped
from jaxthru.huggingface.safetensors import DTYPES, FORMAT, NAMES, TensorInfo
from jaxthru.huggingface.weights import FLOATS, ignored, table_name, tied_copies
from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Tensor
from jaxthru.runtime.atomic import abandoned, sync_folder, write_atomically, writer_id
from jaxthru.runtime.errors import InputError, require

MARKER = "STABLE"
LARGEST_SHARD = 5 * 10**9
"""Bytes of tensors in a file, as transformers 4 has it."""

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a tensor to be written comes from: a weight, or as it is from the folder that was loaded."""

    info: TensorInfo
    weight: Mapped | None = None


def write_folder(
    folder: Path,
    config: FamilyConfig,
    read: Callable[[Tensor], Array],
    dtype_of: Callable[[Tensor], str],
    files: Mapping[str, bytes],
    *,
    like: Folder | None = None,
    marker: str = MARKER,
    largest_shard: int = LARGEST_SHARD,
) -> None:
    """Writes the weights of a configuration as published, and files beside them.

    read: (a tensor of the family's table) -> its weight, in the weight's own shape. Each is asked for once,
    or twice if `like` has a tied head too, and the next one while one is written: two are in memory. One that
    is published in parts, as experts are, is kept while the parts beside it are written, and asked for again
    for others. A weight on devices is transposed there; all its shards must be this process's. dtype_of:
    what a tensor is written in, as "bfloat16". files: {name: content}, such as config.json. like: the folder
    that training began with, whose files keep their names and tensors; what is no weight there is copied.
    marker: the file that is written last, empty. largest_shard: bytes.

    Raises InputError for a folder that is there and not empty, before anything is read, for a name in `files`
    that is none, and for a disk that is full, which it then leaves as it was.
    """
    _check_target(folder, files, marker)
    read = _remembered(read)
    shards = _shards(_sources(config, dtype_of, like), like, largest_shard)
    extra = dict(files)
    if len(shards) > 1 or (like and like.indexed):
        extra[INDEX] = _index(shards)
    with new_folder(folder, marker) as partial:
        needed = sum(source.info.nbytes for shard in shards.values() for source in shard.values())
        needed += sum(map(len, extra.values()))
        free = shutil.disk_usage(partial).free
        require(
            needed <= free, f"{folder}: takes {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left"
        )
        for file, shard in shards.items():
            tensors = {name: source.info for name, source in shard.items()}
            arrays = lambda names, shard=shard: _arrays(names, shard, read, like)  # noqa: E731
            safetensors.write(partial / file, tensors, arrays, _metadata(like, file))
        for name, content in extra.items():
            write_atomically(partial / name, content)


@contextlib.contextmanager
def new_folder(folder: Path, marker: str = MARKER) -> Iterator[Path]:
    """Gives a folder to write to, which at the end takes its place, and then gets its marker. What is raised
    within leaves nothing behind. Raises InputError for what cannot be written."""
    folder = folder.absolute()
    remove_unfinished(folder)
    partial = folder.with_name(f"{folder.name}.{writer_id()}.unfinished")
    try:
        partial.mkdir(parents=True)
        yield partial
        sync_folder(partial)
        partial.rename(folder)  # over an empty folder, but over no other
        sync_folder(folder.parent)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    write_atomically(folder / marker, b"")


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes left of the same folder."""
    begun = re.compile(re.escape(folder.name) + r"\.[0-9a-f]{32}\.(\d+)@([^/]+)\.unfinished")
    for path in folder.parent.glob("*.unfinished"):
        if (writer := begun.fullmatch(path.name)) and abandoned(path, writer[1], writer[2]):
            shutil.rmtree(path, ignore_errors=True)


def _check_target(folder: Path, files: Mapping[str, bytes], marker: str) -> None:
    check_empty(folder)
    for name in (*files, marker):
        free = plain_name(name) and name != INDEX and not name.endswith(".safetensors")
        require(free, f"{name!r}: is no name for a file beside the weights")
    require(marker not in files, f"{marker!r}: is the marker, which is written last")


def _sources(
    config: FamilyConfig, dtype_of: Callable[[Tensor], str], like: Folder | None
) -> dict[str, Source]:
    """Returns all tensors to write: weights in the family's order, behind them what else `like` has."""
    by_name = mapped(config, like.tensors if like else ())
    found: dict[str, Source] = {}
    for name, about in by_name.items():
        dtype = NAMES.get(np.dtype(dtype_of(about.tensor)))
        require(
            dtype in FLOATS,
            f"{name}: cannot be written as {dtype_of(about.tensor)}; one of {', '.join(FLOATS)}",
        )
        found[name] = Source(TensorInfo(dtype, about.published), about)
    others = [name for name in like.tensors if name not in by_name] if like else []
    copies = tied_copies(others, config)
    for name in others:
        if name in copies:  # what it was a copy of may have been trained
            found[name] = found[table_name(by_name, config)]
        elif ignored(name, config):
            found[name] = Source(like.tensors[name])
    return found


def _shards(sources: dict[str, Source], like: Folder | None, largest: int) -> dict[str, dict[str, Source]]:
    """Returns {file name: its tensors}: as in `like`, or as many files as it takes, filled in order."""
    if like:
        files: dict[str, dict[str, Source]] = {file: {} for file in like.files}
        for name, source in sources.items():
            files[like.file_of(name)][name] = source
        return {file: shard for file, shard in files.items() if shard}
    shards: list[dict[str, Source]] = [{}]
    taken = 0
    for name, source in sources.items():
        if shards[-1] and taken + source.info.nbytes > largest:
            shards.append({})
            taken = 0
        shards[-1][name] = source
        taken += source.info.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = len(shards)
    return {f"model-{at:05d}-of-{count:05d}.safetensors": shard for at, shard in enumerate(shards, 1)}


def _index(shards: dict[str, dict[str, Source]]) -> bytes:
    infos = [source.info for shard in shards.values() for source in shard.values()]
    total = {
        "total_parameters": sum(info.size for info in infos),
        "total_size": sum(info.nbytes for info in infos),
    }
    places = {name: file for file, shard in shards.items() for name in shard}
    return (json.dumps({"metadata": total, "weight_map": places}, indent=2, sort_keys=True) + "\n").encode()


def _metadata(like: Folder | None, file: str) -> Mapping[str, str] | None:
    return like.files[file].metadata if like else FORMAT


def _arrays(
    names: Iterable[str], shard: dict[str, Source], read: Callable[[Tensor], Array], like: Folder | None
) -> Iterator[np.ndarray]:
    """Yields tensors as published. While one is written the next one is on its way from its device."""
    begun: Array | None = None
    for name in names:
        coming = _begun(name, shard[name], read, like)
        if begun is not None:
            yield _on_host(begun)
        begun = coming
        del coming
    if begun is not None:
        yield _on_host(begun)


def _begun(name: str, source: Source, read: Callable[[Tensor], Array], like: Folder | None) -> Array:
    if (about := source.weight) is None:
        return like.array(name)
    weight, dtype = read(about.tensor), DTYPES[source.info.dtype]
    if tuple(weight.shape) != about.shape:
        raise ValueError(f"{name}: its weight has the shape {about.shape}, not {weight.shape}")
    if isinstance(weight, jax.Array):
        published = about.tensor_of(jnp.dtype(dtype))(weight)
        published.copy_to_host_async()
        return published
    places = dict(about.tensor.part)
    weight = weight[tuple(places.get(dim, slice(None)) for dim in range(weight.ndim))]
    return np.ascontiguousarray(
        weight.transpose(about.order).reshape(about.published).astype(dtype, copy=False)
    )


WHOLE = 2
"""Weights published in parts that are kept while their parts are written: a layer's experts have two."""


def _remembered(read: Callable[[Tensor], Array]) -> Callable[[Tensor], Array]:
    """Returns `read`, which of the last WHOLE weights that are published in parts still has them."""
    kept: collections.OrderedDict[tuple[str, ...], Array] = collections.OrderedDict()

    def weight(tensor: Tensor) -> Array:
        if not tensor.part:
            return read(tensor)
        if tensor.path not in kept:
            while len(kept) >= WHOLE:
                kept.popitem(last=False)
            kept[tensor.path] = read(tensor)
        return kept[tensor.path]

    return weight


def _on_host(array: Array) -> np.ndarray:
    return np.asarray(array)
