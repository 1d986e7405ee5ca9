"""Memory of the data of 1, 4 and 8 training processes of one host, beside Grain's: a hundred heavy sources.

What is expected, of sources whose records of 32 KiB are tokenised while training:

- jaxthru has one data server and its token workers, whatever the trainers are: an interpreter each, 30 MB
  before it opens anything, a tokenizer, and what they work on; a trainer has its threads and names alone.
- Grain's pipelines are each trainer's own: a worker process of 80 MB or so (`mp_prefetch`), or its threads in
  the trainer itself (`-threads`), which then tokenises between its steps, for nothing is built ahead.

So that at 8 trainers the memory is that of two processes against eight. Every contender is asked for the
same 8 rows a second, all trainers together; `batch s` is how long a trainer waits for one, the median of the
slowest. An iterator for each source with Grain's own 500 records of each takes a GB and more a worker: it
runs at one trainer alone. Numbers are of the whole tree of processes, less what the same trainers have before
they open any data; they load no model.
"""

import dataclasses

import blocks
from suites.measured import Measured, Over, Ratio

PRIVATE = "private_mb"
SAME = ("samples_per_second", "tokens_per_second")
CORPUS = blocks.ROOT / "build" / "bench_data_heavy"
OWN, GRAIN = "jaxthru_host rows=4 sequence=8192", "grain_heavy rows=4"
PEERS = {
    "grain-map-mix": f"{GRAIN} workers=1 mixed_first=true",
    "grain-iterators-short": f"{GRAIN} workers=1 short=true",
    "grain-map-mix-short": f"{GRAIN} workers=1 mixed_first=true short=true",
    "grain-map-mix-short-threads": f"{GRAIN} workers=0 mixed_first=true short=true",
}
LARGE = {"grain-iterators": f"{GRAIN} workers=1"}
COLUMNS = {
    "samples/s": ("samples_per_second", ",.1f"),
    "private MB": (PRIVATE, ",.0f"),
    "proportional MB": ("proportional_mb", ",.0f"),
    "of the trainers alone": ("private_mb_without_data", ",.0f"),
    "batch s": ("batch_seconds_median", ".4f"),
    "first batch s": ("first_batch_seconds", ".1f"),
    "threads": ("threads", ".0f"),
    "processes": ("processes", ".0f"),
    "rounds": ("blocks", "d"),
}


@dataclasses.dataclass(frozen=True)
class Host(Measured):
    """A row of contenders on one host. trainers: how many take batches."""

    trainers: int = 1
    rounds: int = 1
    seconds: float = 240.0
    columns: dict = dataclasses.field(default_factory=lambda: COLUMNS)

    def given(self, setup):
        import data_contenders
        import data_corpus

        folder = CORPUS / "quick" if setup.tiny else CORPUS
        data_corpus.make_heavy(folder, setup.tiny, data_contenders.HEAVY_SEQUENCE)
        return {"folder": [str(folder)]}

    def command(self, name, setup):
        typed = f"host_memory.py {{folder}} {self.contenders[name]} --trainers {self.trainers}"
        return Measured.command(dataclasses.replace(self, contenders={name: typed}), name, setup)


def host(trainers: int, *bars: Over, **more: str) -> Host:
    """Returns the row of so many trainers."""
    contenders = {"jaxthru": OWN} | PEERS | more
    ratios = tuple(Ratio(name, "jaxthru", PRIVATE, SAME) for name in contenders if name != "jaxthru")
    about = f"a hundred heavy sources, {trainers} training process{'es' * (trainers > 1)} of a host"
    return Host(about, bars=bars, contenders=contenders, ratios=ratios, trainers=trainers)


BARS = tuple(
    Over(f"{name} / jaxthru", 4, "{:g} × the memory of jaxthru at equal rates")
    for name in ("grain-map-mix", "grain-iterators-short", "grain-map-mix-short")
)
ROWS = {"trainers_1": host(1, **LARGE), "trainers_4": host(4), "trainers_8": host(8, *BARS)}
NOTES = __doc__
