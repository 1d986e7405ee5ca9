"""Loading, changing and refusing configurations."""

import ast
import dataclasses
import json
import re
import sys
from pathlib import Path

import fuzz_configs
import pytest

from jaxthru import config as configuration
from jaxthru import config_file, train
from jaxthru.config import DataConfig, ModelConfig, RopeScaling, RunConfig, TrainConfig, load
from jaxthru.models import family
from jaxthru.runtime.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.py"
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_survives_its_json(path, tmp_path):
    config = load(path)
    configuration.dump(config, tmp_path / "config.json")
    assert load(tmp_path / "config.json") == config
    assert json.loads((tmp_path / "config.json").read_text()).keys() == {
        field.name for field in dataclasses.fields(RunConfig)
    }


def imported(code: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {getattr(node, "module", None) or node.names[0].name for node in nodes}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_import_nothing_else(path):
    assert imported(path.read_text()) == {"jaxthru.config"}


def test_pages_import_config_classes_from_config_alone():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            found = re.findall(r"from (jaxthru[\w.]*) import [^\n]*Config\b", code)
            assert {*found} <= {"jaxthru.config"}, page


def test_overrides_take_the_declared_type():
    overrides = [
        *("train.steps=7", "optim.learning_rate=1", "data.groups=4", "model.tied_embeddings=true"),
        *("model.rope_scaling.factor=2", "model.loop=unroll", "data.mix=7", "train.rows=1_6"),
    ]
    config = load(QUICKSTART, overrides)
    assert (config.train.steps, config.train.rows, config.data.groups) == (7, 16, 4)
    assert isinstance(config.optim.learning_rate, float)
    assert config.model.tied_embeddings is True
    assert config.model.rope_scaling == RopeScaling(factor=2.0)
    assert config.data.mix == "7"
    assert load(QUICKSTART, ["data.groups=None", "model.rope_scaling=None"]).data.groups is None


@pytest.mark.parametrize(
    ("text", "steps"), [("1e3", 1000), ("1_0e2", 1000), ("20.0", 20), ("2E1", 20), ("007", 7)]
)
def test_a_whole_number_may_be_written_as_a_float(text, steps):
    found = load(QUICKSTART, [f"train.steps={text}", "data.groups=4e0"])
    assert (found.train.steps, found.data.groups) == (steps, 4)
    assert type(found.train.steps) is int and type(found.data.groups) is int


def test_a_family_s_own_keys_are_suggested(own):
    with pytest.raises(InputError, match=r"unknown key windows = '3'; did you mean 'model.windows'\?"):
        load(QUICKSTART, ["windows=3", "model.family=mine.shape", "model.width=3"])


def test_a_configuration_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("quickstart") == load("quickstart.py") == load(QUICKSTART)
    (tmp_path / "configs").mkdir()
    text = QUICKSTART.read_text()
    (tmp_path / "configs" / "quickstart.py").write_text(text.replace("steps=200", "steps=300"))
    (tmp_path / "configs" / "of.mine.py").write_text(text.replace("steps=200", "steps=400"))
    (tmp_path / "quickstart").mkdir()  # a folder is no configuration
    assert [load(name).train.steps for name in ("quickstart", "of.mine")] == [300, 400]
    (tmp_path / "qwen3_8b").write_text("a file of this very name comes first")
    with pytest.raises(InputError, match=r"qwen3_8b: must end in \.py or \.json"):
        load("qwen3_8b")


def test_only_a_checkout_has_shipped_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_file, "CHECKOUT", tmp_path / "site-packages")
    (tmp_path / "site-packages" / "configs").mkdir(parents=True)
    (tmp_path / "site-packages" / "configs" / "quickstart.py").write_text("another package's")
    with pytest.raises(InputError, match=r"^--config quickstart: no such file$"):
        load("quickstart")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("quikstart", "'quickstart'"),
        ("quikstart.py", "'quickstart'"),
        ("configs/quikstart.py", "'configs/quickstart.py'"),
        ("nowhere/quikstart.py", "'quickstart'"),
        ("runs/1/confg.json", "'runs/1/config.json'"),
        ("zzzzzz", None),
    ],
)
def test_a_wrong_name_lists_those_there_are(given, near, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "1" / "config.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        load(given)
    said = str(caught.value)
    hint = f"; did you mean {near}?" if near else ";"
    names = ", ".join(path.stem for path in CONFIGS)
    assert said == f"--config {given}: no such file{hint} There are, by name: {names}"


def test_the_folder_of_a_run_is_no_configuration_but_has_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a folder; did you mean '.*/config.json'\?$"):
        load(tmp_path)


def test_keys_that_fit_only_together():
    assert load(QUICKSTART, ["model.heads=6", "model.kv_heads=3"]).model.kv_heads == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "unknown key train.step = '3'; did you mean 'train.steps'"),
        ("trian.steps=3", "unknown key trian.steps = '3'; did you mean 'train.steps'"),
        (
            "train.stopped_exit_code=0",
            "train.stopped_exit_code = 0: must be from 1 to 255, and none of 0, 1, 2, ",
        ),
        ("train.stopped_exit_code=160", "70, 130, 160, which have other meanings"),
        ("trian=3", "unknown key trian = '3'; did you mean 'train'"),
        ("learning_rate=1e-3", "unknown key learning_rate = '1e-3'; did you mean 'optim.learning_rate'?"),
        ("learing_rate=1e-3", "unknown key learing_rate = '1e-3'; did you mean 'optim.learning_rate'?"),
        ("optim.learing_rate=1", "unknown key optim.learing_rate = '1'; did you mean 'optim.learning_rate'?"),
        ("optm.learing_rate=1", "did you mean 'optim.learning_rate'?"),
        ("model.learning_rate=1", "did you mean 'optim.learning_rate'?"),
        ("steps=3", "unknown key steps = '3'; did you mean 'train.steps' or 'profile.steps'?"),
        ("model.factor=2", "did you mean 'model.rope_scaling.factor'?"),
        ("model.rope_scaling.factr=2", "did you mean 'model.rope_scaling.factor'?"),
        ("zzz.qqq=1", "unknown key zzz.qqq = '1'; the groups are checkpoint, cost, data, "),
        ("metrics.zzz=1", "unknown key metrics.zzz = '1'; the keys of metrics are tensorboard"),
        ("model.attention.x=xla", "unknown key model.attention.x = 'xla'; the keys of model are embed, "),
        ("kernels.attention.x=xla", "unknown key kernels.attention.x = 'xla': kernels.attention has no keys"),
        ("train.steps.more=3", "unknown key train.steps.more = '3': train.steps has no keys"),
        ("train.steps=many", "train.steps = 'many': must be int"),
        ("train.steps=1.5", "train.steps = '1.5': must be int"),
        ("train.steps=1e-3", "train.steps = '1e-3': must be int"),
        ("train.steps=inf", "train.steps = 'inf': must be int"),
        ("train.steps=1e400", "train.steps = '1e400': must be int"),
        ("train.seed=1e18", "train.seed = '1e18': must be int"),  # not every whole number near it is a float
        ("train.steps=true", "train.steps = 'true': must be int"),
        ("data.linear_cost=1", "data.linear_cost = 1.0, data.attention_cost = None: must both be given"),
        ("train.steps=0", "train.steps = 0: must be at least 1"),
        ("train.deterministic=1", "train.deterministic = '1': must be bool"),
        (
            "model.loop=scan_",
            "model.loop = 'scan_': must be one of 'auto', 'scan', 'unroll'; did you mean 'scan'",
        ),
        ("train=3", "train is a group"),
        ("train.steps", "must look like group.key=value"),
        ("train.microbatches=3", "train.rows = 8: must be a multiple of train.microbatches = 3"),
        ("model.heads=3", "model.heads = 3: must be a multiple of model.kv_heads"),
        ("model.head_dim=7", "model.head_dim = 7: must be even"),
        ("data.sequence=10000", "data.sequence = 10000: longer than model.max_sequence"),
        ("data.groups=3", "data.groups = 3: must divide train.rows"),
        ("optim.b1=1", "optim.b1 = 1.0: must be at least 0 and below 1"),
        ("optim.learning_rate=nan", "optim.learning_rate = nan"),
        ("optim.learning_rate=inf", "optim.learning_rate = inf: must be finite"),
        ("train.steps=2147483648", "train.steps = 2147483648: must be below 2**31"),
        ("train.seed=9223372036854775808", "train.seed = 9223372036854775808: must be at least 0, below"),
        ("offload.level=optimiser", "did you mean 'optimizer'"),
        ("mesh.data=0", "mesh.data = 0: must be -1"),
        ("mesh.data=-1", "at most one axis may be -1"),
        ("evaluate.rows=-1", "evaluate.rows = -1"),
        ("checkpoint.keep=0", "checkpoint.keep = 0"),
        ("profile.at=9999", "profile.at = 9999: beyond the last step"),
        (
            "model.family=lama",
            "model.family = 'lama': ModuleNotFoundError: No module named 'lama'; did you mean 'l",
        ),
        ("model.family=os.path", "model.family = 'os.path': must define `Config`"),
        ("model.family=", "model.family = '': ValueError"),
        ("model.family.name=3", "unknown key model.family.name = '3'"),
    ],
)
def test_refuses(override, message):
    with pytest.raises(InputError) as caught:
        load(QUICKSTART, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "no such file"),
        ("a.yaml", "", "must end in .py or .json"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[]", "must hold one JSON object"),
        ("a.json", '{"train": 3}', "train = 3: must be a group"),
        ("a.json", '{"train": {"stepz": 3}}', "unknown key train.stepz = 3; did you mean 'train.steps'"),
        ("a.json", '{"train": {"steps": "3"}}', "train.steps = '3': must be int"),
        ("a.json", '{"model": {"family": 3}}', "model.family = 3: must be str"),
        ("a.json", '{"model": {"family": "lama"}}', "is no family of jaxthru; did you mean 'llama'"),
        ("a.json", '{"model": {"family": "not.imported"}}', "what is stored imports no code"),
        ("a.json", '{"model": 3}', "model = 3: must be a group"),
        ("a.py", "", "must define `def config()"),
        ("a.py", "def config(): return 3", "must return a RunConfig"),
        ("a.py", "def config(:", "a.py"),
    ],
)
def test_refuses_files(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_what_is_no_text_and_no_group(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="not valid JSON"):
        load(path)
    path.write_text('{"train": 3}')
    with pytest.raises(InputError, match="train = 3: must be a group"):
        load(path, ["train.steps=4"])


def test_types_are_checked_in_python_too():
    with pytest.raises(InputError, match=r"data.mix = 3: must be str"):
        RunConfig(data=DataConfig(mix=3))
    with pytest.raises(InputError, match="data is TrainConfig: must be a DataConfig"):
        RunConfig(data=TrainConfig())


def test_what_may_change_when_a_run_is_resumed(tmp_path):
    old = load(QUICKSTART)
    lines = configuration.check_change(
        old, load(QUICKSTART, ["train.steps=400", "mesh.fsdp=2", "checkpoint.keep=5"]), tmp_path
    )
    assert lines == [
        "checkpoint.keep (2 → 5)",
        "mesh.fsdp (-1 → 2)",
        f"train.steps ({old.train.steps} → 400)",
    ]
    assert configuration.check_change(old, old, tmp_path) == []
    with pytest.raises(InputError, match=r"holds a run of another configuration: model.layers \(4 → 5\);"):
        configuration.check_change(old, load(QUICKSTART, ["model.layers=5", "train.steps=9"]), tmp_path)
    with pytest.raises(InputError, match=r"model.rope_scaling"):
        configuration.check_change(old, load(QUICKSTART, ["model.rope_scaling.factor=9"]), tmp_path)


def test_a_run_s_own_config_that_cannot_be_used_is_said_to_be_that(tmp_path):
    path = tmp_path / "config.json"
    for content, said in (
        (None, "no such file"),
        ("", "not valid JSON"),
        ('{"train": {"rnws": 8}}', "train.rnws"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(InputError) as refused:
            configuration.load_own(path)
        line = str(refused.value)
        assert (
            line.startswith(f"{tmp_path} holds a run whose own config.json cannot be used: ") and said in line
        )
        assert line.endswith("put it back as it was, or give another --run-dir")


OWN = """
import dataclasses
from jaxthru.models.family import FamilyConfig


@dataclasses.dataclass(frozen=True)
class Config(FamilyConfig):
    width: int
    attention: str = "own"
    windows: tuple[int, ...] = (1, 2)


def stages(config): ...
def train_flops(config, tokens, attention_span): ...
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A family of the user's own, `mine.shape`. Returns what forgets that it was imported."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shape.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        for name in ("mine", "mine.shape"):
            sys.modules.pop(name, None)

    yield forget
    forget()


def test_a_family_of_one_s_own_is_named_by_hand(own, tmp_path):
    named = ["model.width=3", "model.family=mine.shape", "model.loop=unroll"]
    with pytest.raises(InputError, match=r"model.width is missing"):
        load(QUICKSTART, named[1:])
    config = load(QUICKSTART, [*named, "data.sequence=100_000"])
    assert (config.model.family, config.model.width, config.model.loop) == ("mine.shape", 3, "unroll")
    assert config.train == load(QUICKSTART).train and config.kernels.attention == "xla"
    path = tmp_path / "config.json"
    configuration.dump(dataclasses.replace(config, model=family.module_of(config.model).Config(4)), path)
    tree = json.loads(path.read_text())["model"]
    assert next(iter(tree.items())) == ("family", "mine.shape") and tree["attention"] == "own"
    assert load(path, ["model.attention=other"]).model.attention == "other"  # the old key is llama's
    assert load(path).model.windows == (1, 2)
    assert load(path, ["model.family=llama", "data.sequence=64"]).model == ModelConfig()


def test_what_is_stored_imports_no_family(own, tmp_path):
    path = tmp_path / "config.json"
    configuration.dump(load(QUICKSTART, ["model.family=mine.shape", "model.width=3"]), path)
    own()
    for read in (load, configuration.load_own):
        with pytest.raises(
            InputError, match=r"model.family = 'mine.shape': is no family of .* imports no code"
        ):
            read(path)
    with pytest.raises(InputError, match=r"model.family = 'mine.shape': is no family"):
        load(path, ["model.width=4"])
    assert "mine.shape" not in sys.modules
    assert load(path, ["model.family=mine.shape"]).model.width == 3
    assert configuration.load_own(path).model.width == 3  # whoever resumes has named it


def test_a_py_config_brings_its_own_family(own, tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "from jaxthru.config import *\nfrom mine.shape import Config\n"
        "def config(): return RunConfig(model=Config(5))\n"
    )
    config = load(path, ["model.width=6"])
    assert config.model.family == "mine.shape" and config.model.width == 6
    path.write_text(f"from jaxthru.config import *\n{OWN}\ndef config(): return RunConfig(model=Config(5))\n")
    with pytest.raises(InputError, match=r"model.family = '<run_path>': is no family"):
        load(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "@dataclasses.dataclass(frozen=True)\n",
            "",
            "model.family = 'mine.shape': must define `Config`, a frozen dataclass and FamilyConfig",
        ),
        (
            "(FamilyConfig)",
            "",
            "model.family = 'mine.shape': must define `Config`, a frozen dataclass and Fa",
        ),
        ("def stages", "def stage", "model.family = 'mine.shape': must define `stages`, see jaxthru.models."),
        ("def train_flops", "def flops", "model.family = 'mine.shape': must define `train_flops`, see "),
        (
            '= "own"\n',
            '= "own"\n\n    def __post_init__(self):\n        raise ValueError("width: is odd")\n\n',
            "model: width: is odd",
        ),
        ("import dataclasses", "import dataclass", "model.family = 'mine.shape': ModuleNotFoundError: No mo"),
    ],
)
def test_a_family_that_lacks_something_is_refused_in_one_line(own, tmp_path, capsys, old, new, said):
    (tmp_path / "mine" / "shape.py").write_text(OWN.replace(old, new, 1))
    named = [word for key in ("family=mine.shape", "width=3") for word in ("--set", f"model.{key}")]
    assert train.main(["--config", str(QUICKSTART), *named, "--run-dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxthru: {said}") and not (tmp_path / "run").exists()


def test_a_family_of_one_s_own_is_not_taken_for_a_shipped_one(tmp_path, monkeypatch, capsys):
    """Its module would have the whole name that stands for one of jaxthru's."""
    (tmp_path / "llama.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "config.py"
    path.write_text(
        "from jaxthru.config import *\nfrom llama import Config\n"
        "def config(): return RunConfig(model=Config(5))\n"
    )
    try:
        assert train.main(["--config", str(path), "--run-dir", str(tmp_path / "run")]) == 2
    finally:
        sys.modules.pop("llama", None)
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.family = 'llama': is another class than that of model; define `Config` in a module" in line
    assert not (tmp_path / "run").exists()


def test_another_family_is_another_run(own, tmp_path):
    old = load(QUICKSTART)
    new = load(QUICKSTART, ["model.family=mine.shape", "model.width=3", "train.steps=9"])
    with pytest.raises(
        InputError, match=r"another configuration: model.family \('llama' → 'mine.shape'\); give"
    ):
        configuration.check_change(old, new, tmp_path)
    assert configuration.check_change(old, load(QUICKSTART, ["model.loop=unroll"]), tmp_path)
    kernels = load(QUICKSTART, ["kernels.attention=triton"])
    assert configuration.check_change(old, kernels, tmp_path) == ["kernels.attention ('xla' → 'triton')"]


@pytest.mark.parametrize("case", list(fuzz_configs.cases(60)), ids=lambda case: case.what)
def test_whatever_is_written_is_taken_or_refused_in_one_line(case, tmp_path):
    fuzz_configs.check(case, tmp_path)
