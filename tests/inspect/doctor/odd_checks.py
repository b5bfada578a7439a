"""Checks that hang, crash or fail, for tests of what runs them."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from panscan.inspect.doctor.checks import Check, CheckFinding, ok

ROOT = Path(__file__).parents[3]


def odd(name: str, *, function: str | None = None, lane: str = "a", seconds: float = 60.0) -> Check:
    """A check of this module."""
    return Check(name, "host", f"tests.inspect.doctor.odd_checks:{function or name}", lane, seconds)


def fine() -> Iterator[CheckFinding]:
    os.write(1, b"libraries print to standard output")
    yield ok("one")
    yield ok("two")


def hangs() -> Iterator[CheckFinding]:
    yield ok("before it hung")
    threading.Event().wait()


def crashes() -> Iterator[CheckFinding]:
    os.write(2, b"broken kernel\n")
    os.kill(os.getpid(), signal.SIGSEGV)
    yield ok("never")


def leaves() -> Iterator[CheckFinding]:
    os._exit(3)
    yield ok("never")


def fails() -> Iterator[CheckFinding]:
    raise ValueError("two\nlines")
    yield ok("never")
