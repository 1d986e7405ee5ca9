"""The data plane beside its peers: tokens per second, memory of many heavy sources, one slow source, balance.

What is expected of loading, on two cores:

- packed: a batch is 24 bytes a token (six fields of four bytes) and is written once, so that ten GB/s of
  memory would give 400 M tokens/s and the calls for 64 rows leave about 150 M; each element of Grain's
  costs about 20 us before anything is done with its 2,048 tokens, which leaves 10 to 50 M.
- heavy: 100 sources × 4 workers × 500 records of 32 KiB that are read ahead, Grain's default, are 6.5 GB; one
  Source Loader is an interpreter, a tokenizer and what it works on, below 100 MB. `-short`: Grain told to
  read no further ahead than the rate asked for needs, by one worker, as many as jaxthru has Source Loaders
  (`-short-4`: by four).
- slow: a tenth of the samples at 4 ms of CPU is 0.4 ms a sample, so that two cores give 5,000 a second
  at most. jaxthru has two Source Loaders; Grain's default has threads alone, which the interpreter's lock
  holds to one core: 2,500. `-mp-prefetch` gives it two processes for all that it does, `-mp-slow` for the
  slow source.

`heavy` compares memory at one rate of samples: every contender is asked for as many rows a second and no
more. One that cannot keep up sets the rate for all that follow it, so the one that needs most comes first.
"""

import dataclasses

import blocks
from suites.measured import Measured, Over, Ratio
from suites.rows import TINY, Bar, rate

SAMPLES, PRIVATE = "samples_per_second", "private_mb"
CORPUS = blocks.ROOT / "build" / "bench_data"
ASKED = 16.0  # rows a second, of a heavy row
COLUMNS = {
    "tokens/s": ("tokens_per_second", ",.0f"),
    "per CPU second": ("tokens_per_cpu_second", ",.0f"),
    "bytes/token": ("bytes_per_token", ".0f"),
    "samples/s": (SAMPLES, ",.0f"),
    "private MB": (PRIVATE, ",.0f"),
    "threads": ("threads", ".0f"),
    "processes": ("processes", ".0f"),
    "rounds": ("blocks", "d"),
}


@dataclasses.dataclass(frozen=True)
class Opening(Measured):
    """A row of stores that are opened."""

    columns: dict = dataclasses.field(default_factory=lambda: OPENING)

    def given(self, setup):
        return {"folder": [str(CORPUS / ("opening_quick" if setup.tiny else "opening"))]}


@dataclasses.dataclass(frozen=True)
class Loading(Measured):
    """A row of loaders, each of a reader and its keys. words: of all."""

    words: str = ""
    rounds: int = 5
    seconds: float = 25.0
    columns: dict = dataclasses.field(default_factory=lambda: COLUMNS)

    def given(self, setup):
        import data_corpus

        folder = CORPUS / "quick" if setup.tiny else CORPUS
        data_corpus.make(folder, setup.tiny)  # here, or a contender's memory would be that of making it
        reached = [each["line"][SAMPLES] for each in setup.done if "line" in each]
        return {"folder": [str(folder)], "rate": [f"{min([ASKED, *reached]):g}"]}

    def command(self, name, setup):
        whole = {name: f"loading.py {{folder}} {self.contenders[name]} {self.words}"}
        return Measured.command(dataclasses.replace(self, contenders=whole), name, setup)


def packed(sources: int, *ratios: Ratio, **more: str) -> Loading:
    """Returns the row of a mix of so many sources."""
    mix = f"mix=documents_{sources}"
    readers = {"grain": "grain_default", "grain-first-fit": "grain_first_fit",
               "grain-concat-split": "grain_concat_split"}  # fmt: skip
    own = {"jaxthru": f"jaxthru {mix}", "jaxthru-best-fit": f"jaxthru {mix} packing=best_fit"}
    contenders = own | {name: f"{reader} {mix}" for name, reader in readers.items()} | more
    ratios = (
        *(Ratio("jaxthru", name) for name in readers),
        Ratio("jaxthru-best-fit", "grain-first-fit"),
        *ratios,
    )
    about = f"planned, packed batches of {sources} token stores"
    return Loading(about, bars=(rate(100e6),), contenders=contenders, ratios=ratios)


HEAVY = {
    "grain-iterators": "grain_heavy workers=4",
    "grain-iterators-short-4": "grain_heavy workers=4 short=true",
    "grain-iterators-short": "grain_heavy workers=1 short=true",
    "grain-map-mix": "grain_heavy mixed_first=true workers=4",
    "grain-map-mix-short-4": "grain_heavy mixed_first=true workers=4 short=true",
    "grain-map-mix-short": "grain_heavy mixed_first=true workers=1 short=true",
}
OWN = "rows=8 sequence=8192"
SAME = (SAMPLES, "tokens_per_second")
OPENING = {
    "open s": ("open_seconds", ".2f"),
    "CPU s": ("open_cpu_seconds", ".2f"),
    "first batch s": ("first_batch_seconds", ".2f"),
    "imported MB": ("imported_mb", ".0f"),
    "opened MB": ("opened_mb", ".0f"),
    "first batch MB": ("private_mb", ".0f"),
    "files": ("open_files", ".0f"),
    "made, CPU s": ("made_cpu_seconds", ".0f"),
    "made, bytes": ("kept_bytes", ",.0f"),
}
PEERS = ("mosaicml", "webdataset", "hugging_face", "torchdata")
LENGTHS = ("lognormal(6, 2)", "200 × (1 + pareto(1))")
SEQUENCES = (4096, 8192, 32_768, 131_072)

# fmt: off
ROWS = {
    "packed_5": packed(5),
    "packed_35": packed(35),
    "packed_306": packed(306, Ratio("jaxthru", "jaxthru-5"), **{"jaxthru-5": "jaxthru mix=documents_5"}),
    "heavy": Loading(
        "a hundred heavy sources, at one rate of samples",
        bars=(Over("grain-iterators / jaxthru", 13.5, "{:g} × the memory of jaxthru at equal rates"),),
        contenders=HEAVY | {"jaxthru": f"jaxthru mix=heavy_online {OWN}",
                            "jaxthru-mapped": f"jaxthru mix=heavy {OWN}"},
        ratios=(*(Ratio(who, "jaxthru", PRIVATE, SAME) for who in HEAVY),
                Ratio("grain-iterators", "jaxthru-mapped", PRIVATE, SAME)),
        words="--rate {rate}", seconds=120),
    "slow": Loading(
        "one slow source, a tenth of the samples at 4 ms of CPU",
        bars=(Over("jaxthru / grain", 1.8, "{:g} × the samples of Grain's default"),
              Over("jaxthru / grain-mp-prefetch", 1.3, "{:g} × the samples of Grain with as many processes")),
        contenders={"jaxthru": "jaxthru mix=pages sequence=512 packing=best_fit loaders=2",
                    "grain": "grain_pages",
                    "grain-mp-prefetch": "grain_pages workers=2",
                    "grain-mp-slow": "grain_pages workers=2 slow_alone=true"},
        ratios=tuple(Ratio("jaxthru", f"grain{how}", SAMPLES) for how in ("", "-mp-prefetch", "-mp-slow")),
        words="--milliseconds 4"),
    "peers": Loading(
        "rows that are stored beforehand, in each one's own format",
        contenders={"jaxthru": "jaxthru mix=documents_5"} | {name: name for name in PEERS},
        ratios=tuple(Ratio("jaxthru", name) for name in PEERS)),
    "documents": Opening(
        "a store of 10^9 documents is opened",
        bars=(Bar("open_seconds", 5, "{:g} s", most=True),
              Bar("private_mb", 200, "{:g} MB", most=True)),
        contenders={"split": "opening.py {folder}/documents --documents 1e9"}, seconds=400),
    "sources": Opening(
        "a mix of 3,000 sources is opened",
        bars=(Bar("first_batch_seconds", 3, "{:g} s", most=True),
              Bar("private_mb", 300, "{:g} MB", most=True)),
        contenders={packing: f"opening.py {{folder}}/sources --sources 3000 --sequence 1024 {how}"
                    for packing, how in (("split", ""), ("best_fit", "--packing best_fit"))}),
    "balance": Measured(
        "how evenly a step's work is spread over 32 groups of 4 rows",
        contenders={f"{lengths}, {sequence}": f"balance.py --lengths '{lengths}' --sequence {sequence}"
                    for lengths in LENGTHS for sequence in SEQUENCES},
        columns={name: (name, ".3f") for name in ("arrival", "unbalanced", "balanced", "devices", "padding")}
                | {"ms to plan": ("plan_ms", ".1f")}),
    "balanced_steps": Measured(
        "balanced steps beside the same as they come",
        bars=(Bar("gain_over_predicted", 0.8, "{:.0%} of the predicted gain"),
              Bar("prediction_error", 0.05, "{:.0%} between predicted and measured steps", most=True)),
        config="llama3_8b_8layer", common="model.layers=4 model.vocabulary=16384 model.max_sequence=32768 "
        "data.sequence=32768 data.packing=best_fit",
        contenders={"steps": "balance_steps.py {config} {seconds}"}, gpus=2, seconds=280, within="orders",
        columns={"step s": ("step_seconds", ".4f"), "predicted s": ("predicted_step_seconds", ".4f"),
                 "error": ("error", ".2%"), "worst step": ("worst_error_of_a_step", ".2%"),
                 "A-A": ("spread", ".2%"), "MHz": ("sm_clock_mhz", ".0f"), "W": ("power_watts", ".0f")},
        tiny="--tokens 60000 --steps 2 --microbatches 4 --rounds 1",
        small=TINY.replace("data.groups=1", "data.sequence=256")),
    "starved": Measured(
        "a run that starves for data, 50 ms of CPU a page",
        bars=(Bar("data_wait", 0.005, "{:.1%} of the time waiting for data", most=True),),
        config="llama3_2_1b", common="train.rows=8", rounds=2, seconds=110, timed=(20.0, 20.0),
        contenders={name: f"starved.py {{config}} {{seconds}} --input {name}"
                    for name in ("jaxthru", "grain", "grain-mp", "unstarved")},
        ratios=(Ratio("jaxthru", "grain"), Ratio("jaxthru", "grain-mp"),
                *(Ratio(name, "unstarved") for name in ("jaxthru", "grain", "grain-mp"))),
        columns={"tokens/s": ("tokens_per_second", ",.0f"), "data wait": ("data_wait", ".2%"),
                 "median step s": ("step_seconds", ".3f"), "slowest s": ("step_seconds_max", ".3f")},
        tiny="--sources 2 --pages 8 --vocabulary 1000 --milliseconds 1"),
}
# fmt: on
NOTES = """\
Each contender runs in a process of its own, in rounds through all; numbers are medians over the rounds, and
rates all tokens over all seconds of a round. A-A is the largest spread between rounds of what is compared; a
ratio in bold differs from 1 by more than twice the larger of its two. bytes/token says what a contender
delivers: jaxthru all six fields of a packed, balanced batch, Grain's packers three, the others tokens alone.
Peers that are not installed are left out (see data_peers.py). Texts of other rows need zstandard, all psutil.
"""
