"""Times steps of a model that fills the card's memory as far as it is asked to: prints one JSON line.

    python scripts/bench/measure/near_limit.py --config FILE [--set a.b=v ...] --grow model.vocabulary

The key is raised until the step, as compiled, takes the share of the card: memory is nearly linear in it, so
that two or three compiles find it. The card's memory is what nvidia-smi calls its total, of which XLA's
allocator is given less. On a device that does not tell its memory the model is left as it is.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from measure import step

from jaxthru import config as configuration
from jaxthru.build.compiled import Build, build_step
from jaxthru.build.confirmed import Sizes
from jaxthru.build.defaults import get
from jaxthru.data.loading.dataset import open_data
from jaxthru.runtime import xla

MULTIPLE = 128  # what a grown size is a multiple of
NEAR = 0.002  # of the card, how near the share is near enough
TRIES = 4


def card_bytes() -> int | None:
    """Returns the memory of the card as nvidia-smi tells it."""
    told = harness.ask("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return int(told.splitlines()[0]) * 2**20 if told else None


def peak(built: Build) -> int:
    """Returns the bytes that a step takes as compiled; of several programs, nothing is known."""
    if built.config.offload.layered:
        sys.exit("near_limit.py: this model takes offload to fit; give a smaller one")
    return Sizes.of(built.compiled.program.memory_analysis()).peak


def next_size(tried: list[tuple[int, int]], target: int) -> int:
    """Returns the size to try, from the sizes tried and their bytes: where the line through the last two
    meets the target; after the first alone, a tenth more, to have a line. Where a larger size took less,
    another policy was chosen for it: then halfway between."""
    size, bytes_ = tried[-1]
    if len(tried) == 1:
        wanted = size * 1.1
    else:
        before, bytes_before = tried[-2]
        slope = (bytes_ - bytes_before) / (size - before)
        wanted = size + (target - bytes_) / slope if slope > 0 else (size + before) / 2
    return round(wanted / MULTIPLE) * MULTIPLE


def grown(build, first: int, card: int | None, share: float) -> tuple[Build, list[tuple[int, int]]]:
    """Returns the step that takes the share of the card, and the sizes that were tried with their bytes.
    build: size -> its step."""
    built, size, tried = build(first), first, []
    while card is not None:
        tried.append((size, peak(built)))
        if abs(tried[-1][1] / card - share) <= NEAR or len(tried) == TRIES:
            break
        size = next_size(tried, round(share * card))
        if size in dict(tried):
            break
        built = build(size)
    return built, tried


def measure(arguments) -> dict:
    arguments.warmup_seconds = arguments.timed_seconds = None
    config = configuration.load(arguments.config, ["train.steps=1000000", *arguments.overrides])
    xla.configure(config.kernels.writes_to_peers)
    data, card = open_data(config.data), card_bytes()

    def build(size: int) -> Build:
        settings = ["train.steps=1000000", *arguments.overrides, f"{arguments.grow}={size}"]
        return build_step(configuration.load(arguments.config, harness.set_words(settings)[1::2]), data)

    built, tried = grown(build, get(config, arguments.grow), card, arguments.share)
    line = step.measure(built, step.packed_batches(built), arguments)
    peak_bytes = line["peak_hbm_bytes"]
    return line | {
        "grown": {arguments.grow: get(built.config, arguments.grow)},
        "tried": tried,
        "card_gib": card and round(card / 2**30, 2),
        "share_of_card": round(peak_bytes / card, 4) if card and peak_bytes else None,
        "chosen": step.chosen(built),
    }


main = harness.program(
    __doc__,
    measure,
    harness.option("--grow", default="model.vocabulary", metavar="GROUP.KEY"),
    harness.option("--share", type=float, default=0.924, help="of the card's memory"),
    harness.option("--steps", type=int, nargs=2, default=(3, 40), metavar=("WARMUP", "TIMED")),
)


if __name__ == "__main__":
    sys.exit(main())
