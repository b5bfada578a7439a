"""The process of a lane: runs its checks one after the other and reports each finding at once.

A check may hang in a driver, or end the process in a broken kernel. Only the parent, in another process, survives both.
"""

from __future__ import annotations

import time
from importlib import import_module

from panscan.core.child import Parent
from panscan.core.errors import error_line, one_line
from panscan.inspect.doctor.checks import Check, not_checked


def main() -> None:
    """Receive a list of checks, run them, and send a :data:`panscan.inspect.doctor.run.Message` for each event."""
    parent = Parent()
    checks: list[Check] = parent.receive()
    for check in checks:
        parent.send((check.name, None))
        start = time.perf_counter()
        try:
            module, _, function = check.function.partition(":")
            for finding in getattr(import_module(module), function)():
                parent.send((check.name, finding))
        except Exception as error:  # a bug in one check must not hide what the others find
            parent.send((check.name, not_checked(f"the check failed: {one_line(error_line(error, 300))}")))
        parent.send((check.name, time.perf_counter() - start))
    parent.receive()  # until the parent ends this process: threads of libraries and CUDA's own cleanup may hang
