"""The files of a base that adapters are trained beside, which a run is held to: their sizes and checksums.

A run's checkpoints hold adapters alone, and mean nothing beside other weights.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.distributed import from_first, is_primary
from jaxthru.runtime.errors import InputError, require
from jaxthru.training.checksums import ALGORITHM, checksum

NAME = "weights.json"
THREADS = 8


class BaseFiles:
    """Checks a folder of weights against what a run began with; checksums are made on threads meanwhile. All
    processes call its methods together; the first of them reads."""

    def __init__(self, weights: Any, base: Path):
        """weights: a `huggingface.folder.Folder`. base: of the run directory. Raises InputError if sizes say
        already that these are others."""
        self.folder, self.record = weights.path, base / NAME
        names = [*weights.files]
        from_first(lambda: self._compare_sizes(names))
        threads = ThreadPoolExecutor(THREADS, "checksums")
        self._coming = {name: threads.submit(checksum, self.folder / name) for name in names * is_primary()}
        threads.shutdown(wait=False)

    def settle(self, keep: bool = True) -> None:
        """Waits for the checksums. Raises InputError for a run that began with others. keep: with a run that
        has none."""

        def compare_or_keep() -> None:
            found = {name: coming.result() for name, coming in self._coming.items()}
            if (begun := self._begun_with()) is not None:
                self._require_same(begun, found, "content")
            elif keep:
                content = {"folder": str(self.folder.absolute()), "algorithm": ALGORITHM, "files": found}
                self.record.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.record, json.dumps(content, indent=1) + "\n")

        from_first(compare_or_keep)

    def _compare_sizes(self, names: list[str]) -> None:
        if (begun := self._begun_with()) is not None:
            sizes = {name: (self.folder / name).stat().st_size for name in names}
            self._require_same({name: size for name, (size, _) in begun.items()}, sizes, "size")

    def _begun_with(self) -> dict[str, tuple[int, int]] | None:
        if not self.record.is_file():
            return None
        try:
            files = json.loads(self.record.read_text())["files"]
            return {str(name): (size, crc) for name, (size, crc) in files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{self.record}: cannot be read ({error}); put it back as it was") from error

    def _require_same(self, begun: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
        differ = [name for name in sorted({*begun, *found}) if begun.get(name) != found.get(name)]
        require(
            not differ,
            lambda: (
                f"{self.folder / differ[0]}: has another {what} than in the base of "
                f"{self.record.parents[1]}, whose checkpoints hold adapters of that alone; give it as "
                "model.pretrained"
            ),
        )
