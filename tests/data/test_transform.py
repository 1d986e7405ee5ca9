"""A transform that is not what it should be is told in one line, whatever the user's code does."""

import sys

import pytest

from jaxthru.data.transform import apply, find_transform
from jaxthru.runtime.errors import InputError


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./module_a.py:f", "TypeError: the 'package' argument"),
        ("module_a:g", "AttributeError: module 'module_a' has no attribute 'g'"),
        ("module_b:f", "SyntaxError: invalid syntax"),
        ("module_c:f", "NameError: name 'undefined' is not defined"),
        ("module_d:f", "SystemExit: 0"),  # the command ended so, and with success
    ],
)
def test_what_cannot_be_imported(tmp_path, monkeypatch, name, why):
    lines = {"a": "f = 3\n", "b": "def f(:\n", "c": "undefined\n", "d": "import sys\nsys.exit(0)\n"}
    for letter, text in lines.items():
        (tmp_path / f"module_{letter}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"cannot be imported as module:function \(" + why):
        find_transform(name)


def test_a_transform_that_would_end_the_process_costs_its_text():
    with pytest.raises(InputError, match="the transform raised SystemExit: 0"):
        apply(lambda text: sys.exit(0), "text")
