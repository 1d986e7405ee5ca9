"""What is compiled on other threads while the step is."""

from concurrent.futures import ThreadPoolExecutor

from jaxthru.build.step import Assembled
from jaxthru.config import RunConfig
from jaxthru.training.self_check import wrong_attention
from jaxthru.training.state import FirstState


class Beside:
    """The programs of the first state, where it is `fresh`, and the check of attention against its reference.
    wrong_attention: what the check found, once `wait` has returned."""

    def __init__(self, config: RunConfig, segments: int, fresh: bool, checked: bool):
        self._config, self._segments, self._fresh, self._checked = config, segments, fresh, checked
        self._first: FirstState | None = None
        self._initial = self._check = None
        self.wrong_attention = None

    def __enter__(self):
        self._threads = ThreadPoolExecutor(2, "jaxthru-beside")
        return self

    def __exit__(self, *_):
        self._threads.shutdown()

    def start(self, made: Assembled) -> None:
        """Begins what a candidate needs and none before it did."""
        if self._fresh and self.first_state(made) is None:
            self._first = FirstState(made.step.model, made.step.optimizer, made.abstract)
            self._initial = self._threads.submit(self._first.compile)
        if self._checked and self._check is None:
            train, sequence = self._config.train, self._config.data.sequence
            rows = train.rows // train.microbatches
            self._check = self._threads.submit(
                wrong_attention, made.step.model, rows, sequence, self._segments
            )

    def wait(self) -> None:
        """Returns once all of it is compiled. Raises what stopped it."""
        if self._initial is not None:
            self._initial.result()
        if self._check is not None:
            self.wrong_attention = self._check.result()

    def first_state(self, made: Assembled) -> FirstState | None:
        """Returns what makes a step's first state, None where that is of another step."""
        return self._first if self._first is not None and self._first.makes(made.abstract) else None
