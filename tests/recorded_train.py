"""A training command that writes down, row by row, what its devices are given.

`python recorded_train.py RECORDS ...` is `python -m jaxthru.train ...`, and its process k appends to
RECORDS-k.
"""

import collections
import json
import sys
import zlib
from pathlib import Path

RECORDED = Path(__file__).resolve()


def recorded_rows(records: Path) -> dict[int, dict[str, int]]:
    """Returns {step: {row: checksum}} of what the processes of runs were given, up to the end of each. Raises
    AssertionError where two of them had another row at one step."""
    found = collections.defaultdict(dict)
    for path in records.parent.glob(f"{records.name}-*"):
        for step, rows in map(json.loads, path.read_text().split("\n")[:-1]):
            known = found[step]
            assert all(known.setdefault(row, content) == content for row, content in rows.items()), step
    return dict(found)


class Recorded:
    """Batches, each written down as it is taken. step: completed updates before the first."""

    def __init__(self, made, step: int, records: str):
        self.made, self.step, self.records = made, step, records

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.made.close()

    def __next__(self):
        import jax
        import numpy as np

        placed, rows = next(self.made), {}
        self.step += 1
        for _, array in sorted(placed.items()):
            for shard in array.addressable_shards:
                for row, content in enumerate(np.asarray(shard.data), shard.index[0].start or 0):
                    rows[row] = zlib.crc32(content.tobytes(), rows.get(row, 0))
        with open(f"{self.records}-{jax.process_index()}", "a", buffering=1) as file:  # noqa: PTH123
            print(json.dumps([self.step, rows]), file=file)
        return placed


def main() -> None:
    """Runs the command."""
    from jaxthru import train

    batches, records = train.Build.batches, sys.argv.pop(1)
    train.Build.batches = lambda built, data_state: Recorded(
        batches(built, data_state), data_state.step, records
    )
    train.start()


if __name__ == "__main__":
    main()
