"""The most memory that a process of its own held: what a test compares, instead of time."""

from __future__ import annotations

import subprocess
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


def run_measured(code: str, *arguments: str, cwd: Path | None = None) -> list[str]:
    """Words that a process of its own prints; ``code`` may call ``peak()``."""
    done = subprocess.run(
        program(PEAK + code, *arguments),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
