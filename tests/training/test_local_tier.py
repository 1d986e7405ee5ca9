"""The local tier of checkpoints: the newest that is whole in all processes is taken, over both tiers."""

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes import finish, start_processes

from jaxthru.runtime.errors import InputError
from jaxthru.training import local_tier
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, newest_data_state
from jaxthru.training.checkpoint_config import LocalTierConfig
from jaxthru.training.local_tier import common_steps, located

MANY = CheckpointConfig(keep=9, local=LocalTierConfig(directory="here", keep=9))


def state(step: int) -> dict:
    return {"step": jnp.int32(step), "params": {"w": jnp.full((8, 16), float(step))}}


def shapes(at: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), at)


@pytest.fixture
def run(tmp_path) -> tuple[Path, Path]:
    """Returns the directories of a run's checkpoints: shared at steps 10 and 40, local at 20, 30 and 50."""
    (tmp_path / "run").mkdir()
    shared = tmp_path / "run/checkpoints"
    local = located(tmp_path / "run", LocalTierConfig(directory=str(tmp_path / "disk")), begin=True)
    save(shared, local, [(10, False), (20, True), (30, True), (40, False), (50, True)])
    return shared, local


def save(shared: Path, local: Path, steps: list[tuple[int, bool]]) -> None:
    with Checkpointer(shared, MANY, local=local) as checkpointer:
        tiers = {False: None, True: checkpointer._local}
        for step, here in steps:
            checkpointer.save(step, state(step), {"step": step}, tiers[here])


def restored(shared: Path, local: Path | None) -> int:
    with Checkpointer(shared, MANY, local=local) as checkpointer:
        step, found, data = checkpointer.restore(shapes(state(0)))
    assert data == {"step": step} and int(found["step"]) == step
    assert (found["params"]["w"] == step).all()
    return step


def flip(checkpoint: Path) -> None:
    path = max(checkpoint.glob("state/*/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_the_newest_whole_one_of_both_tiers_is_taken(run, caplog):
    shared, local = run
    assert newest_data_state(shared, local) == {"step": 50}
    assert restored(shared, local) == 50
    flip(local / "50")
    with caplog.at_level(logging.WARNING):
        assert restored(shared, local) == 40
    assert "local checkpoint 50 is passed over: process 0 (" in caplog.text
    assert "other bytes than were written" in caplog.text
    assert common_steps(local) == [30, 20]  # what lies behind step 40 is of another past
    shutil.rmtree(shared / "40/state")
    assert restored(shared, local) == 30
    assert (shared.parent / "damaged/40").is_dir()
    assert newest_data_state(shared, local) == {"step": 30}
    flip(local / "20")
    flip(local / "30")
    assert restored(shared, local) == 10 and common_steps(local) == []
    save(shared, local, [(20, True)])
    assert restored(shared, local) == 20


def test_without_the_local_ones_the_shared_ones_are_taken(run):
    shared, local = run
    shutil.rmtree(local.parent)  # a host that was replaced
    assert restored(shared, local) == 40
    assert restored(shared, None) == 40


def test_never_starts_anew_where_local_ones_are_damaged(run):
    shared, local = run
    shutil.rmtree(shared)
    for step in common_steps(local):
        flip(local / str(step))
    with (
        pytest.raises(CheckpointError, match="none of its checkpoints can be restored"),
        Checkpointer(shared, MANY, local=local) as checkpointer,
    ):
        checkpointer.restore(shapes(state(0)))
    assert common_steps(local) == [50, 30, 20]  # nothing is deleted for that
    shutil.rmtree(local)
    with Checkpointer(shared, MANY, local=local) as checkpointer:
        assert checkpointer.restore(shapes(state(0))) is None


def test_another_mesh_takes_the_shared_ones(run):
    shared, local = run
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    other = shapes(state(0))
    other["params"]["w"] = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=sharding)
    with Checkpointer(shared, MANY, local=local) as checkpointer:
        step, found, _ = checkpointer.restore(other)
    assert step == 40 and found["params"]["w"].sharding == sharding


def test_a_home_is_that_of_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = LocalTierConfig(directory="~/disk")
    local_tier.check(config)
    assert located(tmp_path, config, begin=True).is_relative_to(tmp_path / "disk")
    assert (tmp_path / "disk").is_dir()
    with pytest.raises(InputError, match=r"^checkpoint.local.directory = ~nobody-here/disk: .*knows no such"):
        local_tier.check(LocalTierConfig(directory="~nobody-here/disk"))


def test_what_a_state_consists_of_is_worked_out_once(tmp_path, monkeypatch):
    asked = []
    whole = local_tier.shards
    monkeypatch.setattr(local_tier, "shards", lambda disk: asked.append(disk) or whole(disk))
    tier = local_tier.LocalTier(tmp_path, keep=2)
    found = {tier._shards(state(step)) for step in (1, 2, 3)}
    assert len(asked) == 1 and found == {whole(state(9))}
    assert tier._shards(state(1) | {"more": jnp.zeros(2)}) not in found and len(asked) == 2
    tier.close()


def test_parts_of_another_number_of_processes_are_passed_over(run):
    _, local = run
    path = local / "50/part/metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    (local / "30/part/metadata").write_text("[]")
    assert common_steps(local) == [20]


def test_the_time_to_the_next_shared_one_goes_on_over_restarts_from_local_ones(tmp_path, monkeypatch):
    now, local = [1000.0], tmp_path / "process_0"
    monkeypatch.setattr("time.time", lambda: now[0])
    config = CheckpointConfig(every="2h", local=LocalTierConfig(directory="here", every=1))
    saved = []
    for start in range(4):  # each is killed after 50 minutes
        with Checkpointer(tmp_path / "checkpoints", config, local=local) as checkpointer:
            checkpointer.restore(shapes(state(0)))
            tier = checkpointer.due(start + 1, last=False)
            saved.append(tier.name)
            now[0] += 3000
            checkpointer.save(start + 1, state(start + 1), {}, tier)
    assert saved == ["local checkpoint"] * 3 + ["checkpoint"]


def test_a_run_that_starts_anew_saves_where_parts_of_no_use_lay(run):
    """Of another number of processes, or of one alone that has committed before a kill."""
    shared, local = run
    shutil.rmtree(shared)
    for step in common_steps(local):
        path = local / f"{step}/part/metadata"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    with Checkpointer(shared, MANY, local=local) as checkpointer:
        assert checkpointer.restore(shapes(state(0))) is None
        checkpointer.save(20, state(20), {"step": 20}, checkpointer._local)
    assert restored(shared, local) == 20


def test_a_run_has_a_folder_of_its_own(tmp_path):
    config, run = LocalTierConfig(directory=str(tmp_path / "disk")), tmp_path / "run"
    run.mkdir()
    assert located(run, config) is None
    first = located(run, config, begin=True)
    assert first == located(run, config) and first.parent.parent == tmp_path / "disk"
    assert first.parent.name.startswith("run-") and first.name == "process_0"
    assert located(run, None) is None and located(run, config) == first
    assert located(run, None, begin=True) is None  # and from now on that run has none
    assert located(run, config) is None and located(run, config, begin=True) != first
    (run / local_tier.FILE).write_text('{"folder": "../elsewhere"}')
    with pytest.raises(InputError, match=r"local_tier.json: names '../elsewhere', which is no name of a fo"):
        located(run, config)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"^checkpoint.local.directory = .*/file/x: cannot be made on "):
        local_tier.check(LocalTierConfig(directory=str(tmp_path / "file/x")))
    local_tier.check(None)
    local_tier.check(LocalTierConfig(directory=str(tmp_path / "new/one")))
    assert (tmp_path / "new/one").is_dir()


def test_the_last_step_is_shared_and_old_local_ones_go(tmp_path):
    config = CheckpointConfig(every=6, local=LocalTierConfig(directory="here", every=2))
    with Checkpointer(tmp_path / "checkpoints", config, local=tmp_path / "process_0") as checkpointer:
        for step in range(1, 12):
            if tier := checkpointer.due(step, last=step == 11):
                checkpointer.save(step, state(step), {}, tier)
    assert checkpointer.steps() == [6, 11] and common_steps(tmp_path / "process_0") == [10, 8]
    every = CheckpointConfig(every="2h", keep_every=5, last=False)
    checkpointer = Checkpointer(tmp_path / "checkpoints", every)
    assert [step for step in range(1, 12) if checkpointer.due(step, last=step == 11)] == [5, 10]


TWO_PROCESSES = """
import shutil, sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxthru.runtime.distributed import initialize
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer
from jaxthru.training.checkpoint_config import LocalTierConfig
from jaxthru.training.local_tier import common_steps, located

initialize()
config = CheckpointConfig(local=LocalTierConfig(directory=sys.argv[1] + "/disk", keep=3))
directory, index = Path(sys.argv[1]) / "run", jax.process_index()
local = located(directory, config.local, begin=True)
assert local.name == f"process_{index}"
mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
full = np.arange(3 * 8 * 64, dtype=np.float32).reshape(3, 8, 64)

def place(array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda at: array[at])

def state(step):
    layers = {"w": place(full + step, P(None, "fsdp"))}
    params = {"layers": ((layers,),), "one": place(full[0], P())}
    return {"step": place(np.int32(step), P()), "params": params}

shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))

def restore(wanted):
    multihost_utils.sync_global_devices(f"before {wanted}")
    with Checkpointer(directory / "checkpoints", config, local=local) as checkpointer:
        step, found, data = checkpointer.restore(shapes)
    assert step == wanted and data == {"step": step}, step
    for shard in found["params"]["layers"][0][0]["w"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (full + step)[shard.index])
    np.testing.assert_array_equal(np.asarray(found["params"]["one"].addressable_shards[0].data), full[0])

with Checkpointer(directory / "checkpoints", config, local=local) as checkpointer:
    assert checkpointer.restore(shapes) is None
    for step, tier in ((1, None), (2, "local"), (3, "local"), (4, "local")):
        checkpointer.save(step, state(step), {"step": step}, tier and checkpointer._local)
assert common_steps(local) == [4, 3, 2]
held = sum(path.stat().st_size for path in (local / "4").rglob("*") if path.is_file())
restore(4)
if index == 1:  # what one host lacks, none takes
    shutil.rmtree(local / "4")
assert common_steps(local) == [3, 2]
if index == 0:
    for path in (local / "3/state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"!" * path.stat().st_size)
restore(2)
assert common_steps(local) == [2] and not (local / "4").exists()
if index == 1:
    shutil.rmtree(local)
restore(1)
with Checkpointer(directory / "checkpoints", config, local=local) as checkpointer:
    assert checkpointer.restore(shapes)[0] == 1
    checkpointer.save(5, state(5), {"step": 5}, checkpointer._local)
restore(5)
print("held", held, flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_take_what_both_have(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    outputs = finish(start_processes(script, str(tmp_path), devices=2))
    assert all("held" in output for output in outputs), outputs
    said = "local checkpoint 3 is passed over: process 0 ("
    assert said in outputs[0] and "passed over" not in outputs[1]


def test_devices_with_parts_of_several_copies_are_refused():
    """Three copies of two halves, on two processes of three devices: the second writes one half only."""

    class Device:
        def __init__(self, process):
            self.process_index = process

    devices = [Device(index // 3) for index in range(6)]

    class Sharding:
        def __init__(self, process):
            self.addressable_devices = {each for each in devices if each.process_index == process}

        def devices_indices_map(self, shape):
            return {each: (slice(4 * (n % 2), 4 * (n % 2) + 4),) for n, each in enumerate(devices)}

    def leaf(process):
        class Leaf:
            shape, dtype, sharding = (8,), "float32", Sharding(process)

        return Leaf()

    assert local_tier.shards({"w": leaf(0)}) == local_tier.shards({"w": leaf(0)})
    with pytest.raises(InputError, match="hold parts of several copies of w, which cannot be saved alone"):
        local_tier.shards({"w": leaf(1)})


def test_they_are_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(local_tier, "_own_shards", lambda sharding, shape: None)
    with (
        Checkpointer(tmp_path / "checkpoints", MANY, local=tmp_path / "process_0") as checkpointer,
        pytest.raises(InputError, match="which cannot be saved alone; choose a mesh whose copies end"),
    ):
        checkpointer.restore(shapes(state(0)))
