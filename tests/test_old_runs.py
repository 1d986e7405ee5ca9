"""What was made with commit 56c3c12 works: its configuration files, imports, keys and run directories."""

import dataclasses
import importlib
import json
import logging
import re
import subprocess
from pathlib import Path

import pytest
from runs import ROOT, make_workplace, resumed_from

from jaxthru import config as configuration
from jaxthru import moved
from jaxthru.config import KernelsConfig, MeshConfig, ModelConfig, RunConfig, load
from jaxthru.runtime.errors import InputError
from jaxthru.train import keys_of_run
from jaxthru.training.run_directory import RunDirectory

OLD = Path(__file__).resolve().parent / "old_runs" / "56c3c12"
IMPORTS = """from jaxthru.config import RunConfig
from jaxthru.data.loader import DataConfig
from jaxthru.models.layers import PrecisionConfig
from jaxthru.models.llama import ModelConfig, RopeScaling
from jaxthru.models.remat import RematConfig
from jaxthru.optim.optimizer import OptimConfig
from jaxthru.profile.trace import ProfileConfig
from jaxthru.runtime.mesh import MeshConfig
from jaxthru.training.checkpoint import CheckpointConfig
from jaxthru.training.evaluate import EvaluateConfig
from jaxthru.training.metrics import MetricsConfig
from jaxthru.training.offload import OffloadConfig
from jaxthru.training.step import TrainConfig
"""


@pytest.fixture
def said():
    """Collects what is said to have moved, anew."""
    moved.say.cache_clear()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("jaxthru")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.mark.parametrize("line", IMPORTS.splitlines())
def test_old_imports_give_the_classes_of_config(line):
    found = {}
    exec(line, found)
    for name in line.partition(" import ")[2].split(", "):
        assert found[name] is getattr(configuration, name)


def test_a_class_that_has_left_a_module_is_said_to_be_elsewhere(said):
    from jaxthru.models.llama import ModelConfig as Old

    assert Old is ModelConfig
    (line,) = said
    assert "jaxthru.models.llama.ModelConfig: import ModelConfig from jaxthru.config" in line
    with pytest.raises(ImportError):
        from jaxthru.models.llama import NoSuchName  # noqa: F401


def test_a_module_that_is_gone_still_gives_what_it_held(said, monkeypatch):
    monkeypatch.setitem(moved.MODULES, "training.gone", "runtime.atomic runtime.plain")
    monkeypatch.setattr(moved, "CLASSES", (*moved.CLASSES, "training.gone.TrainConfig"))
    monkeypatch.setattr(moved, "OLD", moved.OLD | {"training.gone"})
    from jaxthru.training.gone import TrainConfig, parse

    assert TrainConfig is configuration.TrainConfig and parse("a", "3", int) == 3
    assert "import TrainConfig from jaxthru.config" in said[0]
    assert "import parse from jaxthru.runtime.plain" in said[1]
    gone = importlib.import_module("jaxthru.training.gone")
    assert not hasattr(gone, "nothing") and not hasattr(gone, "__file__")


def held_then() -> list[tuple[str, str]]:
    """Returns (module, name) of every public name that was defined in jaxthru, but for the report's page."""
    lines = (OLD / "names.txt").read_text().splitlines()
    return [(module, name) for module, *names in map(str.split, lines) for name in names]


def test_what_a_module_held_is_somewhere():
    """By its name, or as `moved` says; and what it says is gone is that."""
    lost, kept = [], []
    for module, name in held_then():
        try:
            getattr(importlib.import_module(f"jaxthru.{module}"), name)
        except (ImportError, AttributeError):
            lost.append(f"{module}.{name}")
        else:
            kept.append(f"{module}.{name}")
    unsaid = sorted({*lost} ^ moved.GONE)
    assert not unsaid, f"say in moved.NAMES where it is, or in moved.GONE that it is gone: {unsaid}"
    assert {*moved.NAMES} < {*kept} and {*moved.MODULES} < {module for module, _ in held_then()}


@pytest.mark.parametrize(
    ("module", "name", "home", "new"),
    [
        ("train", "build", "build.compiled", "build_step"),
        ("data.timeline", "Timeline", "data.mixture.sampler", "MixtureSampler"),
        ("data.store", "TokenStore", "data.store.token_store", "TokenStore"),
        ("data.readers.jsonl", "read", "data.sources.readers.jsonl", "read"),
        ("data.mix", "Recipe", "data.sources.recipes", "Recipe"),
        ("data.schedule", "Mixing", "data.mixture.configuration", "Mixture"),
        ("training.step", "token_weight", "engine.gradients", "token_weight"),
        ("training.step", "CompiledStep", "engine.inline", "CompiledStep"),
        ("training.layered", "LayeredStep", "engine.dispatched", "DispatchedStep"),
        ("training.parts", "init_by_parts", "training.state", "sharded_init"),
        ("training.metrics", "open_record", "training.record", "open_record"),
        ("training.account", "Account", "training.step_timer", "StepTimer"),
        ("training.parts", "slots_by_part", "engine.step", "slots_by_stage"),
        ("models.bind", "from_parts", "engine.model", "join_stages"),
        ("models.bind", "parts", "engine.model", "split_stages"),
        ("plan.fit", "asked_for", "build.checks", "setting_behind"),
        ("profile.paint", "paint", "profile.account.timeline", "assign_owners"),
        ("runtime.sharding", "RULES", "runtime.sharding", "LOGICAL_AXIS_RULES"),
        ("models.flops", "train_flops", "models.llama", "train_flops"),
        ("plan.levels", "PCIE", "build.proposals", "PCIE"),
        ("plan.levels", "table", "plan.memory", "proposal_table"),
        ("profile.clocks", "reference", "profile.account.frequency", "reference"),
        ("runtime.xla", "limit_pinned", "runtime.pinned", "limit"),
    ],
)
def test_a_name_that_has_moved_is_said_to_be_elsewhere(said, module, name, home, new):
    found = {}
    exec(f"from jaxthru.{module} import {name}\n" * 2, found)
    assert found[name] is getattr(importlib.import_module(f"jaxthru.{home}"), new)
    (line,) = said
    assert line.startswith(f"jaxthru.{module}.{name}: import {new} from jaxthru.{home}; ")


def test_a_name_that_is_gone_is_said_to_be(tmp_path):
    path = tmp_path / "old.py"
    path.write_text("from jaxthru.training.state import matrices")
    with pytest.raises(InputError) as refused:
        load(path)
    said = "ImportError: jaxthru.training.state.matrices: is gone, and nothing has taken its place"
    assert str(refused.value) == f"--config {path}: {said}"
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        from jaxthru.training.layered import NoSuchName  # noqa: F401


def test_the_quickstart_of_then_is_that_of_now(said):
    now = load(ROOT / "configs" / "quickstart.py")
    without_samples = dataclasses.replace(now.evaluate, prompts=(), temperature=0.0)
    assert load(OLD / "quickstart.py") == dataclasses.replace(now, evaluate=without_samples)
    names = re.findall(
        r"import (\w+) from jaxthru.config; the old name goes with the next release", "\n".join(said)
    )
    assert {*names} >= {"DataConfig", "ModelConfig", "PrecisionConfig", "OptimConfig", "TrainConfig"}
    assert len(said) == len({*said}) and any(
        "model.attention: is now kernels.attention" in line for line in said
    )
    assert load(ROOT / "configs" / "quickstart.py").kernels.attention == "xla"


OF_THEN = [
    path
    for path in sorted((ROOT / "configs").glob("*.py"))
    if not re.search("gemma|lora|_a\\d+b|moe|olmoe|mixtral", path.stem)
]
"""Configurations of families and classes that there were."""


@pytest.mark.parametrize("path", OF_THEN, ids=lambda path: path.stem)
def test_configurations_by_their_old_imports_and_keys(path, tmp_path):
    body = path.read_text().partition("\n)\n")[2]
    if chosen := re.search(r" *kernels=KernelsConfig\((.*?)\),.*\n", body):
        body = body.replace(chosen[0], "").replace("ModelConfig(", f"ModelConfig({chosen[1]}, ")
    (tmp_path / "old.py").write_text(IMPORTS + body)
    assert load(tmp_path / "old.py") == load(path)


def test_old_keys_have_new_names_wherever_they_are_given(said, tmp_path):
    path, quickstart = tmp_path / "config.json", str(ROOT / "configs" / "quickstart.py")
    path.write_text(json.dumps({"model": {"attention": "triton"}, "mesh": {"collective_matmul": "none"}}))
    chosen = KernelsConfig(attention="triton", collective_matmul="none")
    assert load(path).kernels == chosen
    assert load(path, ["kernels.attention=xla"]).kernels.attention == "xla"
    assert said == [
        f"{old}: is now {new}; the old name goes with the next release" for old, new in moved.KEYS.items()
    ]
    assert load(quickstart, ["model.attention=triton", "mesh.collective_matmul=none"]).kernels == chosen
    made = RunConfig(
        model=ModelConfig(layers=2, attention="triton"), mesh=MeshConfig(collective_matmul="none")
    )
    assert made.kernels == chosen and made == RunConfig(model=ModelConfig(layers=2), kernels=chosen)
    assert len(said) == 2
    configuration.dump(made, path)
    tree = json.loads(path.read_text())
    assert "attention" not in tree["model"] and "collective_matmul" not in tree["mesh"]
    assert load(path, ["mesh.collective_matmul=ring"]).kernels.collective_matmul == "ring"


def test_an_old_key_outlives_a_replacement():
    changed = dataclasses.replace(dataclasses.replace(ModelConfig(attention="xla"), layers=2), heads=8)
    mesh = dataclasses.replace(MeshConfig(collective_matmul="none"), data=2)
    made = RunConfig(model=changed, mesh=mesh)
    assert made.kernels == KernelsConfig(attention="xla", collective_matmul="none")
    assert made.model == changed == ModelConfig(layers=2, heads=8) and made.mesh == MeshConfig(data=2)
    other = dataclasses.replace(changed, attention="triton")
    assert RunConfig(model=other).kernels.attention == "triton"
    # Taken over once, it is the run's: to another model it comes with the run alone.
    assert not hasattr(dataclasses.replace(made.model, layers=3), "old_keys")
    assert dataclasses.replace(made, model=ModelConfig(layers=3)).kernels.attention == "xla"
    fields = [field.name for field in dataclasses.fields(changed)]
    assert fields == [field.name for field in dataclasses.fields(ModelConfig)]
    assert dataclasses.asdict(changed).keys() == {*fields}
    with pytest.raises(TypeError, match="attentoin"):
        dataclasses.replace(changed, attentoin="xla")


def test_an_old_key_and_its_new_one_must_agree(tmp_path):
    path, quickstart = tmp_path / "config.json", str(ROOT / "configs" / "quickstart.py")

    def stored(attention: str) -> RunConfig:
        path.write_text(json.dumps({"model": {"attention": "xla"}, "kernels": {"attention": attention}}))
        return load(path)

    assert stored("xla").kernels.attention == "xla"
    assert load(quickstart, ["model.attention=xla", "kernels.attention=xla"]).kernels.attention == "xla"
    for refused in (
        lambda: stored("auto"),
        lambda: load(quickstart, ["model.attention=xla", "kernels.attention=auto"]),
        lambda: load(quickstart, ["kernels.attention=auto", "model.attention=xla"]),
        lambda: RunConfig(model=ModelConfig(attention="xla"), kernels=KernelsConfig(attention="triton")),
    ):
        with pytest.raises(
            InputError, match=r"model.attention = 'xla' and kernels.attention = '\w+': are one key"
        ):
            refused()
    with pytest.raises(InputError, match=r"kernels.attention = 'xlaa': must be one of"):
        RunConfig(model=ModelConfig(attention="xlaa"))
    with pytest.raises(InputError, match=r"kernels.attention = 'none': must be one of"):
        load(quickstart, ["model.attention=none"])


@pytest.mark.slow
def test_a_run_directory_of_then_is_resumed(tmp_path):
    """Its checkpoints are those of today, but for the version of the mixture sampler."""
    place = make_workplace(tmp_path)
    place.run("run", train__steps=5)
    stored = tmp_path / "run" / "config.json"
    tree = json.loads((OLD / "config.json").read_text())
    tree["data"] |= {"mix": str(tmp_path / "mix.toml"), "store": str(tmp_path / "store")}
    stored.write_text(json.dumps(tree, indent=2))
    command = place.command("run", train__steps=10, model__loop="unroll")
    command[command.index("--config") + 1] = str(OLD / "quickstart.py")
    command = [word.replace("kernels.attention", "model.attention") for word in command]
    ended = subprocess.run(command, env=place.environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert resumed_from(ended.stderr) == 5 and len(place.losses("run")) == 10
    for line in (
        "jaxthru.training.step.TrainConfig: import TrainConfig from jaxthru.config",
        "model.attention: is now kernels.attention",
        "changed since the run was started: model.loop ('scan' → 'unroll')",
    ):
        assert line in ended.stderr
    now = json.loads(stored.read_text())
    assert now["model"]["family"] == "llama" and now["kernels"]["attention"] == "xla"  # as was chosen
    assert "attention" not in now["model"] and "collective_matmul" not in now["mesh"]
    # It was begun by another mixture sampler, which gave two sources other rows.
    saved = tmp_path / "run" / "checkpoints" / "10" / "data" / "metadata"
    tree = json.loads(saved.read_text())
    assert tree.pop("sampler") == 2
    saved.write_text(json.dumps(tree))
    with pytest.raises(InputError, match=r"version 1 of the .* sampler.*continue it with commit 7a9d05a"):
        keys_of_run(RunDirectory(tmp_path / "run"))
