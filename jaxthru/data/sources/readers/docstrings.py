"""Prose in Python packages, parsed on all cores: one document a file."""

import dataclasses
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from jaxthru.data.sources import prose, record
from jaxthru.data.sources.files import File
from jaxthru.data.sources.record import Damage, Document, Place, origin_of, over_long
from jaxthru.runtime.cores import usable_cores


@dataclasses.dataclass(frozen=True)
class Options(record.Options):
    """Docstrings follow their file's text."""

    split_by_file: ClassVar[bool] = True


def read(files: list[File], options: Options) -> Iterator[Document | Damage]:
    """Yields the prose of each file that has some, parsed in child processes a few batches ahead."""
    most = options.max_record_bytes
    workers = min(usable_cores(), 16)
    batches = deque(files[start : start + 64] for start in range(0, len(files), 64))
    running: deque = deque()
    with ThreadPoolExecutor(workers) as pool:
        while batches or running:
            while batches and len(running) < 2 * workers:
                batch = batches.popleft()
                running.append((batch, pool.submit(_in_child, batch, most)))
            batch, result = running.popleft()
            for file, text in zip(batch, result.result(), strict=True):
                place = Place(str(file.path), "whole file")
                if file.size > most:
                    yield place.damage(over_long(most))
                elif text is None:
                    yield place.damage("not UTF-8, or not valid Python")
                elif text:
                    yield Document(text, origin_of(file.path.read_bytes().decode("utf-8-sig")), place, text)


def _in_child(files: list[File], limit: int) -> list[str | None]:
    """Returns the prose of each file; None for one that cannot be read or is longer than `limit` bytes."""
    command = [sys.executable, "-I", "-S", str(Path(prose.__file__))]
    short = [file for file in files if file.size <= limit]
    paths = json.dumps([str(file.path) for file in short]).encode()
    result = subprocess.run(command, input=paths, capture_output=True)
    if result.returncode == 0:
        texts = dict(zip(short, json.loads(result.stdout), strict=True))
        return [texts.get(file) for file in files]
    if len(files) == 1:  # the parser can be made to overflow its stack
        return [None]
    return [text for file in files for text in _in_child([file], limit)]
