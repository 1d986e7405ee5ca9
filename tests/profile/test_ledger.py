import json

import pytest

from jaxthru.profile import ledger


def small() -> ledger.Ledger:
    return ledger.Ledger(
        run=ledger.Run("quickstart", "cpu", 2, 1, "cpu", {"jax": "0"}, 512.0, 64.0),
        window=ledger.Window(5, 2, 0.5, loop_seconds=0.4, closure=0.25, noise=0.01),
        lines=tuple(ledger.Line(name, 0.05, 0.1) for name in ledger.LINES),
        matmul=ledger.Matmul(1e9, 9e8),
        scopes=(ledger.Scope("mlp", "forward", "matmul", 0.1),),
        devices=(
            ledger.Device("0", (ledger.DeviceStep(5, 0.0, 0.5, {"matmul": 0.5}),), ((0.0, 0.5, "matmul"),)),
        ),
        memory=ledger.Memory(
            None, {"parameters": 4}, (ledger.Buffer(4, "a/b", None, "other"),), ((0, 4),), 0
        ),
    )


def test_a_ledger_comes_back_from_its_json(tmp_path):
    kept = small()
    kept.write(tmp_path / "ledger.json")
    assert ledger.read(tmp_path / "ledger.json") == kept
    assert kept.seconds("matmul") == 0.05
    assert json.loads((tmp_path / "ledger.json").read_text())["lines"][0]["name"] == "matmul"


def test_another_version_is_refused():
    with pytest.raises(ValueError, match="version 2"):
        ledger.from_json(small().to_json() | {"version": 2})
