"""A transform is what the mix says, lies beside it, and is told in one line where it cannot be."""

import json
import sys
from importlib import metadata

import pytest

from jaxthru.data.__main__ import main
from jaxthru.data.loading.dataset import DataConfig, open_data
from jaxthru.data.sources import transforms as module
from jaxthru.data.sources.transforms import Transform, apply, find_transform
from jaxthru.data.store.mix_file import load_mix
from jaxthru.data.store.prepare import open_stores
from jaxthru.plan.__main__ import main as plan
from jaxthru.runtime.errors import InputError


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./module_a.py:f", r"no module '\./module_a\.py' lies in .*; give module:function of one that"),
        ("os:system", "no module 'os' lies in "),
        ("subprocess:getoutput", r"no module 'subprocess' lies in .*entry point of jaxthru\.transforms"),
        ("builtins:exec", "no module 'builtins' lies in "),
        ("../outside:f", r"no module '\.\./outside' lies in "),
        ("eval", "no installed package declares it as an entry point of jaxthru.transforms"),
        ("module_a:f", "is not a function"),
        ("module_a:g", r"cannot be imported \(AttributeError: module 'module_a_\w+' has no attribute 'g'"),
        ("module_b:f", r"cannot be imported \(SyntaxError: invalid syntax"),
        ("module_c:f", r"cannot be imported \(NameError: name 'undefined' is not defined"),
        ("module_d:f", r"cannot be imported \(SystemExit: 0"),  # the command ended so, and with success
    ],
)
def test_what_cannot_be_found(tmp_path, name, why):
    lines = {"a": "f = 3\n", "b": "def f(:\n", "c": "undefined\n", "d": "import sys\nsys.exit(0)\n"}
    folder = tmp_path / "mix"
    folder.mkdir()
    for letter, text in lines.items():
        (folder / f"module_{letter}.py").write_text(text)
    (tmp_path / "outside.py").write_text("def f(text):\n    return text\n")
    with pytest.raises(InputError, match=f"^transform = {name!r}: {why}"):
        find_transform(Transform(name, str(folder)))


def test_a_module_beside_the_mix_is_found_by_its_file(tmp_path, monkeypatch):
    """Whatever else has its name; what it imports from beside it is found, too, and hides nothing."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number in range(2):
        folder = tmp_path / str(number)
        (folder / "clean").mkdir(parents=True)
        (folder / "json.py").write_text(f"def mark(text):\n    return text + {str(number)!r}\n")
        (folder / f"beside_{number}.py").write_text("import json\nLOADS = json.loads\n")
        (folder / "clean" / "html.py").write_text(
            f"import beside_{number}\ndef strip(text):\n    return beside_{number}.LOADS(text)\n"
        )
        assert find_transform(Transform("json:mark", str(folder)))("a") == f"a{number}"
        assert find_transform(Transform("clean.html:strip", str(folder)))('"b"') == "b"
    assert json.loads("1") == 1


def test_an_installed_package_may_offer_transforms(monkeypatch):
    entry = metadata.EntryPoint("strip_html", "html:unescape", module.GROUP)
    monkeypatch.setattr(module.metadata, "entry_points", lambda group: [entry] * (group == module.GROUP))
    assert find_transform(Transform("strip_html"))("&lt;") == "<"
    with pytest.raises(InputError, match=r"declares it .*; did you mean 'strip_html'"):
        find_transform(Transform("strip_htm"))


@pytest.fixture
def attacked(tmp_path, monkeypatch):
    """Returns, in a folder with a prepared online source, what has its store name a transform. Whatever runs
    the texts makes a file `ran`."""
    monkeypatch.chdir(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "notes.jsonl").write_text(
        "".join(json.dumps({"text": f"touch {ran} # {number}"}) + "\n" for number in range(20))
    )
    (tmp_path / "mix.toml").write_text(
        "held_out = 0\n[tokenizer]\nvocabulary = 300\n"
        '[sources.local_jsonl]\npaths = ["notes.jsonl"]\nweight = 1\nonline = true\n'
    )
    assert main(["prepare", "mix.toml"]) == 0
    [path] = (tmp_path / "store").glob("*.text/manifest.json")
    manifest = json.loads(path.read_text())
    (path.parent / "evil.py").write_text("import os\nrun = os.system\n")
    return lambda name: path.write_text(json.dumps(manifest | {"transform": name}))


COMMANDS = {
    "prepare": lambda: main(["prepare", "mix.toml"]),
    "inspect": lambda: main(["inspect", "mix.toml", "--sequence", "32"]),
    "plan data": lambda: plan(["data", "--config", "config.json"]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["os:system", "subprocess:getoutput", "evil:run"])
def test_a_store_runs_nothing(attacked, command, name, capsys, tmp_path):
    """A store that comes with somebody's data may name what it likes: the mix decides."""
    keys = {"train": {"rows": 2, "steps": 4}, "data": {"mix": "mix.toml", "sequence": 32}}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert COMMANDS[command]() == 0
    attacked(name)
    capsys.readouterr()
    assert COMMANDS[command]() == 2
    said = capsys.readouterr().err
    assert f"was made with transform = {name!r}, the mix has ''" in said and said.count("jaxthru: ") == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("begun", [False, True])
def test_training_runs_nothing_that_a_store_names(attacked, begun, tmp_path):
    """Neither where it opens the store, nor where the store says so afterwards to the token workers."""
    keys = open_stores(load_mix("mix.toml"), tmp_path / "store").keys
    config = DataConfig("mix.toml", 32, loaders=1)
    with open_data(config) as data:
        attacked("os:system")
        with data.train_batches(((0, data.mixture),), seed=0, rows=2, steps=3) as batches:
            assert len(list(batches)) == 3
    with pytest.raises(InputError, match="was made with transform = 'os:system'"):
        open_data(config, prepare=not begun, begun=keys if begun else None)
    assert not (tmp_path / "ran").exists()


def test_a_run_whose_mix_has_another_transform_is_told_which_it_had(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.py").write_text("upper, lower = str.upper, str.lower\n")
    (tmp_path / "notes.jsonl").write_text('{"text": "Some Words"}\n')
    mix = "held_out = 0\n[tokenizer]\nvocabulary = 300\n[sources.local_jsonl]\n"
    mix += 'paths = ["notes.jsonl"]\nweight = 1\nonline = true\ntransform = "case:upper"\n'
    (tmp_path / "mix.toml").write_text(mix)
    keys = open_stores(load_mix("mix.toml"), tmp_path / "store").keys
    (tmp_path / "mix.toml").write_text(mix.replace("upper", "lower"))
    with pytest.raises(
        InputError, match=r"'case:upper', the mix has 'case:lower'; a run that began with the"
    ):
        open_stores(load_mix("mix.toml"), tmp_path / "store", begun=keys)


def test_a_transform_that_would_end_the_process_costs_its_text():
    with pytest.raises(InputError, match="the transform raised SystemExit: 0"):
        apply(lambda text: sys.exit(0), "text")
