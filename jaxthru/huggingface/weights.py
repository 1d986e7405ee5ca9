"""Published weights on their way to the devices: all accounted for first, then read slice by slice.

The files are mapped into memory. A device is handed the part of a published tensor that becomes its part of
the weight, straight from the map, and transposes and casts it itself: the host keeps no copy.
"""

import collections
import concurrent.futures
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.huggingface.folder import Folder
from jaxthru.huggingface.mapping import Mapped, mapped
from jaxthru.huggingface.safetensors import DTYPES, TensorInfo
from jaxthru.models import family
from jaxthru.models.family import FamilyConfig
from jaxthru.models.published import Tensor
from jaxthru.runtime.errors import InputError, require

FLOATS = ("F32", "F16", "BF16")
"""Dtypes of weights; whole numbers and eight bits are of quantised ones."""
HEAD = re.compile(r"(.*\.)?lm_head\.weight")
"""The LM head by its published name: older files of tied models have it as a copy of the table."""

PIECE = 128 << 20
"""Bytes that go to a device at once: a runtime pins host memory for as many."""
UNDER_WAY = 512 << 20
"""Bytes of tensors that may be on their way: those being copied, and those that wait to be transposed."""
PAGE = 4096
READERS = 4
"""Threads that bring pages of a file into the map, before the devices ask for them."""


class Weights:
    """The weights of a folder, as those of a configuration.

    tensors: {a weight's place in `params`, one entry a layer: Mapped}; of a weight that is published in
    parts, as experts are, the first of them. dtype: of most of their numbers, as "bfloat16". dtypes: of
    each, by place. Raises InputError that names the tensor for one that is not mapped, missing, of another
    shape or of no floating-point dtype, before any device is touched.
    """

    def __init__(self, folder: Path | Folder, config: FamilyConfig):
        self.folder = folder if isinstance(folder, Folder) else Folder(folder)
        by_name = mapped(config, self.folder.tensors)
        check_tensors(self.folder, by_name, config)
        self._parts: dict[tuple[str, ...], list[Mapped]] = {}
        counted = collections.Counter()
        for name, about in by_name.items():
            self._parts.setdefault(about.tensor.path, []).append(about)
            info = self.folder.tensors[name]
            counted[DTYPES[info.dtype].name] += info.size
        for parts in self._parts.values():
            parts.sort(key=lambda about: about.tensor.part)
        self.tensors = {path: parts[0] for path, parts in self._parts.items()}
        self.dtypes = {path: DTYPES[self._info(about).dtype].name for path, about in self.tensors.items()}
        self.dtype = counted.most_common(1)[0][0]
        self._next = dict(zip(self.tensors, _following(self.tensors), strict=True))
        self._readers: concurrent.futures.ThreadPoolExecutor | None = None
        self._under_way: collections.deque[tuple[int, weakref.ref]] = collections.deque()

    def _info(self, about: Mapped) -> TensorInfo:
        return self.folder.tensors[about.tensor.name]

    def dtype_of(self, tensor: Tensor) -> str:
        """Returns the dtype that a tensor of the family's table has in the folder."""
        return self.dtypes[tensor.path]

    def array(self, path: tuple[str, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns a weight with the shape, dtype and sharding of `like`; it may still be on its way.

        path: its place in `params`. Each process reads what its own devices keep. Raises KeyError for a path
        without a weight and ValueError for another shape.
        """
        about = self.tensors[path]
        if tuple(like.shape) != about.shape:
            raise ValueError(f"{'/'.join(path)}: has the shape {about.shape}, not {like.shape}")
        home = like.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self._look_ahead(path)
        if about.tensor.part:
            made = self._joined(self._parts[path], jnp.dtype(like.dtype), home)
        else:
            put = _put(self.folder.array(about.tensor.name), about.sharding(home))
            made = about.weight(jnp.dtype(like.dtype), home)(put)
        weight = jax.device_put(made, home)
        self._wait(sum(self._info(part).nbytes for part in self._parts[path]), weight)
        return weight

    def _joined(self, parts: list[Mapped], dtype: jnp.dtype, home: jax.sharding.Sharding) -> jax.Array:
        """Returns a weight that is published in parts. A device is handed, one after the other, those of them
        that it keeps something of, and puts them together itself."""
        about = parts[0]
        home = home.with_memory_kind(next(iter(home.device_set)).default_memory().kind)
        places = home.addressable_devices_indices_map(about.shape)
        slices = about.sharding(home).addressable_devices_indices_map(about.published)
        shards = []
        for device, index in places.items():
            ranges = [range(*each.indices(size)) for each, size in zip(index, about.shape, strict=True)]
            own = [part for part in parts if all(place in ranges[dim] for dim, place in part.tensor.part)]
            pieces = [_put_on(self.folder.array(part.tensor.name)[slices[device]], device) for part in own]
            shards.append(about.joined(pieces, tuple(map(len, ranges)), dtype))
        return jax.make_array_from_single_device_arrays(about.shape, home, shards)

    def _wait(self, size: int, weight: jax.Array) -> None:
        """Waits until there is room for what comes next: memory is taken when work is handed out."""
        self._under_way.append((size, weakref.ref(weight)))  # who asked for it may be done with it
        while sum(size for size, _ in self._under_way) > UNDER_WAY:
            _, earlier = self._under_way.popleft()
            if (earlier := earlier()) is not None and not earlier.is_deleted():
                earlier.block_until_ready()

    def _look_ahead(self, path: tuple[str, ...]) -> None:
        """Has the same weight of the next layer read meanwhile, likely the next to be asked for. Of several
        processes each keeps a part of it, and would read the rest in vain."""
        if (after := self._next[path]) is None or jax.process_count() > 1:
            return
        if self._readers is None:
            self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "weights")
        parts = [self.folder.bytes(part.tensor.name) for part in self._parts[after]]
        step = max(1, -(-sum(map(len, parts)) // READERS))
        for content in parts:
            for first in range(0, len(content), step):
                self._readers.submit(_touch, content[first : first + step])


def _touch(content: np.ndarray) -> int:
    """Reads a byte of each page, which the system then has in the map."""
    return int(content[::PAGE].max(initial=0))


def _following(paths) -> list[tuple[str, ...] | None]:
    """Returns the same weight of the next layer for each path, None behind the last."""
    after = ((*path[:1], str(int(path[1]) + 1), *path[2:]) if path[0] == "layers" else None for path in paths)
    return [path if path in paths else None for path in after]


def _put(source: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns an array of the host on the devices, each of which gets its own slice."""
    places = sharding.addressable_devices_indices_map(source.shape)
    shards = [_put_on(source[index], device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(source.shape, sharding, shards)


def _put_on(part: np.ndarray, device: jax.Device) -> jax.Array:
    rows = max(1, PIECE * len(part) // max(part.nbytes, 1)) if part.ndim else 1
    if not part.ndim or rows >= len(part):
        return jax.device_put(part, device)
    return _joined([jax.device_put(part[at : at + rows], device) for at in range(0, len(part), rows)])


@jax.jit
def _joined(pieces: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(pieces)


def check_tensors(folder: Folder, by_name: dict[str, Mapped], config: FamilyConfig) -> None:
    """Raises InputError that names a tensor unless a folder's tensors are the weights of a configuration."""
    for name, about in by_name.items():
        _check_weight(folder, name, about, by_name, config)
    others = [name for name in folder.tensors if name not in by_name]
    copies = tied_copies(others, config)
    for name in copies:
        _check_copy(folder, name, table_name(by_name, config))
    rest = [name for name in others if name not in copies and not ignored(name, config)]
    if rest:
        raise InputError(
            f"{_place(folder, rest[0])} {[*folder.tensors[rest[0]].shape]}: {_more(rest)}no weight of "
            f"model.family = {config.family!r} of this shape is published as that"
        )


def _check_weight(
    folder: Folder, name: str, about: Mapped, by_name: dict[str, Mapped], config: FamilyConfig
) -> None:
    if name not in folder.tensors:
        missing = [other for other in by_name if other not in folder.tensors]
        raise InputError(
            f"{folder.path}: lacks tensor {name!r} {[*about.published]}, {_more(missing)}which "
            f"model.family = {config.family!r} of this shape has"
        )
    info = folder.tensors[name]
    if info.shape != about.published:
        raise InputError(
            f"{_place(folder, name)}: has the shape {[*info.shape]}, by the model's configuration it is "
            f"{[*about.published]}"
        )
    if info.dtype not in FLOATS:
        raise InputError(
            f"{_place(folder, name)}: is {info.dtype}; weights are {', '.join(FLOATS)}, quantised ones "
            "are not read"
        )


def ignored(name: str, config: FamilyConfig) -> bool:
    """Says whether a tensor may stand in a file and holds nothing that is trained."""
    return any(re.fullmatch(pattern, name) for pattern in family.published(config).ignored)


def tied_copies(names: list[str], config: FamilyConfig) -> list[str]:
    """Returns, of tensors that are no weights, those that repeat the table that makes the logits too."""
    return [name for name in names if HEAD.fullmatch(name)] if family.chain(config).tied else []


def table_name(by_name: dict[str, Mapped], config: FamilyConfig) -> str:
    """Returns the published name of the matrix that makes the logits."""
    output = family.chain(config).output
    return next(name for name, about in by_name.items() if about.tensor.path == output)


def _check_copy(folder: Folder, name: str, table: str) -> None:
    own, other = folder.tensors[name], folder.tensors[table]
    alike = (own.dtype, own.shape) == (other.dtype, other.shape)
    alike = alike and _same(folder.bytes(name), folder.bytes(table))
    require(
        alike,
        f"{_place(folder, name)} {own}: is not the same as {table!r} {other}, to which the model's "
        "configuration ties it; either they are not tied or a file is damaged",
    )


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Compares a part at a time: a comparison of all would be an array of that size."""
    step = 16 << 20
    return all(np.array_equal(one[at : at + step], other[at : at + step]) for at in range(0, len(one), step))


def _place(folder: Folder, name: str) -> str:
    return f"{folder.path / folder.file_of(name)}: tensor {name!r}"


def _more(names: list[str]) -> str:
    return f"and {len(names) - 1} more, " if len(names) > 1 else ""
