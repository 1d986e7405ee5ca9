"""`model.pretrained`: the shape is the folder's; what contradicts it is one line, on no device."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from published import SPECIAL, change_json, folder_of, make_site, only, save_tokenizer

import jaxthru
from jaxthru import config as configuration
from jaxthru.data.store.tokenizer import Tokenizer
from jaxthru.huggingface.config import read_config
from jaxthru.huggingface.weights import Weights
from jaxthru.models import family
from jaxthru.runtime.errors import InputError
from jaxthru.train import main, run

FAMILIES = {"smollm": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "gemma3": "gemma"}


@pytest.fixture
def site(tmp_path):
    return make_site(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shape_and_the_tokenizer_are_the_folders(site, name):
    folder = folder_of(site.path, name)
    config = site.config(f"model.pretrained={folder}", "model.loop=unroll")
    expected = family.to_plain(read_config(folder)[0]) | {"loop": "unroll", "pretrained": str(folder)}
    assert family.to_plain(config.model) == expected and config.model.family == FAMILIES[name]
    assert config.data.tokenizer == str(folder)
    tokenizer = Tokenizer.of(config.data.tokenizer)
    assert tokenizer.borders == ("<s>" if name in ("smollm", "mistral", "gemma3") else "", "</s>")
    (document,) = tokenizer.encode(["a cat"])
    ids = [SPECIAL[name].index(word) for word in ("<s>", "</s>")]
    assert document[-1] == ids[1] and (document[0] == ids[0]) == bool(tokenizer.borders.bos)


def test_keys_that_agree_pass_and_a_tokenizer_may_be_another(site):
    folder = folder_of(site.path, "smollm")
    save_tokenizer(site.path / "own")
    own = f"data.tokenizer={site.path / 'own'}"
    config = site.config(f"model.pretrained={folder}", "model.layers=3", "model.embed=24", own)
    assert (config.model.layers, config.data.tokenizer) == (3, str(site.path / "own"))
    gemma = site.config(f"model.pretrained={folder_of(site.path, 'gemma3')}", "model.layers=7")
    assert (gemma.model.layers, gemma.model.family) == (7, "gemma")


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("smollm", "model.layers=4", "model.layers = 4: FOLDER/config.json has 3"),
        ("smollm", "model.rope_theta=5e5", "model.rope_theta = 500000.0: FOLDER/config.json has 10000.0"),
        ("smollm", "model.tied_embeddings=false", "model.tied_embeddings = False: .* has True"),
        ("smollm", "model.rope_scaling.factor=8", "model.rope_scaling = .*'factor': 8.0.* has None"),
        ("smollm", "model.family=gemma", "model.family = 'gemma': FOLDER/config.json has 'llama'"),
        ("gemma3", "model.family=llama", "model.family = 'llama': FOLDER/config.json has 'gemma'"),
        ("gemma3", "model.window=24", "model.window = 24: FOLDER/config.json has 16"),
        ("smollm", "data.sequence=128", "data.sequence = 128: longer than model.max_sequence = 96"),
    ],
)
def test_a_key_that_contradicts_the_folder_is_one_line(site, name, setting, said):
    folder = folder_of(site.path, name)
    with pytest.raises(InputError, match=said.replace("FOLDER", str(folder))) as found:
        site.config(f"model.pretrained={folder}", setting)
    assert "\n" not in str(found.value)


def test_a_default_that_is_set_has_to_agree_too(site):
    """Of the command line it is known what was set."""
    folder = folder_of(site.path, "smollm")
    for name, value in family.to_plain(configuration.ModelConfig()).items():
        if name in ("vocabulary", "layers", "embed", "max_sequence", "tied_embeddings"):
            with pytest.raises(InputError, match=f"model.{name} = {value}: .*config.json has"):
                site.config(f"model.pretrained={folder}", f"model.{name}={value}")


@pytest.mark.parametrize(
    ("name", "model", "said"),
    [
        ("smollm", "ModelConfig(pretrained={}, layers=5)", "model.layers = 5: .* has 3"),
        (
            "gemma3",
            "ModelConfig(pretrained={}, layers=5)",
            "model.layers = 5: .* has 7",
        ),
        (
            "gemma3",
            "ModelConfig(pretrained={}, qk_norm=True)",
            "model.qk_norm = True: .* has a model of family 'gemma'",
        ),
        ("smollm", "gemma.Config(pretrained={})", "model.family = 'gemma': .* has 'llama'"),
        (
            "smollm",
            "ModelConfig(pretrained={}, rope_scaling=RopeScaling(factor=8.0))",
            "model.rope_scaling = ",
        ),
    ],
)
def test_a_file_that_contradicts_the_folder_is_one_line(site, name, model, said):
    folder = folder_of(site.path, name)
    (site.path / "own.py").write_text(
        "from jaxthru.config import *\nfrom jaxthru.config import RopeScaling, gemma\n\n"
        "def config():\n    return RunConfig(data=DataConfig(sequence=32),\n"
        f"                     model={model.format(repr(str(folder)))})\n"
    )
    with pytest.raises(InputError, match=said):
        jaxthru.load_config(site.path / "own.py")


def test_a_file_may_name_the_folder_and_the_command_another(site):
    one, other = folder_of(site.path, "smollm"), folder_of(site.path, "gemma3")
    (site.path / "own.py").write_text(
        "from jaxthru.config import *\n\ndef config():\n"
        f"    return RunConfig(model=ModelConfig(pretrained={str(one)!r}, loop='unroll'),\n"
        "                     data=DataConfig(sequence=32))\n"
    )
    assert jaxthru.load_config(site.path / "own.py").model.family == "llama"
    config = jaxthru.load_config(site.path / "own.py", [f"model.pretrained={other}"])
    assert (config.model.family, config.model.loop) == ("gemma", "unroll")
    assert config.data.tokenizer == config.model.pretrained == str(other)
    back = jaxthru.load_config(site.path / "own.py", [f"model.pretrained={one}", "model.layers=3"])
    assert back.model.layers == 3 and back.data.tokenizer == str(one)


def test_a_runs_own_configuration_does_not_hang_on_the_folder(site):
    for name in ("smollm", "gemma3"):
        folder = folder_of(site.path, name)
        config = site.config(f"model.pretrained={folder}", "train.steps=3")
        configuration.dump(config, site.path / f"{name}.json")
        shutil.rmtree(folder)
        assert configuration.to_dict(configuration.load(site.path / f"{name}.json")) == configuration.to_dict(
            config
        )
        longer = configuration.load(site.path / f"{name}.json", ["train.steps=5", "model.loop=unroll"])
        assert longer.train.steps == 5 and longer.model.embed == 24


def test_a_folder_may_be_named_as_a_shell_names_it(site, monkeypatch):
    folder = folder_of(site.path, "smollm")
    monkeypatch.setenv("HOME", str(site.path))
    monkeypatch.chdir(site.path)
    shapes = [
        site.config(f"model.pretrained={where}")
        for where in (
            "~/smollm",
            "smollm",
            "./smollm/",
            "../" + site.path.name + "/smollm",
            str(folder) + "/",
        )
    ]
    assert {config.model.layers for config in shapes} == {3}
    for config in shapes:
        assert Tokenizer.of(config.data.tokenizer).hash == Tokenizer.of(folder).hash
        assert jaxthru.open_data(config.data).tokenizer.borders.bos == "<s>"


def spoil_shard(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def lose_shard(folder: Path) -> None:
    whole = folder / "model.safetensors"
    names = json.loads(whole.read_bytes()[8 : 8 + int.from_bytes(whole.read_bytes()[:8], "little")])
    files = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    files.pop("__metadata__", None)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    whole.rename(folder / "model-00001-of-00002.safetensors")


def quantise(folder: Path) -> None:
    change_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def no_table(folder: Path) -> None:
    change_json(folder / "config.json", model_type="mamba")


def one_layer_more(folder: Path) -> None:
    change_json(folder / "config.json", num_hidden_layers=4)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def many_tokens(folder: Path) -> None:
    save_tokenizer(folder, more=64)


SPOILT = {
    many_tokens: r"model\.vocabulary = 64: smaller than the tokenizer's 98",
    spoil_shard: r"model\.safetensors",
    lose_shard: r"names model-00002-of-00002\.safetensors, which is not there",
    quantise: "quantization_config: quantised weights are not built",
    no_table: "model_type = 'mamba': is not built",
    one_layer_more: r"lacks tensor 'model\.layers\.3\.input_layernorm\.weight'",
    pickled: "pickled weights run code",
    shutil.rmtree: r"config\.json: there is no such file|no such folder",
    lambda folder: (folder / "tokenizer.json").unlink(): r"the folder holds no tokenizer\.json",
}


@pytest.fixture
def untouched(monkeypatch):
    """Whatever would take device memory, or compile, fails."""

    def refuse(*arguments, **options):
        raise AssertionError("a device was touched")

    for owner, name in ((jax, "device_put"), (Weights, "array"), (jax.stages.Lowered, "compile")):
        monkeypatch.setattr(owner, name, refuse)
    only(monkeypatch, 1)


@pytest.mark.parametrize("spoil", SPOILT)
def test_what_cannot_be_begun_with_is_one_line_before_a_device_is_touched(site, untouched, capsys, spoil):
    folder = folder_of(site.path, "smollm")
    spoil(folder)
    where = "--config", str(site.file), "--run-dir", str(site.path / "run")
    assert main([*where, "--set", f"model.pretrained={folder}"]) == 2
    said = capsys.readouterr().err.splitlines()
    with pytest.raises(InputError, match=SPOILT[spoil]):
        raise InputError(said[-1])
    assert not (site.path / "run" / "checkpoints").exists()
    if spoil is not many_tokens:  # the others are said by whatever reads a folder
        with pytest.raises(InputError, match=SPOILT[spoil]):
            jaxthru.load(folder)


def test_a_folder_of_more_tokens_than_rows_cannot_be_loaded(site, untouched):
    folder = folder_of(site.path, "smollm")
    many_tokens(folder)
    with pytest.raises(InputError, match=SPOILT[many_tokens]):
        jaxthru.load(folder)


def test_special_tokens_beyond_the_rows_are_no_text(site):
    """Published tokenizers have such: no document holds one."""
    folder = folder_of(site.path, "smollm")
    save_tokenizer(folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tree["model"]["vocab"]["<image>"] = 70
    tree["added_tokens"].append({"id": 70, "content": "<image>", **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = Tokenizer.of(folder)
    assert tokenizer.vocabulary == 71 and tokenizer.text_vocabulary <= 64
    assert jaxthru.load(folder).tokenizer.encode_prompt("a").max() < 64


@pytest.mark.slow
def test_a_fresh_run_reads_the_weights_and_a_resumed_one_does_not(site, monkeypatch):
    only(monkeypatch, 1)
    folder = folder_of(site.path, "smollm")
    config = site.config(f"model.pretrained={folder}")
    first = jaxthru.build_step(config, jaxthru.open_data(config.data), jax.devices()[:1]).first_state()
    table = np.asarray(first["params"]["embedding"]["table"])
    tensor = Weights(folder, config.model).folder.array("model.embed_tokens.weight")
    np.testing.assert_array_equal(table, tensor.astype(np.float32))
    run(config, site.path / "run")
    shutil.rmtree(folder)
    shutil.rmtree(site.path / "store")
    again = configuration.load(site.path / "run" / "config.json", ["train.steps=2"])
    assert run(again, site.path / "run").steps() == 2


@pytest.mark.slow
def test_the_command_ends_with_2_and_one_line(site):
    folder = folder_of(site.path, "smollm")
    lose_shard(folder)
    words = ["--config", str(site.file), "--set", f"model.pretrained={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxthru.train", *words], cwd=site.path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("jaxthru: ") and "is not there" in done.stderr
