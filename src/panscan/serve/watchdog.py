"""Ends a process that hangs: a small child process kills its parent if the parent's heartbeats stop.

Ray's health checks find a replica that hangs, but then give it its whole grace period before they kill it, and its
requests wait that long. A thread could not do this: a process that hangs may hold Python's lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

__all__ = ["Watchdog"]

_PROGRAM = """
import os, select, signal, sys
parent, limit = int(sys.argv[1]), float(sys.argv[2])
while True:
    silent = not select.select([0], [], [], limit)[0]
    if silent and not select.select([0], [], [], 2.0)[0]:  # twice: a container that was paused gets a second chance
        print(f"process {parent} gave no sign of life for {limit:g} s: killing it", file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)
    if not os.read(0, 65536):
        break  # the parent has ended
"""


class Watchdog:
    """Kills this process with SIGKILL if :meth:`beat` is not called for some time.

    Args:
        seconds: longest time between two heartbeats.
    """

    def __init__(self, seconds: float) -> None:
        # Isolated and without site-packages: starts in milliseconds, and nothing in the environment can change it.
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), str(seconds)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def beat(self) -> None:
        """Give a sign of life."""
        assert self._child.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):  # the watchdog was killed: Ray's health checks remain
            self._child.stdin.write(b".")
            self._child.stdin.flush()

    def close(self) -> None:
        """End the watchdog."""
        assert self._child.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(5.0)
