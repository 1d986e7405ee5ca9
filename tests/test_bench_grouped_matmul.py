"""The tool that measures tiles of Triton's grouped matmuls, with the portable form in the kernels' place."""

import json
import types

import jax
import pytest

from pallas_kernels.grouped_matmul import triton_tiles, xla
from pallas_kernels.grouped_matmul.shapes import GPU, Shape
from pallas_kernels.grouped_matmul.triton_tiles import Tile


@pytest.fixture
def tool(bench, monkeypatch):
    module = bench("tune_grouped_matmul")

    def stand_in(name: str):
        return lambda *arrays, tile, platform, **how: getattr(xla, name)(*arrays, **how)

    names = ("grouped_matmul", "grouped_outer")
    monkeypatch.setattr(module, "triton", types.SimpleNamespace(**{name: stand_in(name) for name in names}))
    monkeypatch.setattr(module.programs, "IN_A_ROW", 1)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["matmul", "transposed", "outer"])
def test_tuning_times_then_orders_then_checks(tool, operation):
    shape = Shape(64, 16, 24, 4)
    case = tool.case(shape, operation)
    I, O = (24, 16) if operation == "transposed" else (16, 24)  # noqa: E741
    assert case.problem == triton_tiles.Problem(operation, 64, 4, I, O, "bfloat16")
    plain, portable = (jax.eval_shape(of, *case.operands)[0] for of in (case.plain, case.portable))
    assert portable.shape == ((4, I, O) if operation == "outer" else (64, O))
    assert plain.shape == portable.shape[-2:]
    tiles = [Tile(64, 64, 16, 4, 2), Tile(128, 64, 16, 4, 2)]
    entry = tool.tune(case, tiles, 1, 0.0)
    orders = triton_tiles.in_other_bands(case.problem, tiles[0])
    assert len(entry["tried"]) == len(tiles) + 1 + len(orders)
    assert len(orders) == (0 if operation == "outer" else 3)
    assert min(entry["microseconds"]) > 0 < min(entry["plain_microseconds"])
    assert entry["tile"] in [{k: v for k, v in one.items() if k != "microseconds"} for one in entry["tried"]]


@pytest.mark.slow
def test_a_wrong_result_is_not_written(tool, monkeypatch):
    case = tool.case(Shape(64, 16, 24, 4), "matmul")
    wrong = lambda *arrays, **how: 2 * xla.grouped_matmul(*arrays, transposed=how["transposed"])  # noqa: E731
    monkeypatch.setattr(tool.triton, "grouped_matmul", wrong)
    with pytest.raises(SystemExit, match="differs from the portable form's"):
        tool.tune(case, [Tile(64, 64, 16, 4, 2)], 1, 0.0)


def test_what_is_measured_is_written_after_each(tool, monkeypatch, tmp_path):
    """As the table is read: by the kind of device and the key of a problem."""
    monkeypatch.setattr(triton_tiles, "TABLE", {})
    monkeypatch.setattr(triton_tiles, "TABLE_FILE", tmp_path / "table.json")
    monkeypatch.setattr(tool, "GPU", {"small": Shape(64, 16, 24, 4)})
    monkeypatch.setattr(tool, "SHAPES", ["small"])
    measured = {"microseconds": [2.0, 1.0], "plain_microseconds": [1.0, 1.0], "tried": []}
    monkeypatch.setattr(tool, "tune", lambda case, *_: measured | {"tile": vars(triton_tiles.HOPPER)})
    monkeypatch.setattr(tool.harness, "keep_stdout", lambda: None)
    monkeypatch.setattr("sys.argv", ["tune_grouped_matmul.py", "--operations", "matmul", "outer"])
    assert tool.main() == 0
    (found,) = json.loads((tmp_path / "table.json").read_text()).values()
    assert sorted(found) == ["matmul/16x16x24/bfloat16", "outer/16x16x24/bfloat16"]
    assert all(entry.keys() == {"tile", "microseconds", "plain_microseconds"} for entry in found.values())


def test_the_shapes_that_are_measured_are_models(tool):
    assert set(tool.SHAPES) <= set(GPU) and len(tool.SHAPES) == 6
    for name in tool.SHAPES:
        assert GPU[name].sizes is None and GPU[name].rows % 1024 == 0
