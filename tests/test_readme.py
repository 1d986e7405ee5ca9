"""What README and docs promise: commands parse and run, links lead somewhere, the map is up to date."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, SETTINGS, Workplace, make_workplace

from jaxthru import __main__ as front
from jaxthru import config as configuration
from jaxthru.runtime.errors import InputError

README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted(ROOT.glob("docs/**/*.md"))

NOT_TYPED = {
    "use an NVIDIA GPU": "needs a GPU",
    "use a TPU": "needs a TPU",
    "train all of Llama 3 8B on one GPU of 141 GB": "needs that GPU: 126 GiB at its peak",
    "train published weights further (Llama, Mistral, Qwen, Gemma)": "needs some; see tests/huggingface",
    "launch on several hosts": "needs several hosts; tests/test_launch.py reads the scripts",
    "see what was measured": "is a page",
    "change jaxthru itself": "is a page",
}
"""Rows of README's table that a CPU cannot do, by their first cell, and why."""

STEPS, PROFILED_STEPS = 6, 24  # enough for profile.at=20
TINY = SETTINGS | {
    "model.kv_heads": 2,
    "optim.warmup_ratio": 0.05,
    "train.steps": STEPS,
    "checkpoint.every": 20,
}
"""Settings that make any shape one that a CPU trains in seconds."""
EXPERTS = {"model.experts": 8, "model.top_k": 2, "model.expert_mlp": 32}
"""Further ones of a mixture of experts."""
TALK = "data.mix=chats.toml"
MIXES = {"sft": {"MIX": "chats.toml"}, "dpo": {"MIX": "pairs.toml"}}
"""What stands for MIX behind these configurations, where others read plain text."""
TUNED = {key: value for key, value in TINY.items() if not key.startswith("model.")} | {
    "data.sequence": 128,
    "precision.compute": "float32",
    "train.steps": 6,
}
"""The same beside a folder of weights, whose shape is its own, and which takes longer."""


def rows(page: str) -> dict[str, list[str]]:
    """Returns {first cell: code in the second} of all rows of a page's tables."""
    found = re.findall(r"^\| ([^|]+) \| (.+) \|$", page, re.MULTILINE)
    return {want: re.findall(r"`([^`]+)`", do) for want, do in found}


TABLE = rows(README[README.index("## Next") : README.index("## How it works")])
DOABLE = [want for want in TABLE if want not in (*NOT_TYPED, "you want to")]


def is_command(code: str) -> bool:
    return code.startswith(("jaxthru ", "python -m jaxthru"))


def words_of(code: str, names: dict[str, str]) -> list[str]:
    """Returns the words behind `jaxthru` of a command, with what stands for its placeholders."""
    code = re.sub(r"^(\S*python -m )?jaxthru[. ]", "", code)
    set_to = lambda word: re.sub(r"(?<==)(MIX|FOLDER)$", lambda found: names[found[1]], word)  # noqa: E731
    return [names.get(word, set_to(word)) for word in shlex.split(code, True)]


def commands_of(page: Path) -> list[str]:
    """Returns the commands in a page's blocks. Those in the text of README and index are commands, too, and
    options stand behind `jaxthru train`; other pages name commands without all that these need."""
    blocks = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.rpartition("&& ")[2].strip() for block in blocks for line in block.splitlines()]
    found = [re.sub(r"^(\w+=\S+ )|^\.venv/bin/", "", line) for line in lines]
    if page.name in ("README.md", "index.md"):
        codes = re.findall(
            r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        )
        found += codes
        found += [f"jaxthru train {code}" for code in codes if re.match(r"--(set|config|run-dir) ", code)]
    return [code for code in found if is_command(code) and "NAME" not in code]


class Parsed(BaseException):
    """Ends a command once its arguments are parsed."""


def parsed(words: list[str], monkeypatch) -> argparse.Namespace:
    """Returns what a command's own parser makes of its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def stop(*given, **named):
        raise Parsed(parse(*given, **named))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as stopped:
        front.main(words)
    return stopped.value.args[0]


NAMES = {"F": "configs/quickstart.py", "MIX": "quickstart", "books.toml": "quickstart", "GROUP": "optim"}
COMMANDS = {(page.name, code): None for page in PAGES for code in commands_of(page)}


@pytest.mark.parametrize(("page", "code"), COMMANDS, ids=lambda value: value)
def test_commands_parse(page, code, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    shape = {"model_type": "llama", "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = words_of(code, NAMES | {"FOLDER": str(tmp_path)})
    if words[0] in ("--help", "config"):
        assert front.main(words) == 0
        return
    if words[0] == "train" and "--config" not in words:
        words += ["--config", NAMES["F"]]
    arguments = parsed(words, monkeypatch)
    if "config" in arguments:
        assert isinstance(configuration.from_arguments(arguments), configuration.RunConfig)


def test_a_command_with_a_wrong_word_would_be_found(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        parsed(["train", "--confg", NAMES["F"]], monkeypatch)
    monkeypatch.undo()
    for wrong in ("--set train.step=3 --config configs/quickstart.py", "--config configs/none.py"):
        with pytest.raises(InputError):
            configuration.from_arguments(parsed(["train", *wrong.split()], monkeypatch))
        monkeypatch.undo()
    assert len(COMMANDS) > 30


def test_each_row_is_typed_or_says_why_not():
    assert NOT_TYPED.keys() <= TABLE.keys()
    for want in DOABLE:
        assert any(is_command(code) or code.startswith("--") for code in TABLE[want]), want


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> "Newcomer":
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "configs").symlink_to(ROOT / "configs")
    place = make_workplace(folder)
    (folder / "data" / "mixes").mkdir(parents=True)
    (folder / "data" / "mixes" / "quickstart.toml").write_bytes((folder / "mix.toml").read_bytes())
    tiny = [sys.executable, ROOT / "scripts" / "tiny_model.py", folder / "tiny"]
    subprocess.run(tiny, env=place.environment() | {"PYTHONPATH": str(ROOT)}, check=True)
    write_conversations(folder)
    return Newcomer(place)


def write_conversations(folder: Path) -> None:
    """Writes the mixes chats.toml, of conversations, and pairs.toml, of pairs of answers."""
    chats, pairs = [], []
    for number in range(160):
        asked = {"role": "user", "content": f"What is {number}?"}
        told = [{"role": "assistant", "content": f"It is {said}."} for said in ("a number", "a river")]
        chats.append({"messages": [asked, told[0]]})
        pairs.append({"prompt": [asked], "chosen": told[:1], "rejected": told[1:]})
    for name, records in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
        recipe = f'recipe = "local_{name.replace("chats", "chat")}"\npaths = ["{name}.jsonl"]\nweight = 1.0\n'
        (folder / f"{name}.toml").write_text(f"held_out = 0.2\n[sources.{name}]\n{recipe}")


class Newcomer:
    """Types commands in a folder, whose mix `quickstart` is a small one."""

    def __init__(self, place: Workplace):
        self.place, self.trained = place, {}

    def type(self, words: list[str], devices: int = 1) -> str:
        """Returns what a command prints; `python -m jaxthru.NAME` stands for `jaxthru NAME`."""
        name, *arguments = words
        command = [f"jaxthru.{name}", *arguments] if name.isidentifier() else ["jaxthru", name, *arguments]
        environment = self.place.environment(devices) | {"PYTHONPATH": str(ROOT)}
        del environment["XLA_CLIENT_MEM_FRACTION"]  # by which a plan would judge a whole GPU
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.place.folder,
            env=environment,
            input="Who are you?\n",  # for --chat
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def train(self, options: list[str]) -> str:
        """Trains with these options of README, once, in a tiny shape; returns the run directory."""
        if tuple(options) not in self.trained:
            directory = f"runs/{len(self.trained) + 1}"
            own = {word.partition("=")[0] for word in options} - {"train.steps"}
            kept = [word for at, word in enumerate(options) if not self._steps(options, at)]
            kept = kept if "--config" in kept else ["--config", NAMES["F"], *kept]
            settings = TUNED if any("model.pretrained=" in word for word in options) else TINY
            if settings is TINY and hasattr(self.loaded(kept).model, "experts"):
                settings = TINY | EXPERTS
            if "profile.at" in own:
                settings = settings | {"train.steps": PROFILED_STEPS}
            words = [
                word
                for key, value in settings.items()
                if key not in own
                for word in ("--set", f"{key}={value}")
            ]
            if settings is TUNED and "data.mix" not in own:
                words += ["--set", TALK]
            words += [] if "--run-dir" in kept else ["--run-dir", directory]
            words = ["train", *kept, *words]
            self.type(words, devices=8 if any("mesh." in word for word in kept) else 1)
            if "--run-dir" in kept:
                directory = kept[kept.index("--run-dir") + 1]
                assert "is complete" in self.type(words)
            self.trained[tuple(options)] = directory
        return self.trained[tuple(options)]

    @staticmethod
    def loaded(options: list[str]) -> configuration.RunConfig:
        """Returns the configuration that `--config` names among these options, as it is there."""
        return configuration.load(options[options.index("--config") + 1])

    @staticmethod
    def _steps(options: list[str], at: int) -> bool:
        """Says whether a word sets the number of steps, which the settings above do here."""
        return any(
            word.startswith("train.steps=") for word in options[at : at + 2][: 2 - (options[at] != "--set")]
        )


@pytest.mark.slow(minutes=0.1)
@pytest.mark.parametrize("want", DOABLE)
def test_rows_do_what_they_say(want, place):
    profiled = ["--set", "profile.at=20"]
    names = NAMES | {"MIX": "mix.toml", "FOLDER": "tiny", "DIR": "runs/kept"}
    tuned = ["--config", "lora", "--set", "model.pretrained=tiny", "--set", TALK]
    config = [word for code in TABLE[want] if code.startswith("--config") for word in shlex.split(code)]
    for code in TABLE[want]:
        if code.startswith("--"):
            options = words_of(code, names | MIXES.get(shlex.split(code)[1], {}))
            place.train(options if "--config" in options else [*config, *options])
        elif is_command(code):
            of_adapters = re.search(r"--(chat|adapter|merged)\b", code)
            own = tuned if of_adapters else profiled
            made = {"RUN_DIR": [], "RUN_A": [], "RUN_B": ["--set", "train.seed=1"]}
            runs = {word: place.train([*own, *made[word]]) for word in code.split() if word in made}
            words = words_of(code, names | runs)
            if "--" in words:  # a command that is supervised: this interpreter's, and tiny as all training is
                at = words.index("--") + 1
                tiny = [word for pair in TINY.items() for word in ("--set", "{}={}".format(*pair))]
                words[at:] = [sys.executable, "-m", *words[at:], *tiny]
            compiles = words[:1] == ["plan"] and words[1] in ("memory", "network")
            few = ["--set", "model.layers=2"] if compiles else []
            assert place.type(words + few)


def test_the_map_of_files_is_up_to_date(script):
    assert script("architecture").main([]) == 0, "run `python scripts/architecture.py --write`"


def test_a_file_without_a_sentence_has_no_place_in_the_map(script, tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""A sentence that goes on\nhere."""\n')
    with pytest.raises(ValueError, match="no whole sentence"):
        script("architecture").sentence(path)


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            path = page.parent / target if target else page
            assert "://" in target or path.exists(), f"{page.name}: {target}"
            if anchor and path.suffix == ".md":
                assert anchor in anchors(path), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index():
    linked = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)", INDEX)}
    assert not {page for page in PAGES if page != ROOT / "docs" / "index.md"} - linked


def test_guides_begin_with_what_the_reader_wants():
    for page in ROOT.glob("docs/*.md"):
        text = page.read_text()
        if page.stem not in ("index", "results", "code_size", "tests", "configuration"):
            assert re.match(r"# .+\n\nYou ", text), page.name


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert re.search(r"^version: (.+)$", text, re.MULTILINE)[1] == version
    assert {"cff-version", "message", "title", "authors"} <= set(
        re.findall(r"^([\w-]+):", text, re.MULTILINE)
    )


def test_the_changelog_names_all_that_has_moved():
    from jaxthru import moved

    page = (ROOT / "CHANGELOG.md").read_text()
    for old, new in moved.KEYS.items():
        assert f"| setting `{old}` | `{new}` |\n" in page
    for old, new in moved.MODULES.items():
        assert f"| module `jaxthru.{old}` | {', '.join(f'`jaxthru.{to}`' for to in new.split())} |\n" in page
    for path in moved.CLASSES:
        module, _, name = path.rpartition(".")
        assert re.search(
            rf"^\| .*`{name}`.* of `jaxthru\.{re.escape(module)}` \| `jaxthru\.config` \|$", page, re.M
        )


def test_two_commands_and_ci_types_the_second():
    commands = re.findall(r"^python3\.12 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("-m jaxthru.train --config configs/quickstart.py")
    pattern = re.search(r"grep -E '(.*)' README.md", (ROOT / ".ci" / "run").read_text())[1]
    assert [c for c in commands if re.search(pattern, c)] == [commands[1]]
