"""Slow steps, announced to whatever displays progress.

A step that may take seconds runs inside :func:`activity`, in library code and commands alike. Without a display, as in
a Python program that uses panscan, this does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from panscan.core.process import now

T = TypeVar("T")

OnProgress = Callable[[str], None]
"""Takes what happens next, or what the user should know, as a line."""


class Activity:
    """A running step.

    Args:
        text: present participle phrase, such as "loading google/gemma-3-4b-it".
        total: amount of work; None if unknown.
        unit: "B" for bytes, else empty.

    Attributes:
        done: finished work, in the same unit as ``total``.
        started: start of the step, in seconds since the epoch.
        renamed: time of the last change of its text, in the same unit.
    """

    def __init__(self, text: str, total: float | None = None, unit: str = "") -> None:
        self.text, self.total, self.unit = text, total, unit
        self.done = 0.0
        self.started = self.renamed = now()

    def update(self, done: float, total: float | None = None) -> None:
        """Set the finished work, and the total if it is given."""
        self.done = done
        if total is not None:
            self.total = total

    def advance(self, amount: float = 1) -> None:
        """Add finished work."""
        self.done += amount

    def rename(self, text: str) -> None:
        """Replace the text."""
        if text != self.text:
            self.text, self.renamed = text, now()

    def restart(self, text: str, total: float | None = None) -> None:
        """Replace this step with another one."""
        self.text, self.total, self.done = text, total, 0.0
        self.started = self.renamed = now()

    def status(self) -> str:
        """Return the progress in words, such as ``12 of 40, 1.5/s, 0:00:19 left``; empty without a total."""
        if self.total is None:
            return ""
        rate = self.done / max(now() - self.started, 1e-9)
        if self.unit == "B":
            words = [f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB", f"{rate / 1e6:.1f} MB/s"]
        else:
            words = [f"{self.done:.0f} of {self.total:.0f}", f"{f'{rate:.0f}' if rate >= 10 else f'{rate:.2g}'}/s"]
        if not rate:
            return words[0]
        return ", ".join([*words, f"{timedelta(seconds=round(max(self.total - self.done, 0) / rate))} left"])


Show = Callable[[list[Activity]], None]
"""Shows the running activities, the outermost first, after one has begun or ended. Called from any thread."""

_lock = threading.RLock()
_running: list[Activity] = []
_show: Show | None = None


@contextmanager
def activity(text: str, *, total: float | None = None, unit: str = "") -> Iterator[Activity]:
    """Announce a step for the duration of the block, and yield it for updates.

    Args:
        text: present participle phrase, such as "loading google/gemma-3-4b-it".
        total: amount of work; None if unknown.
        unit: "B" for bytes, else empty.
    """
    step = Activity(text, total, unit)
    with _lock:
        _running.append(step)
        _refresh()
    try:
        yield step
    finally:
        with _lock:
            _running.remove(step)
            _refresh()


def track(text: str, items: Sequence[T]) -> Iterator[T]:
    """Yield items, and announce the work on them as one step."""
    with activity(text, total=len(items)) as step:
        for item in items:
            yield item
            step.advance()


@contextmanager
def displayed(show: Show) -> Iterator[None]:
    """Show activities for the duration of the block."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before


def _refresh() -> None:
    if _show is not None:
        _show(list(_running))
