"""A run's rows as columns, and what they look like."""

import sys

import numpy as np
import pytest

from jaxthru.runtime.errors import InputError
from jaxthru.training.table import Table

ROWS = [
    {"step": step, "loss": None if step == 2 else 3.0 / step, "by": {"a": 1.5}, "on": True, "mfu": None}
    for step in range(1, 31)
]


def test_columns_are_arrays_of_their_kind():
    table = Table(ROWS)
    assert table.columns == ("step", "loss", "by.a", "on", "mfu") and len(table) == 30
    assert [table[name].dtype.kind for name in table.columns] == ["i", "f", "f", "b", "f"]
    np.testing.assert_array_equal(table["step"], np.arange(1, 31))
    assert np.isnan(table["loss"][1]) and table["loss"][2] == 1.0
    assert "by" not in table and "loss" in table and [*table] == [*table.columns]


def test_a_group_that_comes_late_and_lists_are_columns_too():
    table = Table([{"step": 1, "by": None, "load": [1.0]}, {"step": 2, "by": {"a": 2.0}, "load": [2.0]}])
    assert table.columns == ("step", "load", "by.a")
    assert np.isnan(table["by.a"][0]) and table["by.a"][1] == 2.0
    assert table["load"].tolist() == [[1.0], [2.0]] and table["load"].shape == (2,)


def test_an_unknown_column_has_a_nearest_name():
    with pytest.raises(KeyError, match="no column 'los'; did you mean 'loss'"):
        Table(ROWS)["los"]


def test_it_prints_its_ends(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = repr(Table(ROWS)).splitlines()
    assert lines[0].split() == ["step", "loss", "on", "by.a"]
    assert lines[1].split() == ["1", "3", "True", "1.5"] and lines[2].split()[1] == "-"
    assert lines[6].split() == ["..."] * 4 and lines[-2].split()[0] == "30"
    assert lines[-1] == "30 rows, 5 columns; unknown: mfu" and len(lines) == 1 + 5 + 1 + 5 + 1
    monkeypatch.setenv("COLUMNS", "16")
    assert repr(Table(ROWS)).splitlines()[-1] == "30 rows, 5 columns; not shown: on, by.a; unknown: mfu"


def test_a_notebook_gets_html():
    page = Table([{"<b>": 1}, {"<b>": 2}])._repr_html_()
    assert page.count("<tr>") == 3 and "<th>&lt;b&gt;</th>" in page and "2 rows, 1 columns" in page


def test_nothing_is_a_table_too():
    assert repr(Table([])) == "0 rows, 0 columns" and "0 rows" in Table([])._repr_html_()


def test_pandas_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="needs the package pandas"):
        Table(ROWS).to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", type("pandas", (), {"DataFrame": dict}))
    assert Table(ROWS).to_pandas().keys() == set(Table(ROWS).columns)
