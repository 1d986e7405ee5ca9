"""A run that starves for data, end to end: Grain's default pipeline against jaxthru's Source Loaders.

    python scripts/bench/measure/starved.py --output scripts/bench/results/starved_h200.json

Needs grain and zstandard. Quicker: `--timed-seconds 20 --warmup-seconds 10 --settle-seconds 3`, or one peer
less: `--contenders jaxthru grain`. Tokenisation alone, which starves nobody: `--milliseconds 0`. On a CPU:

    python scripts/bench/measure/starved.py --config configs/quickstart.py --sources 3 --pages 20 \\
        --milliseconds 3 --vocabulary 2048 --set model.layers=1 \\
        --warmup-seconds 0 --timed-seconds 1 --settle-seconds 0

The same pages (4 KiB of source code, 35 sources of .jsonl.zst, a BPE of 32,768 tokens) are read,
transformed, tokenised and packed into rows while Llama 3.2 1B trains on them: jaxthru's compiled step, its
loop's order (ask for a batch, dispatch, read the metrics of the step before) and its transfer to the
device.

- `jaxthru`: sources that are `online`, in Source Loaders (`data.loaders`, by default half of the cores).
- `grain`: MapDataset.mix of the sources, the transform and the tokenizer as `map`, `to_iter_dataset()` with
  its 16 threads, ConcatThenSplit, batch: the strongest of the default ways, for one pool serves all
  sources.
- `grain-mp`: the same behind `mp_prefetch`, with as many processes as jaxthru has Source Loaders.

What is expected. A token is 6 × 1.24 G and attention, about 7.8 GFLOP, so at 450 TFLOP/s the GPU takes
57,000 tokens, 55 pages of 1,030, in a second. A core tokenises 300,000 tokens a second or more, and leaves
Python's lock for it: tokenisation alone starves nothing on one H200, and all contenders are then equal. So
each page also costs --milliseconds of CPU under the lock, as a transform in Python would: 50 by default,
about what extracting the text of a web page takes. That is 2.8 cores, where one process has one: `grain`
gives 20 pages a second or fewer, 20,000 tokens, about a third of what the GPU takes, and its threads slow
the loop. `jaxthru` does about 12 % of the pages twice, for rows are cut anywhere, so it needs 3.1 of 8
cores and must not wait; nor must `grain-mp`. The claim is about the default: against `grain-mp` no gain is
expected.

Contenders take turns in one process, on one state; each is opened anew, so that none works ahead while
another is timed, and has --settle-seconds to get under way. First the GPU is warmed up on one batch that
lies on the device, which also says what it does when it never waits (`unstarved`). `data_wait` is the time
that the loop stands in next(batches) over the timed steps' time; all contenders place batches on the device
ahead, in threads. The device is busy in the beginning of that time. About five minutes on one
H200: 15 s for the corpus, 30 s to compile, 20 s of warm-up, and for each of three contenders 40 s timed and
30 s to start and settle, in two turns. Where memory is short, `--set train.rows=4`.

Log (H200, 8 Source Loaders, batches placed in the loop itself, another GPU of the host compiling, without
`grain-mp`): 62,245 tokens a second, data wait 0.37 %, 7.4 times Grain's default of one process (8,387, 63 %),
whose rate fell short of the 20,000 expected: the lock is also what dispatches the steps.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import comparison
import harness
import jax
import numpy as np
from gpu_clocks import Clocks
from measure import starved_input, starved_transform

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.data.loading.dataset import open_data
from jaxthru.engine.step import Batch
from jaxthru.models import llama
from jaxthru.runtime import hardware, xla
from jaxthru.runtime.errors import require

BAR_WAIT = 0.005


@dataclasses.dataclass(frozen=True)
class Block:
    """A contender's turn. seconds, waits: of each timed step, and of its next(batches). tokens: of all."""

    seconds: list[float]
    waits: list[float]
    tokens: int
    mhz: float | None
    watts: float | None


class Runner:
    """Runs steps in the order of jaxthru's loop, on one state."""

    def __init__(self, built: Build):
        self.built, self.state = built, built.first_state()

    def run(self, batches: Iterator[Batch], settle: float, timed: float) -> Block:
        """Runs steps for so many seconds; the first, and those of `settle` seconds, do not count."""
        steps = self._steps(batches)
        next(steps)  # which waits for whatever is started at first
        began = time.perf_counter()
        while time.perf_counter() - began < settle:
            next(steps)
        with Clocks() as clocks:
            taken, began = [], time.perf_counter()
            while time.perf_counter() - began < timed or len(taken) < 2:
                taken.append(next(steps))
        steps.close()
        seconds, waits, tokens = zip(*taken, strict=True)
        return Block(list(seconds), list(waits), sum(tokens), clocks.mhz, clocks.watts)

    def _steps(self, batches: Iterator[Batch]) -> Iterator[tuple[float, float, int]]:
        """Yields (seconds, wait for data, tokens) for ever: the wait is that of the batch which was asked for
        within these seconds, for the next step."""
        before, clock = None, time.perf_counter()
        try:
            while True:
                asked = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter() - asked
                self.state, metrics = self.built.compiled(self.state, batch)
                ended, before = before, metrics
                if ended is not None:
                    tokens = int(jax.device_get(ended)["tokens"])
                    now = time.perf_counter()
                    yield now - clock, waited, tokens
                    clock = now
        finally:
            jax.device_get(before)


def turns(
    runner: Runner, contenders: dict[str, Callable], rounds: int, settle: float, timed: float
) -> dict[str, list[Block]]:
    """Returns the blocks of each contender, all of them once before any comes again.

    contenders: {name: opens its batches, placed on the device, as a context manager}. timed: seconds of a
    contender in all.
    """
    found = {name: [] for name in contenders}
    for turn, (name, opened) in itertools.product(range(rounds), contenders.items()):
        began = time.perf_counter()
        with opened() as batches:
            block = runner.run(batches, settle, timed / rounds)
        found[name].append(block)
        rate, share = block.tokens / sum(block.seconds), sum(block.waits) / sum(block.seconds)
        took = time.perf_counter() - began
        told = f"turn {turn + 1} {name}, {took:.0f} s: {rate:,.0f} tokens/s, data wait {share:.2%}"
        print(told, file=sys.stderr, flush=True)
    return found


def place(batch: dict[str, np.ndarray], built: Build) -> Batch:
    """Returns the batch on the device. Raises InputError for rows of more documents than the step is
    compiled for."""
    most = int(batch["segment_ids"].max())
    require(
        most < built.data.segments, f"a row of {most} documents, the step takes {built.data.segments - 1}"
    )
    return built.place(batch, built.config.train.rows)


def row(blocks: list[Block]) -> dict:
    """Returns a contender's row."""
    rates = [block.tokens / sum(block.seconds) for block in blocks]
    seconds = [second for block in blocks for second in block.seconds]
    waits = [wait for block in blocks for wait in block.waits]
    rate, spread = sum(block.tokens for block in blocks) / sum(seconds), comparison.spread(rates)
    return {
        "tokens_per_second": round(rate, 1),
        "step_seconds_median": round(statistics.median(seconds), 6),
        "step_seconds_slowest": [round(second, 6) for second in sorted(seconds)[-3:]],
        "steps_timed": len(seconds),
        "data_wait": round(sum(waits) / sum(seconds), 6),
        "data_wait_seconds_median": round(statistics.median(waits), 6),
        "turns": [round(rate, 1) for rate in rates],
        "spread": spread and round(spread, 4),
        "sm_clock_mhz": [block.mhz for block in blocks],
        "power_watts": [block.watts for block in blocks],
    }


def ratios(rows: dict[str, dict]) -> dict[str, dict]:
    """Returns {peer: jaxthru's rate over its, and whether that may be claimed}."""
    own, peers = rows.get("jaxthru"), [name for name in rows if name != "jaxthru"]
    found = {name: comparison.ratio(own, rows[name]) for name in peers} if own else {}
    return {name: one | {"ratio": round(one["ratio"], 3)} for name, one in found.items()}


def table(line: dict) -> str:
    """Returns the result as lines to read."""
    told = [f"never waiting: {line['unstarved']['tokens_per_second']:,.0f} tokens/s"]
    for one in line["rows"]:
        told.append(f"{one['milliseconds']:g} ms a page: jaxthru over {one['ratios']}")
        for name, found in one["contenders"].items():
            rate, wait = found["tokens_per_second"], found["data_wait"]
            share = f"{found['of_unstarved']:.1%} of never waiting"
            told.append(f"  {name}: {rate:,.0f} tokens/s, {share}; data wait {wait:.2%}")
    return "\n".join(told)


def measure(arguments: argparse.Namespace, phases: harness.Phases) -> dict:
    """Returns the result. Raises InputError."""
    defaults = ["train.rows=8", f"data.loaders={max((os.cpu_count() or 1) // 2, 1)}"]
    overrides = [*defaults, *arguments.overrides, "data.packing=split", "train.steps=1000000"]
    config = configuration.load(arguments.config, overrides)
    with phases("corpus"):
        sizes = arguments.sources, arguments.pages, arguments.vocabulary
        folder = starved_input.make_corpus(arguments.folder, *sizes)
        settings = {"mix": str(folder / "mix.toml"), "store": str(folder / "store")}
        # Rows come in any order: there is but one device.
        shape = dataclasses.replace(config.data, **settings, balance=False)
        config = dataclasses.replace(config, data=shape)
        os.environ[starved_transform.VARIABLE] = "0"  # stores are made at once
        data = open_data(config.data)
    with phases("compiling"):
        data.segments = max(data.segments, 16)  # Grain packs other rows, with more documents perhaps
        built = build_step(config, data, jax.devices()[:1])
        runner = Runner(built)
    placed = functools.partial(place, built=built)
    opens = {
        "jaxthru": lambda: starved_input.from_jaxthru(config, placed),
        "grain": lambda: starved_input.from_grain(config, placed, folder, 0),
        "grain-mp": lambda: starved_input.from_grain(config, placed, folder, shape.loaders),
    }
    with phases("warm-up"):
        with opens["jaxthru"]() as batches:
            batch = next(batches)
        unstarved = row(
            [runner.run(itertools.repeat(batch), arguments.warmup_seconds / 2, arguments.warmup_seconds / 2)]
        )
    chosen = {name: opens[name] for name in arguments.contenders}
    rows = []
    for milliseconds in arguments.milliseconds:
        os.environ[starved_transform.VARIABLE] = str(milliseconds)  # for the processes that are started too
        with phases(f"{milliseconds:g} ms a page"):
            blocks = turns(
                runner, chosen, arguments.rounds, arguments.settle_seconds, arguments.timed_seconds
            )
        found = {name: row(of_one) for name, of_one in blocks.items()}
        for one in found.values():
            one["of_unstarved"] = round(one["tokens_per_second"] / unstarved["tokens_per_second"], 4)
        wait = found.get("jaxthru", {}).get("data_wait")
        bar = {"value": wait, "bar": BAR_WAIT, "met": wait is not None and wait < BAR_WAIT}
        rows.append(
            {"milliseconds": milliseconds, "contenders": found, "ratios": ratios(found), "data_wait": bar}
        )
    return {
        "benchmark": "starved",
        "config": Path(arguments.config).stem,
        "set": overrides,
        "parameters": llama.parameters(config.model),
        "sources": arguments.sources,
        "page_characters": starved_input.PAGE_CHARACTERS,
        "vocabulary": data.vocabulary,
        "processes": shape.loaders,
        "cores": os.cpu_count(),
        "tokens_per_step": config.train.rows * shape.sequence,
        "unstarved": unstarved,
        "rows": rows,
        "peak_hbm_bytes": hardware.peak_bytes(),
        "phases": phases.seconds,
        **harness.provenance(),
    }


def main() -> int:
    parser = harness.config_parser(__doc__, harness.ROOT / "configs" / "llama3_2_1b.py")
    add = parser.add_argument
    names = ("jaxthru", "grain", "grain-mp")
    add("--contenders", nargs="+", choices=names, default=names)
    add("--milliseconds", nargs="+", type=float, default=[50.0], help="of CPU that a page costs; a row each")
    add("--sources", type=int, default=35)
    add("--pages", type=int, default=160, help="of each source; they come again and again")
    add("--vocabulary", type=int, default=32_768, help="of the tokenizer")
    add("--rounds", type=int, default=2, help="turns of each contender")
    add("--settle-seconds", type=float, default=8.0, help="of each turn before its time begins")
    add("--folder", type=Path, default=Path("build/bench_starved"), help="corpora, kept")
    harness.add_seconds(parser)
    arguments = parser.parse_args()
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's worker processes ask for it
    xla.configure()
    line = measure(arguments, harness.Phases())
    print(table(line), file=sys.stderr)
    harness.emit(line, arguments.output)
    return 0


if __name__ == "__main__":
    code = harness.run(main)
    sys.stdout.flush()
    os._exit(code)  # threads that read ahead for a contender would keep the process
