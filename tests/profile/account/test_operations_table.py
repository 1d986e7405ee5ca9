"""The table of operations: its rows are all that ran, each instant is one row's, and a file has the same."""

import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from planes import collected

from jaxthru.profile.account import operations
from jaxthru.profile.account.build import account
from jaxthru.profile.account.ledger import LINES
from jaxthru.profile.account.operations import Operations
from jaxthru.profile.account.timeline import Interval, Ran, Window
from jaxthru.profile.read.xplane import Event


@pytest.fixture
def made(tmp_path):
    return account(collected(tmp_path / "runs" / "small" / "1", graphs=True))


def test_each_instant_is_of_one_row(made):
    table, found = made.operations["production"], made.ledger
    assert {*table["step"]} == {5, 6} and {*table["device"]} == {"0", "1"}
    for line in LINES:
        own = table["exposed"][table["line"] == line].sum() / 4 / 1e9
        assert own == pytest.approx(found.seconds(line), abs=1e-15), line
    assert table["exposed"].sum() == 4 * 1000
    assert np.all(table["exposed"] <= table["end"] - table["start"])


def test_a_row_says_what_ran_and_what_for(made):
    table = made.operations["attribution"]
    (row, *_) = np.flatnonzero(table["instruction"] == "gemm.1")
    assert (table["name"][row], table["line"][row]) == ("nvjet_tst_128x128", "matmul")
    assert (table["layer"][row], table["phase"][row]) == ("mlp", "forward")
    assert table["flops"][row] == 2e9 and table["bytes"][row] == 3 * 2e6
    assert table["end"][row] - table["start"][row] == 440
    idle = table["name"] == ""
    assert {*table["line"][idle]} <= {"data_wait", "host_gap", "dependency"}
    assert np.all(table["exposed"][idle] == (table["end"] - table["start"])[idle])
    assert np.isnan(table["flops"][idle]).all()


def test_the_owner_hides_what_runs_beside_it():
    """A sum that runs for 100 beside a product and 30 alone, and one that has 60 of 100 for itself."""
    ran = [
        Ran(Event("0", "", "gemm", 0, 100, "m", "gemm"), "matmul", None),
        Ran(Event("0", "", "sum", 0, 130, "m", "sum"), "exposed_communication", None),
        Ran(Event("0", "", "gemm", 160, 200, "m", "gemm"), "matmul", None),
        Ran(Event("0", "", "sum", 160, 260, "m", "sum"), "exposed_communication", None),
    ]
    intervals = [
        Interval(0, 100, "matmul", 0),
        Interval(100, 130, "exposed_communication", 1),
        Interval(130, 160, "dependency", None),
        Interval(160, 200, "matmul", 2),
        Interval(200, 260, "exposed_communication", 3),
    ]
    table = Operations([Window("0", 1, 0, 260, intervals, ran)])
    assert table["exposed"].tolist() == [100, 30, 40, 60, 30]
    own = ["matmul", "matmul", "matmul", "exposed_communication", "dependency"]
    assert table["owner"].tolist() == own


def test_what_began_in_a_step_before_the_pass_owns_its_time_and_is_not_counted():
    ran = [
        Ran(Event("0", "", "copy", 0, 150), "exposed_host_copies", None),
        Ran(Event("0", "", "gemm", 150, 200), "matmul", None),
        Ran(Event("0", "", "copy", 200, 400), "exposed_host_copies", None),
    ]
    first = [Interval(100, 150, "exposed_host_copies", 0), Interval(150, 200, "matmul", 1)]
    steps = [
        Window("0", 2, 100, 300, [*first, Interval(200, 300, "exposed_host_copies", 2)], ran),
        Window("0", 3, 300, 400, [Interval(300, 400, "exposed_host_copies", 2)], ran),
    ]
    table = Operations(steps)
    assert table["exposed"].tolist() == [50, 50, 200] and table.began.tolist() == [False, True, True]
    assert table["step"].tolist() == [2, 2, 2]


def test_the_file_has_both_passes(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = collected(tmp_path / "runs" / "small" / "1", graphs=True)
    operations.write(folder / "ops.parquet", account(folder).operations)
    found = parquet.read_table(folder / "ops.parquet")
    assert found.column_names == ["pass", *operations.NAMES, "owner"]
    assert {*found["pass"].to_pylist()} == {"attribution", "production"}
    table = account(folder).operations
    assert found["exposed"].to_pylist() == [
        *table["attribution"]["exposed"].tolist(),
        *table["production"]["exposed"].tolist(),
    ]
    assert None in found["flops"].to_pylist() and not any(
        map(np.isnan, filter(None, found["flops"].to_pylist()))
    )


def test_without_pyarrow_one_line_says_so(tmp_path, monkeypatch, caplog, made):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with caplog.at_level(logging.INFO, "jaxthru"):
        operations.write(tmp_path / "ops.parquet", made.operations)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f'{tmp_path / "ops.parquet"}: not written: needs pyarrow, pip install "jaxthru[formats]"'
    assert not (tmp_path / "ops.parquet").exists()


def test_the_pages_questions_are_answered(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow.parquet")
    folder = collected(tmp_path / "runs" / "small" / "1", graphs=True)
    operations.write(folder / "ops.parquet", account(folder).operations)
    page = (Path(__file__).resolve().parents[3] / "docs" / "profile.md").read_text()
    (code,) = re.findall(r"```python\n(import pyarrow.*?)```", page, re.DOTALL)
    monkeypatch.chdir(folder)
    exec(code, {})
    said = capsys.readouterr().out
    for column in ("exposed_sum", "owner", "speed_mean"):
        assert column in said
    assert str(2e9 / 440e-9)[:6] in said  # the product's FLOP/s
