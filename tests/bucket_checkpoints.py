"""Checkpoints of a small state in a bucket, of whichever service: saved, damaged, restored."""

import logging

import jax
import jax.numpy as jnp
from etils import epath

from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer, newest_data_state
from jaxthru.training.checksums import files_below
from jaxthru.training.run_directory import RunDirectory
from jaxthru.training.saved import SavedParameters
from jaxthru.training.tier import saved_steps


def state(step: int) -> dict:
    return {"step": jnp.int32(step), "params": {"w": jnp.full((8, 16), float(step)), "b": jnp.zeros(3)}}


def save(run: RunDirectory, *steps: int) -> None:
    with Checkpointer(run.checkpoints, CheckpointConfig(), before_commit=run.send) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), {"step": step})


def restored(run: RunDirectory) -> int:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    with Checkpointer(run.checkpoints, CheckpointConfig()) as checkpointer:
        step, found, data = checkpointer.restore(shapes)
    assert data == {"step": step} and (found["params"]["w"] == step).all()
    return step


def check_that_damage_is_passed_over(run: RunDirectory, url: str, caplog) -> None:
    """Checks three saves of a new run, and what becomes of the last one when a bit of it is another."""
    save(run, 10, 20, 30)
    assert saved_steps(run.checkpoints) == [20, 30] and newest_data_state(run.checkpoints) == {"step": 30}
    assert not (run.path / "checkpoints").exists()
    assert restored(run) == 30
    assert SavedParameters(run.checkpoints).step == 30
    path = max(files_below(run.checkpoints / "30/state"), key=lambda path: path.stat().length)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with caplog.at_level(logging.WARNING):
        assert restored(run) == 20
    assert "checkpoint 30 is damaged and passed over" in caplog.text
    assert (epath.Path(url) / "damaged/30/seal.json").exists() and saved_steps(run.checkpoints) == [20]
    save(run, 30)
    assert restored(run) == 30
