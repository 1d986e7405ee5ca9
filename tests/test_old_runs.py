"""What was made with commit 56c3c12 works: its configuration files, imports, keys and run directories."""

import importlib
import importlib.util
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
    monkeypatch.setitem(moved.MODULES, "training.gone", "jaxthru.runtime.plain")
    monkeypatch.setattr(moved, "CLASSES", (*moved.CLASSES, "training.gone.TrainConfig"))
    monkeypatch.setattr(moved, "OLD", moved.OLD | {"jaxthru.training.gone"})
    from jaxthru.training.gone import TrainConfig, parse

    assert TrainConfig is configuration.TrainConfig and parse("a", "3", int) == 3
    assert "import TrainConfig from jaxthru.config" in said[0]
    assert "import parse from jaxthru.runtime.plain" in said[1]
    gone = importlib.import_module("jaxthru.training.gone")
    assert not hasattr(gone, "nothing") and not hasattr(gone, "__file__")


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_what_a_module_held_is_somewhere(old):
    there = ROOT.joinpath("jaxthru", *old.split(".")).with_suffix(".py").is_file()
    assert there or importlib.util.find_spec(moved.MODULES[old])


def test_the_quickstart_of_then_is_that_of_now(said):
    assert load(OLD / "quickstart.py") == load(ROOT / "configs" / "quickstart.py")
    names = re.findall(
        r"import (\w+) from jaxthru.config; the old name goes with the next release", "\n".join(said)
    )
    assert {*names} >= {"DataConfig", "ModelConfig", "PrecisionConfig", "OptimConfig", "TrainConfig"}
    assert len(said) == len({*said}) and any(
        "model.attention: is now kernels.attention" in line for line in said
    )
    assert load(ROOT / "configs" / "quickstart.py").kernels.attention == "xla"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
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


def test_a_run_directory_of_then_is_resumed(tmp_path):
    """Its checkpoints are those of today."""
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
    assert now["model"]["family"] == "llama" and now["kernels"]["attention"] == "auto"
    assert "attention" not in now["model"] and "collective_matmul" not in now["mesh"]
