"""Times cuDNN's and Triton's attention by width of heads, row and document, and writes the table of both.

    python scripts/bench/suite.py attention [--output DIR]
    python scripts/bench/measure/attention_table.py --head-dim 64 --sequence 2048
    python scripts/bench/measure/attention_table.py --table DIR/attention_*.json

Every point has 32,768 tokens, forward and backward; documents are as long as those of text (log-normal), and
lie in rows as `data.packing = split` lays them, with as many segments a row as the corpus at most has. Both
take turns, three rounds. Where their outputs or gradients differ by more than 5e-3 the point is an error: it
is recorded but not written into the table. --table writes pallas_kernels/attention/attention_table.json from
the suite's records, of points that have both.

Rows split by document, the third way, are left out: a program has one shape, so that each document would take
a row as long as the longest, and that has 1.2 to 37 times the pairs of whole causal rows at the points here.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
import jax
import jax.numpy as jnp
import numpy as np
from measure.kernels.attention import arrays, passes
from measure.workload import apart

from jaxthru.data.mixture.packing import Packing, pack
from jaxthru.runtime import xla
from jaxthru.runtime.errors import InputError, require
from pallas_kernels import dispatch
from pallas_kernels.attention import CUDNN_WORKSPACE, cudnn_packed, find_segments, measured

TOKENS = measured.TOKENS
MEANS = (128, 512, 2048, 8192, None)
"""Mean tokens of a document; None is one document a row."""
HEADS = ((32, 8), (16, 4), (8, 2))
"""Of queries and of keys: the most whose workspace the choice would let cuDNN have."""
WORKSPACE = 48 << 30  # which fits an H100 too; beyond it cuDNN is not measured
CORPUS = 1 << 24  # tokens whose documents a batch is drawn from
SPREAD = 1.0  # deviation of the logarithm of a document's length
ROUNDS, ROUND_SECONDS = 3, 0.12
TOLERANCE = 5e-3
NAMES = ("cudnn_packed", "triton")


@dataclasses.dataclass(frozen=True)
class Point:
    """What is measured at one place. lengths: of the pieces of each row. documents: the corpus' mean piece.
    segments: room for them in a row."""

    head_dim: int
    sequence: int
    mean: int | None
    documents: float
    segments: int
    lengths: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> list:
        return [self.head_dim, self.sequence, self.mean]

    @property
    def spans(self) -> float:
        """The sum of the squares of documents, which is what attention costs."""
        return float(sum(n * n for row in self.lengths for n in row))

    def workspace(self, heads: int) -> int:
        return cudnn_packed.workspace_bytes(TOKENS * heads * self.head_dim, self.segments)

    @property
    def heads(self) -> tuple[int, int]:
        return next((pair for pair in HEADS if self.workspace(pair[0]) <= CUDNN_WORKSPACE), HEADS[-1])

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is measured."""
        return NAMES if self.workspace(self.heads[0]) <= WORKSPACE else ("triton",)


@functools.cache
def corpus(sequence: int, mean: int | None) -> Packing:
    """Returns the rows of a text whose documents have this mean."""
    if mean is None:
        lengths = np.full(CORPUS // sequence, sequence)
    else:
        rng = np.random.default_rng(0)
        logarithm = math.log(mean) - SPREAD**2 / 2
        lengths = np.maximum(rng.lognormal(logarithm, SPREAD, CORPUS // mean).astype(np.int64), 1)
    return pack(np.cumsum(lengths), sequence, "split")


def point_of(head_dim: int, sequence: int, mean: int | None) -> Point:
    """Returns a point, with the rows whose attention costs as much as the mean of all does."""
    packed, rows = corpus(sequence, mean), TOKENS // sequence
    squares = np.add.reduceat(packed.length.astype(np.float64) ** 2, packed.first[:-1])
    full = (len(squares) - 1) // rows * rows  # the last row may have padding
    cost = squares[:full].reshape(-1, rows).sum(1)
    batch = int(np.abs(cost - cost.mean()).argmin())
    borders = packed.first[batch * rows : (batch + 1) * rows + 1]
    lengths = [tuple(packed.length[a:b].tolist()) for a, b in itertools.pairwise(borders)]
    segments = -(-(packed.max_segments + 1) // 8) * 8  # as `Data.segments`
    return Point(head_dim, sequence, mean, float(packed.length.mean()), segments, tuple(lengths))


def program(name: str):
    """Returns the jitted forward and backward pass of an implementation."""
    return jax.jit(passes(name)["both"])


def seconds_of(run, arguments, calls: int) -> float:
    """Returns the mean time of so many calls after one another."""
    began = time.perf_counter()
    for _ in range(calls):
        out = run(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / calls


def measure(point: Point) -> dict:
    """Returns the row of a point. An implementation that cannot run is left out, and the row says why."""
    ids = np.stack([np.repeat(np.arange(1, len(row) + 1), row) for row in point.lengths]).astype(np.int32)
    segments = jax.jit(find_segments, static_argnums=1)(jnp.asarray(ids), point.segments)
    arguments = (*arrays(*ids.shape, point.heads, point.head_dim), segments)
    runs, first, failed = {}, {}, {}
    for name in point.names:
        run = program(name)
        try:
            first[name], runs[name] = jax.block_until_ready(run(*arguments)), run
        except (jax.errors.JaxRuntimeError, dispatch.Unsupported) as error:
            failed[name] = (str(error).splitlines() or [repr(error)])[0]
    differences = {}
    if len(first) > 1:
        pairs = zip(("o", "dq", "dk", "dv"), *(first[name] for name in reversed(point.names)), strict=True)
        differences = {what: float(f"{float(apart(*pair)):.2e}") for what, *pair in pairs}
    del first
    calls = {}
    for name, run in runs.items():
        seconds_of(run, arguments, 2)
        calls[name] = max(3, math.ceil(ROUND_SECONDS / seconds_of(run, arguments, 2)))
    taken = {name: [] for name in runs}
    for _, (name, run) in itertools.product(range(ROUNDS), runs.items()):
        taken[name].append(1e3 * seconds_of(run, arguments, calls[name]))
    return {
        "point": point.key,
        "rows": len(point.lengths),
        "heads": list(point.heads),
        "documents": round(point.documents, 1),
        "segments": point.segments,
        "share_of_causal": round(point.spans / (TOKENS * point.sequence), 4),
        "milliseconds": {name: round(statistics.median(each), 4) for name, each in taken.items()},
        "spread": {
            name: round((max(each) - min(each)) / statistics.median(each), 4) for name, each in taken.items()
        },
        "differences": differences,
        "failed": failed,
    }


def run(arguments) -> dict:
    """Returns all points of a width of heads and a length of rows, or writes the table."""
    if arguments.table:
        return write_table(arguments.table)
    capability = dispatch.nvidia_compute_capability()
    needs = f"found {jax.default_backend()}: needs an NVIDIA GPU"
    require(jax.default_backend() == "gpu" and capability is not None, needs)
    harness.keep_stdout()
    xla.configure()
    results = []
    for mean in MEANS:
        results.append(measure(point_of(arguments.head_dim, arguments.sequence, mean)))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    settings = {
        "tokens": TOKENS,
        "rounds": ROUNDS,
        "round_seconds": ROUND_SECONDS,
        "lengths": f"log-normal, deviation {SPREAD:g}",
        "capability": list(capability),
    }
    bad = sum(bool(wrong(row) or row["failed"]) for row in results)
    return {"settings": settings, "wrong": bad, "results": results}


def wrong(row: dict) -> bool:
    """Says whether two implementations do not agree."""
    return not all(value <= TOLERANCE for value in row["differences"].values())


def fastest(row: dict) -> str | None:
    """Returns the name of the faster implementation, None where rounds of one differ as much as the two."""
    (name, least), (_, other) = sorted(row["milliseconds"].items(), key=lambda item: item[1])
    return name if other / least - 1 > max(row["spread"].values()) else None


def entries(record: dict) -> dict[str, list[dict]]:
    """Returns the table of a line, see `measured.TABLE`. A point decides nothing where one implementation
    alone ran, or where the two do not agree."""
    rows = [
        dataclasses.asdict(
            measured.Point(
                *row["point"][:2], row["documents"], row["milliseconds"], fastest(row), row["heads"][0]
            )
        )
        for row in record["results"]
        if len(row["milliseconds"]) > 1 and not wrong(row)
    ]
    return {".".join(map(str, record["settings"]["capability"])): rows}


def lines_of(record: Path) -> list[dict]:
    """Returns the lines of a record of the suite, or the one line of a file. Raises InputError."""
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--table {record}: cannot be read ({error})") from error
    of = found if isinstance(found, dict) else {}
    lines = [block["line"] for block in of.get("blocks", [{"line": of}]) if "line" in block]
    ours = bool(lines) and all(line.get("benchmark") == "attention_table" for line in lines)
    require(ours, f"--table {record}: is no record of this benchmark; give those of the suite attention")
    return lines


def write_table(records: list[Path]) -> dict:
    """Writes what records have into the table, in place of all that was there for such GPUs."""
    found: dict[str, list[dict]] = {}
    for line in (line for record in records for line in lines_of(record)):
        for capability, rows in entries(line).items():
            found.setdefault(capability, []).extend(rows)
    table = measured.TABLE | found
    measured.TABLE_FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return {"written": {capability: len(rows) for capability, rows in found.items()}}


main = harness.program(
    __doc__,
    run,
    harness.option("--head-dim", type=int, default=64),
    harness.option("--sequence", type=int, default=2048, help="of a row"),
    harness.option("--table", type=Path, nargs="+", metavar="RECORD", help="write the table from records"),
    config=False,
)


if __name__ == "__main__":
    sys.exit(main())
