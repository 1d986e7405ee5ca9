"""Makes the table of tiles that Hopper's grouped matmuls follow, of a record of their tiles in turns.

    python scripts/bench/measure/experts_tiles.py RECORD ... [--table FILE]

RECORD is what `kernel.py grouped_matmul --shape qwen3_30b --tiles` wrote. A shape's fastest tiles are taken;
the kernel counts as the faster way where these beat all other implementations, and gave their results.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from measure.kernels import grouped_matmul

from jaxthru.runtime.errors import InputError
from pallas_kernels.grouped_matmul import hopper_tiles
from pallas_kernels.testing import GPU_TOLERANCE

OTHERS = ("triton", "xla", "reference")
ORIGIN = ("device", "versions", "commit")
"""Of the record, what the table says of its own."""


def entry(name: str, found: dict) -> tuple[str, dict] | None:
    """Returns a shape's key and its entry, None where no tiles ran. found: {contender: what is said}."""
    problem = grouped_matmul.problem_of(grouped_matmul.SHAPES[name])
    times = {}
    for tiles in hopper_tiles.candidates(problem):
        line = found.get(grouped_matmul.name_of(tiles), {})
        differs = next((value for key, value in line.items() if key.startswith("apart_from_")), None)
        if "milliseconds" in line and (differs is None or differs <= GPU_TOLERANCE):
            times[tiles] = line["milliseconds"]
    if not times:
        return None
    best = min(times, key=times.get)
    others = {
        name: round(1e3 * line["milliseconds"], 1)
        for name, line in found.items()
        if name in OTHERS and "milliseconds" in line
    }
    microseconds = round(1e3 * times[best], 1)
    return problem.key, {
        "tiles": dict(sorted(vars(best).items())),
        "microseconds": microseconds,
        "others": others,
        "faster": microseconds < min(others.values(), default=float("inf")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("--table", type=Path, default=hopper_tiles.TABLE_FILE)
    arguments = parser.parse_args()
    table = json.loads(arguments.table.read_text()) if arguments.table.exists() else {}
    for path in arguments.records:
        record = json.loads(path.read_text())
        if record.get("benchmark") != "grouped_matmul" or "contenders" not in record:
            raise InputError(f"{path}: no record of `kernel.py grouped_matmul`")
        shapes = record["contenders"]
        if record["shape"] in grouped_matmul.SHAPES:
            shapes = {record["shape"]: shapes}
        made = dict(filter(None, (entry(*pair) for pair in shapes.items())))
        if not made:
            raise InputError(f"{path}: has no tiles that ran; measure it with --tiles")
        table.setdefault(record["device"]["kind"], {}).update(made)
    arguments.table.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    line = {"benchmark": "experts_tiles", "table": str(arguments.table), "entries": table}
    print(json.dumps(line | {key: record[key] for key in ORIGIN if key in record}))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run(main))
