"""How often to save: the interval between checkpoints by which a run that fails trains most.

A run trains for tau seconds, waits delta for a save, and so on; failures come at random, M apart in the mean,
and each costs the restart R and all that was not saved. Such a run keeps, of its time,

    tau / (M exp(R/M) (exp((tau + delta)/M) - 1))

(Daly, Future Generation Computer Systems 22, 2006: failures during a restart, too). Its first orders are
Young's 1 - delta/tau - tau/2M - R/M with the best tau = sqrt(2 delta M); exactly, the best is where (1 - x)
e^x = e^(-delta/M) for x = tau/M, which Lambert's W solves. A write that goes on in the background for w
seconds saves what was there w before, so that each failure costs w more.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
from scipy.special import lambertw

from jaxthru.runtime.errors import require
from jaxthru.training import goodput
from jaxthru.training.rows import every as every_row

HOUR = 3600.0
PARTS_OF_RESTART = (
    goodput.INITIALIZATION,
    goodput.PREPARATION,
    goodput.STARTUP,
    goodput.RESTORE,
    goodput.RECOVERY,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a run's goodput depends on, in seconds. between_failures: the mean of the whole run. save: that a
    save keeps the steps waiting. restart: from a failure until steps go on. step: of one step. write: how
    long a save goes on in the background."""

    between_failures: float
    save: float
    restart: float
    step: float
    write: float = 0.0

    def kept(self, every: float) -> float:
        """Returns the goodput with a save after so many steps, from 0 to 1."""
        mean, tau = self.between_failures, every * self.step
        whole = (tau + self.save) / mean
        # log(e^whole - 1), however rarely so many steps are made without a failure
        grows = (self.restart + self.write) / mean + whole + math.log(-math.expm1(-whole))
        return min(1.0, math.exp(math.log(tau / mean) - grows))

    @property
    def best_seconds(self) -> float:
        """Returns the seconds of steps between two saves that keep most. A save begins after the last was
        written."""
        ratio = self.save / self.between_failures
        if ratio < 1e-12:  # so near its branch point Lambert's W has no digit left
            best = self.between_failures * math.sqrt(2.0 * ratio)
        else:
            best = self.between_failures * (1.0 + lambertw(-math.exp(-1.0 - ratio)).real)
        return max(float(best), self.write)

    @property
    def best(self) -> int:
        """Returns the best `checkpoint.every`, in steps."""
        below = max(1, math.floor(self.best_seconds / self.step))
        at_once = max(1, math.ceil(self.write / self.step))
        return max((each for each in (below, below + 1) if each >= at_once), key=self.kept, default=at_once)

    def losses(self, every: int) -> dict[str, float]:
        """Returns the shares of the time that go to saving, to steps made again and to restarts."""
        kept, tau = self.kept(every), every * self.step
        saving = kept * self.save / tau
        restarts = min(1.0 - kept - saving, self.restart / self.between_failures)
        return {
            "saving": saving,
            "made again": max(0.0, 1.0 - kept - saving - restarts),
            "restarts": restarts,
        }

    def simulated(self, every: int, failures: int = 100_000, seed: int = 0, shape: float = 1.0) -> float:
        """Returns the goodput of a simulated run that so many failures befall.

        shape: of the Weibull distribution of the time between them: 1 has no memory, which `kept` supposes;
        below 1 they come in bursts, as those of clusters do. Saves take times that vary by a fifth from start
        to start.
        """
        random = np.random.default_rng(seed)
        mean = self.between_failures / math.gamma(1.0 + 1.0 / shape)
        lives = random.weibull(shape, failures) * mean
        saves = self.save * random.lognormal(-0.02, 0.2, failures)
        trains = np.maximum(0.0, lives - self.restart - self.write)
        whole = np.floor(trains / (every * self.step + saves))
        return float((whole * every * self.step).sum() / lives.sum())

    def simulated_best(self, failures: int = 100_000, seed: int = 0, shape: float = 1.0) -> float:
        """Returns the interval, in steps, by which most is kept in simulations of the same failures: the peak
        of a parabola through those around the best, over the interval's logarithm."""
        around = np.exp(np.linspace(-1.2, 1.2, 33)) * self.best_seconds / self.step
        tried = np.unique(np.maximum(1, np.round(around)).astype(int))
        kept = np.array([self.simulated(int(each), failures, seed, shape) for each in tried])
        near = kept >= kept.max() - 0.35 * (1.0 - kept.max()) * 0.2
        if near.sum() < 4:
            return float(tried[kept.argmax()])
        square, slope, _ = np.polyfit(np.log(tried[near]), kept[near], 2)
        return float(np.exp(-slope / (2 * square))) if square < 0 else float(tried[kept.argmax()])


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run's own files say of `Rates`; None where they do not. failures: that were seen."""

    step: float | None = None
    save: float | None = None
    restart: float | None = None
    between_failures: float | None = None
    failures: int = 0


def measured(run_dir: Path) -> Measured:
    """Returns what a run directory says. Raises InputError if it holds no step."""
    rows = list(every_row(run_dir / "metrics.jsonl"))
    require(bool(rows), f"--run {run_dir}: its metrics.jsonl holds no step")
    saves = [row["checkpoint_seconds"] for row in rows if row.get("checkpoint_seconds")]
    steps = [
        row["step_seconds"] - (row.get("checkpoint_seconds") or 0.0)
        for row in rows
        if row.get("step_seconds")
    ]
    median = lambda values: float(np.median(values)) if values else None  # noqa: E731
    try:
        found = goodput.account(run_dir)
    except ValueError:  # of a run that is older than goodput.jsonl
        return Measured(median(steps), median(saves))
    began = [sum(start.seconds.get(part, 0.0) for part in PARTS_OF_RESTART[:-1]) for start in found.starts]
    waits = [start.seconds.get(goodput.RECOVERY, 0.0) for start in found.starts[:-1]]
    restart = (median(began) or 0.0) + (median(waits) or 0.0)
    apart = found.wall / found.failures if found.failures else None
    return Measured(median(steps), median(saves), restart, apart, found.failures)
