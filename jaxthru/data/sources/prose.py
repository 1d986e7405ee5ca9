"""Prose in Python packages: docstrings, and the long descriptions of package metadata.

Also a program: it reads a JSON list of paths and writes a JSON list with one text (or null) for each. It
imports the standard library only, so that preparation can start one on every core within milliseconds,
without re-importing the caller's main module as `multiprocessing` would.
"""

import ast
import email
import json
import sys
import warnings
from pathlib import Path


def prose_of(path: str) -> str | None:
    """Returns the prose of a Python file or a METADATA file as one text, "" if it has none.

    None stands for a file that is not valid UTF-8 or not valid Python.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if not path.endswith((".py", ".pyi")):
            return str(email.message_from_string(text).get_payload())
        if '"""' not in text and "'''" not in text:
            return ""
        tree = ast.parse(text)
        prose = "\n\n".join(_topics(tree) if path.endswith("topics.py") else _docstrings(tree))
        prose.encode("utf-8")  # an escape can make half of a surrogate pair
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return prose


def _topics(tree: ast.Module) -> list[str]:
    """Returns the language reference, which pydoc holds as a table of strings."""
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str) and len(value) > 200]


def _docstrings(node: ast.AST) -> list[str]:
    """Returns the docstrings below `node` in the order of the file."""
    found = []
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        found = [docstring] if docstring else []
    for child in getattr(node, "body", ()):  # expressions hold no docstrings: statements suffice
        found += _docstrings(child)
    for child in getattr(node, "orelse", ()) if isinstance(node, ast.If | ast.Try) else ():
        found += _docstrings(child)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # invalid escapes in other people's files
    sys.stdout.buffer.write(json.dumps([prose_of(path) for path in json.load(sys.stdin)]).encode())
