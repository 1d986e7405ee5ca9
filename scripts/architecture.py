"""Makes the map of files in docs/architecture.md: `--write` renews it; without, says if it is up to date.

Each file's line is the first line of its docstring, which must be a whole sentence. A folder's line is that
of its `__init__.py`, or of FOLDERS.
"""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/architecture.md"
BEGIN, END = "<!-- by scripts/architecture.py -->", "<!-- end of architecture.py's -->"
FOLDERS = {
    "configs": "One run each, as a Python function.",
    "scripts": "Tools for the repository itself.",
    "scripts/bench": "The harness of all benchmarks: processes, clocks, tables; and what is not yet a suite.",
    "scripts/bench/suites": "The rows of suite.py, and what they are made of.",
    "scripts/bench/measure": "What one process measures: each prints one line of JSON.",
    "scripts/bench/measure/kernels": "What measure/kernel.py times of each operation.",
    "scripts/bench/peers": "The same training step in other stacks, for comparison.",
}
"""Folders that are no packages -> what they hold."""


def sentence(path: Path) -> str:
    """Returns the first line of a module's docstring. Raises ValueError unless it is a whole sentence."""
    line = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    if not line.endswith((".", "?")):
        raise ValueError(f"{path}: the first line of its docstring is no whole sentence: {line!r}")
    return line


def folders(root: Path) -> list[Path]:
    """Returns the folders of the map, each before those within it."""
    packages = {
        path.parent for name in ("jaxthru", "pallas_kernels") for path in root.glob(f"{name}/**/*.py")
    }
    return [*sorted(packages), *(root / name for name in FOLDERS)]


def section(folder: Path, root: Path) -> list[str]:
    """Returns the lines of one folder: its heading, what it holds, and a table of its files."""
    name, package = folder.relative_to(root).as_posix(), folder / "__init__.py"
    lines = [f"### {name}/", "", FOLDERS.get(name) or sentence(package), ""]
    files = [path for path in sorted(folder.glob("*.py")) if path != package]
    if files:
        rows = (
            f"| [`{path.name}`](../{path.relative_to(root).as_posix()}) | {cell(path)} |" for path in files
        )
        lines += ["| file | what it holds |", "|---|---|", *rows, ""]
    return lines


def cell(path: Path) -> str:
    """Returns a module's sentence as a cell of a table."""
    return sentence(path).replace("|", "\\|").replace("<", "&lt;")


def renewed(page: str, root: Path) -> str:
    """Returns the page with the map between its two marks as the files are now."""
    before, rest = page.split(BEGIN)
    lines = [line for folder in folders(root) for line in section(folder, root)]
    return "\n".join([f"{before}{BEGIN}", "", *lines, f"{END}{rest.split(END)[1]}"])


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 1 if the page is out of date and is not to be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"renew the map in {PAGE}")
    arguments = parser.parse_args(argv)
    page = ROOT / PAGE
    text = page.read_text(encoding="utf-8")
    new = renewed(text, ROOT)
    if arguments.write:
        page.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{PAGE} is out of date: run `python scripts/architecture.py --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
