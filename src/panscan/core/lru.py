"""A cache of limited size that forgets what was not used for longest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """The values that were used last. Thread-safe.

    Args:
        most: limit of the sum of all weights. A heavier value is not kept.
        weight: weight of a value, which does not change; by default, the limit is a number of values.
    """

    def __init__(self, most: int, weight: Callable[[Value], int] = lambda _: 1) -> None:
        self._most, self._weight = most, weight
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Value | None:
        """Return a value; None if the cache does not have it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def computed(self, key: Key, compute: Callable[[], Value]) -> Value:
        """Return a value; the cache keeps what ``compute`` returns if it does not have it."""
        if (value := self.get(key)) is None:
            value = compute()
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, in place of an earlier one, and drop those that were not used for longest if there are too
        many."""
        with self._lock:
            if key in self._values:
                self._held -= self._weight(self._values.pop(key))
            self._values[key] = value
            self._held += self._weight(value)
            while self._held > self._most:
                self._held -= self._weight(self._values.popitem(last=False)[1])
