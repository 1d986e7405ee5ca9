"""`jaxthru config`: what it says of every key is what the dataclasses say."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxthru import config as configuration
from jaxthru import config_reference as reference
from jaxthru.config import RunConfig
from jaxthru.models import family
from jaxthru.runtime import plain

ROOT = Path(__file__).resolve().parent.parent
KEYS = {key.name: key for group in reference.groups().values() for key in group.keys}


def test_every_key_of_a_configuration_is_there_with_its_meaning():
    nested = {name for name, kind in configuration.declared_keys().items() if name in vars(RunConfig())}
    assert KEYS.keys() == configuration.declared_keys().keys() - nested
    assert not [key.name for key in KEYS.values() if len(key.meaning) < 10]
    assert not [group.name for group in reference.groups().values() if not group.meaning]


@pytest.mark.parametrize("name", family.SHIPPED)
def test_every_shipped_family_says_what_its_keys_mean(name):
    assert all(key.meaning for key in reference.groups(name)["model"].keys)


def defaults_of(group: str) -> dict:
    """Returns {key: default} of a group that is None by default."""
    fields = dataclasses.fields(configuration.group_in(KEYS[group].declared))
    missing = dataclasses.MISSING
    return {each.name: reference.REQUIRED if each.default is missing else each.default for each in fields}


def test_defaults_are_those_of_the_classes():
    tree = configuration.to_dict(RunConfig())
    for name, key in KEYS.items():
        *path, last = name.split(".")
        within = tree
        for index, part in enumerate(path):
            within = within[part] or defaults_of(".".join(path[: index + 1]))
        assert key.default == within[last], name


def test_what_is_shown_can_be_set():
    """Each default, and each choice, is read back from the text that is shown."""
    for name, key in KEYS.items():
        if name not in ("model.rope_scaling", "checkpoint.local") and key.shown is not None:
            assert plain.parse(name, key.shown, key.declared) == key.default
    assert KEYS["optim.schedule"].kind == "one of cosine, wsd, constant"
    assert KEYS["data.groups"].kind == "int or None"
    assert KEYS["model.rope_scaling"].kind == "group of keys or None"
    assert KEYS["train.deterministic"].kind == "bool"


def test_it_says_what_may_change_when_a_run_is_resumed(tmp_path):
    assert KEYS["train.steps"].changeable and KEYS["kernels.attention"].changeable
    assert not KEYS["optim.learning_rate"].changeable and not KEYS["model.rope_scaling.factor"].changeable
    for name, change in (("train.steps", "train.steps=300"), ("data.mix", "data.mix=other")):
        old, new = (configuration.load("quickstart", settings) for settings in ((), (change,)))
        try:
            taken = bool(configuration.check_change(old, new, tmp_path))
        except configuration.InputError:
            taken = False
        assert taken == KEYS[name].changeable


@dataclasses.dataclass(frozen=True)
class Base:
    """Says what it is of.

    first: of a base,
        over two lines. Its second sentence: with a colon.
    second, third: of two keys
    fourth: `second: not a key here`, no end
    """

    first: int
    second: int = 0
    third: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Derived(Base):
    """first: said anew. fourth: its own (see above). Lead: not a key."""

    fourth: str = "x"


@dataclasses.dataclass(frozen=True)
class Silent(Derived):
    pass


def test_meanings_are_read_from_docstrings():
    lead, found = reference.documented(Silent)
    assert lead == ""
    assert found == {
        "first": "Said anew.",
        "second": "Of two keys fourth: `second: not a key here`, no end",  # `fourth` is no key of that class
        "third": "Of two keys fourth: `second: not a key here`, no end",
        "fourth": "Its own (see above). Lead: not a key.",
    }
    lead, found = reference.documented(Base)
    assert lead == "Says what it is of."
    assert found["first"] == "Of a base, over two lines. Its second sentence: with a colon."


def test_the_page_is_what_the_command_makes(capsys):
    assert reference.main(["--markdown"]) == 0
    page = capsys.readouterr().out
    assert page == (ROOT / "docs" / "configuration.md").read_text(), (
        "python -m jaxthru.config --markdown > docs/configuration.md"
    )
    assert page.split("\n\n")[1].startswith("You want to change a setting: ")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}`" for name in KEYS]


def test_markdown_leaves_code_alone():
    assert reference._markdown("a_b * `c_d|<e>` <f>") == r"a\_b \* `c_d\|<e>` &lt;f>"


def test_plain_text_of_80_columns_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert reference.main([]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    assert [line.split(" ")[0] for line in out.splitlines() if "  (" in line and line[:1] != " "] == [*KEYS]


def test_a_terminal_has_colours_and_its_own_width(capsys, monkeypatch):
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "60"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert reference.main(["evaluate"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1mevaluate.every = 0\x1b[0m  (int; may change)" in out


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("metrics", ["metrics.tensorboard", "metrics.trackers"]),
        ("train.steps", ["train.steps"]),
        ("model.rope_scaling", [name for name in KEYS if name.startswith("model.rope_scaling")]),
        ("model.rope_scaling.factor", ["model.rope_scaling.factor"]),
    ],
)
def test_one_group_or_key(name, keys, capsys):
    assert reference.main([name]) == 0
    out = capsys.readouterr().out
    assert [line.split(" ")[0] for line in out.splitlines() if "  (" in line and line[:1] != " "] == keys
    assert out.startswith(f"{name.partition('.')[0]}: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optm"], "no group or key optm; did you mean 'optim'?"),
        (["learning_rate"], "no group or key learning_rate; did you mean 'optim.learning_rate'?"),
        (["optim.learing_rate"], "no group or key optim.learing_rate; did you mean 'optim.learning_rate'?"),
        (["model.famly"], "no group or key model.famly; did you mean 'model.family'?"),
        (["zzz"], "no group or key zzz; valid: checkpoint, cost, data, "),
        (
            ["--set", "train.steps=3"],
            "--set train.steps=3: only model.family=NAME decides which keys there are",
        ),
        (["--set", "model.family=lama"], "model.family = 'lama': "),
        (["optim", "--markdown"], "--markdown optim: the page has all groups; give none"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert reference.main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.startswith(f"jaxthru: {said}") and streams.err.count("\n") == 1


def test_keys_of_a_family_of_one_s_own(tmp_path):
    """In a process of its own: `python -m jaxthru.config` is a module twice, as `__main__` and imported."""
    (tmp_path / "shape.py").write_text(
        "import dataclasses\nfrom jaxthru.models.family import FamilyConfig\n\n\n"
        "@dataclasses.dataclass(frozen=True)\nclass Config(FamilyConfig):\n"
        '    """Mine.\n\n    width: of what is wide."""\n\n'
        "    width: int\n    sizes: tuple[int, ...] = (1, 2)\n\n\n"
        "def stages(config): ...\ndef train_flops(config, tokens, attention_span): ...\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "jaxthru.config", "model", "--set", "model.family=shape"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    for line in (
        "model.family = shape  (str; fixed)",
        "model.width  (int; fixed; must be given)\n    Of what is wide.",
        "model.sizes = [1, 2]  (list of int; fixed)",
    ):
        assert line in done.stdout
