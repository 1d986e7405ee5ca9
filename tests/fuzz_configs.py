"""Configurations as a tired or a hostile hand writes them: each is taken, or refused in one line.

`cases` makes them, `check` tries one; scripts/fuzz.py tries thousands.
"""

import argparse
import contextlib
import copy
import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxthru import config as configuration
from jaxthru.runtime.errors import LONGEST, exit_code
from jaxthru.runtime.exit_codes import INTERRUPTED

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.py"


class Case(NamedTuple):
    """A file's name and content (None: there is no such file), and what is `--set`. codes: how it may end."""

    what: str
    name: str = "config.json"
    content: bytes | None = b"{}"
    overrides: tuple[str, ...] = ()
    codes: tuple[int, ...] = (0, 2)


def python(what: str, code: str, *codes: int) -> Case:
    return Case(what, "config.py", code.encode(errors="surrogatepass"), codes=codes or (2,))


NAMED = (
    Case("nested 100,000 deep", content=b"[" * 100_000, codes=(2,)),
    Case("nested in a group", content=b'{"train":' * 100_000 + b"1" + b"}" * 100_000, codes=(2,)),
    Case(
        "nested as far as JSON goes",
        content=b'{"train": {"steps": ' + b"[" * 900 + b"]" * 900 + b"}}",
        codes=(2,),
    ),
    Case("400 digits for a float", content=b'{"optim": {"learning_rate": 1%s}}' % (b"0" * 400), codes=(2,)),
    Case(
        "400 digits for a float or None", content=b'{"data": {"linear_cost": 1%s}}' % (b"0" * 400), codes=(2,)
    ),
    Case("400 digits for a whole number", content=b'{"train": {"steps": 1%s}}' % (b"0" * 400), codes=(2,)),
    Case("5,000 digits", content=b'{"train": {"steps": 1%s}}' % (b"0" * 5000), codes=(2,)),
    Case("path of 5,000 characters", name="a" * 5000 + ".json", content=None, codes=(2,)),
    Case("path of 5,000 characters in folders", name="a/" * 2500 + "b.json", content=None, codes=(2,)),
    Case("lone surrogate in a key", content=rb'{"tr\ud800ain": {}}', codes=(2,)),
    Case("newline in a key", content=rb'{"train": {"st\neps": 3}}', codes=(2,)),
    Case("escape sequence in a value", content=rb'{"train": {"steps": "\u001b[2J"}}', codes=(2,)),
    Case("key of 10,000 characters", content=b'{"%s": 3}' % (b"k" * 10_000), codes=(2,)),
    Case("NUL in the path", name="a\0b.json", content=None, codes=(2,)),
    Case("newline in the path", name="a\nb.json", content=None, codes=(2,)),
    Case("key twice", content=b'{"train": {"steps": 3, "steps": 4}}', codes=(2,)),
    Case("group twice", content=b'{"train": {"steps": 3}, "train": {"steps": 3}}', codes=(2,)),
    Case("family of another kind", content=b'{"model": {"family": {"family": []}}}', codes=(2,)),
    Case("family that is a file", content=b'{"model": {"family": "../a/b.py"}}', codes=(2,)),
    Case("family by a stored name", content=b'{"model": {"family": "antigravity"}}', codes=(2,)),
    Case("family that is no module", overrides=("model.family=.", "model.layers=3"), codes=(2,)),
    Case("family of a module that is none", overrides=("model.family=json.tool",), codes=(2,)),
    Case(
        "old and new key", content=b'{"model": {"attention": []}, "kernels": {"attention": {}}}', codes=(2,)
    ),
    Case("old key and no group", content=b'{"mesh": {"collective_matmul": 3}, "kernels": 3}', codes=(2,)),
    Case("--set twice", overrides=("train.steps=3", " train.steps =4"), codes=(2,)),
    python("sys.exit with a code", "import sys\nsys.exit(3)"),
    python("sys.exit with words", "import sys\ndef config(): sys.exit('stop')"),
    python("Ctrl-C", "raise KeyboardInterrupt", INTERRUPTED),
    python("an error of several lines", "def config(): raise ValueError('a\\nb\\n')"),
    python("an exception of its own", "class Mine(BaseException): pass\nraise Mine"),
    python("calls itself", "def config(): return config()"),
    python("no memory", "def config(): raise MemoryError"),
    python(
        "a group of another kind", "from jaxthru.config import *\ndef config(): return RunConfig(train=None)"
    ),
    python("NUL", "def config():\0"),
    python(
        "a value of another kind",
        "from jaxthru.config import *\nconfig = lambda: RunConfig(DataConfig(mix=3))",
    ),
)
"""What once was no plain line, or was taken without a word, and what is near to it."""

VALUES = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**70, 10**400, 0.5, -0.0, 1e300, float("inf"), float("nan")),
    *(
        "",
        " ",
        "7",
        " 7 ",
        "٣",
        "true",
        "None",
        "nan",
        "auto",
        "a\nb",
        "a\0b",
        "\ud800",
        "\u202e\x1b[2J",
        "x" * 9000,
    ),
    *([], [3], {}, {"a": 1}, {"steps": {"steps": 3}}, [[[[[[]]]]]]),
)
KEYS = ("", " ", "steps", "train", "train.steps", "STEPS", "a\nb", "\ud800", "\0", "__class__", "k" * 5000)


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yields so many cases, those with a name first; the same for the same seed."""
    draw = random.Random(seed)
    makers = (changed_tree, changed_tree, changed_bytes, changed_overrides)
    made = (draw.choice(makers)(draw, number) for number in itertools.count())
    yield from itertools.islice(itertools.chain(NAMED, made), count)


def resolved() -> dict:
    return configuration.to_dict(configuration.load(QUICKSTART))


def changed_tree(draw: random.Random, number: int) -> Case:
    """A resolved configuration of which up to three keys or groups are lost, renamed or have other values."""
    tree = copy.deepcopy(resolved())
    for _ in range(draw.randint(1, 3)):
        group = tree if draw.random() < 0.2 or not tree else tree[draw.choice(list(tree))]
        if not isinstance(group, dict) or not group:
            continue
        key, what = draw.choice(list(group)), draw.choice(["value", "value", "lose", "rename", "add"])
        if what == "value":
            group[key] = draw.choice(VALUES)
        elif what == "add":
            group[draw.choice(KEYS)] = draw.choice(VALUES)
        else:
            value = group.pop(key)
            if what == "rename":
                group[draw.choice([*KEYS, key[::-1], f"{key}x"])] = value
    return Case(f"tree {number}", content=json.dumps(tree).encode())


def changed_bytes(draw: random.Random, number: int) -> Case:
    """A resolved configuration's file with bytes lost, changed or repeated, or in other encodings."""
    content = bytearray(json.dumps(resolved(), indent=draw.choice([None, 2])).encode())
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(content)), draw.choice([1, 2, 30, 300])
        part = content[at : at + length]
        if part:
            content[at : at + length] = draw.choice(
                [b"", part * 2, bytes(byte ^ 32 for byte in part), b"\0", b"\xff"]
            )
    encoding = draw.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16"])
    if encoding != "utf-8":
        content = content.decode(errors="replace").encode(encoding)
    return Case(f"bytes {number}", content=bytes(content))


def changed_overrides(draw: random.Random, number: int) -> Case:
    """What a command line may say after `--set`: keys and groups with odd values, keys that are none."""
    tree = resolved()
    texts = []
    for _ in range(draw.randint(1, 3)):
        group = draw.choice(list(tree))
        key = draw.choice([group, *(f"{group}.{name}" for name in tree[group]), *KEYS])
        texts.append(draw.choice([f"{key}={draw.choice(VALUES)}", key, f"={key}", f"{key}==3", f"{key}.x=3"]))
    keys = [text.partition("=")[0].strip() for text in texts]
    codes = (0, 2) if len(set(keys)) == len(keys) else (2,)
    return Case(f"--set {number}", content=json.dumps(tree).encode(), overrides=tuple(texts), codes=codes)


def check(case: Case, folder: Path) -> str:
    """Returns "accepted", or the line that refused a case. Raises AssertionError if it is no plain line, or
    if what was accepted does not come back from its own JSON."""
    path = folder / case.name
    if case.content is not None:
        path.write_bytes(case.content)
    arguments = argparse.Namespace(config=str(path), overrides=list(case.overrides))
    accepted = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = exit_code(lambda: accepted.append(configuration.from_arguments(arguments)))
    assert code in case.codes, f"{case}: exit code {code}"
    if code == 0:
        configuration.dump(*accepted, folder / "again.json")
        assert configuration.load(folder / "again.json") == accepted[0], f"{case}: comes back as another"
        return "accepted"
    (line,) = said.getvalue().splitlines()
    assert line.startswith("jaxthru: ") and len(line) < LONGEST + 10 and line.isprintable(), (
        f"{case}: {line!r}"
    )
    return line
