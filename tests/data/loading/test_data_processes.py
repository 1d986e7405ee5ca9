"""Several real processes build one global batch, each its own rows."""

import zlib

import pytest
from processes import finish, start_processes

from jaxthru.data.loading.dataset import DataConfig, open_data

PROGRAM = """
import pathlib, sys, zlib
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxthru.build import batches
from jaxthru.data.loading.dataset import DataConfig, prepare_data
from jaxthru.data.loading.placement import local_rows, to_global
from jaxthru.runtime import distributed

distributed.initialize()
number = jax.process_index()
mix, store, packing, hosts = sys.argv[1:]
here, processes = number % int(hosts), jax.process_count() // int(hosts)
batches.meeting_place = lambda: f"host-{here}"
if number:  # a host that has the stores and not their text
    mix = str(pathlib.Path(mix).parent / "bare" / "small.toml")
config = DataConfig(mix=mix, sequence=32, store=store, packing=packing, loaders=1 + number % 2)
keys = distributed.from_first(lambda: prepare_data(config))
data = batches.open_shared(config, keys)
print(type(data).__name__, processes)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
mine = local_rows(sharding, 8, 32)
asked = dict(schedule=((0, data.mixture),), seed=3, rows=8, steps=5, cost=(1.0, 1.0))
with data, data.train_batches(**asked, local_rows=mine) as made:
    for step, part in enumerate(made):
        assert part["tokens"].shape == (8 // jax.process_count(), 32)
        for name, array in to_global(part, sharding, 8).items():
            assert array.shape == (8, 32)
            for shard in array.addressable_shards:
                for row, content in enumerate(np.asarray(shard.data), shard.index[0].start or 0):
                    print("row", step, name, row, zlib.crc32(content.tobytes()))
"""


@pytest.fixture
def expected(mix, tmp_path):
    """What the rows of the batches are with one process and tokens made beforehand."""

    def rows(packing: str) -> set[str]:
        data = open_data(DataConfig(str(mix), 32, packing, str(tmp_path / "plain")))
        asked = {"schedule": ((0, data.mixture),), "seed": 3, "rows": 8, "steps": 5, "cost": (1.0, 1.0)}
        return {
            f"row {step} {name} {row} {zlib.crc32(content.tobytes())}"
            for step, batch in enumerate(data.train_batches(**asked))
            for name, array in batch.items()
            for row, content in enumerate(array)
        }

    return rows


@pytest.mark.parametrize(
    ("count", "hosts", "packing", "online"),
    [
        (2, 1, "best_fit", True),
        pytest.param(4, 2, "split", False, marks=pytest.mark.slow),
        pytest.param(4, 4, "best_fit", True, marks=pytest.mark.slow),
        pytest.param(4, 2, "best_fit", True, marks=pytest.mark.slow),
    ],
)
def test_processes_build_one_batch(mix, tmp_path, expected, count, hosts, packing, online):
    """Of token workers some have one, some two. Processes of one host share a data server."""
    script, rows = tmp_path / "program.py", expected(packing)
    script.write_text(PROGRAM)
    if online:
        mix.write_text(mix.read_text().replace("weight =", "online = true\nweight ="))
    bare = tmp_path / "bare" / mix.name
    bare.parent.mkdir()
    bare.write_text(mix.read_text())
    arguments = str(mix), str(tmp_path / "store"), packing, str(hosts)
    how = {"count": count, "devices": 4 // count, "forks": count == 4}  # of which the slow cases have many
    printed = finish(start_processes(script, *arguments, **how))
    opened = "HostData" if hosts < count else "Data"
    assert all(f"{opened} {count // hosts}" in text.splitlines() for text in printed)
    found = [[line for line in text.splitlines() if line.startswith("row ")] for text in printed]
    assert all(len(lines) == 5 * 6 * 8 // count for lines in found)  # steps, arrays, rows
    assert set().union(*found) == rows
