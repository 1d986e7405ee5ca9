import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxthru.data.mixture.shuffle import key_of, places


def order_of(size, key=1, order=0):
    index = np.arange(size)
    return places(index, np.full(size, size), np.full(size, key, np.uint64), np.full(size, order))


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1), order=st.integers(0, 2**40))
def test_each_number_has_one_place(size, key, order):
    assert sorted(order_of(size, key, order)) == list(range(size))


@settings(deadline=None, max_examples=60)
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 50)), min_size=1
    )
)
def test_a_place_does_not_depend_on_what_else_is_asked(asked):
    columns = zip(*asked, strict=True)
    size, key, order = (
        np.array(*pair) for pair in zip(columns, (np.int64, np.uint64, np.int64), strict=True)
    )
    found = places(size // 2, size, key, order)
    assert (found >= 0).all() and (found < size).all()
    for at in range(len(asked)):
        one = slice(at, at + 1)
        assert places(size[one] // 2, size[one], key[one], order[one])[0] == found[at]


def test_the_order_is_that_of_every_version():
    """Runs are resumed by newer versions: a new order would show some rows twice and others never."""
    assert order_of(10, key_of("a")).tolist() == [1, 0, 2, 6, 5, 9, 3, 7, 4, 8]


@pytest.mark.parametrize(("size", "most"), [(5, 1.15), (6, 1.18), (9, 1.13), (12, 1.18), (16, 1.18)])
def test_how_far_from_even_followers_are_in_short_orders(size, most):
    """As the module says: the likeliest follower of a number, over what it would be if all were as likely."""
    count = 20_000
    index, order = np.tile(np.arange(size), count), np.repeat(np.arange(count), size)
    many = np.full(len(index), size), np.full(len(index), key_of("even"), np.uint64)
    numbers = np.argsort(places(index, *many, order).reshape(count, size), axis=1)
    pairs = np.bincount((numbers[:, :-1] * size + numbers[:, 1:]).ravel(), minlength=size * size)
    assert 1.0 < pairs.max() / (count / size) < most


@pytest.mark.parametrize("size", [2, 3, 7, 15, 16, 100])
def test_orders_are_even(size):
    """Places, and distances of neighbours, are as evenly spread as chance would have them."""
    count = 400_000 // size
    index, order = np.tile(np.arange(size), count), np.repeat(np.arange(count), size)
    many = np.full(len(index), size), np.full(len(index), key_of("even"), np.uint64)
    found = places(index, *many, order).reshape(count, size)
    for numbers, kinds in ((found[:, 0], size), ((found[:, 1] - found[:, 0]) % size - 1, size - 1)):
        seen = np.bincount(numbers, minlength=kinds)
        expected = count / kinds
        assert ((seen - expected) ** 2 / expected).sum() < kinds + 5 * np.sqrt(2 * kinds) + 5
