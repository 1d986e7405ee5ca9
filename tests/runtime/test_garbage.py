import gc
import weakref

from jaxthru.runtime.garbage import PYTHONS, SELDOM, collect_seldom, heap_frozen


class Cycle:
    def __init__(self):
        self.itself = self


def test_what_exists_is_walked_by_no_collection_and_what_comes_is():
    gc.collect()  # so that none comes before the heap is frozen
    before = weakref.ref(Cycle())
    with heap_frozen():
        within = weakref.ref(Cycle())
        gc.collect()
        assert before() is not None and within() is None
    gc.collect()
    assert before() is None


def test_collections_are_seldom_until_the_steps():
    tests = gc.get_threshold()
    try:
        with heap_frozen():
            assert gc.get_threshold() == tests
        collect_seldom()
        assert gc.get_threshold()[0] == SELDOM > PYTHONS[0]
        with heap_frozen():
            assert gc.get_threshold() == PYTHONS
    finally:
        gc.set_threshold(*tests)
