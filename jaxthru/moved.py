"""What has moved since commit 56c3c12: old imports and keys work for one release, and say the new name."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

KEYS = {"model.attention": "kernels.attention", "mesh.collective_matmul": "kernels.collective_matmul"}
"""Old key -> new. Those of `model` are of the family llama."""

CLASSES = (
    *("data.loader.DataConfig", "models.layers.PrecisionConfig", "models.llama.ModelConfig"),
    *("models.llama.RopeScaling", "models.remat.RematConfig", "optim.optimizer.OptimConfig"),
    *("profile.trace.ProfileConfig", "runtime.mesh.MeshConfig", "training.checkpoint.CheckpointConfig"),
    *("training.evaluate.EvaluateConfig", "training.metrics.MetricsConfig", "training.step.TrainConfig"),
    "training.offload.OffloadConfig",
)
"""Where configuration files had their classes from; all are `jaxthru.config`'s now. This and the tables below
leave `jaxthru.` out."""

MODULES = {
    "data.balance": "data.mixture.balance",
    "data.batch": "data.loading.batch",
    "data.constructor": "data.loading.batch_builder",
    "data.corpus": "data.sources.corpus",
    "data.files": "data.sources.files",
    "data.loader": "data.loading.dataset data.loading.loader data.loading.planned_batches",
    "data.loader_process": "data.loading.worker_handle data.loading.worker_process",
    "data.loaders": "data.loading.token_workers",
    "data.memory": "data.loading.batch_memory",
    "data.mix": "data.sources.readers data.sources.recipes data.store.mix_file",
    "data.online": "data.loading.online",
    "data.packing": "data.mixture.packing",
    "data.placement": "data.loading.placement",
    "data.planner": "data.mixture.planner",
    "data.prepare": "data.store.prepare",
    "data.progress": "data.store.progress runtime.progress",
    "data.readers": "data.sources.documents",
    "data.readers.array_record": "data.sources.readers.array_record",
    "data.readers.docstrings": "data.sources.readers.docstrings",
    "data.readers.jsonl": "data.sources.readers.jsonl",
    "data.readers.parquet": "data.sources.readers.parquet",
    "data.readers.prose": "data.sources.prose",
    "data.readers.record": "data.sources.record data.sources.keyed",
    "data.readers.streams": "data.sources.streams",
    "data.readers.tar": "data.sources.readers.tar",
    "data.readers.text": "data.sources.readers.text",
    "data.schedule": "data.mixture.configuration data.mixture.schedule",
    "data.shuffle": "data.mixture.shuffle",
    "data.source_loader": "data.loading.worker",
    "data.state": "data.loading.state",
    "data.store": "data.store.token_store data.store.flat_file data.mixture.packing",
    "data.text_store": "data.store.text_store",
    "data.timeline": "data.mixture.schedule data.mixture.sampler",
    "data.tokenizer": "data.store.tokenizer",
    "data.transform": "data.sources.transforms",
    "data.writer": "data.store.writer",
    "models.bind": "engine.model models.stage",
    "plan.arithmetic": "build.memory_estimate",
    "plan.assemble": "build.step",
    "plan.cost": "build.batches",
    "plan.fit": "build.checks",
    "plan.levels": "build.proposals build.least_offload build.choices plan.memory",
    "plan.plot": "training.plot",
    "plan.rehearsal": "engine.rehearsed engine.memory_tally plan.memory",
    "profile.attribution": "profile.account.attribution",
    "profile.build": "profile.account.build profile.show.publish",
    "profile.clocks": "profile.collect.clocks profile.account.frequency runtime.nvml",
    "profile.clues": "profile.explain.causes profile.explain.settings",
    "profile.compare": "profile.explain.compare",
    "profile.events": "profile.read.xplane",
    "profile.evidence": "profile.explain.run_facts",
    "profile.footprint": "profile.account.memory",
    "profile.hlo": "profile.read.hlo",
    "profile.ledger": "profile.account.ledger",
    "profile.lint": "profile.explain.lint",
    "profile.measured": "profile.account.measured profile.account.timeline",
    "profile.memory": "profile.read.buffers",
    "profile.paint": "profile.account.timeline",
    "profile.publish": "profile.show.publish",
    "profile.trace": "profile.collect.trace",
    "profile.windows": "profile.account.timeline",
    "training.account": "training.step_timer",
    "training.layered": "engine.dispatched",
    "training.loss": "engine.objectives.objective",
    "training.offload": "engine.offload",
    "training.parts": "engine.step engine.programs training.state runtime.sharding",
    "training.programs": "engine.programs",
    "training.seal": "training.checksums",
    "training.step": "engine.step engine.gradients engine.inline",
}
"""A module that is no more -> those that have what it held, by the same names but for NAMES."""

NAMES = {
    "training.checkpoint.WRITE_TIMEOUT": "training.tier.WRITE_TIMEOUT",
    "training.run_directory.FLAG_PREFIXES": "training.environment.FLAG_PREFIXES",
    "training.run_directory.PACKAGES": "training.environment.PACKAGES",
    "training.programs.placed": "engine.programs.with_shardings",
    "training.offload.placed": "engine.offload.offloaded_state",
    "optim.optimizer.make_schedule": "optim.schedules.make_schedule",
    "plan.fit.fit": "build.checks.validate",
    "plan.levels.ready": "build.choices.resolve",
    "config.check_types": "runtime.plain.check_groups",
    "data.constructor.Constructor": "data.loading.batch_builder.BatchBuilder",
    "data.constructor.EMPTY": "data.mixture.planner.EMPTY",
    "data.loader_process.LoaderProcess": "data.loading.worker_process.WorkerProcess",
    "data.loaders.Loaders": "data.loading.token_workers.TokenWorkers",
    "data.mix.Mix": "data.store.mix_file.MixFile",
    "data.readers.record.from_json": "data.sources.keyed.from_json",
    "data.schedule.MIXING_KEYS": "data.mixture.configuration.MIXTURE_KEYS",
    "data.schedule.Mixing": "data.mixture.configuration.Mixture",
    "data.text_store.STRETCH_BYTES": "data.store.chunks.CHUNK_BYTES",
    "data.text_store.Stretch": "data.store.chunks.Chunk",
    "data.text_store.stretches": "data.store.chunks.chunks",
    "data.timeline.Timeline": "data.mixture.sampler.MixtureSampler",
    "models.bind.from_parts": "engine.model.join_stages",
    "models.bind.parts": "engine.model.split_stages",
    "models.flops.matmul_parameters": "models.llama.matmul_parameters",
    "models.flops.parameters": "models.llama.parameters",
    "models.flops.train_flops": "models.llama.train_flops",
    "models.layers.weight": "models.layers.drawn",
    "plan.fit.asked_for": "build.checks.setting_behind",
    "plan.levels.pinned": "build.pinned_host.needed",
    "plan.levels.saved_at_once": "build.pinned_host.saved_at_once",
    "plan.levels.table": "plan.memory.proposal_table",
    "plan.arithmetic.LOSS_CHUNK": "build.memory_sizes.LOSS_CHUNK",
    "plan.memory.DOCUMENTS": "build.choices.DOCUMENTS",
    "plan.memory.stand_in": "build.stand_ins.attention_stand_in",
    "plan.memory.layered": "build.memory_estimate.fullest",
    "plan.memory.Moment": "engine.rehearsed.Moment",
    "plan.memory.PROCESS": "build.memory_estimate.PROCESS",
    "plan.rehearsal.layered_step": "plan.memory.dispatched",
    "plan.rehearsal.rehearse": "engine.rehearsed.Rehearsals",
    "profile.attribution.ATTENTION": "models.scopes.ATTENTION_KERNEL",
    "profile.attribution.SCOPES": "models.scopes.LAYER_KINDS",
    "profile.clues.Clues": "profile.explain.causes.Causes",
    "profile.clues.KEYS": "profile.explain.settings.SETTINGS",
    "profile.evidence.Evidence": "profile.explain.run_facts.RunFacts",
    "profile.paint.paint": "profile.account.timeline.assign_owners",
    "profile.paint.Painted": "profile.account.timeline.Interval",
    "profile.publish.show": "profile.show.publish.present",
    "runtime.distributed.STDERR": "runtime.stop_signal.STDERR",
    "runtime.distributed.StopSignal": "runtime.stop_signal.StopSignal",
    "runtime.sharding.RULES": "runtime.sharding.LOGICAL_AXIS_RULES",
    "runtime.xla.limit_pinned": "runtime.pinned.limit",
    "runtime.xla.PINNED_DEFAULT": "runtime.pinned.DEFAULT",
    "runtime.xla.PINNED_LIMIT": "runtime.pinned.LIMIT",
    "train.build": "build.compiled.build_step",
    "train.describe": "build.searched.announce",
    "training.account.Account": "training.step_timer.StepTimer",
    "training.layered.LayeredStep": "engine.dispatched.DispatchedStep",
    "training.loss.Metrics": "engine.terms.Terms",
    "training.parts.init_by_parts": "training.state.sharded_init",
    "training.display.Bar": "training.display.StepProgress",
    "training.display.INTERVAL": "runtime.progress.INTERVAL",
    "training.display.Lines": "training.display.StepProgress",
    "training.parts.slots_by_part": "engine.step.slots_by_stage",
    "training.metrics.open_record": "training.record.open_record",
    "training.metrics.Record": "training.record.Record",
    "training.metrics.scalars": "training.sinks.tensorboard.scalars",
    "training.metrics.TensorBoard": "training.sinks.tensorboard.TensorBoard",
    "training.seal.fingerprint": "training.checksums.checksum",
    "training.seal.SEAL": "training.checksums.CHECKSUMS",
    "training.seal.sealed_names": "training.checksums.covered_names",
    "training.seal.UNSEALED": "training.checksums.LEFT_OUT",
    "training.seal.write_seal": "training.checksums.write_checksums",
    "training.watchdog.EXIT_CODE": "runtime.exit_codes.HUNG",
}
"""A name that has left a module which is still there, or has another name now -> where it is."""

GONE = {
    *("data.corpus.DECISIVE", "data.corpus.READERS", "data.corpus.TRANSFORMS", "data.readers.READERS"),
    *("optim.optimizer.Linear", "models.bind.bind"),
    *("data.packing.most_segments", "data.source_loader.OPEN_BYTES", "data.text_store.LONG_BYTES"),
    *("data.writer.THREADS", "data.writer.write"),
    *("data.timeline.Phase", "data.timeline.UNIT"),
    *("models.bind.is_axes", "models.bind.is_matrix", "models.bind.Part", "models.bind.Substituted"),
    *("models.bind.Summing", "models.bind.wide_stand_in", "models.bind.widened"),
    *("profile.clues.BATCH", "profile.clues.UPDATE", "profile.clues.RULES", "profile.trace.NoProfile"),
    *("profile.memory.PURPOSES", "profile.memory.SCOPES", "training.metrics.NoRecord"),
    *("training.metrics.NoTensorBoard", "training.parts.slots_by_name", "training.programs.lower"),
    *("training.state.init_state", "training.state.matrices"),
    *("plan.levels.CERTAIN", "plan.levels.resolve", "plan.levels.resolve_here"),
}
"""Names that nothing has taken the place of."""

OLD = {*MODULES, *(name.rpartition(".")[0] for name in (*CLASSES, *NAMES, *GONE))}
"""The modules that something has left."""


@functools.cache
def say(line: str) -> None:
    """Logs what has moved, once a process."""
    logging.getLogger("jaxthru").warning("%s; the old name goes with the next release", line)


def say_imports(source: bytes) -> None:
    """Says which classes a configuration's file imports from an old place, though they may still be there."""
    for node in ast.walk(ast.parse(source)):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if (old := f"{node.module}.{alias.name}").removeprefix("jaxthru.") in CLASSES:
                say(f"{old}: import {alias.name} from jaxthru.config")


class Finder:
    """Finds old modules, and gives them what has left them, whether or not there still is a file."""

    @staticmethod
    def find_spec(module: str, path=None, target=None) -> ModuleSpec | None:
        if module.removeprefix("jaxthru.") not in OLD:
            return None
        gone = SimpleNamespace(create_module=lambda spec: None, exec_module=lambda module: None)
        spec = PathFinder.find_spec(module, path, target) or ModuleSpec(module, gone, is_package=True)
        execute = spec.loader.exec_module

        def exec_module(made: ModuleType) -> None:
            made.__getattr__ = functools.partial(_left, module)
            execute(made)

        spec.loader.exec_module = exec_module
        return spec


def _left(module: str, name: str) -> Any:
    """Returns what has left a module. Raises ImportError for what is gone, or AttributeError."""
    old = f"{module}.{name}"
    if old.removeprefix("jaxthru.") in GONE:  # `from ... import` hides what an AttributeError says
        raise ImportError(f"{old}: is gone, and nothing has taken its place")
    for home, new in _places(module.removeprefix("jaxthru."), name):
        with contextlib.suppress(ImportError, AttributeError):
            found = getattr(importlib.import_module(home), new)
            say(f"{old}: import {new} from {home}")
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _places(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields where a name of an old module may be: a module, and the name in it."""
    old = f"{module}.{name}"
    if old in CLASSES:
        yield "jaxthru.config", name
    elif old in NAMES:
        home, _, new = NAMES[old].rpartition(".")
        yield f"jaxthru.{home}", new
    elif not name.startswith("__"):
        yield from ((f"jaxthru.{home}", name) for home in MODULES.get(module, "").split())


def renewed(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns nested plain values of a configuration with each key where it is now, and says which were not.

    Raises InputError where a key has two values, at its old and its new place.
    """
    from jaxthru.runtime.errors import require

    tree = {group: dict(keys) if isinstance(keys, dict) else keys for group, keys in tree.items()}
    for old, new in KEYS.items():
        (group, name), (to, key) = old.split("."), new.split(".")
        keys, there = tree.get(group), tree.get(to, {})
        groups = isinstance(keys, dict) and isinstance(there, dict)
        if groups and name in keys and keys.get("family", "llama") == "llama":
            value = keys.pop(name)
            both = f"{old} = {value!r} and {new} = {there.get(key)!r}: are one key now; give {new} alone"
            require(there.setdefault(key, value) == value, both)
            tree[to] = there
            say(f"{old}: is now {new}")
    return tree


def take_old_keys(cls: type, group: str) -> None:
    """Lets a group's class be made with keys that have left it. They wait in the instance's `old_keys`.

    Until a RunConfig takes them over they are fields of the instance too, of those that only `__init__` sees:
    `dataclasses.replace` hands them on, and nothing else of `dataclasses` knows of them.
    """
    names = [old.removeprefix(f"{group}.") for old in KEYS if old.startswith(f"{group}.")]
    passed = dataclasses.make_dataclass("Old", [(name, dataclasses.InitVar, None) for name in names])
    make: Callable = cls.__init__

    @functools.wraps(make)
    def init(self, *values, **keys):
        old = {name: keys.pop(name) for name in names if name in keys}
        make(self, *values, **keys)
        if old:
            fields = {name: field for name, field in passed.__dataclass_fields__.items() if name in old}
            vars(self).update(old, old_keys=old, __dataclass_fields__=cls.__dataclass_fields__ | fields)

    cls.__init__ = init
