"""Taking a trace of a few steps, and the program that they ran."""

import dataclasses
from pathlib import Path

import jax

from jaxthru.runtime.errors import require


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """at: the first step to trace; 0 is off. steps: how many."""

    at: int = 0
    steps: int = 3

    def __post_init__(self):
        require(self.at >= 0, f"profile.at = {self.at}: must be at least 0")
        require(self.steps >= 1, f"profile.steps = {self.steps}: must be at least 1")


class Trace:
    """Writes `<directory>/<at>/`: a trace that TensorBoard and Perfetto read, and the compiled HLO."""

    def __init__(self, config: ProfileConfig, directory: Path, compiled: jax.stages.Compiled):
        self.config, self.compiled = config, compiled
        self.directory = directory / str(config.at)
        self.running = False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, about to be dispatched, is the first one wanted."""
        if step == self.config.at:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "step.hlo.txt").write_text(self.compiled.as_text())
            jax.profiler.start_trace(str(self.directory))
            self.running = True

    def after(self, step: int) -> None:
        """Ends the trace once the last step wanted has finished."""
        if self.running and step >= self.config.at + self.config.steps - 1:
            self.close()

    def close(self) -> None:
        """Ends a trace that is still running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False


class NoTrace:
    """Tracing switched off."""

    def before(self, step: int) -> None:
        pass

    def after(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass
