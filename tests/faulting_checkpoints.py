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
    """Damages the newest of four checkpoints that lie in two tiers by turns, or the newest two or three,
    `count` times; returns how many were found and passed over for the newest whole one, whose arrays are
    compared."""
    import jax
    import jax.numpy as jnp

    from jaxthru.training.checkpoint import Checkpointer
    from jaxthru.training.checkpoint_config import CheckpointConfig, LocalTierConfig
    from jaxthru.training.local_tier import located

    def state(step: int) -> dict:
        keys = jax.random.split(jax.random.key(step), 3)
        return {
            "step": jnp.int32(step),
            "params": {f"w{number}": jax.random.normal(key, (64, 32)) for number, key in enumerate(keys)},
        }

    config = CheckpointConfig(every=20, local=LocalTierConfig(str(folder / "whole/disk"), every=10, keep=3))
    (folder / "whole").mkdir()
    local = located(folder / "whole", config.local, begin=True)
    within = {"local": local.relative_to(folder / "whole"), "shared": Path("checkpoints")}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    with Checkpointer(folder / "whole/checkpoints", config, local=local) as checkpointer:
        for step in (10, 20, 30, 40, 50):
            checkpointer.save(step, state(step), {"step": step}, checkpointer.due(step, last=False))
    tiers = {50: "local", 40: "shared", 30: "local", 20: "shared"}
    draw, wrong, found, kinds = random.Random(seed), [], 0, {}
    for number in range(count):
        run = folder / str(number)
        shutil.copytree(folder / "whole", run)
        steps = list(tiers)[: draw.choice([1, 1, 2, 3])]
        if draw.random() < 0.25:  # a host that was replaced
            shutil.rmtree(run / "disk")
            steps = [step for step in tiers if tiers[step] == "shared"][: draw.choice([0, 1])]
        done = [(tiers[step], *damage(draw, run / within[tiers[step]] / str(step))) for step in steps]
        for tier, how, _ in done:
            kinds[f"{tier}: {how}"] = kinds.get(f"{tier}: {how}", 0) + 1
        there = [step for step in tiers if (run / within[tiers[step]]).is_dir()]
        whole = next(step for step in there if step not in steps)
        with Checkpointer(run / "checkpoints", config, local=run / within["local"]) as checkpointer:
            step, restored, data = checkpointer.restore(shapes)
        same = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored, state(step)))
        aside = sorted(path.name for path in (run / "damaged").glob("*"))
        gone = [
            each for each in steps if tiers[each] == "local" and (run / within["local"] / str(each)).exists()
        ]
        shared = sorted(str(each) for each in steps if tiers[each] == "shared")
        if step == whole and same and data == {"step": step} and aside == shared and not gone:
            found += 1
        else:
            wrong.append({"case": number, "damage": done, "restored": step, "equal": same, "aside": aside})
        shutil.rmtree(run)
    return {"checkpoints": count, "found": found, "kinds": dict(sorted(kinds.items())), "wrong": wrong}


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
