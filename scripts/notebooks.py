"""Executes the notebooks and keeps what they show: `python scripts/notebooks.py [--check] [NAME ...]`.

Each runs as a reader's would, from top to bottom and on a CPU, all of them in one new folder. What they show
is written into their files, without paths of this machine; with --check it is not, and only errors count.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NAMES = ("quickstart", "profile", "published_weights", "fine_tune")
"""In the order in which a reader wants them."""


def read(name: str) -> nbformat.NotebookNode:
    """Returns a notebook."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def write(name: str, notebook: nbformat.NotebookNode) -> None:
    """Writes a notebook, as it is committed."""
    text = nbformat.writes(notebook)
    (FOLDER / f"{name}.ipynb").write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def execute(notebook: nbformat.NotebookNode, place: Path) -> None:
    """Runs all cells with this interpreter, in a folder; what they show becomes their outputs.

    Raises nbclient.exceptions.CellExecutionError for a cell that fails.
    """
    kernel = place / "kernels" / "python3"
    kernel.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3"}))
    given = {"JUPYTER_PATH": str(place), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(place)}},
            coalesce_streams=True,
            record_timing=False,
        ).execute()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def strip(notebook: nbformat.NotebookNode, place: Path) -> None:
    """Takes out of the notebook what it says of this machine: paths, and the interpreter's version."""
    language = {"name": "python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": language})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(_stripped(output, place)) for output in cell.outputs]


def _stripped(value, place: Path):
    if isinstance(value, dict):
        return {key: _stripped(each, place) for key, each in value.items()}
    if isinstance(value, list):
        return [_stripped(each, place) for each in value]
    if isinstance(value, str):
        for path, name in ((place, "."), (ROOT, "jaxthru"), (Path.home(), "~")):
            if path != Path("/"):
                value = value.replace(str(path), name)
    return value


def main(argv: list[str] | None = None) -> int:
    """Runs the script; returns its exit code."""
    parser = argparse.ArgumentParser(description="Executes the notebooks and keeps what they show.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names or NAMES:
            began, notebook = time.monotonic(), read(name)
            execute(notebook, Path(folder))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            strip(notebook, Path(folder))
            if not arguments.check:
                write(name, notebook)
    return 0


if __name__ == "__main__":
    sys.exit(main())
