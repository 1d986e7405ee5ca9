"""Made-up mixes over made-up files: `python -m jaxthru.data` prepares each, or refuses it in one line.

`cases(count, seed)` yields them, `check(case, folder)` tries one. See scripts/fuzz.py.
"""

import contextlib
import io
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import formats

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
    "\\u001b[31m",
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
    "paths": ('["corpus/**/*"]', '["corpus"]', "[]", '"a"', *(f'["{text}"]' for text in TEXTS)),
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
TEXTS_OF_FILES = (
    "a text of some words\n" * 9,
    "another",
    "é 名 \u2028",
    "",
    "[/b]",
    "\0",
    "\x1b[31m red",
    "x" * 5000,
)
LINES = (
    b"{",
    b"",
    b"null",
    b"\xff\xfe",
    b"[" * 2000,
    b'{"text": "\\udc00"}',
    b'{"text": 5}',
    b'{"body": "x"}',
    b"\0",
)
KINDS = {
    "text": "local_text",
    "jsonl": "local_jsonl",
    "parquet": "local_parquet",
    "tar": "local_tar",
    "array_record": "local_array_record",
    "docstrings": "local_text",
}


class Case(NamedTuple):
    """mix: the TOML text. files: {name: content} beside it, in `corpus`. command: prepare or inspect."""

    mix: str
    files: dict[str, bytes]
    command: str


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """Yields made-up mixes of made-up files: some sound, most with damage that is to be accounted for, or
    with one or two things that cannot be right."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.choice(sorted(KINDS))
        mix = _mix(draw, kind, faults=draw.choice((0, 0, 0, 1, 2)))
        yield Case(mix, _files(draw, kind), draw.choice(("prepare", "prepare", "inspect")))


def _mix(draw: random.Random, kind: str, faults: int) -> str:
    top = {"held_out": "0.1", "tokenizer": "{vocabulary = 300, train_bytes = 20000}"}
    source = {"recipe": f'"{KINDS[kind]}"', "paths": '["corpus/*"]', "weight": "1", "max_damaged": "1.0"}
    source |= {"format": '"docstrings"'} if kind == "docstrings" else {}
    name = draw.choice(("a", '"é 名"', '"[x]"', '"--x"'))
    for _ in range(faults):
        what = draw.random()
        if what < 0.2:
            key = draw.choice(sorted(TOP))
            top[key] = draw.choice(TOP[key])
        elif what < 0.3:
            name = draw.choice(NAMES)
        else:
            key = draw.choice(sorted(KEYS))
            source[key] = draw.choice(KEYS[key])
    tables = ("\n".join(f"{key} = {value}" for key, value in table.items()) for table in (top, source))
    text = f"\n[sources.{name}]\n".join(tables)
    if faults and draw.random() < 0.1:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice("\0\n[]{}=\"'#\x1b") + text[at + 1 :]
    return text


def _files(draw: random.Random, kind: str) -> dict[str, bytes]:
    """Returns files of a format, half of them damaged somewhere, and seldom none."""
    texts = [f"{draw.choice(TEXTS_OF_FILES)}{number}" for number in range(draw.choice((1, 5, 20)))]
    with tempfile.TemporaryDirectory() as folder:
        formats.write(Path(folder), kind, texts)
        found = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    if kind == "jsonl":
        found["b.jsonl"] = b"\n".join(draw.choices(LINES, k=draw.choice((0, 3))))
    if draw.random() < 0.05:
        return {}
    return dict(_changed(draw, kind, name, content) for name, content in found.items())


def _changed(draw: random.Random, kind: str, name: str, content: bytes) -> tuple[str, bytes]:
    if kind in ("text", "jsonl", "tar") and draw.random() < 0.3:
        suffix = draw.choice((".gz", ".zst"))
        name, content = name + suffix, formats.compress(suffix, content)
    at, length = draw.randrange(len(content) + 1), draw.choice((1, 8, 300))
    ways = (content[:at], content[:at] + draw.randbytes(length) + content[at + length :], content[at:], b"")
    return name, draw.choice(ways) if draw.random() < 0.5 else content


def check(case: Case, folder: Path) -> str:
    """Prepares a case in an empty folder; returns `accepted`, or the line that refuses it. AssertionError, or
    whatever is raised, if it is neither."""
    (folder / "corpus").mkdir()
    for name, content in case.files.items():
        (folder / "corpus" / name).write_bytes(content)
    (folder / "mix.toml").write_bytes(case.mix.encode())
    said, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):
        code = main([case.command, str(folder / "mix.toml"), "--store", str(folder / "store")])
    lines: list[Any] = [line for line in said.getvalue().splitlines() if line.startswith("jaxthru: ")]
    assert "\x1b" not in told.getvalue() + said.getvalue(), "what a mix holds reaches the terminal as it is"
    if code == 0:
        assert not lines
        return "accepted"
    assert code == 2 and len(lines) == 1, (code, said.getvalue()[-500:])
    assert said.getvalue().endswith(f"{lines[0]}\n") and lines[0].isprintable(), repr(lines[0][:300])
    assert len(lines[0]) < 1500, len(lines[0])
    return lines[0]
