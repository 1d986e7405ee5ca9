"""Prefetching from JAX's compilation cache: programs are read by what the last such start asked for.

A program's key in the cache is a hash of what tracing it gives, and so reading begins only then: of a step of
36 unrolled layers 2 MB, of which XLA makes a program in 2 s. Here it is read beside the tracing, by the key
of last time, and taken where tracing gives that key. Another source, option or version gives another key, and
what was read is dropped.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.lib import xla_client

from jaxthru.runtime.atomic import written_atomically
from jaxthru.runtime.errors import InputError

log = logging.getLogger("jaxthru")

LEAST_BYTES = 100_000
"""Of a program as it lies in the cache: smaller ones are read in no time."""

READERS = 3
"""Threads; XLA lets go of Python meanwhile."""


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
        where = jax.config.jax_compilation_cache_dir or ""
        on = jax.config.jax_enable_compilation_cache and where and "://" not in where
        self._folder = Path(where) if on else None
        of = jax.process_index(), jax.process_count(), jax.devices()[0].device_kind, start
        name = hashlib.sha256(repr(of).encode()).hexdigest()[:32]
        self._list = self._folder and self._folder / "prefetch" / f"{name}.json"
        self._told = "[]"
        self._asked: dict[str, Asked] = {}
        self._ahead: dict[str, tuple[Asked, Future]] = {}
        self._read = compilation_cache.get_executable_and_time

    def __enter__(self):
        if self._folder is not None:
            compilation_cache.get_executable_and_time = self._get
            self._threads = ThreadPoolExecutor(READERS, "jaxthru-cache-prefetch")
            for asked in self._of_last_time():
                self._ahead[asked.key] = asked, self._threads.submit(self._read_ahead, asked)

    def __exit__(self, *_):
        if self._folder is not None:
            compilation_cache.get_executable_and_time = self._read
            self._ahead.clear()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._keep_list()

    def _get(self, key: str, options: Any, backend: Any, devices: Any, host_callbacks=()) -> tuple:
        """Takes the place of JAX's `get_executable_and_time`."""
        if host_callbacks:
            return self._read(key, options, backend, devices, host_callbacks)
        now = Asked(key, options.SerializeAsString(), tuple(device.id for device in devices))
        self._asked[key] = now
        last, ahead = self._ahead.pop(key, (None, None))
        if last is not None and last.devices == now.devices:
            with contextlib.suppress(Exception):  # and whoever asks then reads it himself
                if (found := ahead.result())[0] is not None:
                    log.debug("prefetched %s", key)
                    return found
        return self._read(key, options, backend, devices)

    def _read_ahead(self, asked: Asked) -> tuple:
        by_id = {device.id: device for device in jax.devices()}
        devices = xla_client.DeviceList(tuple(by_id[each] for each in asked.devices))
        options = xla_client.CompileOptions.ParseFromString(asked.options)
        return self._read(asked.key, options, jax.devices()[0].client, devices)

    def _of_last_time(self) -> list[Asked]:
        """Returns what was asked for then, the largest first."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            self._told = self._list.read_text()
            each = json.loads(self._told)
            found = [Asked(key, base64.b64decode(options), tuple(ids)) for key, options, ids in each]
            return sorted(found, key=self._bytes, reverse=True)
        return []

    def _keep_list(self) -> None:
        large = [asked for asked in self._asked.values() if self._bytes(asked) >= LEAST_BYTES]
        each = [[asked.key, base64.b64encode(asked.options).decode(), asked.devices] for asked in large]
        if (told := json.dumps(sorted(each))) == self._told:
            return
        with contextlib.suppress(InputError), written_atomically(self._list, sync=False) as stream:
            stream.write(told.encode())  # without it, a start is slower

    def _bytes(self, asked: Asked) -> int:
        with contextlib.suppress(OSError):
            return (self._folder / f"{asked.key}-cache").stat().st_size
        return 0
