"""The notebooks as they are committed, and whether they still run."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
from runs import ROOT

import jaxthru
from jaxthru.build.memory_estimate import Room, estimate
from jaxthru.build.proposals import candidates

FOLDER = ROOT / "notebooks"
NAMES = ("quickstart", "profile", "published_weights", "fine_tune")
PICTURES = {"quickstart": 2, "profile": 2, "published_weights": 1, "fine_tune": 1}
GPU_GIB = 15  # of a free GPU of 16 GB
FEWER = 20  # as many times fewer steps are trained of what trains for long
LONG = 50  # steps


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_of(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def settings_of(name: str) -> list[str]:
    """Returns the list SETTINGS of a notebook's own cell."""
    for cell in code_of(read(name)):
        for node in ast.parse("".join(cell["source"])).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS":
                return ast.literal_eval(node.value)
    raise AssertionError(f"{name}: has no SETTINGS")


def test_there_are_four_and_the_script_knows_them(script):
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NAMES} == {*script("notebooks").NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_whole(name):
    import nbformat

    notebook = read(name)
    nbformat.validate(nbformat.from_dict(notebook))
    assert len(notebook["cells"]) < 15
    assert notebook["cells"][0]["cell_type"] == "markdown"
    first = "".join(notebook["cells"][0]["source"])
    assert re.search(r"minute.* on two\s+(idle )?CPU\s+cores", first, re.DOTALL) and "GPU" in first
    cells = code_of(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        source = "".join(cell["source"])
        compile(source, name, "exec")
        assert not re.search(r"^\s*[!%]", source, re.MULTILINE), "shell magic"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_there_and_tell_nothing_of_a_machine(name):
    outputs = [output for cell in code_of(read(name)) for output in cell["outputs"]]
    said = json.dumps(outputs, ensure_ascii=False)
    assert outputs and not [each for each in outputs if each["output_type"] == "error"]
    assert not [each for each in outputs if each.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|work|Users|usr|opt)/|Warning|Traceback", said)
    pictures = [each for each in outputs if "image/svg+xml" in each.get("data", {})]
    assert len(pictures) >= PICTURES[name]
    for cell in code_of(read(name)):
        assert len(cell["outputs"]) <= 16


@pytest.mark.parametrize("name", NAMES)
def test_only_public_names_are_used(name):
    used = set()
    for cell in code_of(read(name)):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("jaxthru")
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxthru":
                used.add(node.attr)
    assert used and used <= {*dir(jaxthru)}


@pytest.mark.parametrize("name", ["published_weights", pytest.param("fine_tune", marks=pytest.mark.slow)])
def test_published_weights_fit_a_free_gpu(name):
    """Qwen3-0.6B with the notebook's settings and what `auto` takes there, and the sentence that says so."""
    settings = settings_of(name)
    assert "precision.compute=float32" in settings
    room = Room(device=GPU_GIB << 30, host=0)
    plan = next(candidates(jaxthru.load_config("qwen3_0_6b", settings), room)).plan
    assert plan.peak_device <= 0.93 * room.device  # JAX's share of it, and room for what is not in the plan
    text = "".join("".join(cell["source"]) for cell in read(name)["cells"])
    said = re.search(r"Qwen3-0\.6B takes an estimated ([\d.]+) GiB", text)
    assert said and float(said[1]) == pytest.approx(plan.peak_device / 2**30, abs=0.05)


@pytest.mark.parametrize("name", ["quickstart", "profile"])
def test_the_small_models_fit_too(name):
    plan, _ = estimate(jaxthru.load_config("quickstart", settings_of(name)))
    assert plan.peak_device < 2**30


def test_what_the_script_writes_names_no_folder(script, tmp_path):
    import nbformat

    notebook = nbformat.from_dict(read("profile"))
    text = f"in {tmp_path}/runs/1, {ROOT}/docs and {Path.home()}/x"
    code_of(notebook)[0].outputs = [
        nbformat.from_dict({"output_type": "stream", "name": "stdout", "text": text})
    ]
    script("notebooks").strip(notebook, tmp_path)
    assert code_of(notebook)[0].outputs[0]["text"].startswith("in ./runs/1, jaxthru/docs and ")
    nbformat.validate(notebook)


def shortened(source: str) -> str:
    """Returns a cell; what trains for long does so for fewer steps, and is evaluated and saved as often; all
    is evaluated on fewer rows; what is profiled is so sooner, and of fewer rows."""
    if "evaluate.rows=" not in source:
        source = source.replace('"evaluate.every=0"', '"evaluate.every=0", "evaluate.rows=8"')
    if "profile.at=12" in source:
        source = source.replace('"profile.at=12"', '"profile.at=5", "train.rows=2"')
        return source.replace("train.steps=24", "train.steps=17")
    if max(map(int, re.findall(r"train\.steps=(\d+)", source)), default=0) < LONG:
        return source
    if "evaluate.rows=" not in source:
        source = source.replace('"train.rows=4"', '"train.rows=4", "evaluate.rows=8"')
    return re.sub(
        r"\b(train\.steps|evaluate\.every|checkpoint\.every)=(\d+)",
        lambda found: f"{found[1]}={-(-int(found[2]) // FEWER)}",
        source,
    )


@pytest.mark.slow(minutes=2.5)
def test_all_run(script, tmp_path, monkeypatch):
    """From top to bottom in one folder, where the second finds the first's corpus prepared."""
    one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    monkeypatch.setenv("XLA_FLAGS", one_device)  # as a reader has
    monkeypatch.delenv("WEIGHTS", raising=False)
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name)
    notebooks = script("notebooks")
    for name in NAMES:
        notebook = notebooks.read(name)
        for cell in code_of(notebook):
            cell["source"] = shortened(cell["source"])
        notebooks.execute(notebook, tmp_path)
        outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]
        assert len([each for each in outputs if "image/svg+xml" in each.get("data", {})]) >= PICTURES[name]
        assert name != "fine_tune" or "the same answers: True" in json.dumps(outputs)
        assert "the same text: False" not in json.dumps(outputs)
