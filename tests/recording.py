"""Configurations whose numbers are recorded, and what each gives: for scripts/golden.py and test_golden.py.

All that is asked of a commit stands in `configured`, `program` and `on_disk`. Weights go by their names on
disk, whatever their form in memory is.
"""

import contextlib
import functools
import importlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from batches import ROWS, SEQUENCE, SOURCES, VOCABULARY, batch

STEPS, SEGMENTS = 20, 8
BASE = (
    f"train.steps={STEPS} train.rows={ROWS} data.sequence={SEQUENCE} model.vocabulary={VOCABULARY} "
    "model.loop=scan model.layers=4 model.embed=64 model.heads=4 model.kv_heads=2 model.head_dim=16 "
    "model.mlp=128 optim.learning_rate=0.003 optim.epsilon=1e-5 precision.compute=float32 "
    "mesh.data=1 mesh.fsdp=1 mesh.tensor=1"
)
"""With the usual epsilon, updates made of gradients near 0 are all noise. With that and three times the
learning rate, differences of last bits grow to 1e-4 of the loss within 20 steps; so, to less than 1e-6."""

EIGHT_HEADS = "model.heads=8 model.kv_heads=8"
CUBE = f"{EIGHT_HEADS} mesh.data=2 mesh.fsdp=2 mesh.tensor=2"
LAYERED = "model.loop=unroll remat.policy=projections"

CASES = {
    "scan": "",
    "unroll": "model.loop=unroll",
    "scan, 2 micro-batches": "train.microbatches=2",
    "scan, 4 micro-batches": "train.microbatches=4",
    "unroll, 2 micro-batches": "model.loop=unroll train.microbatches=2",
    "unroll, 4 micro-batches": "model.loop=unroll train.microbatches=4",
    "tied": "model.tied_embeddings=true",
    "tied, unroll, 2 micro-batches": "model.tied_embeddings=true model.loop=unroll train.microbatches=2",
    "qk_norm": "model.qk_norm=true",
    "rope scaling": "model.rope_scaling.original_sequence=32 model.rope_theta=1e4",
    "z-loss, 2 micro-batches": "train.z_loss=0.01 train.microbatches=2",
    "previous clipping": "optim.clip_rule=previous",
    "wsd, no clipping": "optim.schedule=wsd optim.warmup_ratio=0.2 optim.clip=0",
    "remat full": "remat.policy=full",
    "remat attention, unroll": "remat.policy=attention model.loop=unroll",
    "muon": "optim.name=muon",
    "muon, unroll, qk_norm": "optim.name=muon model.loop=unroll model.qk_norm=true",
    "state bfloat16": "optim.state=bfloat16",
    "state int8": "optim.state=int8",
    "state split_master_float32": "optim.state=split_master_float32",
    "state split_master": "optim.state=split_master model.loop=unroll",
    "state split_master_int8": "optim.state=split_master_int8 model.loop=unroll",
    "state stochastic_rounding": "optim.state=stochastic_rounding train.microbatches=2",
    "fp8": "precision.matmul=fp8",
    "fp8, unroll, 2 micro-batches": "precision.matmul=fp8 model.loop=unroll train.microbatches=2",
    "fp8, remat projections": "precision.matmul=fp8 remat.policy=projections",
    "bf16": "precision.compute=bfloat16",
    "bf16, unroll, split_master": "precision.compute=bfloat16 model.loop=unroll optim.state=split_master",
    "keep_parameters": "remat.policy=full remat.keep_parameters=true",
    "mesh (8,1,1)": f"{EIGHT_HEADS} mesh.data=8",
    "mesh (1,8,1)": f"{EIGHT_HEADS} mesh.fsdp=8",
    "mesh (1,1,8)": f"{EIGHT_HEADS} mesh.tensor=8",
    "mesh (2,2,2)": CUBE,
    "mesh (2,2,2), unroll, 2 micro-batches": f"{CUBE} model.loop=unroll train.microbatches=2",
    "mesh (2,2,2), tied, XLA's collectives": f"{CUBE} model.tied_embeddings=true mesh.collective_matmul=none",
    "mesh (2,2,2), muon": f"{CUBE} optim.name=muon",
    "mesh (1,8,1), keep_parameters": (
        f"{EIGHT_HEADS} mesh.fsdp=8 remat.policy=projections remat.keep_parameters=true"
    ),
    "mesh (1,8,1), fp8": f"{EIGHT_HEADS} mesh.fsdp=8 precision.matmul=fp8",
    "mesh (1,8,1), int8, unroll": f"{EIGHT_HEADS} mesh.fsdp=8 optim.state=int8 model.loop=unroll",
    **{
        f"offload {level}, {rule}": f"{LAYERED} offload.level={level} optim.clip_rule={rule}"
        for level in ("optimizer", "gradients", "parameters")
        for rule in ("exact", "previous")
    },
    "activations inputs": f"{LAYERED} offload.activations=inputs",
    "activations names, previous": f"{LAYERED} offload.activations=names optim.clip_rule=previous",
    "offload parameters, names, half, tied, 2 micro-batches": (
        f"{LAYERED} offload.level=parameters offload.activations=names offload.fraction=0.5 "
        "model.tied_embeddings=true train.microbatches=2"
    ),
    "offload gradients, split_master_int8": (
        f"{LAYERED} offload.level=gradients optim.state=split_master_int8"
    ),
    "offload parameters, fp8": f"{LAYERED} offload.level=parameters precision.matmul=fp8",
    "offload parameters, mesh (2,2,2)": f"{LAYERED} {CUBE} offload.level=parameters",
}
"""Name -> words that differ from BASE."""

SAME_WEIGHTS = {"int8": "float32", "bfloat16": "float32", "float32": "float32"}
"""optim.state -> that with float32 moments and weights of the same dtype; of the others it is
split_master_float32."""

Arrays = dict[str, np.ndarray]


class Program(NamedTuple):
    """A compiled step. start: () -> the first state. run: (state, batch) -> (state, metrics), and `settled`.
    rows: sharding of a batch's arrays."""

    start: Callable[[], Any]
    run: Any
    rows: jax.sharding.Sharding


class Recording(NamedTuple):
    """losses, norms: of gradients, of each step. weights: number of steps -> name on disk -> array."""

    losses: np.ndarray
    norms: np.ndarray
    weights: dict[int, Arrays]


def words_of(name: str) -> dict[str, str]:
    """Returns {key: value} of a case."""
    return dict(word.split("=") for word in f"{BASE} {CASES[name]}".split())


def precision(words: dict[str, str]) -> str:
    """Returns what is rounded to less than float32, so that a difference in a last bit may become more: the
    `products`, the `state`, or nothing (`float32`)."""
    exact = {"precision.compute": "float32", "precision.matmul": "compute"}
    if any(words.get(key, value) != value for key, value in exact.items()):
        return "products"
    return "float32" if words.get("optim.state", "float32") == "float32" else "state"


def configured(words: dict[str, str]) -> Any:
    """Returns the RunConfig of `group.key=value` words."""
    from jaxthru.config import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text("{}")
        return load(path, [f"{key}={value}" for key, value in words.items()])


def devices_of(config: Any) -> list[jax.Device]:
    return jax.devices()[: config.mesh.data * config.mesh.fsdp * config.mesh.tensor]


def by_parts_where_older(config: Any) -> Callable | None:
    """Returns what made the first state of a dispatched step, of commits where that was a function of its
    own."""
    for home in ("jaxthru.training.state", "jaxthru.training.parts") if config.offload.layered else ():
        with contextlib.suppress(ModuleNotFoundError):
            if found := vars(importlib.import_module(home)).get("init_by_parts"):
                return found
    return None


def program(words: dict[str, str]) -> Program:
    """Returns the step of a configuration."""
    from jaxthru.training.state import sharded_init

    try:
        from jaxthru.build.checks import attention_by
        from jaxthru.build.checks import validate as fit
        from jaxthru.build.step import assemble
    except ModuleNotFoundError:  # of commits that have no jaxthru/build and no jaxthru/engine
        from jaxthru.plan.assemble import assemble
        from jaxthru.plan.fit import attention_by, fit
    config = configured(words)
    layout = fit(config, devices_of(config))
    made = assemble(config, layout, segments=SEGMENTS, sources=SOURCES, attention=attention_by(config))
    init = by_parts_where_older(config) or sharded_init
    of_run = made.step.objective.model, made.step.optimizer, made.abstract, config.train.seed
    return Program(lambda: init(*of_run), made.compile({}), layout.sharding(("batch", "sequence")))


def on_disk(state: Any) -> dict[str, Any]:
    """Returns the state as nested dicts with an entry for each layer."""
    from jaxthru.training.layout import to_disk

    return to_disk(state)


def flat(tree: dict[str, Any], prefix: str = "") -> Arrays:
    """Returns {`layers/0/attention/query`: array} of nested dicts. bfloat16 becomes float32, exactly."""
    found: Arrays = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[prefix + name] = np.asarray(value.astype(np.float32))
    return found


def train(words: dict[str, str], steps: int, kept: Iterable[int]) -> Recording:
    """Returns what so many steps of a configuration give. kept: after how many steps to keep the weights."""
    made = program(words)
    state, losses, norms, weights = made.start(), [], [], {}
    for step in range(steps + 1):
        if step in kept:
            state = made.run.settled(state)
            weights[step] = flat(on_disk(state)["params"])
        if step < steps:
            arrays = {name: jax.device_put(array, made.rows) for name, array in batch(step).items()}
            state, metrics = made.run(state, arrays)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    return Recording(np.asarray(losses), np.asarray(norms), weights)


def first_gradients(words: dict[str, str]) -> Arrays:
    """Returns the gradients of the first step.

    They are the first moments after it, of a run that differs in its optimizer alone: where b1 is 0, a moment
    is the gradient. So this holds of any executor, however it goes about its gradients.
    """
    optim = {key for key in words if key.startswith("optim.")}
    state = SAME_WEIGHTS.get(words.get("optim.state", "float32"), "split_master_float32")
    rest = tuple((key, value) for key, value in words.items() if key not in optim)
    return _first_moments((*rest, ("optim.b1", "0"), ("optim.clip", "0"), ("optim.state", state)))


@functools.cache  # many cases differ in their optimizers alone
def _first_moments(words: tuple[tuple[str, str], ...]) -> Arrays:
    made = program(dict(words))
    arrays = {name: jax.device_put(array, made.rows) for name, array in batch(0).items()}
    state, _ = made.run(made.start(), arrays)
    return flat(on_disk(made.run.settled(state))["opt_state"]["slots"]["mu"])


KEPT = Path(__file__).resolve().parent / "golden" / "steps.npz"
KEPT_STEP, ENTRIES = 3, 64


def kept(name: str) -> Arrays:
    """Returns what is kept of a case: losses and norms of all steps; of each leaf of the first gradients, and
    of the weights after KEPT_STEP steps, when differences have not yet grown, the name, [sum, sum of squares]
    and ENTRIES entries at fixed places."""
    words = words_of(name)
    losses, norms, weights = train(words, STEPS, (KEPT_STEP,))
    found = {"losses": losses, "norms": norms}
    for kind, leaves in {"gradients": first_gradients(words), "weights": weights[KEPT_STEP]}.items():
        names = sorted(leaves)
        values = [leaves[leaf].astype(np.float64).ravel() for leaf in names]
        found[f"{kind} leaves"] = np.asarray(names)
        found[f"{kind} sums"] = np.stack([(leaf.sum(), np.square(leaf).sum()) for leaf in values])
        entries = [leaf[np.arange(ENTRIES) * KNUTH % leaf.size] for leaf in values]
        found[f"{kind} entries"] = np.stack(entries).astype(np.float32)
    return found


KNUTH = 2654435761
"""Multiples of it, in any modulus, lie spread (The Art of Computer Programming, 6.4)."""
