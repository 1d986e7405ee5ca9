"""Counts code, in lines and tokens of each package: `--write` keeps the table in docs/code_size.md.

Left out are blank lines, comments, imports, docstrings and other bare strings. A line counts if it holds
code, however much; tokens are Python's tokenizer's, so that statements packed onto one line save nothing.
"""

import argparse
import ast
import io
import subprocess
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "code_size.md"
FOLDERS = ("jaxthru", "pallas_kernels", "scripts/bench", "scripts", "configs", "tests")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENDMARKER, tokenize.SEMI}  # a semicolon stands for a new line, which is no code either


class Size(NamedTuple):
    files: int = 0
    lines: int = 0
    tokens: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(*(own + more for own, more in zip(self, other, strict=True)))


def left_out(text: str) -> list[tuple]:
    """Returns [(start, end)] of imports and bare strings, as the tokenizer says it: (line, character)."""

    def place(line: int, offset: int) -> tuple[int, int]:  # ast counts in bytes
        return line, len(lines[line - 1].encode()[:offset].decode())

    lines = io.StringIO(text).readlines()
    return [
        (place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str))
    ]


def count(text: str) -> Size:
    """Returns the size of a module."""
    spans, lines, tokens = left_out(text), set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.exact_type in LAYOUT:
            continue
        if not any(start <= token.start < end for start, end in spans):
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return Size(1, len(lines), tokens)


def package(path: Path) -> str:
    """Returns the row of the table that a file belongs to, by its path in the repository."""
    if path.parts[0] == "jaxthru":
        return "/".join(path.parts[:-1][:2]) if len(path.parts) > 2 else "jaxthru/*.py"
    return next(folder for folder in FOLDERS if path.is_relative_to(folder))


def sizes(root: Path) -> dict[str, Size]:
    """Returns the size of each package, and of the whole of jaxthru."""
    found: dict[str, Size] = {}
    for path in sorted({path for folder in FOLDERS for path in root.joinpath(folder).rglob("*.py")}):
        one, row = count(path.read_text(encoding="utf-8")), package(path.relative_to(root))
        for name in (row, *(["jaxthru"] if row.startswith("jaxthru/") else [])):
            found[name] = found.get(name, Size()) + one
    order = {name: at for at, name in enumerate(FOLDERS)}
    return dict(sorted(found.items(), key=lambda row: (order.get(row[0], 0), row[0])))


def table(found: dict[str, Size]) -> str:
    total = sum((size for name, size in found.items() if not name.startswith("jaxthru/")), Size())
    rows = ["| package | files | code lines | tokens |", "|:--|--:|--:|--:|"]
    for name, size in (found | {"**all**": total}).items():
        shown = {"scripts": "scripts, the rest"}.get(name, name)
        rows.append(f"| {shown} | {size.files} | {size.lines:,} | {size.tokens:,} |")
    return "\n".join(rows)


def commit(root: Path) -> str:
    """Returns the commit that is checked out, and says whether the code has changed since."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, check=True, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", *FOLDERS)
    return git("rev-parse", "--short=12", "HEAD") + (" and changes since" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the table in docs/code_size.md")
    text = table(sizes(ROOT))
    if parser.parse_args().write:
        told = "Without blank lines, comments, docstrings and imports, by `scripts/count_code.py --write`"
        KEPT.write_text(f"# Code size\n\n{told} at {commit(ROOT)}.\n\n{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
