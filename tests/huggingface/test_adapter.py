"""Adapters in PEFT's form, and whole runs of them: trained, resumed, exported, merged, used."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from published import change_json, folder_of, make_site, only

import jaxthru
from jaxthru import train
from jaxthru.build.adapted_weights import adapted_paths
from jaxthru.build.export_weights import export_weights
from jaxthru.build.language_model import load
from jaxthru.build.step import chain_of
from jaxthru.huggingface import adapter
from jaxthru.huggingface.adapter import CONFIG, WEIGHTS, AdapterWeights, Side
from jaxthru.huggingface.config import read_config
from jaxthru.huggingface.safetensors import Reader
from jaxthru.models.lora import LoraConfig
from jaxthru.runtime.errors import InputError

TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
KEYS = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("modules_to_save", "peft_type", "r", "rank_pattern", "revision", "target_modules", "task_type"),
    *("use_dora", "use_rslora"),
}
"""Of adapter_config.json, as PEFT 0.21 has written them for years."""


def wanted(config: jaxthru.RunConfig) -> dict[str, Side]:
    return adapter.sides(config.model, adapted_paths(chain_of(config)), config.lora.rank)


@pytest.fixture
def base(tmp_path):
    return folder_of(tmp_path, "qwen3")


@pytest.fixture
def config(tmp_path, base):
    return make_site(tmp_path).config(f"model.pretrained={base}", "lora.rank=4")


@pytest.fixture
def written(tmp_path, config):
    """An adapter's folder, with numbers by name."""
    sides = wanted(config)
    by_path = {side.path: number for number, side in enumerate(sides.values())}

    def read(path, like):
        drawn = np.random.default_rng(by_path[path]).standard_normal(like.shape)
        return jax.device_put(drawn.astype(np.float32), like.sharding)

    folder = tmp_path / "adapter"
    settings = adapter.settings_of(config.lora, TARGETS, config.model.pretrained)
    adapter.write_adapter(folder, sides, read, "float32", {CONFIG: settings})
    return folder


def test_tensors_and_settings_are_called_as_peft_calls_them(config, written):
    model, tensors = config.model, Reader(written / WEIGHTS).tensors
    sizes = {
        **{"self_attn.q_proj": (model.heads * model.head_dim, model.embed)},
        **{f"self_attn.{name}_proj": (model.kv_heads * model.head_dim, model.embed) for name in "kv"},
        **{"self_attn.o_proj": (model.embed, model.heads * model.head_dim)},
        **{f"mlp.{name}_proj": (model.mlp, model.embed) for name in ("gate", "up")},
        **{"mlp.down_proj": (model.embed, model.mlp)},
    }
    expected = {}
    for layer in range(model.layers):
        for module, (outputs, inputs) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            expected |= {f"{name}.lora_A.weight": (4, inputs), f"{name}.lora_B.weight": (outputs, 4)}
    assert {name: info.shape for name, info in tensors.items()} == expected
    keys = json.loads((written / CONFIG).read_text())
    assert keys.keys() == KEYS and (keys["peft_type"], keys["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (keys["r"], keys["lora_alpha"], keys["bias"], keys["inference_mode"]) == (4, 32, "none", True)
    assert Reader(written / WEIGHTS).metadata == {"format": "pt"} and (written / "STABLE").is_file()


def test_what_was_written_is_read_again(config, written):
    weights, sides = AdapterWeights(written, wanted(config)), wanted(config)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for number, side in enumerate(sides.values()):
        found = weights(side.path, jax.ShapeDtypeStruct(side.shape, np.float32, sharding=where))
        drawn = np.random.default_rng(number).standard_normal(side.shape).astype(np.float32)
        np.testing.assert_array_equal(found, drawn)
    o_proj = Reader(written / WEIGHTS).array("base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight")
    side = sides["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"]
    assert side.shape == (config.model.heads, config.model.head_dim, 4)
    mine = weights(side.path, jax.ShapeDtypeStruct(side.shape, np.float32, sharding=where))
    np.testing.assert_array_equal(o_proj, np.asarray(mine).reshape(-1, 4).T)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3': is not built; built: 'LORA'"),
        ({"peft_type": None}, "has no peft_type"),
        ({"bias": "all"}, "bias = 'all': is not built; built: 'none'"),
        ({"use_dora": True}, "use_dora = True: is not built"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = .*: is not built"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern = .*: is not built"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]: is not built; must be null"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa.*': is not built; built"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens = \[5, 6\]: is not built"),
        ({"target_modules": ".*_proj"}, "target_modules = '.*': must be a list of names"),
        ({"r": 0}, "r = 0: must be a whole number from 1"),
    ],
)
def test_an_adapter_that_is_not_built_is_one_line(written, keys, message):
    change_json(written / CONFIG, **keys)
    with pytest.raises(InputError, match=message):
        adapter.taken(LoraConfig(adapter=str(written)))


def test_rank_scale_and_targets_are_the_adapters(written):
    change_json(written / CONFIG, target_modules=["q_proj", "v_proj"], lora_alpha=7, use_rslora=True)
    found = adapter.taken(LoraConfig(adapter=str(written)))
    assert (found.rank, found.alpha, found.rslora) == (4, 7.0, True)
    assert found.targets == ("q_proj", "v_proj")
    with pytest.raises(InputError, match=r"lora.rank = 8: .*adapter_config.json has 4; leave it to"):
        adapter.taken(LoraConfig(rank=8, adapter=str(written)))
    (written / CONFIG).unlink()
    assert adapter.taken(found) == found, "a run's own configuration needs no folder"
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        adapter.taken(LoraConfig(adapter=str(written)))


def test_an_adapter_of_another_base_is_one_line(tmp_path, base, config, written):
    adapter.check_base(written, base)
    change_json(written / CONFIG, base_model_name_or_path="meta/other")
    with pytest.raises(InputError, match=r"is an adapter of 'meta/other', and .* is qwen3"):
        adapter.check_base(written, base)
    model = dataclasses.replace(config.model, pretrained=None)
    wider = dataclasses.replace(config, model=dataclasses.replace(model, mlp=2 * model.mlp))
    with pytest.raises(InputError, match=r"has the shape \[40, 4\], for the base it is \[80, 4\]"):
        AdapterWeights(written, wanted(wider))
    deeper = dataclasses.replace(config, model=dataclasses.replace(model, layers=9))
    with pytest.raises(InputError, match=r"lacks tensor .*layers\.\d+.*: it is an adapter of another base"):
        AdapterWeights(written, wanted(deeper))
    fewer = dataclasses.replace(config, lora=dataclasses.replace(config.lora, targets=("q_proj",)))
    with pytest.raises(InputError, match="is of no linear layer that is adapted"):
        AdapterWeights(written, wanted(fewer))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run of four updates, with checkpoints at the second and the last, and exports of both forms."""

    site: object
    base: object
    run: object
    settings: tuple[str, ...]

    def config(self, *more: str) -> jaxthru.RunConfig:
        return self.site.config(*self.settings, *more)

    def logits(self, where, *overrides: str) -> np.ndarray:
        ids = np.arange(4, 24)[None] % 20 + 4
        return load(where, ["precision.compute=float32", *overrides]).logits(ids)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    base, site = folder_of(path, "qwen3"), make_site(path)
    settings = (f"model.pretrained={base}", "lora.rank=4", "lora.dropout=0.1", "optim.learning_rate=1e-2")
    settings += ("train.steps=4", "checkpoint.every=2", "evaluate.rows=4")
    with pytest.MonkeyPatch.context() as patch:
        only(patch, 1)
        made = Trained(site, base, train.run(site.config(*settings), path / "run"), settings)
        for form, alone in (("adapter", True), ("merged", False)):
            export_weights(made.run, path / form, adapter=alone, dtype=None if alone else "float32")
        yield made


@pytest.mark.slow
def test_checkpoints_hold_adapters_alone_and_resume_to_the_bit(trained, tmp_path):
    saved = sorted(path.name for path in trained.run.checkpoints.iterdir())
    assert saved == ["2", "4"]
    tree = ocp.PyTreeCheckpointHandler().metadata(trained.run.checkpoints.absolute() / "4" / "state").tree
    assert tree["params"].keys() == {"layers"}, "nothing of embedding and head"
    assert all(layer.keys() == {"lora"} for layer in tree["params"]["layers"].values())
    assert tree["opt_state"]["slots"]["mu"].keys() == {"layers"}
    again = tmp_path / "again"
    shutil.copytree(trained.run.path, again)
    shutil.rmtree(again / "checkpoints" / "4")
    resumed = train.run(trained.config(), again)
    losses = [[row["loss"] for row in run.read_metrics()] for run in (trained.run, resumed)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert trained.run.read_eval() == resumed.read_eval()
    np.testing.assert_array_equal(trained.logits(trained.run), trained.logits(resumed))
    # And with its layers in a loop or not, and the base in host memory.
    shutil.rmtree(again / "checkpoints" / "4")
    other = train.run(trained.config("model.loop=unroll", "remat.policy=attention"), again)
    found = [row["loss"] for row in other.read_metrics()]
    assert found == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_adapter_and_merged_folder_compute_what_the_run_does(trained):
    folder = trained.run.path.parent
    ours, plain = trained.logits(trained.run), trained.logits(trained.base)
    assert np.max(np.abs(ours - plain)) > 1e-2
    merged = trained.logits(folder / "merged")
    adapter_ = trained.logits(trained.base, f"lora.adapter={folder / 'adapter'}")
    assert np.max(np.abs(merged - ours)) <= 1e-4 and np.max(np.abs(adapter_ - ours)) <= 1e-4
    assert read_config(folder / "merged")[0].layers == read_config(trained.base)[0].layers
    card = (folder / "adapter" / "README.md").read_text()
    assert "base_model_relation: adapter" in card and "library_name: peft" in card


@pytest.mark.slow
def test_training_goes_on_from_an_adapter(trained, tmp_path):
    folder = trained.run.path.parent / "adapter"
    settings = ["lora.rank=0", f"lora.adapter={folder}", "train.steps=1", "lora.dropout=0.0"]
    run = train.run(trained.config(*settings), tmp_path / "on")
    assert run.read_eval()[0]["loss"] == pytest.approx(trained.run.read_eval()[-1]["loss"], rel=1e-5)


@pytest.mark.slow
def test_another_base_is_refused_by_its_content(trained, tmp_path):
    base, again = tmp_path / "qwen3", tmp_path / "run"
    shutil.copytree(trained.base, base)
    shutil.copytree(trained.run.path, again)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (base / "model.safetensors").write_bytes(content)
    message = r"model.safetensors: has another content than in the base of .*; give it as model.pretrained"
    with pytest.raises(InputError, match=message):
        load(again, [f"model.pretrained={base}"])
    (base / "model.safetensors").write_bytes(content + b"0")
    with pytest.raises(InputError):
        load(again, [f"model.pretrained={base}"])


@pytest.mark.slow
def test_an_export_of_adapters_asks_for_its_form(trained, tmp_path):
    with pytest.raises(InputError, match=r"is a run of adapters .*; give --adapter .* or --merged"):
        export_weights(trained.run, tmp_path / "out")
    for form, name in ((True, "--adapter"), (False, "--merged")):
        with pytest.raises(InputError, match=f"{name}: .* is no run; leave it out"):
            export_weights(trained.base, tmp_path / "out", adapter=form)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT takes a name that transformers gives up
def test_peft_computes_the_same(trained):
    """With PyTorch and PEFT installed: mean KL over tokens at most 1e-6."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder = trained.run.path.parent
    base = transformers.AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    ids = torch.arange(4, 24)[None] % 20 + 4
    with torch.no_grad():
        theirs = torch.log_softmax(model(ids).logits.double(), -1).numpy()
    ours = trained.logits(trained.run).astype(np.float64)
    ours -= np.log(np.sum(np.exp(ours), -1, keepdims=True))
    assert np.mean(np.sum(np.exp(theirs) * (theirs - ours), -1)) <= 1e-6
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        found = torch.log_softmax(merged(ids).logits.double(), -1).numpy()
    assert np.mean(np.sum(np.exp(found) * (found - ours), -1)) <= 1e-6
