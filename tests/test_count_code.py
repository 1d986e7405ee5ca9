"""What counts as code: scripts/count_code.py against a source counted by hand."""

from pathlib import Path

COUNTED = '''"""Of the module,
on two lines."""

import os; import sys
from pathlib import (  # a comment
    Path,
)

LIMIT = 3  # 3 tokens
"""Of an attribute."""
a = 1; b = 2; "naïveté, déjà vu"; c = 3
if a: import json; d = [1]


@decorator(
    1,
)
class Kept:
    "One line."

    name: "str" = """
not a docstring
"""

    def told(self):
        """Of a method."""

        return f"{self.name:>4};", \\
            "no docstring"
'''
# LIMIT = 3 | a = 1 b = 2 c = 3 | if a : d = [ 1 ] | @ decorator ( 1 , ) | class Kept :
# | name : "str" = """…""" | def told ( self ) : | return f" { self . name : >4 } ; " , "no docstring"
TOKENS = 3 + 9 + 8 + 6 + 3 + 5 + 6 + 13
LINES = 1 + 1 + 1 + 3 + 1 + 3 + 1 + 2


def test_lines_and_tokens_are_those_counted_by_hand(script):
    assert script("count_code").count(COUNTED) == (1, LINES, TOKENS)
    assert script("count_code").count('"""Nothing."""\n\n# at all\n') == (1, 0, 0)


def test_packing_lines_saves_no_tokens(script):
    count = script("count_code").count
    apart = count("def f(x):\n    y = x\n    return y\n")
    packed = count("def f(x): y = x; return y\n")
    assert (apart.lines, packed.lines) == (3, 1) and apart.tokens == packed.tokens == 11


def test_each_file_counts_in_one_row_and_jaxthru_also_as_a_whole(script, tmp_path):
    for path in (
        "jaxthru/one.py",
        "jaxthru/data/two.py",
        "jaxthru/data/deep/three.py",
        "pallas_kernels/attention/four.py",
        "scripts/bench/peers/five.py",
        "scripts/six.py",
        "tests/data/seven.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    counting = script("count_code")
    found = counting.sizes(tmp_path)
    assert {name: size.files for name, size in found.items()} == {
        "jaxthru": 3,
        "jaxthru/*.py": 1,
        "jaxthru/data": 2,
        "pallas_kernels": 1,
        "scripts/bench": 1,
        "scripts": 1,
        "tests": 1,
    }
    assert all(size.lines == size.files and size.tokens == 3 * size.files for size in found.values())
    assert counting.table(found).splitlines()[-1] == "| **all** | 7 | 7 | 21 |"


def test_the_kept_table_is_of_the_packages_there_are(script):
    counting, root = script("count_code"), Path(__file__).resolve().parent.parent
    folders = {f"jaxthru/{path.parent.name}" for path in root.glob("jaxthru/*/__init__.py")}
    kept = [
        line.split(" | ")[0].strip("| ") for line in counting.KEPT.read_text().splitlines() if "|" in line
    ]
    assert folders == {name for name in kept if name.startswith("jaxthru/")} - {"jaxthru/*.py"}
