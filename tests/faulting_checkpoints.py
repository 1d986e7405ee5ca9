"""Damaged checkpoints and bad inputs, many of each, made at random: for scripts/faults.py."""

import importlib
import random
import shutil
import tempfile
import time
from pathlib import Path

from jaxthru.runtime.errors import LONGEST

SLOW = 10.0
"""Seconds that no refusal takes."""


def damaged(count: int, seed: int, folder: Path) -> dict:
    """Damages the newest checkpoint, or the newest two of three, `count` times; returns how many were found
    and passed over for the newest whole one, whose arrays are compared."""
    import jax
    import jax.numpy as jnp

    from jaxthru.training.checkpoint import CheckpointConfig, Checkpointer

    def state(step: int) -> dict:
        keys = jax.random.split(jax.random.key(step), 3)
        return {
            "step": jnp.int32(step),
            "params": {f"w{number}": jax.random.normal(key, (64, 32)) for number, key in enumerate(keys)},
        }

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    with Checkpointer(folder / "whole/checkpoints", CheckpointConfig(keep=3)) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state(step), {"step": step})
    draw, wrong, found, kinds = random.Random(seed), [], 0, {}
    for number in range(count):
        run = folder / str(number)
        shutil.copytree(folder / "whole", run)
        steps = [30, 20][: draw.choice([1, 1, 2])]
        done = [damage(draw, run / f"checkpoints/{step}") for step in steps]
        for how, _ in done:
            kinds[how] = kinds.get(how, 0) + 1
        with Checkpointer(run / "checkpoints", CheckpointConfig(keep=3)) as checkpointer:
            step, restored, data = checkpointer.restore(shapes)
        same = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored, state(step)))
        whole = {30: 20, 20: 10}[steps[-1]]
        aside = sorted(path.name for path in (run / "damaged").glob("*"))
        if step == whole and same and data == {"step": step} and aside == sorted(map(str, steps)):
            found += 1
        else:
            wrong.append({"case": number, "damage": done, "restored": step, "equal": same, "aside": aside})
        shutil.rmtree(run)
    return {"checkpoints": count, "found": found, "kinds": kinds, "wrong": wrong}


def damage(draw: random.Random, checkpoint: Path) -> tuple[str, str]:
    """Damages a checkpoint in one way; returns how, and in which file."""
    from jaxthru.training.checksums import CHECKSUMS, covered_names

    names = sorted(name for name in covered_names(checkpoint) if (checkpoint / name).stat().st_size)
    name = draw.choice(names)
    how = draw.choice(["flip", "flip", "cut", "empty", "remove", "add", "no checksums", "no part"])
    path = checkpoint / name
    match how:
        case "flip":
            content = bytearray(path.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
        case "cut":
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
        case "add":
            name = "stranger"
            (checkpoint / name).write_bytes(draw.randbytes(draw.randrange(1, 99)))
        case "no checksums":
            name = CHECKSUMS
            (checkpoint / name).unlink()
        case "no part":
            name = draw.choice(["state", "data"])
            shutil.rmtree(checkpoint / name)
    return how, name


def refused(count: int, seed: int, folder: Path) -> dict:
    """Tries made-up configurations and mixes in turn until `count` were refused; returns how many were not
    refused in one plain line, with exit code 2, soon. The others, which are taken, are counted."""
    modules = [importlib.import_module(name) for name in ("fuzz_configs", "fuzz_mixes")]
    cases = [module.cases(100 * count, seed) for module in modules]
    lines, taken, wrong, number = 0, 0, [], 0
    while lines < count:
        module, case = modules[number % 2], next(cases[number % 2])
        number, began = number + 1, time.monotonic()
        try:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                line = module.check(case, Path(place))
            assert time.monotonic() - began < SLOW, "slow"
            assert line == "accepted" or (line.isprintable() and len(line) < 1.5 * LONGEST), line
        except Exception as error:
            wrong.append({"case": str(case)[:300], "error": f"{type(error).__name__}: {error}"[:300]})
            lines += 1
            continue
        taken, lines = taken + (line == "accepted"), lines + (line != "accepted")
    return {"refused": lines - len(wrong), "taken": taken, "wrong": wrong}
