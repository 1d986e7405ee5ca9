"""Made-up mixes over made-up files: `python -m jaxthru.data` prepares each, or refuses it in one line.

`cases(count, seed)` yields them, `check(case, folder)` tries one. See scripts/fuzz.py.
"""

import contextlib
import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxthru.data.__main__ import main

NUMBERS = (
    "-1",
    "0",
    "0.0",
    "1",
    "1e300",
    "inf",
    "nan",
    "true",
    '"1"',
    "[]",
    "[[0, 1], [5, 2]]",
    "2**3",
    "9" * 400,
)
TEXTS = (
    "",
    "a",
    "..",
    "/",
    "~",
    "~nosuchuser/x",
    "a\\u0000b",
    "x" * 300,
    "s3://bucket/a.jsonl",
    "[/docs]",
    "*",
    "[",
)
NAMES = (
    "a",
    '""',
    '"a/b"',
    '"a\\u0000b"',
    '"a\\nb"',
    '"[/x]"',
    f'"{"y" * 300}"',
    '"\\u001b[31m"',
    '"é 名"',
    '"--x"',
)
KEYS = {
    "weight": NUMBERS,
    "paths": ('["*.jsonl"]', '["corpus"]', "[]", '"a"', *(f'["{text}"]' for text in TEXTS)),
    "format": ('"jsonl"', '"text"', '"parquet"', '"tar"', '"array_record"', '"docstrings"', '"json"', "3"),
    "text_key": ('"text"', '"body"', '""', '"te\\u0000xt"'),
    "cap_bytes": NUMBERS,
    "max_record_bytes": NUMBERS,
    "max_damaged": NUMBERS,
    "max_epochs": NUMBERS,
    "transform": ('"os:system"', '"a:b"', '":"', '"x"', '"../a:b"', '"a\\u0000:b"'),
    "online": ("true", "1"),
    "exhausted": ('"drop"', '"stop"', '"dorp"'),
    "extension": ('"txt"', '".json"', "5"),
    "unknown": ("1",),
}
TOP = {
    "held_out": NUMBERS,
    "description": tuple(f'"{text}"' for text in TEXTS),
    "tokenizer": (
        '"none.json"',
        "5",
        "{vocabulary = 300}",
        "{vocabulary = 1}",
        "{vocab = 300}",
        '{vocabulary = "x"}',
    ),
    "interpolate": ('"staged"', '"step"'),
    "temperature": ("0.5",),
}
LINES = (
    *(
        b'{"text": "a text of some words"}',
        b'{"text": "another"}',
        b'{"text": ""}',
        b'{"body": "x"}',
        b"{",
        b"",
    ),
    *(
        b"null",
        b"\xff\xfe",
        b"[" * 2000,
        b'{"text": "\\udc00"}',
        b'{"text": 5}',
        b"\0\0\0",
        b'{"text": "[/b]"}',
    ),
)


class Case(NamedTuple):
    """mix: the TOML text. files: {name: content} beside it. command: prepare or inspect."""

    mix: str
    files: dict[str, bytes]
    command: str


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yields made-up mixes, most of them with one or two things that cannot be right."""
    draw = random.Random(seed)
    for _ in range(count):
        yield Case(_mix(draw), dict(_files(draw)), draw.choice(("prepare", "prepare", "inspect")))


def _mix(draw: random.Random) -> str:
    top = {"held_out": "0.1", "tokenizer": "{vocabulary = 300, train_bytes = 20000}"}
    top |= {key: draw.choice(TOP[key]) for key in draw.sample(sorted(TOP), draw.choice((0, 0, 0, 1)))}
    lines = [f"{key} = {value}" for key, value in top.items()]
    for name in draw.sample(NAMES, draw.choice((1, 1, 2))) if draw.random() < 0.3 else ["a"]:
        keys = {"recipe": '"local_jsonl"', "paths": '["*.jsonl"]', "weight": "1", "max_damaged": "1.0"}
        keys |= {key: draw.choice(KEYS[key]) for key in draw.sample(sorted(KEYS), draw.choice((0, 1, 1, 2)))}
        lines += [f"[sources.{name}]", *(f"{key} = {value}" for key, value in keys.items())]
    text = "\n".join(lines)
    if draw.random() < 0.05:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice("\0\n[]{}=\"'#\x1b") + text[at + 1 :]
    return text


def _files(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    for number in range(draw.choice((0, 1, 1, 1, 2, 3))):
        content = b"\n".join(draw.choices(LINES, k=draw.choice((0, 1, 5, 30))))
        kind = draw.choice(
            (".jsonl", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".tar", ".array_record")
        )
        if kind.endswith(".gz"):
            content = gzip.compress(content)[: draw.choice((None, -5))]
        yield f"f{number}{kind}", content


def check(case: Case, folder: Path) -> str:
    """Prepares a case in an empty folder; returns `accepted`, or the line that refuses it. AssertionError, or
    whatever is raised, if it is neither."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    (folder / "corpus").mkdir()
    (folder / "mix.toml").write_bytes(case.mix.encode())
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
        code = main([case.command, str(folder / "mix.toml"), "--store", str(folder / "store")])
    lines: list[Any] = [line for line in said.getvalue().splitlines() if line.startswith("jaxthru: ")]
    assert "\x1b" not in told.getvalue(), "what a mix holds reaches the terminal as it is"
    if code == 0:
        assert not lines
        return "accepted"
    assert code == 2 and len(lines) == 1, (code, said.getvalue()[-500:])
    assert said.getvalue().endswith(f"{lines[0]}\n") and lines[0].isprintable(), repr(lines[0][:300])
    assert len(lines[0]) < 1500, len(lines[0])
    return lines[0]


def as_json(case: Case) -> str:
    """Returns a case as one line, to be kept."""
    return json.dumps([case.mix, {name: content.hex() for name, content in case.files.items()}, case.command])
