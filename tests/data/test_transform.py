"""A transform is what the mix says, lies beside it, and is told in one line where it cannot be."""

import json
import sys
from importlib import metadata

import pytest

from jaxthru.data import transform as module
from jaxthru.data.__main__ import main
from jaxthru.data.transform import Transform, apply, find_transform
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


def test_a_store_runs_nothing(tmp_path, monkeypatch, capsys):
    """A store that comes with somebody's data may name what it likes: the mix decides."""
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
    for name in ("os:system", "subprocess:getoutput", "evil:run", ""):
        (path.parent / "evil.py").write_text("import os\nrun = os.system\n")
        path.write_text(json.dumps(manifest | {"transform": name}))
        capsys.readouterr()
        assert main(["inspect", "mix.toml", "--sequence", "32"]) == (2 if name else 0)
        assert not ran.exists()
        said = capsys.readouterr().err
        assert not name or f"was made with transform = {name!r}, the mix has ''" in said


def test_a_transform_that_would_end_the_process_costs_its_text():
    with pytest.raises(InputError, match="the transform raised SystemExit: 0"):
        apply(lambda text: sys.exit(0), "text")
