"""The direction of imports, and who may import what: see CONTRIBUTING.md."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from jaxthru.models import family, llama

ROOT = Path(__file__).resolve().parent.parent

LEVEL = {
    "pallas_kernels": 0,
    "runtime": 0,
    "moved": 1,
    "optim": 1,
    "data": 1,
    "profile/read": 1,
    "models": 2,
    "engine": 3,
    "training": 4,
    "profile/collect": 5,
    "config_file": 5,
    "config": 6,
    "config_reference": 7,
    "build": 7,
    "profile": 8,
    "plan": 9,
    "train": 10,
    "__main__": 11,
}
"""Room -> its place in the order, from left to right; "profile" is what is in neither of its two rooms."""

CONFIG_READERS = ("config_reference", "build", "plan", "train")


def package_of(module: str) -> str | None:
    """Returns the room (a key of LEVEL) that a dotted module name belongs to, if it is ours."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    if (room := "/".join(parts[1:3])) in LEVEL:
        return room
    return parts[1] if parts[0] == "jaxthru" and len(parts) > 1 else None


def sources() -> list[Path]:
    """Returns all modules but jaxthru/__init__.py, which lists public names of all packages."""
    found = {*ROOT.glob("jaxthru/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")}
    return sorted(found - {ROOT / "jaxthru" / "__init__.py"})


def imported_modules(path: Path) -> set[str]:
    """Returns every module that a file imports, at its top or within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            found.add(node.module)
            if node.module in ("jaxthru", "pallas_kernels"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_left(path):
    own = package_of(module_name(path))
    assert own in LEVEL, f"{path}: package {own!r} has no place in the order"
    for module in imported_modules(path):
        other = package_of(module)
        if other is None or other == own:
            continue
        assert LEVEL[other] < LEVEL[own], f"{path}: {own} imports {other}"
        assert {own, other} != {"train", "plan"}, f"{path}: a run needs no plan"
        assert other != "config" or own in CONFIG_READERS, f"{path}: {own} imports config"


def test_a_configuration_loads_without_the_profiler():
    """Neither the report nor the tables, nor what else makes a ledger of a profile."""
    command = [sys.executable, "-c", "import sys, jaxthru.config; print(*sys.modules)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    rooms = {package_of(name) for name in said.split() if name.startswith("jaxthru.profile.")}
    assert {"profile/collect"} <= rooms <= {"profile/collect", "profile/read"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_flax_and_pallas_stay_in_their_rooms(path):
    own = package_of(module_name(path))
    modules = imported_modules(path)
    if own != "models":
        assert not [m for m in modules if m.split(".")[0] == "flax"], f"{path}: only models/ imports Flax"
    if own != "pallas_kernels":
        kernels = [m for m in modules if m.startswith(("jax.experimental.pallas", "jax_triton", "triton"))]
        assert not kernels, f"{path}: only pallas_kernels/*/ imports Pallas or jax_triton"


def test_no_nameless_rooms():
    banned = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [path for path in sources() if path.stem in banned]


def test_rooms_are_not_crowded():
    limits = {"pallas_kernels": 600}
    crowded = {}
    for path in sources():
        lines = len(path.read_text().splitlines())
        if lines > limits.get(package_of(module_name(path)), 320):
            crowded[str(path.relative_to(ROOT))] = lines
    assert not crowded
    for config in ROOT.glob("configs/*.py"):
        assert len(config.read_text().splitlines()) <= 80, config


FAMILY_NEUTRAL = ("plan", "profile", "training", "engine", "build")


@pytest.mark.parametrize("room", FAMILY_NEUTRAL)
def test_no_family_is_known_by_name_or_by_its_keys(room):
    """Beside its own file. `layers` counts as a key only of a model, for engines have layers too."""
    fields = {field.name for field in dataclasses.fields(llama.Config)} - {"loop"}
    keys, of_config = fields - {"layers"}, {f"config.model.{name}" for name in fields}
    names = {*family.SHIPPED, "ModelConfig"}
    for path in sorted((ROOT / "jaxthru" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                told = ast.unparse(node)
                known = node.attr in (keys | names) - NEUTRAL_WORDS and told != "data.vocabulary"
                assert not known, f"{path}:{node.lineno}: {told}"
                assert told not in of_config, f"{path}:{node.lineno}: {told}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                key = node.value.removeprefix("model.")
                named = key in keys | names and (key != node.value or key not in NEUTRAL_WORDS)
                assert not named, f"{path}:{node.lineno}: {node.value!r}"
            if isinstance(node, ast.ImportFrom):
                imported = {alias.name for alias in node.names} | {f"{node.module}".rpartition(".")[2]}
                assert not imported & names, f"{path}:{node.lineno}: imports {imported & names}"


NEUTRAL_WORDS = {"embed", "heads", "kv_heads", "head_dim", "mlp"}
"""Keys that are also names of logical axes and scopes."""


def test_no_function_is_long():
    """80 lines, of `jaxthru`: from its `def` to its end, without the docstring."""
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if path.is_relative_to(ROOT / "jaxthru") and isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                lines = node.end_lineno - node.lineno + 1
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
                long += [f"{path}: {node.name}, {lines} lines"] * (lines > 80)
    assert not long, "; ".join(long)
