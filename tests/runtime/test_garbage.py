import gc
import weakref

from jaxthru.runtime.garbage import heap_frozen


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
