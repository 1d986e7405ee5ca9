"""Cases of a test, most of them slow: `from cases import slow_but_for`."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def slow_but_for(
    *fast: str, slow: Iterable[str] | None = None, minutes: float = 0, **axes: Mapping[str, Any]
) -> pytest.MarkDecorator:
    """Returns the `parametrize` of combinations of named values; those with an id in `fast` are fast.

    slow: the ids of the others, by default all there are. minutes: that each of them takes.
    slow_but_for("ring-4", name={"ring": "ring"}, t={"2": 2, "4": 4}) makes `ring-2` slow and `ring-4` fast.
    """
    combinations = {
        "-".join(names): values
        for names, values in (
            zip(*combination, strict=True)
            for combination in itertools.product(*(axis.items() for axis in axes.values()))
        )
    }
    taken = {*fast, *(combinations if slow is None else slow)}
    assert combinations.keys() >= taken, f"no such cases: {taken - combinations.keys()}"
    cases = [
        pytest.param(*values, id=name, marks=() if name in fast else pytest.mark.slow(minutes=minutes))
        for name, values in combinations.items()
        if name in taken
    ]
    return pytest.mark.parametrize(",".join(axes), cases)


def named(*values: Any) -> dict[str, Any]:
    """Returns {str(value): value}."""
    return {str(value): value for value in values}
