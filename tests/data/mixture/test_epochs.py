"""How often sources are read, and which of them are named for it."""

import pytest

from jaxthru.data.mixture.configuration import Mixture
from jaxthru.data.mixture.epochs import in_one_pass, repeated

TOKENS = {"large": 1_000_000, "small": 10_000, "tiny": 100}
DOCUMENTS = {"large": 1000, "small": 10, "tiny": 10}


def mixture(**tree) -> Mixture:
    weights = {"large": 0.9, "small": 0.09, "tiny": 0.01}
    sources = {name: {"weight": weight} | tree.pop(name, {}) for name, weight in weights.items()}
    return Mixture.from_tree({"sources": sources} | tree)


def test_epochs_while_as_many_tokens_are_read_as_there_are():
    total = sum(TOKENS.values())
    expected = {"large": 0.9 * total / 1_000_000, "small": 0.09 * total / 10_000, "tiny": 0.01 * total / 100}
    assert in_one_pass(mixture(), TOKENS, DOCUMENTS) == pytest.approx(expected)


def test_weights_of_documents():
    """A document of each: 1,000 tokens, 1,000 and 10."""
    taken = 0.9 * 1000 + 0.09 * 1000 + 0.01 * 10
    found = in_one_pass(mixture(count="documents"), TOKENS, DOCUMENTS)
    assert found["small"] == pytest.approx(0.09 / 10 * sum(TOKENS.values()) / taken)
    assert sum(found[name] * TOKENS[name] for name in TOKENS) == pytest.approx(sum(TOKENS.values()))


def test_caps_end_it_and_of_changing_weights_nothing_is_known():
    capped = mixture(tiny={"max_epochs": 3}, small={"max_tokens": 25_000})
    found = in_one_pass(capped, TOKENS, DOCUMENTS)
    assert found["tiny"] == 3 and found["small"] == 2.5
    assert in_one_pass(mixture(tiny={"weight": [[0, 1], [9, 2]]}), TOKENS, DOCUMENTS) == {}
    empty = in_one_pass(mixture(), TOKENS | {"tiny": 0}, DOCUMENTS | {"tiny": 0})
    assert empty.keys() == {"large", "small"}


def test_one_line_of_any_number_of_sources():
    assert repeated({"a": 4.0, "b": 0.1}, "in this run") is None
    line = repeated({"a": 4.0, "b": 4.04, "c": 504.2}, "in this run")
    assert line.startswith("2 sources are read more than 4 times in this run (c 504, b 4.0): ")
    line = repeated({f"s{number}": 5.0 + number for number in range(3000)}, "in this run")
    assert "(s2999 3,004, " in line and " and 2,992 more): " in line and len(line) < 400
