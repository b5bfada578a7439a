"""The most memory that a process of its own held: what a test compares, instead of time."""

import subprocess
import sys
from pathlib import Path

from tests.forked_workers import program

PEAK = """
import sys
def peak():
    # Not ru_maxrss: a child begins with its parent's, and the tests' own process is large.
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) // 1000
"""
"""Python that defines ``peak()``: MB."""


def run_measured(code: str, *arguments: str, cwd: Path | None = None, forked: bool = False) -> list[str]:
    """Words that a process of its own prints; ``code`` may call ``peak()``.

    ``forked``: from the tests, which saves the imports. What they freed, and their allocator's settings, count by tens
    of MB.
    """
    command = program(PEAK + code, *arguments) if forked else [sys.executable, "-c", PEAK + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
