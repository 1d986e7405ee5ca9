"""A line in a notebook, and what a run and a preparation show there."""

import io
import sys
import time
import types

import pytest
import rich.console

from jaxthru.data.store.progress import Progress
from jaxthru.runtime import notebook
from jaxthru.training import display


@pytest.fixture
def cells(monkeypatch):
    """The lines below a cell, as they stand."""
    shown = []

    class Handle:
        def __init__(self):
            self.at = len(shown)

        def update(self, data, raw):
            shown[self.at] = data["text/plain"]

    def put(data, raw, display_id):
        handle = Handle()
        shown.append(data["text/plain"])
        return handle

    ipython = types.SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=put))
    return shown


def test_a_line_changes_in_place(cells):
    assert notebook.in_notebook()
    first, second = notebook.Line(), notebook.Line()
    for text in ("a", "b"):
        first(text)
    second("c")
    first("d")
    assert cells == ["d", "c"]


def test_a_run_ends_with_its_last_step(cells):
    row = {"loss": 1.0, "tokens_per_second": 9.0, "mfu": None, "data_wait_seconds": None}
    with display.StepProgress(3, console=rich.console.Console(file=io.StringIO())) as cell:
        for step in (1, 2, 3):
            cell.update(row | {"step": step, "skipped_updates": 0})
        cell.wait("reading the profile")
        assert cells == ["reading the profile"]
    assert cells == ["step 3/3  loss 1.0000  9 tokens/s  0:00 left"]


def test_a_preparation_takes_one_line_and_its_notes_stay(cells):
    with Progress() as progress:
        for name in ("prose", "code"):
            progress.begin(name, 1_000_000)
            progress.end()
            progress.keep(f"source {name}: fine")
    assert cells[0].startswith("prepared data: code [") and cells[1:] == [
        "source prose: fine",
        "source code: fine",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_preparation_elsewhere_says_what_is_done_and_nothing_where_nothing_is(monkeypatch, terminal):
    out, now = io.StringIO(), [0.0]
    make = rich.console.Console
    console = make(file=out, force_terminal=terminal, width=120)
    monkeypatch.setattr(rich.console, "Console", lambda **_: console)
    with Progress():
        pass
    assert not out.getvalue()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress() as progress:
        progress.begin("prose", 2_000_000)
        for _ in range(8):
            now[0] += 1.0
            progress.advance(200_000)
        progress.end()
        progress.keep("source prose: fine")
    if terminal:
        assert "prose" in out.getvalue() and "1.6/1.6 MB" in out.getvalue()
        return
    assert out.getvalue().splitlines() == [
        "preparing data: prose: 0.0 of about 2.0 MB [0 s]",
        "preparing data: prose: 1.0 of about 2.0 MB [5 s]",
        "source prose: fine",
    ]
