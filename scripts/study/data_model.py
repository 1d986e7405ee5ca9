"""The data plane of a run as a simulation: trainers ask for batches, token workers make them, cores are few.

A discrete-event model in SimPy. A step begins when all trainers have their batch, as the gradients' sum has
it; each then takes the next and, that there may be `ahead` of them, has another one fetched. A fetch plans
the step, asks token workers for the tokens of its rows, and builds the batch. Who asks, and where the workers
are, is a `Way`; what each thing takes is measured (`Services`), CPU seconds all.
"""

import bisect
import dataclasses
import gc
import itertools
from collections.abc import Callable

import numpy as np
import simpy
from data_resources import NO_QUANTUM, Barrier, Cores, Process, Worker

from jaxthru.data.loading.worker_handle import TASK_TOKENS

Task = tuple[int, float]
"""Of which source, and how many tokens are to be made for it."""


@dataclasses.dataclass(frozen=True)
class Services:
    """What was measured, CPU seconds. token: to make one, the text's decompression included. task: of a token
    worker, beside its tokens. ask: of the asker, for each task that it sends and whose answer it takes.
    row: to build one. fetch: beside these, of a batch. plan: {rows of a step: to plan it and to tell the
    workers what is coming}. extra: tokens made for each token of a row, since chunks overlap its ends.
    restart: until a worker that was killed is there again, its stores opened; of the clock. handed: for a
    trainer to get a batch that is there from its host's server. message: to answer one over TCP. byte: to
    send one so."""

    token: float
    task: float = 0.0
    ask: float = 0.0
    row: float = 0.0
    fetch: float = 0.0
    plan: dict[int, float] = dataclasses.field(default_factory=dict)
    extra: float = 1.0
    restart: float = 0.0
    handed: float = 0.0
    message: float = 0.0
    byte: float = 0.0

    def planned(self, rows: int) -> float:
        """Returns the seconds of planning a step of so many rows: between those measured a straight line,
        beyond them the last one's."""
        known = sorted(self.plan)
        return float(np.interp(rows, known, [self.plan[at] for at in known])) if known else 0.0


@dataclasses.dataclass(frozen=True)
class Way:
    """Who fetches, and from whom. host: one pool for the trainers of a host, else each has its own. anywhere:
    token workers serve all hosts, over the network, else those that ask them."""

    name: str
    host: bool
    anywhere: bool


WAYS = {
    way.name: way
    for way in (
        Way("process", host=False, anywhere=False),
        Way("host", host=True, anywhere=False),
        Way("direct", host=False, anywhere=True),
        Way("fan-out", host=True, anywhere=True),
    )
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run. trainers: a GPU and a process each. per_host: trainers of a host. share: neighbours that take
    the same rows, as those along a tensor axis. rows: that these take in a step, of `sequence` tokens.
    sources: with log-normal weights. period: seconds that a step computes. cores: of a host, for its data;
    quantum: seconds after which one that waits for a core gets it. workers: in a pool, or of all hosts where
    they are anywhere. threads: fetches of an asker under way at once; ahead: batches that it keeps ready.
    apart: a trainer does not wait for the others, and begins its steps a period apart from the start on.
    planned: rows of a step that are planned, where they are more than these trainers'. slow: so many times
    the seconds does the first worker take. killed: the time at which it is.
    row_bytes: of a row on its way from workers that are anywhere; 4 for each token without. network: bytes a
    second of such a worker, a sixteenth of 25 Gbit/s."""

    trainers: int
    per_host: int = 8
    share: int = 1
    rows: int = 1
    sequence: int = 8192
    sources: int = 306
    period: float = 5.0
    steps: int = 16
    cores: int = 16
    quantum: float = NO_QUANTUM
    workers: int = 8
    threads: int = 4
    ahead: int = 8
    apart: bool = False
    planned: int | None = None
    slow: float = 1.0
    killed: float | None = None
    row_bytes: float | None = None
    network: float = 25e9 / 8 / 16

    @property
    def global_rows(self) -> int:
        return self.trainers // self.share * self.rows


@dataclasses.dataclass
class Found:
    """What a run took. fetches: seconds of each. waits: seconds that each step waited for data, of the last
    trainer. seconds: of all steps that count. busy: CPU seconds of all token workers."""

    fetches: np.ndarray
    waits: np.ndarray
    seconds: float
    rows: int
    busy: float

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.fetches, share))

    def told(self) -> dict[str, float]:
        """Returns the numbers of a record."""
        return {
            "fetch_p50": self.quantile(0.5),
            "fetch_p99": self.quantile(0.99),
            "fetch_max": float(self.fetches.max()),
            "wait_share": float(self.waits.sum() / self.seconds),
            "rows_per_second": self.rows / self.seconds,
        }


Draw = Callable[[np.random.Generator, int, int], list[Task]]
"""Draws the tasks of a fetch: of which group of trainers, of which step."""


def tasks_of(weights: np.ndarray, rows: int, tokens: float) -> Draw:
    """Returns what draws the rows of a fetch from sources of these weights; those of one source are a task,
    as far as one holds them. tokens: that have to be made for a row."""
    ends = np.cumsum(weights / weights.sum()).tolist()
    most = max(int(TASK_TOKENS // tokens), 1)

    def draw(random: np.random.Generator, group: int, step: int) -> list[Task]:
        drawn = sorted(min(bisect.bisect(ends, at), len(ends) - 1) for at in random.random(rows).tolist())
        found = []
        for source, each in itertools.groupby(drawn):
            for part in itertools.batched(each, most):
                found.append((source, len(part) * tokens))
        return found

    return draw


def simulate(
    setup: Setup, way: Way, services: Services, seed: int = 0, draw: Draw | None = None, warm: int = 0
) -> Found:
    """Returns what a run takes. draw: the tasks of each fetch; by default those of `setup`'s sources. warm:
    steps that do not count."""
    return Run(setup, way, services, seed, draw).found(warm)


class Run:
    """One simulation: its processes, and what they note."""

    def __init__(self, setup: Setup, way: Way, services: Services, seed: int, draw: Draw | None):
        self.setup, self.way, self.services = setup, way, services
        self.environment = environment = simpy.Environment()
        self.random = np.random.default_rng(seed)
        weights = np.random.default_rng(0).lognormal(0.0, 1.5, setup.sources)
        self.draw = draw or tasks_of(weights, setup.rows, setup.sequence * services.extra)
        self.hosts = -(-setup.trainers // setup.per_host)
        self.groups = 0
        self.fetches: list[tuple[int, float]] = []
        self.ready = [0.0] * setup.steps  # when the last trainer had its batch
        self.begun = [0.0] * setup.steps  # when the first asked for it
        self.barrier = Barrier(environment, setup.trainers)
        cores = [Cores(environment, setup.cores, setup.quantum) for _ in range(self.hosts)]
        self.workers: list[Worker] = []
        ends = np.cumsum(weights / weights.sum()) * setup.workers
        # Sources end to end, cut into equal parts, one a worker: as `share_out` has it.
        self.serving = list(itertools.pairwise([0.0, *ends.tolist()]))
        if way.anywhere:
            self.queues = [simpy.Store(environment) for _ in range(setup.workers)]
            self.workers += [self.worker(queue, None, not at) for at, queue in enumerate(self.queues)]
        if setup.killed is not None:
            environment.process(self.kill())
        for host, of_host in enumerate(itertools.batched(range(setup.trainers), setup.per_host)):
            pool = self.pool(cores[host]) if way.host else None
            for neighbours in itertools.batched(of_host, setup.share):
                group = None
                for _ in neighbours:
                    if group is None or not way.host:
                        group = Group(self, cores[host], pool or self.pool(cores[host]))
                    environment.process(self.trainer(group))

    def pool(self, cores: Cores) -> "Pool":
        queues = self.queues if self.way.anywhere else [simpy.Store(self.environment)]
        if not self.way.anywhere:
            self.workers += [
                self.worker(queues[0], cores, not self.workers and not at) for at in range(self.setup.workers)
            ]
        return Pool(self, queues)

    def worker(self, queue: simpy.Store, cores: Cores | None, first: bool) -> Worker:
        slow = self.setup.slow if first else 1.0
        return Worker(self.environment, queue, cores, slow=slow, restart=self.services.restart)

    def kill(self) -> Process:
        yield self.environment.timeout(self.setup.killed)
        self.workers[0].kill()

    def trainer(self, group: "Group") -> Process:
        """A trainer's steps: it waits for its batch, then for the others, then computes."""
        for step in range(self.setup.steps):
            self.begun[step] = self.begun[step] or self.environment.now
            yield group.taken(step)
            if self.way.host and self.services.handed:
                yield self.environment.timeout(self.services.handed)
            self.ready[step] = max(self.ready[step], self.environment.now)
            if self.setup.apart:
                due = (step + 1) * self.setup.period - self.environment.now
                yield self.environment.timeout(max(due, 0.0))
            else:
                yield self.barrier.wait()
                yield self.environment.timeout(self.setup.period)
        self.end = self.environment.now

    def found(self, warm: int) -> Found:
        gc.disable()  # millions of events are alive, and all that is garbage is there at the end
        try:
            self.environment.run()
        finally:
            gc.enable()
        seconds = self.end - self.begun[warm]
        waits = np.array(self.ready[warm:]) - np.array(self.begun[warm:])
        taken = np.array([seconds for step, seconds in self.fetches if step >= warm + self.setup.ahead])
        rows = (self.setup.steps - warm) * self.setup.global_rows
        return Found(taken, waits, seconds, rows, sum(worker.busy for worker in self.workers))


class Pool:
    """What those who fetch together have together: token workers, and the plans of steps."""

    def __init__(self, run: Run, queues: list[simpy.Store]):
        self.run, self.queues = run, queues
        self._plans: dict[int, simpy.Event] = {}

    def planned(self, step: int, cores: Cores) -> Process:
        """Has the step planned, once."""
        if step in self._plans:
            yield self._plans[step]
            return
        self._plans[step] = planned = self.run.environment.event()
        setup = self.run.setup
        yield from cores.work(self.run.services.planned(setup.planned or setup.global_rows))
        planned.succeed()

    def ask(self, task: Task) -> simpy.Event:
        """Sends a task to a worker that serves its source, and returns the event of its answer."""
        run, (source, tokens) = self.run, task
        services, setup = run.services, run.setup
        at = 0
        if run.way.anywhere:
            begin, end = run.serving[source]
            at = min(int(begin + run.random.random() * (end - begin)), setup.workers - 1)
        seconds = services.task + services.token * tokens
        if run.way.anywhere:
            each = setup.row_bytes or 4.0 * setup.sequence
            sent = each * max(round(tokens / (setup.sequence * services.extra)), 1)
            seconds += services.message + sent * services.byte + sent / setup.network
        done = run.environment.event()
        self.queues[at].put((seconds, done))
        return done


class Group:
    """Trainers that take the same batch, which is fetched ahead for them."""

    def __init__(self, run: Run, cores: Cores, pool: Pool):
        self.run, self.cores, self.pool = run, cores, pool
        self.number, run.groups = run.groups, run.groups + 1
        self._threads = simpy.Resource(run.environment, run.setup.threads)
        self._batches: dict[int, simpy.Event] = {}

    def taken(self, step: int) -> simpy.Event:
        """Returns the event of a step's batch; with it, those ahead are asked for."""
        for ahead in range(step, min(step + self.run.setup.ahead, self.run.setup.steps - 1) + 1):
            if ahead not in self._batches:
                self._batches[ahead] = self.run.environment.process(self._fetch(ahead))
        return self._batches[step]

    def _fetch(self, step: int) -> Process:
        run, services = self.run, self.run.services
        with self._threads.request() as thread:
            yield thread
            began, tasks = run.environment.now, run.draw(run.random, self.number, step)
            yield from self.pool.planned(step, self.cores)
            yield from self.cores.work(services.fetch + services.ask * len(tasks))
            asked = [self.pool.ask(task) for task in tasks]
            for answer in asked:
                if not answer.processed:
                    yield answer
            yield from self.cores.work(services.row * run.setup.rows)
            run.fetches.append((step, run.environment.now - began))
