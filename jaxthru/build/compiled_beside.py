"""What is compiled on other threads while the step is."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jaxthru.build.step import Assembled
from jaxthru.config import RunConfig
from jaxthru.engine.inline import loss_terms
from jaxthru.engine.step import abstract_batch
from jaxthru.training.self_check import wrong_attention
from jaxthru.training.state import FirstState


class Beside:
    """The programs of the first state, where it is `drawn`, and of its evaluation, where it is `evaluated`,
    and the check of attention against its reference. wrong_attention: what the check found, once `wait` has
    returned."""

    def __init__(self, config: RunConfig, segments: int, drawn: bool, evaluated: bool, checked: bool):
        self._config, self._segments, self._drawn, self._checked = config, segments, drawn, checked
        self._evaluated = evaluated
        self._first: FirstState | None = None
        self._initial = self._evaluation = self._check = None
        self.wrong_attention = None

    def __enter__(self):
        self._threads = ThreadPoolExecutor(2, "jaxthru-beside")
        return self

    def __exit__(self, *_):
        self._threads.shutdown()

    def start(self, made: Assembled) -> None:
        """Begins what a candidate needs and none before it did."""
        if self._drawn and self.first_state(made) is None:
            self._first = FirstState(made.step.model, made.step.optimizer, made.abstract)
            self._initial = self._threads.submit(self._first.compile)
        if self._checked and self._check is None:
            rows, sequence = self._config.train.rows_at_once, self._config.data.sequence
            self._check = self._threads.submit(
                wrong_attention, made.step.model, rows, sequence, self._segments
            )
        if self._evaluated and not made.offload.layered:
            self._evaluation = self._threads.submit(_compile_evaluation, self._config, made)

    def wait(self) -> None:
        """Returns once all of it is compiled. Raises what stopped it."""
        if self._initial is not None:
            self._initial.result()
        if self._evaluation is not None:
            self._evaluation.result()
        if self._check is not None:
            self.wrong_attention = self._check.result()

    def first_state(self, made: Assembled) -> FirstState | None:
        """Returns what makes a step's first state, None where that is of another step."""
        return self._first if self._first is not None and self._first.makes(made.abstract) else None


def _compile_evaluation(config: RunConfig, made: Assembled) -> None:
    """Has what evaluation runs compiled, which is kept for the call."""
    objective, where = made.step.objective, made.batch["tokens"].sharding
    batch = abstract_batch(config.train.rows_at_once, config.data.sequence, where, objective.columns)
    weight = jax.ShapeDtypeStruct((), jnp.float32)
    loss_terms(objective).lower(made.abstract["params"], batch, weight).compile()
