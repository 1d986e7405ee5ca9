"""Writes a corpus of short documents, and its mix: the functions and classes of the standard library.

    python scripts/bench/functions_corpus.py DIRECTORY

Definition by definition is how corpora of code are often cut. Rows of 8,192 tokens then hold about as many
documents as rows of web text do, where the files of the quickstart's mix fill most of a row each. Use it with
`--set data.mix=DIRECTORY/mix.toml`.
"""

import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

MIX = """\
description = "Functions and classes of the standard library, one document each."
held_out = 0.05

[tokenizer]
vocabulary = 8192

[sources.local_jsonl]
weight = 1.0
paths = ["functions.jsonl"]
"""
SKIPPED = {"test", "tests", "idle_test", "site-packages", "lib2to3"}


def definitions(path: Path) -> Iterator[str]:
    """Yields the source of each function and class at the top of a file."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield ast.get_source_segment(text, node)


def write(directory: Path) -> int:
    """Writes the corpus and then its mix; returns how many documents there are."""
    library, documents = Path(sysconfig.get_path("stdlib")), 0
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "functions.jsonl").open("w", encoding="utf-8") as file:
        for path in sorted(library.rglob("*.py")):
            if SKIPPED.isdisjoint(path.relative_to(library).parts):
                with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's files
                    found = list(definitions(path))
                for text in found:
                    file.write(json.dumps({"text": text}) + "\n")
                    documents += 1
    (directory / "mix.toml").write_text(MIX)
    return documents


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    print(f"{write(directory):,} documents in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
