"""Prefetching from JAX's compilation cache: programs are read by what the last such start asked for.

A program's key in the cache is a hash of what tracing it gives, and so reading begins only then: of a step of
36 unrolled layers 2 MB, of which XLA makes a program in 2 s. Here it is read beside the tracing, by the key
of last time, and taken where tracing gives that key. With another source or option it gives another key, and
what was read is dropped.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax._src import compilation_cache
from jax._src.lib import xla_client

from jaxthru.runtime.atomic import written_atomically
from jaxthru.runtime.errors import InputError
from pallas_kernels.triton_cache import cache_folder

log = logging.getLogger("jaxthru")

LEAST_BYTES = 100_000
"""Of a program as it lies in the cache: smaller ones are read in no time."""

READERS = 3
"""Threads; XLA lets go of Python meanwhile."""

MOSAIC = "jax.experimental.mosaic.gpu"
"""A module whose import tells XLA where the library of its kernels is. It comes with tracing them: a program
that may have some is not to be read before."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A program as it was asked for. key: in the cache. options: of its compilation, as XLA writes them.
    devices: ids of those that run it."""

    key: str
    options: bytes
    devices: tuple[int, ...]


class CachePrefetch:
    """Within it, programs are read that were asked for within the last such, and what is asked for is noted.

    start: what starts that compile the same have in common; where it is not so, reading is in vain. Nothing
    is done for a cache that is switched off, or not on a disk.
    """

    def __init__(self, start: str):
        self._folder = cache_folder()
        self._backend = (device := jax.devices()[0]).client
        # Another XLA might not withstand what this one has kept.
        made_by = jaxlib.__version__, self._backend.platform_version, device.device_kind
        of = repr((jax.process_index(), jax.process_count(), made_by, start))
        self._name = f"{hashlib.sha256(of.encode()).hexdigest()[:32]}.json"
        self._told = "[]"
        self._asked: dict[str, Asked] = {}
        self._ahead: dict[str, tuple[Asked, Future]] = {}
        self._threads = ThreadPoolExecutor(READERS, "jaxthru-cache-prefetch")
        self._read = compilation_cache.get_executable_and_time

    def __enter__(self):
        if self._folder is None:
            return
        with contextlib.suppress(Exception):  # of a list that is not there, or damaged
            for asked in self._of_last_time():
                self._ahead[asked.key] = asked, self._threads.submit(self._read_ahead, asked)
        compilation_cache.get_executable_and_time = self._get

    def __exit__(self, kind: type | None, *_):
        if self._folder is None:
            return
        compilation_cache.get_executable_and_time = self._read
        self._ahead.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if kind is None:  # else not all was asked for
            self._keep_list()

    def _get(self, key: str, options: Any, backend: Any, devices: Any, *callbacks: Any) -> tuple:
        """Takes the place of JAX's `get_executable_and_time`."""
        if any(callbacks) or backend is not self._backend:
            return self._read(key, options, backend, devices, *callbacks)
        now = Asked(key, options.SerializeAsString(), tuple(device.id for device in devices))
        self._asked[key] = now
        last, ahead = self._ahead.pop(key, (None, None))
        if last == now and not ahead.cancel():  # which it can be while it waits for others
            with contextlib.suppress(Exception):  # and is then read here, where JAX says what is wrong
                if (found := ahead.result())[0] is not None:
                    log.debug("prefetched %s", key)
                    return found
        return self._read(key, options, backend, devices, *callbacks)

    @property
    def _list(self) -> Path:
        return self._folder / "prefetch" / self._name

    def _read_ahead(self, asked: Asked) -> tuple:
        by_id = {device.id: device for device in jax.devices()}
        devices = xla_client.DeviceList(tuple(by_id[each] for each in asked.devices))
        options = xla_client.CompileOptions.ParseFromString(asked.options)
        return self._read(asked.key, options, self._backend, devices)

    def _of_last_time(self) -> list[Asked]:
        """Returns what was asked for then, the largest first."""
        self._told = self._list.read_text()
        each = json.loads(self._told)
        found = [Asked(key, base64.b64decode(options), tuple(ids)) for key, options, ids in each]
        return sorted(found, key=self._bytes, reverse=True)

    def _keep_list(self) -> None:
        large = [asked for asked in self._asked.values() if self._bytes(asked) >= LEAST_BYTES]
        if MOSAIC in sys.modules:
            large = []
        each = [[asked.key, base64.b64encode(asked.options).decode(), asked.devices] for asked in large]
        if (told := json.dumps(sorted(each))) == self._told:
            return
        with contextlib.suppress(InputError), written_atomically(self._list, sync=False) as stream:
            stream.write(told.encode())  # without it, a start is slower

    def _bytes(self, asked: Asked) -> int:
        with contextlib.suppress(OSError):
            return (self._folder / f"{asked.key}-cache").stat().st_size
        return 0
