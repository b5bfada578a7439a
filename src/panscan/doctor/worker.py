"""The process of a lane: runs its checks one after the other and reports each finding at once.

A check may hang in a driver, or end the process in a broken kernel. Only the parent, in another process, survives both.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib import import_module
from multiprocessing.connection import Connection

from panscan.core.errors import one_line
from panscan.doctor.findings import Check, CheckFinding, not_checked

__all__ = ["Message", "main"]

Message = tuple[str, CheckFinding | float | None]
"""Name of a check with None when it begins, with each finding, and with its seconds when it ends."""


def main() -> None:
    """Receive a list of checks, run them, and send a :data:`Message` for each event.

    The command line has the file descriptor of the connection.
    """
    connection = Connection(int(sys.argv[1]))
    checks: list[Check] = connection.recv()
    threading.Thread(target=_exit_with_parent, args=(connection,), daemon=True).start()
    for check in checks:
        connection.send((check.name, None))
        start = time.perf_counter()
        try:
            module, _, function = check.function.partition(":")
            for finding in getattr(import_module(module), function)():
                connection.send((check.name, finding))
        except Exception as error:  # a bug in one check must not hide what the others find
            connection.send((check.name, not_checked(f"the check failed: {type(error).__name__}: {_text(error)}")))
        connection.send((check.name, time.perf_counter() - start))
    os._exit(0)  # threads of libraries and CUDA's own cleanup may hang, and nothing here needs them


def _exit_with_parent(connection: Connection) -> None:
    """End this process when the parent closes the connection, whatever a check is waiting for."""
    connection.poll(None)
    os._exit(1)


def _text(error: Exception) -> str:
    return one_line(" ".join(str(error).split()))[:300]
