"""jaxthru trains transformer language models on JAX/XLA and says where every lost percent went.

For a notebook, each imported when it is first used:

    load_config   the configuration in a file, with settings changed: load_config(FILE, ["train.steps=100"])
    RunConfig     a configuration, in groups of keys; dataclasses.replace changes them
    open_data     its data, prepared if it is not: token counts, sources, packing
    preview       rows of that data as text, with what of them is trained on in colour
    batches       the batches that a run of it trains on, as arrays on the devices
    build_step    its compiled training step, with the state and the batches for it
    load          a trained model, of a run or of published weights: text, logits, losses
    Conversation  with such a model, by its chat template: Conversation.of(model).answer("Which river?")
    export_weights  a run's weights, or published ones, as a folder that transformers and vLLM read
    run           trains, from the data's preparation to the final table, and returns the RunDirectory
    ledger        where the time of a profiled run's step went: a picture, its operations, advice
    compare       what changed from one profiled run to another, and what likely caused it
    RunDirectory  a run's files: metrics() and evaluations() give tables, plot() draws the losses

    config = jaxthru.load_config("configs/quickstart.py", ["train.steps=100"])
    run = jaxthru.run(config)
    run.plot()
"""

import importlib
import sys
from typing import Any

from jaxthru import moved

_HOME = {
    "load_config": ("jaxthru.config", "load"),
    "RunConfig": ("jaxthru.config", "RunConfig"),
    "open_data": ("jaxthru.data.loading.dataset", "open_data"),
    "preview": ("jaxthru.data.loading.preview", "preview"),
    "batches": ("jaxthru.build.batches", "batches"),
    "build_step": ("jaxthru.build.compiled", "build_step"),
    "load": ("jaxthru.build.language_model", "load"),
    "Conversation": ("jaxthru.build.conversation", "Conversation"),
    "export_weights": ("jaxthru.build.export_weights", "export_weights"),
    "run": ("jaxthru.train", "run"),
    "ledger": ("jaxthru.profile.show.notebook", "ledger"),
    "compare": ("jaxthru.profile.show.notebook", "compare"),
    "RunDirectory": ("jaxthru.training.run_directory", "RunDirectory"),
}
__all__ = list(_HOME)
sys.meta_path.insert(0, moved.Finder)


def __getattr__(name: str) -> Any:
    if name == "build":
        return importlib.import_module("jaxthru.build")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxthru' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
