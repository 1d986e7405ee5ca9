"""The `jaxthru` command is what the modules are, and says where to go."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxthru import __main__ as command
from jaxthru import train
from jaxthru.runtime import errors

ROOT = Path(__file__).resolve().parent.parent


def ended(function, *arguments) -> object:
    """Returns how a command ends: what it returns, or the code that it exits with."""
    try:
        return function(*arguments)
    except SystemExit as end:
        return end.code


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """The training command sets up this process's memory and ends it: not that of the tests."""
    monkeypatch.setattr(train.allocator, "keep_freed", lambda: False)
    monkeypatch.setattr(train, "leave", lambda code, hung: sys.exit(code))


def test_it_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"jaxthru": "jaxthru.__main__:main"}


def test_help_and_version_need_no_jax():
    code = (
        "import sys\nfrom jaxthru.__main__ import main\n"
        "codes = [main([word]) for word in ('--help', '-h', '--version', 'tarin')]\n"
        "print(codes, [name for name in ('jax', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *said, version, last = done.stdout.splitlines()
    assert last == "[0, 0, 0, 2] []"
    assert version.startswith("jaxthru ") and said[: len(said) // 2] == said[len(said) // 2 :]
    assert done.stderr == "jaxthru: unknown command 'tarin'; did you mean 'train'?\n"
    for name, (*_, line) in command.COMMANDS.items():
        assert any(one.split() == [name, *line.split()] for one in said)
    assert "docs/index.md" in done.stdout and max(map(len, said)) <= 80


def test_python_m_is_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "jaxthru", "--hlep"], cwd=ROOT, capture_output=True, text=True
    )
    said = "jaxthru: unknown option '--hlep'; did you mean '--help'?\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_without_a_command_it_says_which_there_are(capsys):
    assert command.main([]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.startswith("usage: jaxthru COMMAND")
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out == streams.err
    assert command.main(["--help"], "python -m jaxthru") == 0
    assert "first run: python -m jaxthru train --config quickstart" in capsys.readouterr().out


CALLS = (
    *(("train", "--help"), ("plan", "--help"), ("plan", "data", "--help"), ("plan", "memory", "--help")),
    *(("data", "--help"), ("data", "prepare", "--help"), ("data", "inspect", "--help")),
    *(("profile", "--help"), ("profile", "compare", "--help"), ("config", "--help")),
    *(("supervise", "--help"), ("plan", "goodput", "--help")),
)


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_every_help_ends_with_where_to_go(call, capsys):
    name, *rest = call
    assert ended(command.main, [*call]) == 0
    out = capsys.readouterr().out
    words = " ".join(call[:-1])
    assert out.startswith(f"usage: jaxthru {words} [-h]")
    *_, example, settings, pages = out.splitlines()
    assert example.startswith(f"example:  jaxthru {words} ") and len(example) <= 80
    assert "jaxthru config, or python -m jaxthru.config," in settings and pages.endswith("docs/index.md")
    module, function, _ = command.COMMANDS[name]
    assert ended(getattr(importlib.import_module(module), function), rest) == 0
    alone = capsys.readouterr().out
    assert alone.startswith(f"usage: python -m jaxthru.{words} [-h]")
    assert alone.splitlines()[-3] == example.replace("jaxthru ", "python -m jaxthru.", 1)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (["train", "--config", "nowhere"], 2),
        (["train", "--config", "quickstart", "--set", "train.stepz=3"], 2),
        (["train"], 2),
        (["plan"], 2),
        (["plan", "data", "--config", "nowhere"], 2),
        (["data", "inspect", "nowhere"], 2),
        (["profile", "nowhere"], 2),
        (["config", "nowhere"], 2),
        (["config", "metrics"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_codes_and_messages_are_the_modules_own(call, code, capsys):
    name, *rest = call
    assert ended(command.main, call) == code
    whole = capsys.readouterr()
    module, function, _ = command.COMMANDS[name]
    assert ended(getattr(importlib.import_module(module), function), rest, f"jaxthru {name}") == code
    assert capsys.readouterr() == whole and "Traceback" not in whole.err


def test_training_owns_its_process(monkeypatch, capsys):
    """As `python -m jaxthru.train` does: memory that is freed is kept, and a failure ends at once."""
    called = []
    monkeypatch.setattr(train.allocator, "keep_freed", lambda: called.append("keep_freed"))
    monkeypatch.setattr(train, "main", lambda argv, prog: called.append((argv, prog)) or 1)
    monkeypatch.setattr(train, "leave", lambda code, hung: called.append(code))
    command.main(["train", "--config", "quickstart"])
    assert called == ["keep_freed", (["--config", "quickstart"], "jaxthru train"), 1]


def test_modules_of_the_current_folder_are_found(tmp_path, monkeypatch):
    """`python -m` begins `sys.path` with the current folder; what pip installs as a script does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setitem(command.COMMANDS, "train", ("jaxthru.runtime.errors", "one_line", ""))
    monkeypatch.setattr(errors, "one_line", lambda argv, prog: 0)
    assert command.main(["train"]) == 0
    assert sys.path == [str(tmp_path), "elsewhere"]
