"""From published weights to a run and back: nothing is lost; runs go on, are mailed, and are exported."""

import contextlib
import dataclasses
import functools
import io
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from published import folder_of, make_site, only

import jaxthru
from jaxthru import config as configuration
from jaxthru.huggingface.folder import Folder
from jaxthru.runtime.errors import InputError
from jaxthru.train import run


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """With folders of three families."""
    made = make_site(tmp_path_factory.mktemp("site"))
    for name in ("smollm", "qwen2", "qwen3"):
        folder_of(made.path, name)
    return made


def trained(site, name: str, where: str, *settings: str, devices: int = 1) -> jaxthru.RunDirectory:
    config = site.config(f"model.pretrained={site.path / name}", *settings)
    with pytest.MonkeyPatch.context() as patch:
        only(patch, devices)
        return run(config, site.path / where)


@pytest.fixture(scope="module")
def smollm(site):
    """A run that begins with bfloat16 weights and changes nothing in them; two updates, two samples each."""
    samples = 'evaluate.prompts=["the cat", "a dog"]', "evaluate.max_tokens=6", "evaluate.rows=8"
    return trained(site, "smollm", "run", "train.steps=2", "checkpoint.every=1", *samples)


def same_tensors(one: Path, other: Path) -> None:
    """Names, their order, dtypes, shapes and every byte."""
    before, after = Folder(one), Folder(other)
    assert before.tensors.keys() == after.tensors.keys()
    for name, info in before.tensors.items():
        found = after.tensors[name]
        assert (found.dtype, found.shape) == (info.dtype, info.shape), name
        assert before.bytes(name).tobytes() == after.bytes(name).tobytes(), name


def same_folder(before: Path, after: Path) -> None:
    """What an export of untrained weights has to keep, and what transformers reads of it."""
    same_tensors(before, after)
    keys, found = (json.loads((each / "config.json").read_text()) for each in (before, after))
    assert {name: found.get(name) for name in keys} == keys
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (before / name).read_bytes() == (after / name).read_bytes(), name
    assert (after / "STABLE").read_bytes() == b""
    card = (after / "README.md").read_text()
    assert card.startswith(f"---\nbase_model: {before.name}\nbase_model_relation: finetune\n")
    assert "license: apache-2.0\n" in card and "continued from" in card
    theirs, ours = (transformers.AutoConfig.from_pretrained(each).to_dict() for each in (before, after))
    assert {**ours, **theirs, "_name_or_path": None} == {**ours, "_name_or_path": None}
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(each) for each in (before, after))
    assert ours("the cat")["input_ids"] == theirs("the cat")["input_ids"]
    assert ours.eos_token == "</s>"


def test_untrained_weights_come_back_to_the_byte(site, smollm):
    out = jaxthru.export_weights(smollm, site.path / "out")
    same_folder(site.path / "smollm", out)
    card = (out / "README.md").read_text()
    assert "after 2 updates. The weights are bfloat16." in card
    assert "held-out loss after update 2" in card and "`optim.learning_rate` | `1e-30`" in card
    again = jaxthru.export_weights(out, site.path / "out-of-out")  # a folder of a folder
    assert {path.name for path in out.iterdir()} == {path.name for path in again.iterdir()}
    same_tensors(out, again)


CASES = {
    "qwen2": ("qwen2", 8, ["mesh.fsdp=4", "mesh.tensor=2", "model.loop=unroll"]),
    "qwen3": ("qwen3", 1, ["optim.state=split_master", "model.loop=unroll"]),
    "smollm_split": ("smollm", 8, ["mesh.fsdp=8", "optim.state=split_master"]),
    "qwen3_offloaded": (
        "qwen3",
        1,
        ["offload.level=optimizer", "model.loop=unroll", "remat.policy=attention"],
    ),
    "qwen2_parameters_offloaded": (
        "qwen2",
        1,
        ["offload.level=parameters", "model.loop=unroll", "remat.policy=attention"],
    ),
}


@pytest.fixture(scope="module")
def published(site):
    """Returns what the model of a folder writes, and its logits: some cases share a folder."""

    @functools.cache
    def of(name: str) -> tuple[str, np.ndarray]:
        model = jaxthru.load(site.path / name)
        return model.generate("the cat sat", max_tokens=12), model.logits([1, 5, 9])

    return of


@pytest.mark.slow(minutes=0.12)
@pytest.mark.parametrize("case", CASES)
def test_untrained_weights_come_back_from_any_mesh_and_state(site, published, case):
    name, devices, settings = CASES[case]
    made = trained(site, name, f"run-{case}", *settings, devices=devices)
    out = jaxthru.export_weights(made, site.path / f"out-{case}")
    same_folder(site.path / name, out)
    model = jaxthru.load(made)
    text, wanted = published(name)
    assert model.generate("the cat sat", max_tokens=12) == text
    # What a step multiplies by, where weights are split, is the half that bfloat16 has.
    split = "optim.state=split_master" in settings and name != "smollm"
    np.testing.assert_allclose(model.logits([1, 5, 9]), wanted, rtol=0, atol=5e-3 if split else 0)


def test_samples_are_kept_with_evaluations_and_printed(site, smollm, capsys):
    rows = smollm.read_eval()
    assert [row["step"] for row in rows] == [0, 2]
    for row in rows:
        assert [each["prompt"] for each in row["samples"]] == ["the cat", "a dog"]
        assert all(isinstance(each["text"], str) and len(each["text"]) <= 6 for each in row["samples"])
    assert rows[0]["samples"] == rows[1]["samples"]  # nothing was learnt
    model = jaxthru.load(smollm)
    texts = model.generate(["the cat", "a dog"], max_tokens=6)
    assert [each["text"] for each in rows[-1]["samples"]] == texts
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jaxthru.train.final_table(smollm)
    for prompt, text in zip(("the cat", "a dog"), texts, strict=True):
        assert f"sample: {prompt}{text}".split("\n")[0].rstrip() in printed.getvalue()


def test_a_mailed_run_generates_is_exported_and_goes_on(site, smollm, tmp_path):
    """Without the folder of weights, the store and the place it was made in."""
    mailed = tmp_path / "somewhere else"
    shutil.copytree(smollm.path, mailed)
    hidden = site.path.rename(site.path.with_name("gone"))
    try:
        model = jaxthru.load(mailed)
        assert isinstance(model.generate("the cat", max_tokens=4), str)
        out = jaxthru.export_weights(mailed, tmp_path / "out")
    finally:
        hidden.rename(site.path)
    same_tensors(site.path / "smollm", out)
    away = (site.path / "smollm").rename(site.path / "smollm-gone")
    shutil.rmtree(site.path / "store")
    try:
        config = configuration.load(mailed / "config.json", ["train.steps=4"])
        with pytest.MonkeyPatch.context() as patch:
            only(patch, 1)
            assert run(config, mailed).steps() == 4
    finally:
        away.rename(site.path / "smollm")
    # Samples of before stay in the record, those of now stand behind them.
    rows = jaxthru.RunDirectory(mailed).read_eval()
    assert [row["step"] for row in rows] == [0, 2, 4] and all(len(row["samples"]) == 2 for row in rows)


def step_text(config, data) -> str:
    """Returns the optimised program, without the lines of source that its parts are from: of what was traced
    before, JAX says where that was."""
    text = jaxthru.build_step(config, data, jax.devices()[:1]).compiled.as_text()
    return text[: text.index("\n")] + re.sub(r", metadata={[^}]*}", "", text[text.index("\n%") :])


def test_continued_training_runs_the_program_of_training_from_scratch(site):
    continued = site.config(f"model.pretrained={site.path / 'smollm'}")
    model = dataclasses.replace(continued.model, pretrained=None)
    scratch = dataclasses.replace(continued, model=model)
    assert scratch.model.pretrained is None and scratch.data.tokenizer == str(site.path / "smollm")
    with jaxthru.open_data(continued.data) as data:
        texts = [step_text(each, data) for each in (continued, scratch)]
    assert len(texts[0]) > 10_000 and texts[0].splitlines() == texts[1].splitlines()


def test_a_step_and_a_dtype_are_chosen(site, smollm, tmp_path):
    first = jaxthru.export_weights(smollm, tmp_path / "first", step=1, dtype="float32")
    assert {info.dtype for info in Folder(first).tensors.values()} == {"F32"}
    assert json.loads((first / "config.json").read_text())["dtype"] == "float32"
    assert "after 1 update. The weights are float32." in (first / "README.md").read_text()
    half = jaxthru.export_weights(site.path / "smollm", tmp_path / "half", dtype="float16")
    assert {info.dtype for info in Folder(half).tensors.values()} == {"F16"}
    assert (half / "LICENSE").is_file()
    name = "model.norm.weight"
    np.testing.assert_array_equal(
        Folder(half).array(name), Folder(site.path / "smollm").array(name).astype(np.float16)
    )


def test_what_cannot_be_exported_is_one_line(site, smollm, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for options, said in (
        ({"where": smollm, "folder": tmp_path / "taken"}, "taken: is there and not an empty folder"),
        ({"where": smollm, "folder": tmp_path / "taken" / "file"}, "file: is there and not an empty folder"),
        ({"where": smollm, "folder": tmp_path / "a", "step": 9}, "step 9: no checkpoint .* there are 1, 2"),
        ({"where": smollm, "folder": tmp_path / "a", "dtype": "int8"}, "--dtype int8: must be one of"),
        ({"where": tmp_path / "none", "folder": tmp_path / "a"}, "no such folder"),
        ({"where": tmp_path / "taken", "folder": tmp_path / "a"}, "config.json"),
        ({"where": site.path / "smollm", "folder": tmp_path / "a", "step": 1}, "has no steps"),
    ):
        with pytest.raises(InputError, match=said):
            jaxthru.export_weights(options.pop("where"), options.pop("folder"), **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_family_of_ones_own_has_to_be_named_and_to_have_a_table(site, tmp_path):
    family = "models.toys.alternating"
    made = tmp_path / "own"
    shape = "words=64", "depth=3", "width=32", "ways=2", "way_size=16", "hidden=48"
    tokenizer = f"data.tokenizer={site.path / 'smollm'}"
    config = site.config(f"model.family={family}", tokenizer, *(f"model.{word}" for word in shape))
    with pytest.MonkeyPatch.context() as patch:
        only(patch, 1)
        run(config, made)
    with pytest.raises(InputError, match=f"model.family = '{family}': .*PUBLISHED") as found:
        jaxthru.export_weights(made, tmp_path / "out", overrides=[f"model.family={family}"])
    assert "\n" not in str(found.value) and not (tmp_path / "out").exists()
    model = jaxthru.load(made, [f"model.family={family}"])
    assert isinstance(model.generate("the", max_tokens=4), str)
