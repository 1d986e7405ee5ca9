"""The direction of imports, and who may import what: see CONTRIBUTING.md."""

import ast
import dataclasses
import re
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
    "generation": 4,
    "training": 5,
    "huggingface": 5,
    "profile/collect": 6,
    "config_file": 6,
    "config": 7,
    "config_reference": 8,
    "build": 8,
    "profile/account": 9,
    "profile/explain": 10,
    "profile/show": 11,
    "profile": 12,
    "plan": 12,
    "train": 13,
    "generate": 13,
    "export": 13,
    "evaluate": 13,
    "compare": 13,
    "__main__": 14,
}
"""Room -> its place in the order, from left to right; "profile" is the command, beside its rooms."""

CONFIG_READERS = ("config_reference", "build", "plan", "train", "generate", "export", "evaluate")


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
def test_flax_pallas_and_ray_stay_in_their_rooms(path):
    own = package_of(module_name(path))
    modules = imported_modules(path)
    if own != "models":
        assert not [m for m in modules if m.split(".")[0] == "flax"], f"{path}: only models/ imports Flax"
    if own != "pallas_kernels":
        kernels = [m for m in modules if m.startswith(("jax.experimental.pallas", "jax_triton", "triton"))]
        assert not kernels, f"{path}: only pallas_kernels/*/ imports Pallas or jax_triton"
    if path.stem != "ray_driver":
        assert "ray" not in {m.split(".")[0] for m in modules}, f"{path}: Ray ends a process that uses it"


DATA = ("mixture", "sources", "store", "loading")
"""The rooms of jaxthru/data: each imports itself and those before it."""
INPUT_OUTPUT = {
    *("builtins", "fcntl", "fileinput", "glob", "io", "mmap", "os", "pathlib", "pickle", "shutil", "socket"),
    *("sqlite3", "subprocess", "tempfile", "threading", "urllib", "zipfile", "grain", "jax", "pyarrow"),
}
READ_OR_WRITE = {"open", "print", "input", "exec", "eval", "__import__"}
READ_OR_WRITE |= {"fromfile", "load", "loadtxt", "memmap", "save", "savez", "tofile", "import_module"}


def room_of_data(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["jaxthru", "data"] and len(parts) > 2 and parts[2] in DATA else None


@pytest.mark.parametrize("path", sorted(ROOT.glob("jaxthru/data/*/**/*.py")), ids=lambda path: path.stem)
def test_rooms_of_data_import_what_stands_before_them(path):
    own = DATA.index(room_of_data(module_name(path)))
    for module in imported_modules(path):
        other = room_of_data(module)
        assert other is None or DATA.index(other) <= own, f"{path}: {DATA[own]} imports {module}"


def input_or_output(source: str) -> list[str]:
    """Returns what a module imports or calls to read or write anything."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in INPUT_OUTPUT]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in INPUT_OUTPUT:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found += [name] * (name in READ_OR_WRITE)
    return found


def test_the_mixture_does_no_io():
    for path in ROOT.glob("jaxthru/data/mixture/*.py"):
        assert not (found := input_or_output(path.read_text())), f"{path}: {found}"
        ours = {module for module in imported_modules(path) if module.startswith("jaxthru.")}
        rooms = ("jaxthru.data.mixture.", "jaxthru.runtime.errors")
        assert not [module for module in ours if not module.startswith(rooms)], path


@pytest.mark.parametrize(
    "planted",
    [
        "import os",
        "from pathlib import Path",
        "open('a')",
        "np.load('a')",
        "np.memmap('a')",
        "import os.path as p",
    ],
)
def test_io_that_is_done_is_found(planted):
    assert input_or_output(f"import numpy as np\n\n{planted}\n")


def test_a_reader_is_one_file():
    """No other file names it, nor does a reader import another."""
    readers = {path.stem: path for path in ROOT.glob("jaxthru/data/sources/readers/*.py")}
    del readers["__init__"]
    for path in ROOT.glob("jaxthru/data/**/*.py"):
        modules = {
            module for module in imported_modules(path) if module.startswith("jaxthru.data.sources.readers.")
        }
        assert not modules, f"{path}: {modules}"
        if path not in readers.values():
            strings = {getattr(node, "value", None) for node in ast.walk(ast.parse(path.read_text()))}
            named = {*readers} & {text for text in strings if isinstance(text, str)}
            # The recipe's default, and the kind of a text store.
            assert named <= {"text"}, f"{path}: {named}"


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


FAMILY_NEUTRAL = ("plan", "profile", "training", "engine", "build", "generation", "huggingface")
NEUTRAL_WORDS = {"embed", "heads", "kv_heads", "head_dim", "mlp", "weighted_swiglu"}
"""Keys that are also names of logical axes and scopes, and an operation: attributes and whole strings."""
PROSE = {"embed", "heads", "mlp", "vocabulary"}
"""Keys that are also words of the field: within a string they are keys behind `model.` alone."""
OF_ALL = {field.name for field in dataclasses.fields(family.FamilyConfig)}
FIELDS = {field.name for field in dataclasses.fields(llama.Config)} - OF_ALL
KEYS = FIELDS - {"layers", "window"}
"""Engines have layers too, and attention has windows: both are keys of a model only."""
FAMILY = re.compile(rf"(?<![a-z])(?:{'|'.join(family.SHIPPED)}|modelconfig|swiglu|rope)(?![a-z])", re.I)
KEY = re.compile(rf"\b(?:{'|'.join(KEYS - PROSE)}|model\.(?:{'|'.join(FIELDS)}))\b")

CONFIGS = re.compile("|".join(sorted((path.stem for path in ROOT.glob("configs/*.py")), reverse=True)))
"""Names of shipped configurations, of which a command's help shows examples."""


def known_of_a_family(source: str) -> list[str]:
    """Returns what a module's code knows of a family, by its name or by its configuration's keys."""
    tree = ast.parse(source)
    alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    documentation = {node for node in alone if isinstance(node, ast.Constant)}
    nodes = (node for node in ast.walk(tree) if node not in documentation and knows_a_family(node))
    return [f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)}" for node in nodes]


def knows_a_family(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr=name):
            told = ast.unparse(node)
            of_model = ast.unparse(node.value).endswith("config.model") and name in FIELDS
            key = name in KEYS - NEUTRAL_WORDS and told != "data.vocabulary"
            return key or of_model or bool(FAMILY.search(name))
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in FIELDS and ast.unparse(node.value).endswith(("model", "['model']"))
        case ast.Call(func=function, args=arguments, keywords=keywords):
            called, given = ast.unparse(function), {keyword.arg for keyword in keywords}
            named = FIELDS & {each.value for each in arguments if isinstance(each, ast.Constant)}
            read = called in ("getattr", "hasattr") or called.endswith(("model'].get", "model.get"))
            changed = FIELDS & given if called in ("replace", "dataclasses.replace") else KEYS & given
            return bool(changed or (read and named))
        case ast.Constant(value=str(text)):
            text = CONFIGS.sub("", text)
            return text not in NEUTRAL_WORDS and bool(text in KEYS or KEY.search(text) or FAMILY.search(text))
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in names)]
            return any(FAMILY.search(module) for module in modules)
        case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return bool(FAMILY.search(name))
    return False


@pytest.mark.parametrize("room", FAMILY_NEUTRAL)
def test_no_family_is_known_by_name_or_by_its_keys(room):
    """Beside its own file."""
    for path in sorted((ROOT / "jaxthru" / room).rglob("*.py")):
        assert not (known := known_of_a_family(path.read_text())), f"{path}: {known}"


@pytest.mark.parametrize(
    "planted",
    [
        "config.model.layers",
        "shape.kv_heads_per_rank(shape.qk_norm)",
        "dataclasses.replace(model, kv_heads=2)",
        "replace(config.model, layers=2)",
        "Config(mlp=4 * width)",
        "getattr(model, 'kv_heads')",
        "config['model']['heads']",
        "tree['model']['layers']",
        "config['model'].get('heads')",
        "said = f'model.kv_heads = {count}'",
        "said = f'{group}.tied_embeddings = {tied}'",
        "key = 'model.layers'",
        "key = 'vocabulary'",
        "key = 'rope_theta'",
        "import jaxthru.models.llama as x",
        "import jaxthru.models.llama",
        "from jaxthru.models import llama as x",
        "from jaxthru.models.llama import Config",
        "from jaxthru.config import ModelConfig as Shape",
        "importlib.import_module('jaxthru.models.llama')",
        "f'jaxthru.models.{family}' if family == 'llama' else family",
        "scopes['swiglu']",
        "SwiGLU(x)",
        "def rope_angles(positions): ...",
        "lambda rope: rope",
    ],
)
def test_a_family_that_is_known_is_found(planted):
    assert known_of_a_family(f'"""A model of llama, with kv_heads."""\n\n{planted}\n')


@pytest.mark.parametrize(
    "neutral",
    [
        "dims['heads'] // dims['kv_heads']",
        "heads, head_dim = item.dims",
        "data.vocabulary",
        "self.embed(params) + programs.embed",
        "Sizes(layers=3)",
        "'a larger vocabulary, and heads that the mesh does not split'",
        "properties.europe",
        "example = 'plan memory --config llama3_8b_one_gpu'",
        "def f():\n    'Of llama: kv_heads.'",
        "KEPT = {}\n'What a layer keeps, as of SwiGLU.'",
    ],
)
def test_words_of_every_model_are_no_family_s(neutral):
    assert not known_of_a_family(neutral)


def test_a_run_loads_no_plan():
    command = [sys.executable, "-c", "import sys, jaxthru.train; print(*sys.modules)"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "jaxthru.build.compiled" in said
    assert not [name for name in said if package_of(name) == "plan"]


def test_no_function_is_long():
    """80 lines, of `jaxthru`: from its `def` to its end, without the docstring."""
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())) if path.is_relative_to(ROOT / "jaxthru") else ():
            if isinstance(node, ast.FunctionDef):
                documented = ast.get_docstring(node) is not None
                lines = node.end_lineno - node.lineno + 1
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
                long += [f"{path}: {node.name}, {lines} lines"] * (lines > 80)
    assert not long, "; ".join(long)
