"""What a notebook shows while something runs: a line that changes in place."""

import importlib
import sys
from typing import Any


def in_notebook() -> bool:
    """Says whether IPython runs this process."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class Line:
    """A line below the cell that runs; each further text takes the place of the one before."""

    def __init__(self):
        self._shown: Any = None

    def __call__(self, text: str) -> None:
        """Shows a text. IPython has to run this process."""
        data = {"text/plain": text}
        if self._shown is None:
            display = importlib.import_module("IPython.display").display
            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)
