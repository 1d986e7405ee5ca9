"""The batches of a run, for the loop and for whoever wants to look at them, as in a notebook."""

import contextlib
import dataclasses
import functools
import logging
import operator
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxthru.build.checks import validate
from jaxthru.build.step import needed_flops
from jaxthru.config import RunConfig
from jaxthru.data.loading.batch import check_batch
from jaxthru.data.loading.dataset import DataConfig, open_data, prepare_data
from jaxthru.data.loading.host_channel import NOWHERE, meeting_place
from jaxthru.data.loading.host_client import Host
from jaxthru.data.loading.host_pool import HostData, RunData
from jaxthru.data.loading.placement import local_rows, to_global
from jaxthru.data.loading.planned_batches import Batches
from jaxthru.data.loading.state import DataState
from jaxthru.engine.offload import OffloadConfig
from jaxthru.engine.step import Batch
from jaxthru.runtime import distributed, hardware, xla
from jaxthru.runtime.sharding import Layout

log = logging.getLogger("jaxthru")


def row_cost(config: RunConfig) -> tuple[float, float] | None:
    """Returns the cost of a token and of a token² of a document, or None where nothing is to be balanced.

    In seconds if `data` gives what was measured, else in floating-point operations.
    """
    data = config.data
    if not data.balance:
        return None
    if data.linear_cost is not None:
        return data.linear_cost, data.attention_cost
    flops = needed_flops(config)
    return flops(1, 0), flops(0, 1)


def place(
    batch: dict[str, np.ndarray],
    rows: int,
    *,
    sequence: int,
    layout: Layout,
    columns: Collection[str] = (),
) -> Batch:
    """Returns this process's part of a batch of so many rows as the global batch on the devices. columns:
    what it brings along beside the fields of every batch."""
    check_batch(batch, len(batch["tokens"]), sequence, columns)
    return to_global(batch, layout.sharding(("batch", "sequence")), rows)


def train_batches(config: RunConfig, data: RunData, layout: Layout, data_state: DataState) -> Batches:
    """Returns the batches of the updates after `data_state.step`, on the devices; close it."""
    train, sequence = config.train, config.data.sequence
    how = {"sequence": sequence, "layout": layout, "columns": data.builder.columns}
    return data.train_batches(
        data_state.schedule,
        seed=train.seed,
        rows=train.rows,
        steps=train.steps,
        start=data_state.step,
        local_rows=local_rows(layout.sharding(("batch", "sequence")), train.rows, sequence),
        cost=row_cost(config),
        place=functools.partial(place, rows=train.rows, **how),
    )


def prepared(
    config: DataConfig, begun: Mapping[str, str] | None = None, kept: Path | None = None
) -> dict[str, str]:
    """Returns what `prepare_data` does; the first process makes what is missing, for all. All processes must
    call it."""
    packings = jax.process_count() > 1  # one alone makes them as it opens the data
    return distributed.from_first(lambda: prepare_data(config, begun, kept, packings=packings))


def open_shared(config: DataConfig, keys: Mapping[str, str], kept: Path | None = None) -> RunData:
    """Returns the opened data of a run. Processes that share a host have one data server open it for all; one
    alone opens it itself. All processes must call it.

    keys: of `prepare_data`. kept: where a run that goes on keeps its tokenizer. Raises InputError.
    """
    hosts = sharing_host()
    if hosts is None:
        return open_data(config, prepare=False, begun=keys, kept=kept)
    host, first = hosts
    if first:
        log.info("data: one pool for %d training processes of this host", host.trainers)
    return HostData(host, config, keys, kept)


def sharing_host() -> tuple[Host, bool] | None:
    """Returns the training processes that share this one's host, and whether this is the first of them; None
    if it has none beside it. All processes must call it."""
    if not jax.distributed.is_initialized():
        return None
    # A new name each time, which nobody can guess: a server of before may be about to end.
    name = distributed.from_first(lambda: f"jaxthru-data-{secrets.token_hex(16)}")
    identity, process = meeting_place(), jax.process_index()
    cores = sum(1 << core for core in os.sched_getaffinity(0)) if identity != NOWHERE else 0
    found = [text.split() for text in distributed.gather_text(f"{identity} {cores:x}")]
    beside = [number for number, (other, *_) in enumerate(found) if other == identity]
    if identity == NOWHERE or len(beside) == 1:
        return None
    cores = functools.reduce(operator.or_, (int(found[number][1], 16) for number in beside))
    usable = [core for core in range(cores.bit_length()) if cores >> core & 1]
    return Host(f"{name}-{identity[:16]}", len(beside), usable), process == beside[0]


class RunBatches(contextlib.AbstractContextManager):
    """An iterator over batches that closes them and their data: at its end, by `close`, or as a context
    manager."""

    def __init__(self, config: RunConfig, data: RunData, batches: Batches):
        self.config, self.data = config, data
        self._batches = batches

    def __iter__(self) -> Iterator[Mapping[str, jax.Array]]:
        return self

    def __next__(self) -> Mapping[str, jax.Array]:
        try:
            return next(self._batches)
        except StopIteration:
            self.close()
            raise

    def __exit__(self, *exception) -> None:
        self.close()

    def __repr__(self) -> str:
        train, sequence = self.config.train, self.config.data.sequence
        return f"<batches of {train.steps:,} steps, {train.rows} rows of {sequence} tokens each; {self.data}>"

    def close(self) -> None:
        """Ends the threads that build ahead, and closes the data."""
        self._batches.close()
        self.data.close()


def batches(config: RunConfig) -> RunBatches:
    """Returns the batches that a run of this configuration trains on, from its first step to its last.

    The data is prepared if it is not, and nothing is compiled. Each batch is a dict of jax.Arrays of shape
    [train.rows, data.sequence], sharded over the devices as the step takes them:

        tokens       int32, token ids: the input
        targets      int32, the token that follows in the same document; 0 where there is none
        segment_ids  int32, which document of the row, from 1; 0 is padding
        positions    int32, from 0 in each document
        loss_mask    float32, 1 where `targets` counts
        source       int32, index into the sources: `.data.names`

    Close it, or use it as a context manager; after its last batch it closes itself:

        with jaxthru.batches(config) as batches:
            batch = next(batches)

    Raises InputError.
    """
    xla.configure(config.kernels.writes_to_peers)
    distributed.initialize()
    hardware.devices()  # or it says why there are none
    layout = validate(dataclasses.replace(config, offload=OffloadConfig()))  # no state is made
    keys = prepared(config.data)
    with contextlib.ExitStack() as opened:
        data = opened.enter_context(open_shared(config.data, keys))
        made = train_batches(config, data, layout, DataState.first(data.mixture, data.keys))
        opened.pop_all()  # whoever gets the batches closes it
    return RunBatches(config, data, made)
