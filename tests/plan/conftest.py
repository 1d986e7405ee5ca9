"""What all tests of plans share."""

import pytest

from jaxthru.build import proposals


@pytest.fixture(autouse=True)
def no_search_of_another_test():
    """A process remembers its searches, and tests change what these go by."""
    proposals._candidates.cache_clear()
    yield
    proposals._candidates.cache_clear()
