"""The reference model of an objective that asks for one: of which rows, on which devices, and with what."""

import dataclasses
from typing import Any

import numpy as np

from jaxthru.build.adapted_weights import published_weights
from jaxthru.build.compiled import Build
from jaxthru.build.step import base_of
from jaxthru.data.loading.state import DataState
from jaxthru.engine.objectives.answers import answers_of
from jaxthru.engine.step import Batch
from jaxthru.training.reference import Reference, rows_of
from jaxthru.training.run_directory import RunDirectory


class NoReference:
    """Of an objective that asks for none."""

    missing = False

    def ask(self, params: Any) -> None:
        """Does nothing."""

    def feed(self) -> None:
        """Does nothing."""


class ReferenceModel:
    """What training begins with, asked for the rows that a run will read."""

    def __init__(self, built: Build, directory: RunDirectory, data_state: DataState):
        """directory: where its answers are kept. data_state: where the run begins or goes on. Raises
        InputError if what is kept there cannot be used."""
        self.built, config, data = built, built.config, built.data
        train, rows = config.train, config.train.rows_at_once
        builders = {"train": data.builder, "held_out": data.held_out_builder}
        self._reference = Reference(directory.reference, builders, data.keys)
        planner = data.planner(data_state.schedule, seed=train.seed, rows=train.rows)
        last = train.steps if planner.end is None else min(train.steps, planner.end)
        self._wanted = {
            "train": rows_of(planner, range(data_state.step, last)),
            "held_out": tuple(each.reshape(-1) for each in data.held_out_rows(config.evaluate.rows, rows)),
        }

    @property
    def missing(self) -> bool:
        """Whether something has to be asked."""
        return bool(self._reference.missing(self._wanted))

    def ask(self, params: Any) -> None:
        """Computes what is missing. params: those that training begins with. Raises InputError if others gave
        what is there."""
        objective, rows = self.built.step.objective, self.built.config.train.rows_at_once
        base = base_of(self.built.config, objective.model)
        terms = self.built.compiled.terms_of(answers_of(objective, base or objective.model))
        self._reference.complete(self._wanted, params, terms, rows, self._placed)

    def ask_first_state(self) -> None:
        """The same with the state before the first update, made anew: there must be room for it."""
        weights = published_weights(self.built.config)
        self.ask(dataclasses.replace(self.built, weights=weights).first_state()["params"])

    def feed(self) -> None:
        """Has batches bring the answers along."""
        self._reference.feed(self.built.step.objective.max_segments)

    def _placed(self, split: str, source: np.ndarray, row: np.ndarray) -> Batch:
        local = self.built.local_rows(len(row))
        batch = self._reference.builders[split].build(source[local], row[local])
        return self.built.place(batch, len(row))


def reference_model(
    built: Build, directory: RunDirectory, data_state: DataState
) -> ReferenceModel | NoReference:
    """Returns the reference model that the objective of a run asks for. Raises InputError."""
    return ReferenceModel(built, directory, data_state) if built.step.objective.columns else NoReference()
