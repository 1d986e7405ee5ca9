"""What a user sees of a peer whose package is not installed: a module that works without it, or one line."""

import ast
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
PEERS = {path.stem: path for path in sorted((BENCH / "peers").glob("*.py"))}
OWN = {
    *("jax", "flax", "numpy", "jaxthru", "pallas_kernels", "peers"),
    *sys.stdlib_module_names,
    *(path.stem for path in BENCH.glob("*.py")),
}


def foreign(statements) -> set[str]:
    """Returns the packages that some statements import, but for those that jaxthru needs itself."""
    found = set()
    for each in statements:
        if isinstance(each, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in each.names}
        elif isinstance(each, ast.ImportFrom):
            found.add(each.module.partition(".")[0])
    return found - OWN


@pytest.fixture
def absent(monkeypatch):
    """Makes each package that any peer imports absent, installed or not; what a test imports is forgotten."""
    packages = foreign(each for path in PEERS.values() for each in ast.walk(ast.parse(path.read_text())))
    assert {"torch", "transformers", "torchtitan", "deepspeed"} <= packages
    loaded = {name for name in sys.modules if name.partition(".")[0] in packages}
    for name in packages | loaded:
        monkeypatch.setitem(sys.modules, name, None)
    yield packages
    for name in [name for name in sys.modules if name.partition(".")[0] == "peers"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_without_its_packages_works_or_says_so_in_one_line(bench, absent, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [str(PEERS[name])])
    needed = foreign(ast.parse(PEERS[name].read_text()).body)  # to be imported at all
    if not needed:
        assert callable(bench(f"peers.{name}").main)
        return
    with pytest.raises(SystemExit) as ended:
        bench(f"peers.{name}")
    [line] = ended.value.code.splitlines()
    said, _, packages = line.partition(": not installed: ")
    assert said == f"{name}.py" and needed <= set(packages.split(", "))


def test_collective_matmul_leaves_a_line_for_its_caller(bench, absent, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torch_collective_matmul.py", "--shapes", "{}"])
    assert bench("peers.torch_collective_matmul").main() == 0
    assert json.loads(capsys.readouterr().out) == {"missing": "torch is not installed"}
