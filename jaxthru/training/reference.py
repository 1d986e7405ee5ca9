"""The reference model of a run: what it made of each answer, computed once before training changes it.

A preference is measured against the model that training began with. Of that model nothing is needed but the
log-probability of each answer, so those are kept, in the run directory, and no second model is in memory.

reference.npz   `train`, `held_out`: float32 [documents in rows], NaN where no step reads them; `about`: JSON,
                which documents and which weights they are of
"""

import io
import json
import logging
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthru.data.loading.batch_builder import BatchBuilder
from jaxthru.data.mixture.planner import EMPTY, Planner
from jaxthru.engine.step import Batch
from jaxthru.engine.terms import Terms
from jaxthru.runtime.atomic import write_atomically
from jaxthru.runtime.distributed import from_first
from jaxthru.runtime.errors import require
from jaxthru.training.layout import device_sharding

log = logging.getLogger("jaxthru")

Rows = tuple[np.ndarray, np.ndarray]
"""source, row: int64 [n], which row of which source; EMPTY is none."""

SAVED_EVERY = 64
"""Batches after which what is computed is saved."""


class Reference:
    """The reference's log-probabilities of all documents of a run, those that are known."""

    def __init__(self, path: Path, builders: Mapping[str, BatchBuilder], keys: Mapping[str, str]):
        """path: where they are kept. builders: of the splits. keys: of the stores.

        Raises InputError if what is kept is damaged, or of other documents.
        """
        self.path, self.builders = path, builders
        packing = {split: builder.checksum() for split, builder in builders.items()}
        self.about = {"keys": dict(keys), "packing": packing}
        counts = {split: builder.piece_count for split, builder in builders.items()}
        self.values = {split: np.full(count, np.nan, np.float32) for split, count in counts.items()}
        if from_first(path.is_file):  # a file system may be slow to show it to all, or not be theirs
            self._load()

    def missing(self, wanted: Mapping[str, Rows]) -> dict[str, Rows]:
        """Returns those of the wanted rows of which not all is known, each once."""
        found = {}
        for split, (source, row) in wanted.items():
            source, row = np.unique(np.stack([source, row])[:, row != EMPTY], axis=1)
            in_row, _, piece, *_ = self.builders[split].pieces(source, row)
            unknown = np.zeros(len(row), bool)
            unknown[in_row[np.isnan(self.values[split][piece])]] = True
            found[split] = source[unknown], row[unknown]
        return {split: rows for split, rows in found.items() if len(rows[0])}

    def complete(
        self,
        wanted: Mapping[str, Rows],
        params: Any,
        answers: Callable[[Any, Batch, jax.Array], Terms],
        rows: int,
        place: Callable[[str, np.ndarray, np.ndarray], Batch],
    ) -> None:
        """Computes what is missing of the wanted rows, and keeps it. All processes must call it.

        params: those that training begins with. answers: (params, batch, 1) -> `answers` [rows, segments].
        rows: of a batch. place: (split, source, row), each [rows] -> the batch on the devices.
        Raises InputError if other weights gave what is there.
        """
        missing = self.missing(wanted)
        if not missing:
            return
        weights = weights_checksum(params)
        known = self.about.setdefault("weights", weights)
        require(
            known == weights,
            f"{self.path}: is of other weights than training begins with here; delete it to have it computed "
            "anew, or give back the weights that the run began with",
        )
        total = sum(len(source) for source, _ in missing.values())
        log.info("computing the reference's log-probabilities of %s rows ...", f"{total:,}")
        begun, done, one = time.monotonic(), 0, jnp.ones((), jnp.float32)
        asked: list[tuple] = []
        for number, (split, source, row) in enumerate(_batches(missing, rows), start=1):
            asked.append((split, source, row, answers(params, place(split, source, row), one)["answers"]))
            if number > 1:  # of the batch before, while the devices are at this one
                done += self._take(*asked.pop(0))
            if number % SAVED_EVERY == 0:
                self._save()
                log.info("reference: %s of %s rows", f"{done:,}", f"{total:,}")
        self._take(*asked.pop())
        require(not self.missing(missing), "the reference's log-probabilities are not all finite numbers")
        self._save()
        log.info("computed the reference's log-probabilities in %.1f s", time.monotonic() - begun)

    def feed(self, segments: int) -> None:
        """Has batches bring them along, as `reference`. segments: most of a row."""
        for split, builder in self.builders.items():
            builder.add_column("reference", self.values[split], segments)

    def _take(self, split: str, source: np.ndarray, row: np.ndarray, answers: jax.Array) -> int:
        """Notes the answers of a batch, [rows, segments], and returns of how many rows they are."""
        in_row, segment, piece, *_ = self.builders[split].pieces(source, row)
        found = np.asarray(answers)[in_row, segment]
        self.values[split][piece] = np.where(np.isfinite(found), found, np.nan)
        return int(np.count_nonzero(row != EMPTY))

    def _save(self) -> None:
        def write() -> None:
            content = io.BytesIO()
            about = np.frombuffer(json.dumps(self.about).encode(), np.uint8)
            np.savez(content, about=about, **self.values)
            write_atomically(self.path, content.getvalue())

        from_first(write)

    def _load(self) -> None:
        remedy = "delete it to have it computed anew"
        try:
            with np.load(self.path, allow_pickle=False) as kept:  # zip files have checksums
                about = json.loads(kept["about"].tobytes())
                values = {split: kept[split] for split in self.values}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            require(False, f"{self.path}: is damaged ({error}); {remedy}")
        own = {name: about.get(name) for name in self.about}
        require(own == self.about, f"{self.path}: is of other documents than this run reads; {remedy}")
        self.about, self.values = about, values


def rows_of(planner: Planner, steps: range) -> Rows:
    """Returns the rows that a run reads in these steps, counted from 0."""
    plans, nothing = [planner.plan(step) for step in steps], [np.zeros(0, np.int64)]
    source = np.concatenate(nothing + [plan.source for plan in plans])
    return source, np.concatenate(nothing + [plan.row for plan in plans])


def weights_checksum(params: Any) -> int:
    """Returns a checksum of parameters, the same on any mesh and with layers stacked or not: of the sum of
    each array's bits."""

    @jax.jit
    def bits(leaf: jax.Array) -> jax.Array:
        kind = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        return jnp.sum(jax.lax.bitcast_convert_type(leaf, kind).astype(jnp.uint32), dtype=jnp.uint32)

    leaves = jax.tree.leaves(params)
    sums = [bits(jax.device_put(leaf, device_sharding(leaf))) for leaf in leaves]
    return sum(int(each) for each in sums) % 2**32


def _batches(rows: Mapping[str, Rows], size: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields (split, source, row) in batches of `size`, the last one of a split filled up with EMPTY."""
    for split, of in rows.items():
        for at in range(0, len(of[0]), size):
            source, row = (each[at : at + size] for each in of)
            fill = (0, size - len(row))
            yield split, np.pad(source, fill), np.pad(row, fill, constant_values=EMPTY)
