"""Checkpoints: what is saved comes back, whatever happens to the disk or the process in between."""

import contextlib
import errno
import functools
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint._src.metadata import checkpoint as orbax_metadata
from orbax.checkpoint._src.serialization import worker_memory_utils
from processes import finish, start_processes

from jaxthru.engine.offload import in_place
from jaxthru.runtime.errors import InputError, TrainingError
from jaxthru.training import checkpoint, layout, orbax_settings
from jaxthru.training.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    newest_data_state,
    saved_steps,
)
from jaxthru.training.checksums import broken, covered_names

LAYERS = 3


def make_state(form, mesh=None, seed=0):
    """Returns a state with layers as a tuple (unroll) or stacked (scan); the same numbers in both forms."""
    random = np.random.default_rng(seed)

    def array(*shape):
        return random.standard_normal(shape, dtype=np.float32)

    layers = [{"norm": array(16), "mlp": {"up": array(16, 32)}} for _ in range(LAYERS)]
    params = {"embedding": array(64, 16), "layers": ((tuple(layers),),), "final": array(16)}
    moments = [jax.tree.map(lambda x: array(*x.shape), params) for _ in range(2)]
    adam = optax.ScaleByAdamState(count=np.int32(7), mu=moments[0], nu=moments[1])
    opt_state = (optax.EmptyState(), adam, {"clip": optax.EmptyState()})
    state = {"step": np.int32(7), "params": params, "opt_state": opt_state, "skipped": np.int32(1)}
    if form == "scan":
        state["params"] = stacked(params)
        state["opt_state"] = (
            opt_state[0],
            adam._replace(mu=stacked(adam.mu), nu=stacked(adam.nu)),
            opt_state[2],
        )
    return place(state, mesh)


def stacked(tree):
    (layers,) = tree["layers"][0]
    return {**tree, "layers": ((jax.tree.map(lambda *leaves: np.stack(leaves), *layers),),)}


def make_mesh(fsdp, tensor):
    return Mesh(np.asarray(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor), ("fsdp", "tensor"))


def place(state, mesh):
    if mesh is None:
        return jax.tree.map(jnp.asarray, state)

    def sharding(leaf):
        spec = ("fsdp", "tensor")[: leaf.ndim]
        if leaf.ndim == 3 or leaf.shape[:1] == (LAYERS,):  # a leading layer dim
            spec = (None, *spec[: leaf.ndim - 1])
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), state)


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(found, wanted):
    def same(one, other):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert one.dtype == other.dtype

    jax.tree.map(same, found, wanted)


def save_steps(directory, steps, **config):
    with Checkpointer(directory, CheckpointConfig(**config)) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state("unroll", seed=step), {"step": step})


@pytest.mark.parametrize("saved_form", ["scan", "unroll"])
@pytest.mark.parametrize("read_form", ["scan", "unroll"])
@pytest.mark.parametrize("meshes", [(None, None), ((4, 2), (2, 1)), ((2, 1), (2, 4))])
def test_restores_into_either_form_on_another_mesh(tmp_path, saved_form, read_form, meshes):
    meshes = [make_mesh(*mesh) if mesh else None for mesh in meshes]
    data_state = {"step": 7, "schedule": [[0, {"prose": 0.5}]]}
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        assert checkpointer.restore(abstract(make_state(read_form))) is None
        checkpointer.save(7, make_state(saved_form, meshes[0]), data_state)
    wanted = make_state(read_form, meshes[1])
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        step, state, found_data = checkpointer.restore(abstract(wanted))
    assert (step, found_data) == (7, data_state)
    assert_same(state, wanted)


def test_disk_has_one_entry_per_layer():
    for form in ("scan", "unroll"):
        disk = layout.to_disk(make_state(form))
        assert sorted(disk["params"]["layers"]) == ["0", "1", "2"]
        assert sorted(disk["opt_state"]["1"]["mu"]["layers"]) == ["0", "1", "2"]
        assert disk["params"]["layers"]["1"]["mlp"]["up"].shape == (16, 32)
        np.testing.assert_array_equal(
            disk["params"]["layers"]["2"]["norm"], make_state("unroll")["params"]["layers"][0][0][2]["norm"]
        )


def test_a_block_that_does_not_train_has_no_slots_and_counts_as_layers():
    still, trains = {"up": None}, {"up": jnp.zeros((2, 16))}
    slots = {"layers": ((still, trains, trains), (still, {"up": jnp.ones((1, 16))}))}
    disk = layout.to_disk(slots)["layers"]
    assert list(disk) == ["1", "4", "2", "5", "7"] and disk["7"]["up"].all()


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_a_donated_update_straight_after_save_does_not_reach_the_disk(tmp_path, shape):
    mesh = make_mesh(*shape)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state):
        return jax.tree.map(lambda x: x + 1, state)

    count = 6
    state = {
        "step": jnp.int32(0),
        "params": {"embedding": jax.device_put(jnp.zeros((1024, 1024)), sharding)},
    }
    for i in range(4):
        state["params"][f"w{i}"] = jax.device_put(jnp.full((1024, 1024), float(i)), sharding)
    shapes = abstract(state)
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(keep=count)) as checkpointer:
        for step in range(count):
            checkpointer.save(step, state, {})
            for _ in range(3):
                state = update(state)
        jax.block_until_ready(state)
    for step in range(count):
        with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
            found, restored, _ = checkpointer.restore(shapes)
        assert found == count - 1 - step
        assert int(restored["step"]) == 3 * found
        for i in range(4):
            assert np.unique(restored["params"][f"w{i}"]).tolist() == [3.0 * found + i]
        shutil.rmtree(tmp_path / "checkpoints" / str(found))


@pytest.mark.gpu
def test_on_a_gpu_too_and_without_a_second_copy(tmp_path):
    layers = {name: jnp.full((8, 4096, 2048), index, jnp.float32) for index, name in enumerate("abcd")}
    state = {"step": jnp.int32(0), "params": {"embedding": jnp.zeros((8192, 1024)), "layers": ((layers,),)}}
    stacked = layers["a"].nbytes
    del layers
    shapes = abstract(state)
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = jax.block_until_ready(update(state))
    device = jax.devices()[0]
    before = device.memory_stats()["peak_bytes_in_use"]
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(3):
            state = update(state)
        assert device.memory_stats()["peak_bytes_in_use"] - before < 1.5 * stacked
        checkpointer.wait()
        del state
        _, restored, _ = checkpointer.restore(shapes)
    assert int(restored["step"]) == 1
    for index, name in enumerate("abcd"):
        assert np.unique(restored["params"]["layers"][0][0][name]).tolist() == [index + 1.0]


def in_two_places(size: int, count: int = 8) -> dict:
    """A state of arrays of so many float32, the first quarter of them in host memory."""
    device = SingleDeviceSharding(jax.devices()[0])
    homes = [device.with_memory_kind("pinned_host" if 4 * i < count else "device") for i in range(count)]
    return {
        "params": {
            str(index): jax.device_put(jnp.full((size // 1024, 1024), index, jnp.float32), home)
            for index, home in enumerate(homes)
        }
    }


def test_a_state_in_host_memory_is_written_from_there_before_the_save_returns(tmp_path):
    state = in_two_places(1 << 16)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    largest = in_place(shapes)
    assert largest == 4 << 16 and in_place({"2": shapes["params"]["2"]}) == 0
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(), largest) as checkpointer:
        checkpointer.save(1, state, {})
        assert checkpointer.steps() == [1]
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # as the next step does
        _, restored, _ = checkpointer.restore(shapes)
        with pytest.raises(ValueError, match="settled"):
            checkpointer.save(2, restored | {"pending": None}, {})
    assert checkpointer.steps() == [1]
    for name, leaf in restored["params"].items():
        assert leaf.sharding == shapes["params"][name].sharding
        assert np.unique(leaf).tolist() == [float(name)]


def test_a_state_in_host_memory_is_copied_a_little_at_a_time(tmp_path, monkeypatch):
    """As Orbax does it, which for some versions takes more than to set `save_device_host_concurrent_gb`."""
    asked, batches = [], worker_memory_utils.next_memory_budgeted_batch

    def watched(params, most, **settings):
        asked.append((len(params), most))
        return batches(params, most, **settings)

    monkeypatch.setattr(worker_memory_utils, "next_memory_budgeted_batch", watched)
    state = in_two_places(1 << 16) | {"step": jnp.int32(1)}
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(), in_place=2 * 10**9) as checkpointer:
        checkpointer.save(1, state, {})
    assert asked == [(8, 5 * 10**9)]


@pytest.mark.gpu
def test_what_is_on_the_device_is_saved_a_little_at_a_time(tmp_path):
    """Of 3 GiB in host memory and 9 on the device, neither saving nor restoring puts another 9 on the host:
    2 are under way, as numbers and as pinned memory, whose pools grow by doubling and do not shrink."""
    state = jax.block_until_ready(in_two_places(1 << 27, count=24))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    more = {}
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(), in_place(shapes)) as checkpointer:
        with most_resident() as more["save"]:
            checkpointer.save(1, state, {})
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        with most_resident() as more["restore"]:
            _, restored, _ = checkpointer.restore(shapes)
            jax.block_until_ready(restored)
    gib = {name: (most[1] - most[0]) / 2**30 for name, most in more.items()}
    print(f"GiB more: {gib}")
    assert max(gib.values()) < 7
    for name, leaf in restored["params"].items():
        assert (np.asarray(leaf) == float(name)).all()


@contextlib.contextmanager
def most_resident():
    """Yields [bytes of this process's memory before, the most while the block runs]."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    found, over = [resident()] * 2, threading.Event()

    def watch():
        while not over.wait(0.02):
            found[1] = max(found[1], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def test_keeps_the_newest_and_the_multiples(tmp_path):
    save_steps(tmp_path / "checkpoints", range(1, 9), keep=2, keep_every=3)
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    assert checkpointer.steps() == [3, 6, 7, 8]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "6", "7", "8"]


def test_when_to_save():
    def saved(**config):
        checkpointer = Checkpointer("checkpoints", CheckpointConfig(**config))
        return [step for step in range(1, 8) if checkpointer.due(step, last=step == 7)]

    assert saved(every=3) == [3, 6, 7]
    assert saved(every=0) == [7]
    assert saved(every=3, last=False) == [3, 6]
    assert saved(every=0, last=False) == []


def test_a_step_is_saved_once(tmp_path):
    save_steps(tmp_path / "checkpoints", [5, 5])
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        state = make_state("unroll", seed=5)
        assert checkpointer.restore(abstract(state))[0] == 5
        checkpointer.save(5, state, {})
        assert checkpointer.steps() == [5]


def array_file(directory):
    """Returns the largest file of a checkpoint: arrays."""
    return max(
        (path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def truncate(directory):
    path = array_file(directory)
    os.truncate(path, path.stat().st_size // 2)


def flip(directory):
    path = array_file(directory)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": (truncate, "bytes instead of"),
    "flipped": (flip, "other bytes than were written"),
    "array missing": (lambda directory: array_file(directory).unlink(), "is missing"),
    "metadata missing": (lambda directory: (directory / "state/_METADATA").unlink(), "_METADATA is missing"),
    "garbled": (
        lambda directory: (directory / "state/manifest.ocdbt").write_text("!"),
        "manifest.ocdbt has 1 b",
    ),
    "data state missing": (lambda directory: shutil.rmtree(directory / "data"), "is missing"),
    "a file without a size": (
        lambda directory: (directory / "seal.json").write_text('{"algorithm": "crc32", "files": {"a": []}}'),
        "seal.json cannot be read",
    ),
    "another algorithm": (
        lambda directory: (directory / "seal.json").write_text('{"algorithm": "xxh64", "files": {}}'),
        "seal.json has checksums by 'xxh64', and only crc32 is known here",
    ),
    "no checksums": (lambda directory: (directory / "seal.json").unlink(), "seal.json is missing"),
    "torn checksums": (
        lambda directory: os.truncate(directory / "seal.json", 40),
        "seal.json cannot be read",
    ),
    "nested checksums": (
        lambda directory: (directory / "seal.json").write_text("[" * 100_000),
        "seal.json cannot be read",
    ),
    "checksums of no file": (
        lambda directory: (directory / "seal.json").write_text(
            json.dumps(
                {
                    "algorithm": "crc32",
                    "files": dict.fromkeys([*covered_names(directory), "\0"], (0, 0)),
                }
            )
        ),
        "seal.json names '\\x00'",
    ),
    "a file": (lambda directory: (shutil.rmtree(directory), directory.touch()), "cannot be read: Not a dir"),
    "empty": (lambda directory: (shutil.rmtree(directory), directory.mkdir()), "seal.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, caplog, damage):
    break_it, reason = DAMAGES[damage]
    save_steps(tmp_path / "checkpoints", [10, 20])
    break_it(tmp_path / "checkpoints/20")
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        with caplog.at_level(logging.WARNING):
            step, state, data_state = checkpointer.restore(abstract(make_state("unroll")))
        assert (step, data_state) == (10, {"step": 10})
        assert_same(state, make_state("unroll", seed=10))
        assert len(caplog.records) == 1
        assert "checkpoint 20 is damaged" in caplog.text
        assert reason in caplog.text
        assert (tmp_path / "damaged/20").exists()
        checkpointer.save(20, make_state("unroll", seed=20), {"step": 20})
        checkpointer.wait()
        assert checkpointer.steps() == [10, 20]
        flip(tmp_path / "checkpoints/20")
        assert checkpointer.restore(abstract(make_state("unroll")))[0] == 10
        assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == ["20", "20_"]


def test_which_data_to_open_is_known_from_the_checkpoint_that_will_be_restored(tmp_path):
    assert newest_data_state(tmp_path / "checkpoints") == {}
    save_steps(tmp_path / "checkpoints", [10, 20])
    assert newest_data_state(tmp_path / "checkpoints") == {"step": 20}
    for other in ("5", "[" * 100_000):
        (tmp_path / "checkpoints/20/data/metadata").write_text(other)
        assert newest_data_state(tmp_path / "checkpoints") == {"step": 10}
    shutil.rmtree(tmp_path / "checkpoints/20/data")
    assert newest_data_state(tmp_path / "checkpoints") == {"step": 10}


def test_every_flipped_bit_is_noticed(tmp_path):
    save_steps(tmp_path / "checkpoints", [1])
    directory = tmp_path / "checkpoints/1"
    assert broken(directory) is None
    where = random.Random(0)
    for name in json.loads((directory / "seal.json").read_text())["files"]:
        path = directory / name
        good = path.read_bytes()
        for _ in range(3):
            bad = bytearray(good)
            bad[where.randrange(len(bad))] ^= 1 << where.randrange(8)
            path.write_bytes(bad)
            assert name in broken(directory)
        path.write_bytes(good)
    assert broken(directory) is None


def test_never_starts_anew_when_all_are_damaged(tmp_path, caplog):
    save_steps(tmp_path / "checkpoints", [10, 20])
    for step in (10, 20):
        truncate(tmp_path / f"checkpoints/{step}")
    for _ in range(2):  # neither does the next process
        with (
            Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer,
            pytest.raises(CheckpointError, match="no checkpoint can be restored"),
        ):
            checkpointer.restore(abstract(make_state("unroll")))
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 2


def without_final(state):
    del state["params"]["final"]


def with_bias(state):
    state["params"]["bias"] = jnp.zeros(3)


def fewer_layers(state):
    state["params"]["layers"] = ((state["params"]["layers"][0][0][:2],),)


def wider(state):
    state["params"]["layers"][0][0][1]["norm"] = jnp.zeros(17)


def in_half(state):
    state["params"]["embedding"] = state["params"]["embedding"].astype(jnp.bfloat16)


@pytest.mark.parametrize(
    "change, message",
    [
        (without_final, "holds params/final, which"),
        (with_bias, "holds no params/bias, which"),
        (fewer_layers, "holds params/layers/2/mlp/up, which"),
        (wider, r"params/layers/1/norm is float32\[16\], this run's is float32\[17\]"),
        (in_half, r"params/embedding is float32\[64, 16\], this run's is bfloat16"),
    ],
)
def test_another_model_is_no_damage(tmp_path, change, message):
    save_steps(tmp_path / "checkpoints", [10])
    other = make_state("unroll")
    change(other)
    with (
        Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer,
        pytest.raises(InputError, match=message),
    ):
        checkpointer.restore(abstract(other))
    assert checkpointer.steps() == [10]
    assert not (tmp_path / "damaged").exists()


def test_what_a_killed_save_left_is_cleared_away(tmp_path):
    save_steps(tmp_path / "checkpoints", [10])
    unfinished = tmp_path / f"checkpoints/20{checkpoint.TEMPORARY}"
    shutil.copytree(tmp_path / "checkpoints/10", unfinished)
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        assert not unfinished.exists()
        assert checkpointer.restore(abstract(make_state("unroll")))[0] == 10


KILLED_WHILE_DELETING = """
import os, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer

directory, removed = Path(sys.argv[1]), []

def hook(event, arguments):
    if event == "os.remove" and (directory / "3").exists():
        removed.append(arguments)
        if len(removed) == 3:
            os._exit(9)

state = {"params": {str(i): jnp.full((300, 100), i) for i in range(4)}}
with Checkpointer(directory, CheckpointConfig(keep=2)) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state, {})
    checkpointer.wait()
    sys.addaudithook(hook)
    checkpointer.save(3, state, {})
"""


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_with_holes(tmp_path):
    command = [sys.executable, "-c", KILLED_WHILE_DELETING, str(tmp_path / "checkpoints")]
    assert subprocess.run(command, timeout=120).returncode == 9
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        assert checkpointer.steps() == [2, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(tmp_path, caplog, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(keep=1)) as checkpointer:
        checkpointer.save(1, make_state("unroll"), {})
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refused)
            patch.setattr(os, "rmdir", refused)
            checkpointer.save(2, make_state("unroll"), {})
            checkpointer.wait()
        assert checkpointer.steps()[-1] == 2
        assert "checkpoint 1 is no longer needed but cannot be deleted: Permission denied" in caplog.text
        checkpointer.save(3, make_state("unroll"), {})
    assert saved_steps(tmp_path / "checkpoints") == [3]


def test_a_failed_save_is_told_and_harms_nothing(tmp_path, monkeypatch):
    failed = threading.Event()

    def full(directory):
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def late(*of, update=orbax_metadata._MetadataStoreImpl.update, **said):
        """As on busy cores: a thread of its own writes this, maybe when the save has failed already."""
        failed.wait(10)
        time.sleep(0.1)
        update(*of, **said)

    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        checkpointer.save(10, make_state("unroll", seed=10), {"step": 10})
        checkpointer.wait()
        for surface in (checkpointer.wait, lambda: checkpointer.save(30, make_state("unroll"), {})):
            failed.clear()
            with monkeypatch.context() as patch:
                patch.setattr(orbax_settings, "write_checksums", full)
                patch.setattr(orbax_metadata._MetadataStoreImpl, "update", late)
                checkpointer.save(20, make_state("unroll"), {})
                with pytest.raises(
                    CheckpointError, match=r"checkpoint 20 was not saved: .*No space"
                ) as caught:
                    surface()
            assert str(tmp_path / "checkpoints") in str(caught.value)
            assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["10"]
        assert_same(checkpointer.restore(abstract(make_state("unroll")))[1], make_state("unroll", seed=10))
        checkpointer.save(20, make_state("unroll", seed=20), {"step": 20})
        checkpointer.wait()
        assert checkpointer.steps() == [10, 20]


def test_a_save_that_cannot_begin_leaves_no_thread_behind(tmp_path, capfd):
    """One that waited for the folder would keep the interpreter from ending."""
    (tmp_path / "checkpoints").touch()
    before = set(threading.enumerate())
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    refused = pytest.raises(CheckpointError, match=r"checkpoint 10 was not saved: .*Not a directory")
    with checkpointer, refused:
        checkpointer.save(10, make_state("unroll"), {"step": 10})
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    assert all(thread.name.startswith("asyncio_") for thread in left), left  # idle: they end with the process
    assert capfd.readouterr() == ("", "")


def test_a_save_that_breaks_off_says_so_once(tmp_path):
    """In a process of its own, as each of the arrays breaks off in a thread of the storage's own."""
    (tmp_path / "break.py").write_text(BREAKS_OFF)
    command = [sys.executable, str(tmp_path / "break.py"), str(tmp_path / "run/checkpoints")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = f"jaxthru: {tmp_path}/run/checkpoints: checkpoint 2 was not saved: File too large\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "[1]\n", said)


BREAKS_OFF = """
import resource, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxthru.runtime.errors import exit_code, leave
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer

def command():
    state = {"params": {str(i): jax.random.normal(jax.random.key(i), (300, 100)) for i in range(24)}}
    with Checkpointer(Path(sys.argv[1]), CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        print(checkpointer.steps())
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        checkpointer.save(2, state, {})

leave(exit_code(command))
"""


def test_an_error_in_the_loop_is_not_hidden_by_a_failed_save(tmp_path, monkeypatch, caplog):
    def full(directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(orbax_settings, "write_checksums", full)
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    with pytest.raises(KeyError, match="first"), checkpointer:
        checkpointer.save(20, make_state("unroll"), {})
        raise KeyError("first")
    assert "checkpoint 20 was not saved" in caplog.text
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    with pytest.raises(CheckpointError, match=r"^metrics.jsonl: full; .*checkpoint 20 was not"), checkpointer:
        checkpointer.save(20, make_state("unroll"), {})
        raise TrainingError("metrics.jsonl: full")


FULL_DISK = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer, CheckpointError

directory = Path(sys.argv[1])
state = {"step": jnp.int32(0), "params": {"w": jax.random.normal(jax.random.key(0), (1024, 1024))}}  # 4 MiB
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
with Checkpointer(directory / "run/checkpoints", CheckpointConfig(keep=3)) as checkpointer:
    for step in range(1, 9):
        try:
            checkpointer.save(step, {**state, "step": jnp.int32(step)}, {"step": step})
            checkpointer.wait()
        except CheckpointError as error:
            failed = step
            print("failed:", error)
            break
    step, restored, data = checkpointer.restore(shapes)
    assert step == failed - 1 and data == {"step": step}, (step, failed)
    assert (restored["params"]["w"] == state["params"]["w"]).all() and restored["step"] == step
    (directory / "filler").unlink()
    checkpointer.save(failed, {**state, "step": jnp.int32(failed)}, {"step": failed})
    checkpointer.wait()
    assert checkpointer.restore(shapes)[0] == failed
    print("recovered", failed)
"""


@pytest.mark.slow
def test_a_full_disk(tmp_path):
    disk, script = tmp_path / "disk", tmp_path / "fill.py"
    disk.mkdir()
    script.write_text(FULL_DISK)
    fill = f"dd if=/dev/zero of={disk}/filler bs=1M count=9 status=none"
    mount = f"mount -t tmpfs -o size=20m tmpfs {disk} && {fill}"
    namespace = ["unshare", "-m"] if os.getuid() == 0 else ["unshare", "-rm"]
    try:
        subprocess.run([*namespace, "sh", "-c", mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small file system here: {error}")
    ran = subprocess.run(
        [*namespace, "sh", "-c", f"{mount} && exec {sys.executable} {script} {disk}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert "No space left on device" in ran.stdout, ran.stdout
    assert "recovered" in ran.stdout


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer

update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
first = [np.random.default_rng(i).integers(0, 1000, (700, 700)).astype(np.float32) for i in range(6)]
state = {"step": jnp.int32(0), "params": {f"w{i}": jnp.asarray(array) for i, array in enumerate(first)}}
shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
step = 0
with Checkpointer(Path(sys.argv[1]), CheckpointConfig(keep=2)) as checkpointer:
    if found := checkpointer.restore(shapes):
        step, state, data_state = found
        assert data_state == {"step": step} and int(state["step"]) == step
        for i, array in enumerate(first):
            np.testing.assert_array_equal(state["params"][f"w{i}"], array + step)
    print("from", step, flush=True)
    while True:
        step += 1
        state = update(state)
        checkpointer.save(step, state, {"step": step})
"""


@pytest.mark.slow(minutes=0.3)
def test_kills_at_random_moments(tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    moments = random.Random(seed)
    directory = tmp_path / "checkpoints"
    newest = within_a_save = 0
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        line = process.stdout.readline()
        time.sleep(moments.uniform(0.05, 0.7))
        process.kill()
        rest = process.communicate()[0]
        assert line == f"from {newest}\n", line + rest
        assert not rest
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        within_a_save += any(checkpoint.TEMPORARY in name for name in names)
    assert within_a_save >= 1  # 10 kills, each in one or not by chance
    assert newest > 3
    assert not (tmp_path / "damaged").exists()


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxthru.runtime.distributed import initialize
from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer

initialize()
assert jax.process_count() == 2 and len(jax.devices()) == 4
mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
full = np.arange(3 * 8 * 64, dtype=np.float32).reshape(3, 8, 64)

def place(array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda at: array[at])

def state(step):
    layers = {"w": place(full + step, P(None, "fsdp"))}
    return {"step": place(np.int32(step), P()), "params": {"layers": ((layers,),)}}

shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
directory = Path(sys.argv[1])
with Checkpointer(directory, CheckpointConfig()) as checkpointer:
    assert checkpointer.restore(shapes) is None
    for step in (1, 2, 3):
        checkpointer.save(step, state(step), {"step": step})
    checkpointer.wait()
    if jax.process_index() == 0:
        for path in (directory / "3/state/ocdbt.process_1").rglob("*"):
            if path.is_file():
                path.write_bytes(b"!" * path.stat().st_size)
    multihost_utils.sync_global_devices("damaged")
    step, found, data = checkpointer.restore(shapes)
    assert step == 2 and data == {"step": 2}
    for shard in found["params"]["layers"][0][0]["w"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (full + 2)[shard.index])
    print("restored", step, flush=True)
jax.distributed.shutdown()
"""


def test_two_processes_write_their_shards(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    outputs = finish(start_processes(script, str(tmp_path / "checkpoints"), devices=2))
    assert all("restored 2" in output for output in outputs), outputs
    assert sum("checkpoint 3 is damaged" in output for output in outputs) == 1
    # One process reads what two wrote, unrolled.
    full = np.arange(3 * 8 * 64, dtype=np.float32).reshape(3, 8, 64)
    layer = {"w": jnp.zeros((8, 64))}
    shapes = abstract({"step": jnp.int32(0), "params": {"layers": (((layer, layer, layer),),)}})
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig()) as checkpointer:
        step, state, _ = checkpointer.restore(shapes)
    assert step == 2
    for i in range(3):
        np.testing.assert_array_equal(state["params"]["layers"][0][0][i]["w"], full[i] + 2)
