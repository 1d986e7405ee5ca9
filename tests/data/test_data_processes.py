"""Several real processes build one global batch, each its own rows."""

from pathlib import Path

import pytest
from processes import finish, start_processes

PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxthru.data.loader import DataConfig, local_rows, open_data, to_global
from jaxthru.runtime import distributed

distributed.initialize()
config = DataConfig(mix=sys.argv[1], sequence=32, store=sys.argv[2])
data = open_data(config, prepare=jax.process_index() == 0)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
mine = local_rows(sharding, 8, 32)
whole_batches = None
asked = dict(schedule=((0, data.mixing),), seed=3, rows=8, steps=5, cost=(1.0, 1.0))
parts, wholes = data.train_batches(**asked, local_rows=mine), data.train_batches(**asked)
for part, whole in zip(parts, wholes, strict=True):
    assert part["tokens"].shape == (8 // jax.process_count(), 32)
    for name, array in to_global(part, sharding, 8).items():
        assert array.shape == (8, 32)
        for shard in array.addressable_shards:
            assert (np.asarray(shard.data) == whole[name][shard.index]).all()
print("rows", mine.start, mine.stop)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_processes_build_one_batch(mix, tmp_path, count):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    printed = finish(
        start_processes(Path(script), str(mix), str(tmp_path / "store"), count=count, devices=4 // count)
    )
    each = 8 // count
    for number, text in enumerate(printed):
        assert f"rows {number * each} {(number + 1) * each}" in text
