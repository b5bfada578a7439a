"""Memory of this process."""

from __future__ import annotations

import gc
import weakref

from panscan.model.machine import freeze_heap, release_memory


class Node:
    """An object that refers to itself, so that only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_a_frozen_heap_is_collected_where_memory_is_released() -> None:
    node = Node()
    reference = weakref.ref(node)
    try:
        freeze_heap()
        del node
        gc.collect()
        assert reference() is not None
        release_memory()
        assert reference() is None
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
