"""When work for a request must stop: at a time, or as soon as the request is abandoned."""

from __future__ import annotations

import math
import threading

from panscan.core.process import now


class Deadline:
    """The time at which a request's work ends, or earlier if the request is abandoned. Thread-safe.

    Args:
        until: time in seconds of :func:`panscan.core.now`.
    """

    def __init__(self, until: float = math.inf) -> None:
        self.until = until
        self._abandoned = threading.Event()

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return a deadline that many seconds from now."""
        return cls(now() + seconds)

    def abandon(self) -> None:
        """End the work as soon as possible: the client left, or the server shuts down."""
        self._abandoned.set()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; 0 if it has passed or the request was abandoned."""
        return 0.0 if self._abandoned.is_set() else max(0.0, self.until - now())

    def check(self) -> None:
        """Raise if the work must stop.

        Raises:
            TimeoutError: the deadline has passed, or the request was abandoned.
        """
        if not self.remaining:
            raise TimeoutError
