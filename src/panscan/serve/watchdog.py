"""A watchdog for processes that hang: a small child process kills its parent if the parent's heartbeats stop.

Ray's health checks detect a replica that hangs, but Ray waits for its whole grace period before it kills the replica,
and the requests wait that long. A thread cannot replace the child process: a process that hangs may hold the GIL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

_PROGRAM = """
import os, select, signal, sys
parent, limit = int(sys.argv[1]), float(sys.argv[2])
while True:
    silent = not select.select([0], [], [], limit)[0]
    if silent and not select.select([0], [], [], 2.0)[0]:  # twice: a container that was paused gets a second chance
        print(f"process {parent} sent no heartbeat for {limit:g} s: killing it", file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)
    if not os.read(0, 65536):
        break  # the parent has ended
"""


class Watchdog:
    """A child process that kills this one with SIGKILL unless :meth:`beat` is called regularly.

    Args:
        seconds: longest time between two heartbeats.
    """

    def __init__(self, seconds: float) -> None:
        # Isolated and without site-packages: starts in milliseconds, and nothing in the environment can change it.
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), str(seconds)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def beat(self) -> None:
        """Send a heartbeat."""
        assert self._child.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):  # the watchdog was killed: Ray's health checks remain
            self._child.stdin.write(b".")
            self._child.stdin.flush()

    def close(self) -> None:
        """Stop the watchdog."""
        assert self._child.stdin is not None  # it is a pipe
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(5.0)
